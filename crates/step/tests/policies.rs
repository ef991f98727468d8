//! Every memory policy of a step: the plan knows it to the byte, and what only moves or recomputes changes no bit.

use std::sync::Arc;

use crate::common::*;
use plimsoll_device::Device;
use plimsoll_step::{
    AttentionKind, BlockSparse, Checkpointing, Compression, GradientClipping, Group, LossScaling, MicroBatch,
    NormSource, Precision, StepSettings, UpdateTiming,
};

fn every_checkpointing() -> Vec<Checkpointing> {
    let groups = |groups: &[Group]| Checkpointing::Selective(groups.iter().copied().collect());
    let mut all = vec![
        Checkpointing::None,
        Checkpointing::Full,
        Checkpointing::Every(2),
        Checkpointing::Every(3),
        Checkpointing::Sqrt,
        Checkpointing::Ratio(0.5),
        groups(&[Group::Norms, Group::Swiglu]),
        groups(&[Group::Qkv, Group::Attention, Group::Ffn]),
    ];
    all.extend(Group::ALL.map(|group| groups(&[group])));
    let mixed = |layers, first: &[Group], others: &[Group]| Checkpointing::Mixed {
        layers,
        first: first.iter().copied().collect(),
        others: others.iter().copied().collect(),
    };
    all.push(mixed(1, &[Group::Block], &[Group::Swiglu, Group::Norms]));
    all.push(mixed(1, &[], &[Group::Ffn]));
    all
}

/// Settings that must give the same bits as the first of them.
fn lossless(base: &StepSettings) -> Vec<StepSettings> {
    let timing = |update| StepSettings { update, ..base.clone() };
    let exact = UpdateTiming::InBackward(NormSource::SecondBackward);
    let mut all: Vec<StepSettings> = every_checkpointing()
        .into_iter()
        .map(|checkpointing| StepSettings { checkpointing, ..base.clone() })
        .collect();
    all.push(timing(exact));
    all.push(StepSettings { checkpointing: Checkpointing::Sqrt, ..timing(exact) });
    all.push(StepSettings {
        clipping: GradientClipping::None,
        ..timing(UpdateTiming::InBackward(NormSource::PreviousStep))
    });
    all
}

/// The same settings with every other kind of attention, and with documents.
fn attentions(base: &StepSettings) -> Vec<StepSettings> {
    let sparse = AttentionKind::BlockSparse(BlockSparse { block: 2, local_blocks: 2, global_blocks: 1 });
    // A token that there is.
    let document_end = Some(tokens(100, base.batch_size, base.sequence_length).0[3]);
    let kinds = [AttentionKind::Standard, AttentionKind::SlidingWindow(4), sparse];
    let mut all: Vec<StepSettings> =
        kinds.into_iter().map(|attention| StepSettings { attention, ..base.clone() }).collect();
    for attention in [AttentionKind::Flash, AttentionKind::Standard, sparse] {
        all.push(StepSettings { attention, document_end, ..base.clone() });
    }
    all
}

/// The policies that treat attention in different ways.
fn about_attention(base: &StepSettings) -> Vec<StepSettings> {
    let groups = |groups: &[Group]| Checkpointing::Selective(groups.iter().copied().collect());
    let forms = [
        Checkpointing::None,
        Checkpointing::Full,
        Checkpointing::Every(2),
        groups(&[Group::Attention]),
        groups(&[Group::Qkv, Group::Norms]),
    ];
    forms.into_iter().map(|checkpointing| StepSettings { checkpointing, ..base.clone() }).collect()
}

/// Settings that change the result, each beside what it must stay near to.
fn lossy(base: &StepSettings) -> Vec<StepSettings> {
    let mut all = Vec::new();
    for block in [16, 64, u64::MAX] {
        for checkpointing in [Checkpointing::None, Checkpointing::Full, Checkpointing::Every(2)] {
            all.push(StepSettings {
                compression: Compression::Int8 { block },
                checkpointing,
                ..base.clone()
            });
        }
    }
    for compression in [Compression::None, Compression::Int8 { block: 64 }] {
        all.push(StepSettings { attention: AttentionKind::Standard, compression, ..base.clone() });
    }
    for checkpointing in [Checkpointing::None, Checkpointing::Full] {
        all.push(StepSettings { mlp_chunk_tokens: Some(5), checkpointing, ..base.clone() });
    }
    all.push(StepSettings { update: UpdateTiming::InBackward(NormSource::PreviousStep), ..base.clone() });
    all
}

fn precisions() -> [Precision; 6] {
    [Precision::F32, BF16_WITH_MASTERS, PURE_BF16, Precision::F16, Precision::FP8, PURE_FP8]
}

#[test]
fn the_plan_knows_every_policy() {
    for spec in families() {
        for precision in precisions() {
            let base = StepSettings { precision, ..settings(2, 9) };
            let attentions = attentions(&base);
            let packed = attentions
                .iter()
                .map(|base| StepSettings { compression: Compression::Int8 { block: 16 }, ..base.clone() });
            let attentions = attentions.iter().flat_map(about_attention).chain(packed);
            for settings in lossless(&base).into_iter().chain(lossy(&base)).chain(attentions) {
                let planned = planned_peak(&spec, &settings, 2);
                let device = device(&spec, &settings, 1);
                let mut trainer = trainer(&device, &spec, &settings);
                for step in 0..2 {
                    one_step(&mut trainer, &settings, step);
                }
                assert_eq!(device.arena().high_water(), planned, "{settings:?}");
                assert_eq!(device.arena().capacity(), planned, "{settings:?}");
            }
        }
    }
}

#[test]
fn moving_and_recomputing_change_no_bit() {
    for spec in families() {
        for precision in precisions() {
            let base = StepSettings { precision, ..settings(2, 9) };
            let plain = train(&spec, &base, 2, 3);
            let unclipped = StepSettings { clipping: GradientClipping::None, ..base.clone() };
            let plain_unclipped = train(&spec, &unclipped, 2, 3);
            for settings in lossless(&base) {
                let want = if settings.clipping == base.clipping { &plain } else { &plain_unclipped };
                assert!(train(&spec, &settings, 1, 3) == *want, "{settings:?}");
            }
            for base in attentions(&base) {
                let plain = train(&spec, &base, 3, 2);
                for settings in about_attention(&base) {
                    assert!(train(&spec, &settings, 1, 2) == plain, "{settings:?}");
                }
            }
        }
    }
}

#[test]
fn lossy_policies_stay_near() {
    for spec in families() {
        for precision in precisions() {
            let base = StepSettings { precision, ..settings(2, 9) };
            let (plain, _) = train(&spec, &base, 1, 12);
            for settings in lossy(&base) {
                let (losses, _) = train(&spec, &settings, 1, 12);
                // The paths of so small a model part soon; on average they stay together.
                let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
                for (losses, plain) in [(&losses[..2], &plain[..2]), (&losses, &plain)] {
                    let (a, b) = (mean(losses), mean(plain));
                    assert!((a / b - 1.0).abs() < 0.04, "{a} {b}, {settings:?}");
                }
                assert!(mean(&losses[9..]) < 1.04 * mean(&losses[..3]), "{settings:?}: {losses:?}");
            }
        }
    }
}

/// Chunks of the feed-forward part give the same loss to the bit: only sums of weight gradients have another order.
#[test]
fn chunks_of_the_feed_forward_part_change_no_output() {
    for spec in families() {
        let base = settings(2, 9);
        let chunked = StepSettings { mlp_chunk_tokens: Some(4), ..base.clone() };
        assert_eq!(train(&spec, &base, 2, 1).0, train(&spec, &chunked, 2, 1).0);
    }
}

#[test]
fn each_policy_needs_less_memory() {
    // Large enough that activations are what counts.
    let spec = plimsoll_model::ModelSpec { num_layers: 9, ..llama() };
    let base = StepSettings { loss_chunk_tokens: 8, ..settings(8, 16) };
    let with = |checkpointing| planned_peak(&spec, &StepSettings { checkpointing, ..base.clone() }, 1);
    let none = with(Checkpointing::None);
    let full = with(Checkpointing::Full);
    for group in Group::ALL {
        assert!(with(Checkpointing::Selective([group].into_iter().collect())) < none, "{group:?}");
    }
    let half = with(Checkpointing::Ratio(0.5));
    assert!(full < half && half < none, "{full} {half} {none}");
    assert!(with(Checkpointing::Sqrt) < full);
    let planned = |settings: StepSettings| planned_peak(&spec, &settings, 1);
    let packed = planned(StepSettings { compression: Compression::Int8 { block: 64 }, ..base.clone() });
    assert!(packed < none);
    let chunked = planned(StepSettings { mlp_chunk_tokens: Some(16), ..base.clone() });
    assert!(chunked < none);
    let timing = UpdateTiming::InBackward(NormSource::SecondBackward);
    let full_base = StepSettings { checkpointing: Checkpointing::Full, ..base };
    assert!(planned(StepSettings { update: timing, ..full_base }) < full);
}

/// What only products read is kept in 8 bits: of a llama's block two normed inputs and the activation. And there is no
/// second copy of the weights.
#[test]
fn eight_bit_floats_need_less_memory_than_bf16() {
    let spec = plimsoll_model::ModelSpec { num_layers: 9, ..llama() };
    let base = StepSettings { loss_chunk_tokens: 8, ..settings(8, 16) };
    let planned = |precision, checkpointing| {
        planned_peak(&spec, &StepSettings { precision, checkpointing, ..base.clone() }, 1)
    };
    let weights: u64 = spec.parameters().iter().map(|p| 2 * p.elements()).sum();
    let tokens = base.batch_size * base.sequence_length;
    let kept = 2 * spec.hidden_size + spec.mlp.intermediate_size;
    for (fp8, bf16, saved) in [(Precision::FP8, BF16_WITH_MASTERS, weights), (PURE_FP8, PURE_BF16, 0)]
        .map(|(a, b, weights)| (a, b, weights + tokens * kept * u64::from(spec.num_layers)))
    {
        let (less, more) = (planned(fp8, Checkpointing::None), planned(bf16, Checkpointing::None));
        // The 8-bit operands of a product, and the ends of blocks of the arena, come on top.
        assert!(less + saved / 2 < more, "{less} {more}, of which {saved}");
    }
}

/// With updates in the backward pass no full set of gradients ever exists.
#[test]
fn updates_in_the_backward_pass_hold_one_block_of_gradients() {
    let spec = plimsoll_model::ModelSpec { num_layers: 9, ..biased() };
    let settings = StepSettings {
        update: UpdateTiming::InBackward(NormSource::SecondBackward),
        checkpointing: Checkpointing::Full,
        ..settings(1, 4)
    };
    let dry = plimsoll_device::Dry::new();
    let mut trainer =
        plimsoll_step::Trainer::new(&dry, Arc::default(), spec.clone(), settings, &plimsoll_parallel::Solo)
            .unwrap();
    let (tokens, targets) = tokens(1, 1, 4);
    trainer.step(&[MicroBatch::new(&tokens, &targets)], 1e-3).unwrap();
    let most = dry.arena().ledger().most(plimsoll_memory::Tag::Gradients);
    let largest = spec
        .blocks()
        .map(|block| spec.block_parameters(block).iter().map(|p| 4 * p.elements()).sum::<u64>())
        .max()
        .unwrap();
    let all: u64 = spec.parameters().iter().map(|p| 4 * p.elements()).sum();
    assert!(most < largest + largest / 2 && 3 * most < all, "{most} of {all}, a block has {largest}");
}

#[test]
fn a_bad_gradient_stops_updates_before_its_block() {
    let spec = llama();
    let settings = StepSettings {
        update: UpdateTiming::InBackward(NormSource::PreviousStep),
        clipping: GradientClipping::None,
        ..settings(1, 4)
    };
    let device = device(&spec, &settings, 1);
    let mut trainer = trainer(&device, &spec, &settings);
    let huge =
        spec.parameters().into_iter().find(|p| p.name.contains("layers.1.") && p.name.contains("norm"));
    let weight = trainer.weight(&huge.unwrap()).unwrap().clone();
    device
        .write(&weight, &mut |bytes| {
            bytes.chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&f32::MAX.to_ne_bytes()));
        })
        .unwrap();
    let batch = MicroBatch::new(&[0, 1, 2, 3], &[1, 2, 3, 0]);
    let before = state(&trainer);
    let error = trainer.step(&[batch], 1e-3).unwrap_err().to_string();
    assert!(error.contains("not finite") || error.contains("weights were not changed"), "{error}");
    let bad = trainer.first_bad_output(&batch).unwrap();
    assert_eq!(bad, Some(plimsoll_model::BlockId::Layer(1)));
    if error.contains("were not changed") {
        assert!(before == state(&trainer));
    }
}

#[test]
fn half_precision_learns_with_a_scaled_loss() {
    for spec in families() {
        let base = settings(2, 9);
        let half = StepSettings {
            precision: Precision::F16,
            loss_scaling: Some(LossScaling { initial: 256.0, ..LossScaling::default() }),
            ..base.clone()
        };
        let (losses, _) = train(&spec, &half, 2, 12);
        let (plain, _) = train(&spec, &base, 2, 12);
        for (a, b) in losses.iter().zip(&plain).take(2) {
            assert!((a / b - 1.0).abs() < 0.01, "{losses:?} {plain:?}");
        }
        let sum = |losses: &[f64]| losses.iter().sum::<f64>();
        // Each step has tokens of its own, and tokens may go to other experts.
        let learns = match spec.experts {
            None => losses[11] < losses[0],
            Some(_) => sum(&losses[8..]) < sum(&losses[..4]),
        };
        assert!(learns, "{losses:?}");
        assert!(train(&spec, &half, 1, 3) == train(&spec, &half, 3, 3));
    }
}

#[test]
fn a_step_whose_scaled_gradients_overflow_is_skipped_and_the_scale_halved() {
    let spec = llama();
    let scaling = LossScaling { initial: 2f64.powi(30), growth_interval: 3, ..LossScaling::default() };
    let settings = StepSettings { precision: Precision::F16, loss_scaling: Some(scaling), ..settings(1, 8) };
    let device = device(&spec, &settings, 2);
    let mut trainer = trainer(&device, &spec, &settings);
    let (tokens, targets) = tokens(3, 1, 8);
    let batch = MicroBatch::new(&tokens, &targets);
    let before = state(&trainer);
    let outcome = trainer.step(&[batch], 1e-3).unwrap();
    assert!(outcome.skipped && outcome.loss.is_finite());
    assert!(before == state(&trainer));
    let mut skipped = 1;
    while trainer.step(&[batch], 1e-3).unwrap().skipped {
        skipped += 1;
    }
    let progress = trainer.progress();
    let scale = progress.loss_scale.unwrap();
    assert_eq!((progress.steps, scale.skipped_steps, scale.good_steps), (1, skipped, 1));
    assert_eq!(scale.scale, 2f64.powi(30 - skipped as i32));
    trainer.step(&[batch], 1e-3).unwrap();
    trainer.step(&[batch], 1e-3).unwrap();
    assert_eq!(trainer.progress().loss_scale.unwrap().scale, 2.0 * scale.scale);
}
