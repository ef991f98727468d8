//! Snapshots of simulated trainings, in the form of every version, read again; and files that mean harm.

use proptest::prelude::*;

use super::*;
use crate::allocator::{CachingAllocator, Settings, TraceTag};

const MIB: u64 = 1 << 20;

/// Stacks by tag, innermost frame first.
const STACKS: [&[(&str, &str, u32)]; 9] = [
    &[],
    &[("_apply", "/usr/lib/python3/site-packages/torch/nn/modules/module.py", 900), ("main", "train.py", 10)],
    &[
        ("forward", "/opt/site-packages/torch/nn/modules/linear.py", 125),
        ("_call_impl", "/opt/site-packages/torch/nn/modules/module.py", 1750),
        ("forward", "model.py", 42),
        ("main", "train.py", 20),
    ],
    &[("_engine_run_backward", "/opt/site-packages/torch/autograd/graph.py", 823), ("main", "train.py", 21)],
    &[("_init_group", "/opt/site-packages/torch/optim/adamw.py", 180), ("main", "train.py", 22)],
    &[("main", "train.py", 23)],
    &[("at::cuda::getCUDABlasWorkspace()", "??", 0), ("main", "train.py", 20)],
    &[("save_hook", "probe.py", 7), ("_call_impl", "/opt/site-packages/torch/nn/modules/module.py", 1750)],
    &[("update", "/opt/site-packages/transformers/cache_utils.py", 400), ("generate", "serve.py", 5)],
];

fn frames_of(tag: TraceTag) -> Vec<StackFrame> {
    let frames = STACKS[tag.0 as usize].iter();
    frames
        .map(|&(name, filename, line)| StackFrame { name: name.into(), filename: filename.into(), line })
        .collect()
}

/// A training of `steps` steps. From `leak` on a tensor of a mebibyte is kept in each step, with that tag. The recording begins behind
/// the weights.
fn training(settings: &str, steps: u64, leak: Option<u32>, entries: usize) -> CachingAllocator {
    let mut allocator = CachingAllocator::new(Settings::parse(settings).unwrap(), 4 << 30);
    let take = |allocator: &mut CachingAllocator, tag: u32, bytes: u64, stream: u32| {
        allocator.set_tag(TraceTag(tag));
        allocator.malloc(bytes, stream).unwrap()
    };
    for layer in 0..6 {
        take(&mut allocator, 1, 7 * MIB + layer, 0);
    }
    let early = take(&mut allocator, 1, 5 * MIB, 0);
    allocator.record_history(entries);
    allocator.reset_peaks();
    take(&mut allocator, 6, 8_519_680, 0);
    allocator.set_tag(TraceTag(5));
    allocator.free(early);
    for step in 0..steps {
        let activations: Vec<_> =
            (0..6).map(|layer| take(&mut allocator, 2, 3 * MIB + 100 * layer, 0)).collect();
        let side = take(&mut allocator, 2, 300_000, 1);
        allocator.record_stream(side, 0);
        allocator.free(side);
        let mut gradients = Vec::new();
        for activation in activations.into_iter().rev() {
            gradients.push(take(&mut allocator, 3, 7 * MIB, 0));
            allocator.free(activation);
        }
        if step == 0 {
            for _ in 0..12 {
                take(&mut allocator, 4, 7 * MIB, 0);
            }
        }
        if let Some(tag) = leak {
            // A cache is made anew, one token longer.
            take(&mut allocator, tag, MIB, 0);
        }
        allocator.set_tag(TraceTag(5));
        gradients.into_iter().for_each(|gradient| allocator.free(gradient));
    }
    allocator
}

fn written(allocator: &CachingAllocator, format: Format) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_snapshot(&[allocator], frames_of, format, &mut bytes).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<Snapshot, PickleError> {
    read_snapshot(bytes, bytes.len() as u64, Limits::default())
}

const FORMATS: [Format; 7] = [
    Format::Python(TorchVersion::V2_0),
    Format::Python(TorchVersion::V2_1),
    Format::Python(TorchVersion::V2_2),
    Format::Python(TorchVersion::V2_6),
    Format::Python(TorchVersion::V2_9),
    Format::Cpp(TorchVersion::V2_2),
    Format::Cpp(TorchVersion::V2_9),
];

#[test]
fn every_version_says_what_the_allocator_counted() {
    for settings in ["", "expandable_segments:True", "max_split_size_mb:20"] {
        for format in FORMATS {
            let allocator = training(settings, 10, None, usize::MAX);
            let snapshot = read(&written(&allocator, format)).unwrap();
            let analysis = Analysis::of(&snapshot, 0);
            let statistics = allocator.statistics();
            assert_eq!(analysis.peak.allocated_bytes, statistics.requested.peak, "{settings} {format:?}");
            assert_eq!(analysis.entries, allocator.history().count() as u64);
            let live: u64 = analysis.peak.live.iter().map(|live| live.bytes).sum();
            assert_eq!(live, analysis.peak.allocated_bytes, "what is live adds up");
            for point in &analysis.timeline {
                assert_eq!(point.by_kind.iter().sum::<u64>(), point.allocated_bytes);
            }
            let top = analysis.timeline.iter().max_by_key(|point| point.allocated_bytes).unwrap();
            for (kind, bytes) in &analysis.peak.by_kind {
                assert_eq!(top.by_kind[*kind as usize], *bytes, "{kind:?}");
            }
            let fragmentation = analysis.fragmentation;
            assert_eq!(fragmentation.reserved_bytes, statistics.reserved.current);
            assert_eq!(fragmentation.allocated_bytes, statistics.allocated.current);
            let held =
                fragmentation.allocated_bytes + fragmentation.pending_bytes + fragmentation.unused_bytes;
            assert_eq!(held, fragmentation.reserved_bytes);
            let most = analysis.timeline.iter().map(|point| point.reserved_bytes).max();
            assert_eq!(most, Some(statistics.reserved.peak));
            let expandable = snapshot.segments(0).any(|segment| segment.expandable);
            let told = !matches!(format, Format::Python(TorchVersion::V2_0));
            assert_eq!(expandable, settings.starts_with("expandable") && told);
            assert!(analysis.leaks.is_empty(), "{:?}", analysis.leaks);
        }
    }
}

#[test]
fn what_is_live_at_the_peak_is_grouped_by_what_it_is_for() {
    let snapshot = read(&written(&training("", 3, None, usize::MAX), FORMATS[4])).unwrap();
    let kinds: std::collections::HashMap<_, _> =
        Analysis::of(&snapshot, 0).peak.by_kind.into_iter().collect();
    assert_eq!(kinds[&GuessedKind::Weights], 6 * 7 * MIB + 15);
    assert_eq!(kinds[&GuessedKind::OptimizerStates], 12 * 7 * MIB);
    assert_eq!(kinds[&GuessedKind::Workspace], 8_519_680);
    assert!(kinds[&GuessedKind::Gradients] % (7 * MIB) == 0);
    assert_eq!(kinds[&GuessedKind::Activations] / MIB, 3);
}

#[test]
fn a_recording_that_lost_its_beginning_has_the_same_peak() {
    let allocator = training("", 10, None, 150);
    assert_eq!(allocator.history().count(), 150);
    let analysis = Analysis::of(&read(&written(&allocator, FORMATS[3])).unwrap(), 0);
    // Later steps are alike, and each reaches the peak.
    assert_eq!(analysis.peak.allocated_bytes, allocator.statistics().requested.peak);
    assert!(
        analysis
            .peak
            .live
            .iter()
            .any(|live| live.before_recording && live.kind == GuessedKind::OptimizerStates)
    );
}

#[test]
fn what_only_grows_is_named_with_its_line_and_pattern() {
    for (tag, pattern, line) in [
        (2, "losses_kept_with_their_graph", "model.py:42 forward"),
        (5, "tensors_kept_in_a_list", "train.py:23 main"),
        (7, "hooks", "probe.py:7 save_hook"),
        (8, "growing_cache", "serve.py:5 generate"),
    ] {
        let allocator = training("", 40, Some(tag), usize::MAX);
        let analysis = Analysis::of(&read(&written(&allocator, FORMATS[4])).unwrap(), 0);
        let [leak] = &analysis.leaks[..] else { panic!("{:?}", analysis.leaks) };
        assert_eq!(leak.line.as_deref(), Some(line));
        assert_eq!(leak.count, 40);
        // Seven of eight parts of 40 steps.
        assert!((32..=37).contains(&(leak.bytes / MIB)), "{}", leak.bytes);
        assert_eq!(analysis.patterns[0].name, pattern);
    }
}

#[test]
fn a_failed_request_is_told_with_what_was_there() {
    let mut allocator = training("", 2, None, usize::MAX);
    allocator.set_tag(TraceTag(2));
    allocator.malloc(8 << 30, 0).unwrap_err();
    let snapshot = read(&written(&allocator, FORMATS[4])).unwrap();
    let [oom] = &Analysis::of(&snapshot, 0).out_of_memory[..] else { panic!("one request failed") };
    assert_eq!((oom.asked_bytes, oom.line.as_deref()), (8 << 30, Some("model.py:42 forward")));
    assert_eq!(oom.allocated_bytes, allocator.statistics().requested.current);
    assert_eq!(oom.reserved_bytes, allocator.statistics().reserved.current);
    assert_eq!(oom.device_free_bytes, (4 << 30) - oom.reserved_bytes);
}

#[test]
fn the_fullest_of_several_devices_is_shown() {
    let (small, large) = (training("", 1, None, usize::MAX), training("", 9, Some(5), usize::MAX));
    let mut bytes = Vec::new();
    write_snapshot(&[&small, &large], frames_of, FORMATS[4], &mut bytes).unwrap();
    let snapshot = read(&bytes).unwrap();
    assert_eq!(snapshot.devices(), 2);
    assert_eq!(Analysis::of_fullest(&snapshot).unwrap().device, 1);
    assert_eq!(Analysis::of(&snapshot, 0).peak.allocated_bytes, small.statistics().requested.peak);
}

fn problem(bytes: &[u8]) -> PickleError {
    read(bytes).unwrap_err()
}

#[test]
fn nothing_is_run() {
    // The usual attack: cos, system, a command.
    let attack = b"cposix\nsystem\n(S'echo harm'\ntR.";
    assert_eq!(problem(attack), PickleError { offset: 0, problem: Problem::RunsCode("GLOBAL") });
    for (opcode, name) in [
        (0x93, "STACK_GLOBAL"),
        (b'R', "REDUCE"),
        (b'b', "BUILD"),
        (b'i', "INST"),
        (b'o', "OBJ"),
        (0x81, "NEWOBJ"),
        (0x92, "NEWOBJ_EX"),
        (b'P', "PERSID"),
        (b'Q', "BINPERSID"),
        (0x82, "EXT"),
        (0x97, "NEXT_BUFFER"),
    ] {
        let error = problem(&[0x80, 4, b'N', b'N', opcode]);
        assert_eq!(error, PickleError { offset: 4, problem: Problem::RunsCode(name) });
    }
}

#[test]
fn damaged_and_hostile_files_are_errors_with_their_place() {
    for (bytes, offset, expected) in [
        (&b""[..], 0, Problem::Truncated),
        (b"PK\x03\x04", 0, Problem::RunsCode("")),
        (b"\x80\x06.", 0, Problem::Protocol(6)),
        (b"\x80\x04X\xff\xff\xff\xff", 2, Problem::Length(u32::MAX.into())),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", 2, Problem::Length(u64::MAX)),
        (b"Nr\xff\xff\xff\xff.", 1, Problem::Memo(u32::MAX.into())),
        (b"h\x05.", 0, Problem::Memo(5)),
        (b"u", 0, Problem::Underflow),
        (b"(0a", 2, Problem::Underflow),
        (b"}(K\x01u.", 4, Problem::Type("")),
        (b"N(Na.", 3, Problem::Underflow),
        (b"NNa", 2, Problem::Type("")),
        (b"Iseven\n", 0, Problem::Number("seven".into())),
        (b"\xff", 0, Problem::Opcode(0xff)),
        (b"N.", 1, Problem::NoSnapshot("")),
        (b"}.", 1, Problem::NoSnapshot("")),
    ] {
        let error = problem(bytes);
        assert_eq!(
            std::mem::discriminant(&error.problem),
            std::mem::discriminant(&expected),
            "{bytes:?}: {error}"
        );
        assert_eq!(error.offset, offset, "{bytes:?}: {error}");
    }
}

/// The sizes of entries, blocks and segments: -1, and 2^70.
#[test]
fn sizes_that_no_tensor_has_are_errors_with_their_place() {
    for number in [&b"J\xff\xff\xff\xff"[..], b"\x8a\x09\0\0\0\0\0\0\0\0\x40"] {
        for (key, size) in [
            (&b"X\x06\0\0\0action"[..], &b"X\x04\0\0\0size"[..]),
            (b"X\x05\0\0\0state", b"X\x04\0\0\0size"),
            (b"X\x06\0\0\0blocks", b"X\x0a\0\0\0total_size"),
        ] {
            let entry = [b"}(", key, b"X\x05\0\0\0alloc", size, number].concat();
            let error = problem(&[&entry[..], b"u."].concat());
            assert!(matches!(error.problem, Problem::Type(_)), "{error}");
            assert_eq!(error.offset, entry.len() as u64, "{error}");
        }
    }
}

#[test]
fn a_bomb_reaches_the_limit_and_no_more() {
    let limits = Limits { memory: 1 << 20 };
    // Lists within lists.
    let deep = vec![b']'; 200_000];
    let error = read_snapshot(&deep[..], deep.len() as u64, limits).unwrap_err();
    assert_eq!(error.problem, Problem::TooLarge(1 << 20));
    // A list that holds itself again and again; doubling would be 2^64 elements.
    let mut doubling = b"]q\x00".to_vec();
    doubling.extend(b"(h\x00h\x00h\x00h\x00e".repeat(20_000));
    assert!(read_snapshot(&doubling[..], doubling.len() as u64, limits).is_err());
    // A segment of many blocks, many times.
    let block = b"}(X\x05\x00\x00\x00stateNX\x04\x00\x00\x00sizeK\x01u";
    let mut bomb = b"](]q\x01(".to_vec();
    bomb.extend(block.repeat(3000));
    bomb.extend(b"e");
    bomb.extend(b"}(X\x06\x00\x00\x00blocksh\x01X\x0a\x00\x00\x00total_sizeK\x01u".repeat(20_000));
    bomb.extend(b"e.");
    let error = read_snapshot(&bomb[..], bomb.len() as u64, limits).unwrap_err();
    assert_eq!(error.problem, Problem::TooLarge(1 << 20));
}

#[test]
fn every_beginning_of_a_file_is_an_error() {
    let bytes = written(&training("", 1, None, usize::MAX), FORMATS[4]);
    for length in 0..bytes.len() {
        let error = problem(&bytes[..length]);
        assert!(error.offset <= length as u64);
    }
    assert!(read(&bytes).is_ok());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(snapshot) = read(&bytes) {
            Analysis::of_fullest(&snapshot);
        }
    }

    #[test]
    fn a_changed_file_is_read_or_refused(
        format in proptest::sample::select(&FORMATS[..]),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = written(&training("", 1, None, usize::MAX), format);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(snapshot) = read_snapshot(&bytes[..], bytes.len() as u64, Limits { memory: 1 << 26 }) {
            for device in 0..snapshot.devices().min(4) {
                Analysis::of(&snapshot, device);
            }
        }
    }
}
