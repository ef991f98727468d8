//! What a run says when it cannot write, and what it finds in its folder.

use std::io::{Error, ErrorKind};
use std::path::Path;

use plimsoll_memory::ByteSize;
use plimsoll_plan::DiskNeeds;
use plimsoll_train::{Checkpoint, TrainError};

const MIB: u64 = 1 << 20;

#[test]
fn what_there_is_no_room_for_is_named_with_what_would_take_less() {
    let fewer = ", or keep fewer checkpoints (output.save_total_limit; 0 for output.save_steps writes none)";
    let none = ", or write no checkpoints (output.save_steps: 0)";
    for ([model, checkpoint, most, spill], written, remedy) in [
        ([0, 3, 1, 0], "3.00 MiB (a checkpoint of 3.00 MiB)", none),
        ([0, 3, 2, 0], "6.00 MiB (2 checkpoints at once, 3.00 MiB each)", none),
        ([1, 3, 3, 0], "10.0 MiB (3 checkpoints at once, 3.00 MiB each, its model of 1.00 MiB)", fewer),
        ([1, 3, 0, 0], "1.00 MiB (its model)", ""),
        ([1, 3, 0, 5], "6.00 MiB (its model, 5.00 MiB of offloaded tensors)", ""),
        ([0, 3, 0, 5], "5.00 MiB (5.00 MiB of offloaded tensors)", ""),
    ] {
        let needs = DiskNeeds {
            model_bytes: model * MIB,
            checkpoint_bytes: checkpoint * MIB,
            most_checkpoints: most,
            spill_bytes: spill * MIB,
        };
        let error =
            TrainError::NoRoom { path: "out".into(), needs, available: ByteSize(512), token_bytes: 0 };
        assert_eq!(
            error.to_string(),
            format!(
                "out: the run would write {written}, and this disk has room for 512 B; free some space or choose another output.dir{remedy}"
            )
        );
    }
}

#[test]
fn room_that_tokens_have_taken_is_named() {
    let needs = DiskNeeds { model_bytes: 1 << 20, ..DiskNeeds::default() };
    let error =
        TrainError::NoRoom { path: "out".into(), needs, available: ByteSize(512), token_bytes: 3 << 20 };
    let words = "room for 512 B beside the tokens of its data (3.00 MiB); free some space";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn what_the_system_refuses_comes_with_a_remedy() {
    for (kind, remedy) in [
        (ErrorKind::StorageFull, "; free some space or choose another output.dir, then --resume"),
        (ErrorKind::QuotaExceeded, "; free some space or choose another output.dir, then --resume"),
        (ErrorKind::FileTooLarge, "; raise `ulimit -f` or choose another output.dir, then --resume"),
        (ErrorKind::PermissionDenied, "; choose an output.dir that you may write to"),
        (ErrorKind::ReadOnlyFilesystem, "; choose an output.dir that you may write to"),
        (ErrorKind::NotFound, ""),
    ] {
        let source = Error::from(kind);
        let expected = format!("could not write a/b: {source}{remedy}");
        let error = TrainError::Io { action: "write", path: "a/b".into(), source };
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn checkpoints_are_listed_by_their_steps() {
    let root = tempfile::tempdir().unwrap();
    let of = |path: &Path| Checkpoint::list(path).map(|all| all.iter().map(|c| c.step).collect::<Vec<_>>());
    for name in ["checkpoint-10", "checkpoint-9", ".old-checkpoint-3", "checkpoint-x", "model"] {
        std::fs::create_dir(root.path().join(name)).unwrap();
    }
    assert_eq!(of(root.path()).unwrap(), [9, 10]);
    assert!(of(&root.path().join("none")).unwrap().is_empty());
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(of(&file), Err(TrainError::Io { action: "list", .. })));
    // A state that does not name its optimizer is of the time when there was one.
    let state = r#"{"version": 2, "step": 9, "updates": 9, "windows": 1, "tokens": 2, "data": ""}"#;
    let checkpoint = Checkpoint::list(root.path()).unwrap().remove(0);
    std::fs::write(checkpoint.path.join("trainer_state.json"), state).unwrap();
    let state = checkpoint.state().unwrap();
    assert_eq!((state.optimizer.as_str(), state.step, state.tokens), ("adamw", 9, 2));
}
