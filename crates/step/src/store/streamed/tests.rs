//! Homes of weights, by hand.

use plimsoll_device::Dry;

use plimsoll_disk::DiskError;

use super::*;
use crate::common::{biased, llama};
use crate::store::Residency;
use crate::tier::HomePart;
use crate::{EvaluateSettings, Evaluator, MicroBatch, Precision};

/// Tables of two pieces of 1024 rows and one of 1053.
fn large() -> ModelSpec {
    ModelSpec { vocab_size: 3101, ..biased() }
}

fn on_host(types: &dyn Fn(&Parameter) -> DType) -> WeightStorage<'_> {
    let residency = Residency::Spread { layers: 0, head: false };
    let offload =
        WeightOffload { tier: Tier::Host, in_files: None, residency, expert_slots: 0, host_layers: 0 };
    WeightStorage { offload: Some(offload), ..WeightStorage::new(types) }
}

#[test]
fn every_piece_has_a_home_of_its_size() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let store = WeightStore::new(&dry, &tiers, &large(), on_host(&|_| DType::F32), None).unwrap();
    // Rows of 24 floats.
    let table = [1024 * 96, 1024 * 96, 1053 * 96];
    for away in store.away().iter().filter(|away| away.parameter.block.layer().is_none()) {
        let Contents::Homes(parts) = away.contents() else {
            panic!("{} is on the device", away.parameter.name)
        };
        assert_eq!(parts.iter().map(|part| part.bytes).collect::<Vec<_>>(), table, "{}", away.parameter.name);
        assert!(parts.iter().all(|part| part.start + part.bytes <= part.home.bytes()));
    }
    // In whole pages: both tables, and six matrices of less than a page in each of three layers.
    let in_pages: u64 = table.iter().map(|bytes| bytes.next_multiple_of(4096)).sum();
    assert_eq!(tiers.host().high_water(), 2 * in_pages + 3 * 6 * 4096);
}

#[test]
fn rows_are_not_looked_for_behind_the_end_of_a_home() {
    let tiers = LowerTiers::dry();
    let home = Arc::new(tiers.take(Tier::Host, 64, Tag::Weights, "weights").unwrap());
    let mut parameter = large().parameters().swap_remove(0);
    parameter.shape = vec![4, 8];
    // Two rows of 32 bytes, of four.
    let part = HomePart { home, start: 0, bytes: 64 };
    let table = AwayParameter {
        by_expert: false,
        parameter,
        dtype: DType::F32,
        pieces: vec![AwayPiece {
            rows: 0..4,
            shared: None,
            own: 0..128,
            contents: Contents::Homes(vec![part]),
        }],
        in_file: None,
    };
    let needed = |row| match table.read_rows(&tiers, &[row], &mut [0; 32]) {
        Err(DiskError::Buffer { has: 64, needed }) => needed,
        other => panic!("{other:?}"),
    };
    assert_eq!([needed(2), needed(3), needed(4), needed(9)], [96, 128, 160, 320]);
}

/// No device looks up rows that share factors: that is what a pass over such a table ends with, wherever the table lives.
#[test]
fn a_table_whose_rows_cannot_be_looked_up_is_refused() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let spec = ModelSpec { vocab_size: 64, ..biased() };
    let types = |p: &Parameter| match p.role {
        Role::TokenEmbedding => DType::Nf4,
        _ => DType::F32,
    };
    let (precision, storage) = (Precision::F32, on_host(&types));
    let mut evaluator = Evaluator::new(
        &dry,
        &tiers,
        spec,
        EvaluateSettings { precision, longest: 9, loss_chunk_tokens: 9 },
        storage,
    )
    .unwrap();
    let error = evaluator.losses(1, &MicroBatch::new(&[], &[])).unwrap_err().to_string();
    assert!(error.contains("rows cannot be read one by one"), "{error}");
}

/// While a pass is at the head, what the next one begins with is brought: the first layer, where the embedding stays or is looked
/// up. Four layers come through two buffers.
#[test]
fn a_pass_ends_with_what_the_next_one_begins_with() {
    let types = |_: &Parameter| DType::F32;
    for (tied, head) in [(true, true), (true, false), (false, true), (false, false)] {
        let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
        let spec = ModelSpec { tie_word_embeddings: tied, num_layers: 4, ..llama() };
        let residency = Residency::Spread { layers: 0, head };
        let offload =
            WeightOffload { tier: Tier::Disk, in_files: None, residency, expert_slots: 0, host_layers: 0 };
        let storage = WeightStorage { offload: Some(offload), ..WeightStorage::new(&types) };
        let mut evaluator = Evaluator::new(
            &dry,
            &tiers,
            spec,
            EvaluateSettings { precision: Precision::F32, longest: 9, loss_chunk_tokens: 9 },
            storage,
        )
        .unwrap();
        let mut layers_read = || {
            let before = dry.moved();
            evaluator.losses(1, &MicroBatch::new(&[], &[])).unwrap();
            // Seven matrices of a page each in a layer; two pages of a table that does not stay.
            let pages = dry.moved().less(before).read / 4096;
            (pages / 7, pages % 7)
        };
        let table = if head { 0 } else { 2 };
        assert_eq!([layers_read(), layers_read()], [(5, table), (4, table)], "tied {tied}, head {head}");
    }
}
