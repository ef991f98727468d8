//! Where gradients are, and in which type.

use plimsoll_device::{Cpu, CpuOptions, Dry};
use plimsoll_model::ModelSpec;

use super::*;
use crate::common::llama;

/// Tables of two pieces of 1024 rows and one of 1053.
fn gradients<'a>(dry: &'a Dry, tiers: &Arc<LowerTiers>, tier: Tier) -> (Vec<Parameter>, Gradients<'a>) {
    let trained = ModelSpec { vocab_size: 3101, ..llama() }.parameters();
    let on_tier = OnTier { tiers, tier, stays: &|_| false, totals: None };
    let gradients = Gradients::new(dry, &trained, DType::Bf16, on_tier, (Pieces::of_bytes(0, 1), 3)).unwrap();
    (trained, gradients)
}

#[test]
fn vectors_have_wide_gradients_and_matrices_those_of_the_settings() {
    let (dry, tiers) = (Dry::new(), Arc::default());
    let (trained, mut gradients) = gradients(&dry, &tiers, Tier::Device);
    for p in &trained {
        let Target { tensor: gradient, accumulate, .. } = gradients.target(p.block, p.role).unwrap();
        let expected = if p.shape.len() == 1 { DType::F32 } else { DType::Bf16 };
        assert_eq!((gradient.dtype(), accumulate), (expected, false), "{}", p.name);
        assert!(gradients.target(p.block, p.role).unwrap().accumulate, "{}", p.name);
    }
}

#[test]
fn a_piece_in_a_buffer_is_no_other_piece() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let (_, mut gradients) = gradients(&dry, &tiers, Tier::Host);
    let (block, role) = (BlockId::Embedding, Role::TokenEmbedding);
    assert_eq!(gradients.pieces(block, role), Some(vec![0..1024, 1024..2048, 2048..3101]));
    let unit = Unit::Piece(block, 1);
    gradients.announce([(unit, false)].into_iter()).unwrap();
    gradients.hold(unit).unwrap();
    let held = |piece| gradients.held_piece(block, role, piece).map(|tensor| tensor.rows());
    assert_eq!([0, 1, 2].map(held), [None, Some(1024), None]);
    assert!(gradients.held_piece(block, Role::LmHead, 1).is_none());
    assert!(gradients.held_piece(BlockId::Head, role, 1).is_none());
}

/// Rows that were looked up in two micro-batches of passes before the last one, and in one of the last: 1, 2 and 4 times a row of
/// two numbers.
#[test]
fn rows_that_were_looked_up_are_added_to_their_piece() {
    let device = Cpu::new(1 << 16, CpuOptions { threads: Some(1), isa: None }).unwrap();
    let (block, role) = (BlockId::Embedding, Role::TokenEmbedding);
    let table = Parameter { name: "table".into(), block, role, shape: vec![8, 2] };
    let tiers = Arc::default();
    let on_tier = OnTier { tiers: &tiers, tier: Tier::Device, stays: &|_| false, totals: None };
    let trained = std::slice::from_ref(&table);
    let mut gradients =
        Gradients::new(&device, trained, DType::F32, on_tier, (Pieces::of_bytes(0, 1), 3)).unwrap();
    gradients.begin(7);
    gradients.looked_up = LookedUp::with_room(&device, 2, 3, (DType::F32, 2)).unwrap();
    // Without the last pass nothing is complete.
    let unfinished = gradients.looked_up.len();
    for (number, tokens, times) in [(0, [5, 1, 5], 1.0), (1, [1, 2, 7], 2.0), (2, [7, 7, 0], 4.0)] {
        let places = device.alloc(DType::U32, &[3], Tag::Data, "tokens").unwrap();
        device.write_u32(&places, &tokens).unwrap();
        let dx = device.alloc(DType::F32, &[3, 2], Tag::Data, "dx").unwrap();
        device.write_f32(&dx, &[1.0, 10.0, 1.0, 10.0, 1.0, 10.0].map(|x| times * x)).unwrap();
        gradients.looked_up.keep(&device, number, places, dx).unwrap();
    }
    assert_eq!((unfinished, gradients.looked_up.len()), (0, 3));
    gradients.gather_looked_up(&Part::whole(&table)).unwrap();
    let found = device.read_f32(gradients.get(block, role).unwrap()).unwrap();
    let expected = [4.0, 3.0, 2.0, 0.0, 0.0, 2.0, 0.0, 10.0].map(|x: f32| [x, 10.0 * x]);
    assert_eq!(found.as_chunks().0, expected);
    gradients.clear();
    assert_eq!(gradients.looked_up.len(), 0);
}

/// Sums are rounded by how often something was added before, and by the place of the first number of a piece.
#[test]
fn roundings_of_a_piece_depend_on_its_place_and_on_what_was_added() {
    let (dry, tiers) = (Dry::new(), Arc::default());
    let (_, mut gradients) = gradients(&dry, &tiers, Tier::Device);
    let (block, role) = (BlockId::Embedding, Role::TokenEmbedding);
    gradients.begin(5);
    let seeds: Vec<u64> =
        (0..9).map(|times| splitmix64(splitmix64(5, times), block.parameter_number(role))).collect();
    let target = |gradients: &mut Gradients<'_>, piece, range: &Range<u64>, nth| {
        let Target { tensor, accumulate, rounding } =
            gradients.rows_target((block, role), piece, range, nth).unwrap();
        let Rounding::Stochastic { seed, first } = rounding else { panic!("{rounding:?}") };
        let times = seeds.iter().position(|of| *of == seed).unwrap();
        (tensor.rows(), accumulate, times, first)
    };
    // Rows of 24.
    assert_eq!(target(&mut gradients, 0, &(0..1024), 0), (1024, false, 0, 0));
    assert_eq!(target(&mut gradients, 2, &(2048..3101), 1), (1053, true, 1, 2048 * 24));
    gradients.count_rows(block, role, 2);
    assert_eq!(target(&mut gradients, 1, &(1024..2048), 0), (1024, true, 2, 1024 * 24));
    assert_eq!(target(&mut gradients, 1, &(1024..2048), 3), (1024, true, 5, 1024 * 24));
    gradients.count_rows(block, role, 1);
    assert_eq!(target(&mut gradients, 0, &(0..1024), 2), (1024, true, 5, 0));
    // Of what is added as a whole, the first addition is the one of no other before it.
    let (head, norm) = (BlockId::Head, Role::FinalNorm);
    let seeds: Vec<u64> =
        (0..3).map(|times| splitmix64(splitmix64(5, times), head.parameter_number(norm))).collect();
    for seed in &seeds {
        let rounding = gradients.target(head, norm).unwrap().rounding;
        assert_eq!(rounding, Rounding::Stochastic { seed: *seed, first: 0 });
    }
}
