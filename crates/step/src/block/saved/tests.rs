//! What becomes of each group of activations.

use std::sync::Arc;

use plimsoll_device::{Device, Dry};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::Tier;

use super::*;
use crate::block::Mover;
use crate::common::llama;
use crate::inputs::{Inputs, Places};
use crate::rope::RopeTables;
use crate::settings::{MicroBatch, Precision};

/// Looks at the context of a pass over 100 tokens.
fn with_context(look: impl FnOnce(&Dry, &Context<'_>)) {
    let (dry, spec) = (Dry::new(), llama());
    let ropes = RopeTables::new(&dry, &spec, 100).unwrap();
    let inputs =
        Inputs::upload(&dry, &spec, &Places::whole(1, 100), None, &MicroBatch::new(&[], &[])).unwrap();
    look(&dry, &inputs.context(&dry, &spec, Precision::F32, &ropes));
}

/// How many tensors of a group are kept as codes, and how many go to the host: those of a page at least.
fn kept<T: Activations>(dry: &Dry, ctx: &Context<'_>, group: impl Fn() -> T) -> (usize, usize) {
    let Held::Kept { mut value, away, packings } = Held::new(ctx, Save::Int8 { block: 16 }, group()).unwrap()
    else {
        panic!("no codes")
    };
    assert!(away.is_empty());
    let count = value.tensors().iter().filter(|tensor| tensor.dtype() == DType::I8).count();
    assert_eq!(count, packings.len());
    let mover = Mover::new(dry, &Arc::new(LowerTiers::dry()), Tier::Host).unwrap();
    let ctx = Context { away: Some(&mover), ..*ctx };
    let Held::Kept { away, packings, .. } = Held::new(&ctx, Save::Keep, group()).unwrap() else {
        panic!("it stays")
    };
    assert!(packings.is_empty());
    (count, away.into_iter().flatten().count())
}

#[test]
fn every_tensor_that_is_worth_it_is_compressed_and_sent_away() {
    with_context(|dry, ctx| {
        // A page and less than a page.
        let tensor = |columns| dry.alloc(DType::F32, &[100, columns], Tag::Activations, "test").unwrap();
        let (large, small) = (|| tensor(24), || tensor(6));
        let statistics = || Statistics { mean: None, rstd: small() };
        let raw = || Raw { x: large(), statistics: statistics() };
        assert_eq!(kept(dry, ctx, large), (1, 1));
        assert_eq!(kept(dry, ctx, small), (1, 0));
        assert_eq!(kept(dry, ctx, || Normed { out: large(), statistics: Some(statistics()) }), (1, 1));
        assert_eq!(kept(dry, ctx, raw), (1, 1));
        let qkv = |raw_q, raw_k| Qkv { q: large(), k: large(), v: small(), raw_q, raw_k };
        assert_eq!(kept(dry, ctx, || qkv(None, None)), (3, 2));
        assert_eq!(kept(dry, ctx, || qkv(Some(raw()), Some(raw()))), (5, 4));
        assert_eq!(kept(dry, ctx, || Summed { stream: large(), raw: None }), (1, 1));
        assert_eq!(kept(dry, ctx, || Summed { stream: large(), raw: Some(raw()) }), (2, 2));
        let attended = |probabilities| Attended { out: large(), lse: large(), probabilities };
        assert_eq!(kept(dry, ctx, || attended(None)), (1, 1));
        assert_eq!(kept(dry, ctx, || attended(Some(large()))), (2, 2));
        assert_eq!(kept(dry, ctx, || Inner { gate: Some(large()), up: large() }), (2, 2));
        assert_eq!(kept(dry, ctx, || Inner { gate: None, up: small() }), (1, 0));
    });
}

#[test]
fn what_is_not_kept_is_dropped() {
    with_context(|dry, ctx| {
        let tensor = || dry.alloc(DType::F32, &[4, 4], Tag::Activations, "test").unwrap();
        let held = |save| Held::new(ctx, save, tensor()).unwrap();
        assert!(held(Save::Recompute).is_dropped());
        assert!(!held(Save::Keep).is_dropped() && !held(Save::Int8 { block: 16 }).is_dropped());
        let again = held(Save::Recompute).restore(ctx, || Ok(tensor())).unwrap();
        assert_eq!(again.elements(), 16);
    });
}
