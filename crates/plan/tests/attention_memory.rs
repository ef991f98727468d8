//! What attention takes as sequences grow, by the plan of SmolLM2-135M: tiles grow with the sequence, scores that are
//! written out with its square; a mask makes attention cheaper in time.

use plimsoll_memory::Tag;
use plimsoll_model::catalogue;
use plimsoll_plan::DryRun;
use plimsoll_step::{AttentionKind, BlockSparse, Checkpointing, StepSettings};

const LENGTHS: [u64; 4] = [1 << 10, 1 << 12, 1 << 14, 1 << 16];

/// The most bytes of attention that ever live at once, and its arithmetic, for a sequence of each length.
fn planned(attention: AttentionKind, checkpointing: Checkpointing) -> [(u64, u64); 4] {
    let spec = catalogue::find("smollm2-135m").unwrap();
    LENGTHS.map(|length| {
        let settings =
            StepSettings { attention, checkpointing, loss_chunk_tokens: 256, ..StepSettings::new(1, length) };
        let dry_run = DryRun::training(&spec, &settings, 1).unwrap();
        (dry_run.ledger.most(Tag::Attention), dry_run.tally.attention_f32)
    })
}

#[test]
fn tiled_attention_grows_with_the_sequence() {
    for checkpointing in [Checkpointing::None, Checkpointing::Full] {
        let [first, rest @ ..] = planned(AttentionKind::Flash, checkpointing);
        for (i, (bytes, _)) in (1..).zip(rest) {
            assert_eq!(bytes, first.0 << (2 * i), "{checkpointing:?}");
        }
    }
}

#[test]
fn scores_written_out_grow_with_its_square() {
    for (checkpointing, layers) in [(Checkpointing::None, 30), (Checkpointing::Full, 1)] {
        let tiled = planned(AttentionKind::Flash, checkpointing);
        let standard = planned(AttentionKind::Standard, checkpointing);
        for ((length, tiled), standard) in LENGTHS.into_iter().zip(tiled).zip(standard) {
            // A score in f32 for each pair of positions, of nine heads.
            assert_eq!(standard.0 - tiled.0, layers * 9 * length * length * 4, "{checkpointing:?}, {length}");
        }
    }
}

#[test]
fn masks_save_arithmetic() {
    let all = planned(AttentionKind::Flash, Checkpointing::None);
    let pattern = BlockSparse { block: 64, local_blocks: 4, global_blocks: 1 };
    for attention in [AttentionKind::SlidingWindow(256), AttentionKind::BlockSparse(pattern)] {
        let masked = planned(attention, Checkpointing::None);
        for (masked, all) in masked.into_iter().zip(all) {
            assert_eq!(masked.0, all.0, "{attention:?}");
        }
        // From 16 384 to 65 536 tokens: four times the work, and sixteen times where all is seen.
        assert!(masked[3].1 / masked[2].1 <= 4 && all[3].1 / all[2].1 >= 15, "{attention:?}: {masked:?}");
    }
}
