//! What tokens see in training: kinds of attention that see the same agree, and documents are as if they were alone.

use crate::common::*;
use plimsoll_device::IGNORED_TARGET;
use plimsoll_model::{AttentionSpec, ModelSpec, SlidingWindow};
use plimsoll_step::{AttentionKind, BlockSparse, GradientClipping, MicroBatch, StepSettings};

fn with(attention: AttentionKind) -> StepSettings {
    StepSettings { attention, ..settings(2, 9) }
}

fn sparse(block: u64, local_blocks: u64, global_blocks: u64) -> AttentionKind {
    AttentionKind::BlockSparse(BlockSparse { block, local_blocks, global_blocks })
}

/// The same loss up to rounding before the first update. After it they are merely near: AdamW makes whole steps of
/// gradients that are only rounding.
fn near(a: &[f64], b: &[f64], label: &str) {
    for (step, (x, y)) in a.iter().zip(b).enumerate() {
        let tolerance = if step == 0 { 1e-5 } else { 2e-3 };
        assert!((x / y - 1.0).abs() < tolerance, "{label}: {a:?} and {b:?}");
    }
}

#[test]
fn masks_that_hide_nothing_change_no_bit() {
    for spec in families() {
        let plain = train(&spec, &with(AttentionKind::Flash), 2, 2);
        for attention in [AttentionKind::SlidingWindow(9), sparse(3, 3, 0), sparse(2, 1, 5)] {
            assert!(train(&spec, &with(attention), 2, 2) == plain, "{attention:?}");
        }
        // A token that never comes.
        let documents = StepSettings { document_end: Some(VOCAB), ..with(AttentionKind::Flash) };
        assert!(train(&spec, &documents, 2, 2) == plain);
    }
}

#[test]
fn scores_written_out_give_the_same_loss() {
    for spec in families() {
        let (flash, _) = train(&spec, &with(AttentionKind::Flash), 2, 3);
        let (standard, _) = train(&spec, &with(AttentionKind::Standard), 2, 3);
        near(&standard, &flash, &format!("{spec:?}"));
    }
}

#[test]
fn a_window_is_that_of_a_model_with_one() {
    let spec = llama();
    let sliding_window = Some(SlidingWindow { size: 3, layers: vec![true; 3] });
    let own =
        ModelSpec { attention: AttentionSpec { sliding_window, ..spec.attention.clone() }, ..spec.clone() };
    let asked = train(&spec, &with(AttentionKind::SlidingWindow(3)), 2, 2);
    assert!(asked == train(&own, &with(AttentionKind::Flash), 2, 2));
    // The narrower one counts.
    assert!(asked == train(&own, &with(AttentionKind::SlidingWindow(5)), 2, 2));
    // Blocks of one token with two more behind them are that window too.
    assert!(asked == train(&spec, &with(sparse(1, 3, 0)), 2, 2));
    assert!(asked != train(&spec, &with(AttentionKind::Flash), 2, 2));
}

/// Two documents of five tokens in one sequence, or each in one of its own.
#[test]
fn packed_documents_train_as_if_alone() {
    let end = VOCAB - 1;
    let mut tokens: Vec<u32> = tokens(5, 1, 10).0.into_iter().map(|token| token % end).collect();
    (tokens[4], tokens[9]) = (end, end);
    let mut targets: Vec<u32> = tokens[1..].iter().copied().chain([IGNORED_TARGET]).collect();
    targets[4] = IGNORED_TARGET;
    let batch = MicroBatch::new(&tokens, &targets);
    let steps = |spec: &ModelSpec, settings: &StepSettings| -> Vec<f64> {
        let device = device(spec, settings, 2);
        let mut trainer = trainer(&device, spec, settings);
        (0..4).map(|_| trainer.step(&[batch], 1e-3).unwrap().loss).collect()
    };
    for spec in families() {
        for attention in
            [AttentionKind::Flash, AttentionKind::Standard, AttentionKind::SlidingWindow(2), sparse(3, 1, 0)]
        {
            let settings = |batch_size, length, document_end| StepSettings {
                attention,
                document_end,
                clipping: GradientClipping::None,
                ..settings(batch_size, length)
            };
            let alone = steps(&spec, &settings(2, 5, None));
            let packed = steps(&spec, &settings(1, 10, Some(end)));
            let joined = steps(&spec, &settings(1, 10, None));
            // Blocks are counted from the beginning of the sequence: the second document has other ones.
            if attention != sparse(3, 1, 0) {
                near(&alone, &packed, &format!("{attention:?}"));
            }
            assert!((joined[0] / packed[0] - 1.0).abs() > 1e-4, "{attention:?}: {joined:?} and {packed:?}");
        }
    }
}

#[test]
fn evaluation_knows_the_models_own_attention() {
    let spec = llama();
    let (tokens, targets) = tokens(1, 2, 9);
    let batch = MicroBatch::new(&tokens, &targets);
    let loss = |settings: StepSettings| {
        let device = device(&spec, &settings, 2);
        trainer(&device, &spec, &settings).evaluate(2, &batch).unwrap().0
    };
    let plain = loss(with(AttentionKind::Flash));
    let documents = StepSettings { document_end: Some(tokens[3]), ..with(AttentionKind::Standard) };
    for settings in [with(AttentionKind::SlidingWindow(2)), with(sparse(1, 1, 0)), documents] {
        assert_eq!(loss(settings), plain);
    }
}
