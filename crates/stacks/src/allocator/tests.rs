//! Worked examples: numbers that the sources of PyTorch, its documentation and published snapshots give.

use super::sizes::LARGE_BUFFER;
use super::*;

const MIB: u64 = 1 << 20;

fn with(text: &str, capacity: u64) -> CachingAllocator {
    CachingAllocator::new(Settings::parse(text).unwrap(), capacity)
}

fn free_blocks(allocator: &CachingAllocator) -> Vec<u64> {
    let blocks = allocator.segments().into_iter().flat_map(|segment| segment.blocks);
    blocks.filter(|block| block.state == BlockState::Inactive).map(|block| block.size).collect()
}

#[test]
fn cublas_workspace_leaves_the_rest_of_twenty_mebibytes() {
    // PyTorch's forum, thread 178671: a block of 8,519,680 bytes in a segment of 20 MiB.
    let mut allocator = with("", u64::MAX);
    allocator.malloc(8_519_680, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, LARGE_BUFFER);
    assert_eq!(free_blocks(&allocator), [12_451_840]);
}

#[test]
fn sizes_are_rounded_as_in_the_sources() {
    let plain = Settings::default();
    let four = Settings { roundup_power2_divisions: [4; DIVISION_RANGES], ..Settings::default() };
    for (bytes, expected) in [(0, 512), (1, 512), (512, 512), (513, 1024), (1200, 1536), (MIB + 1, MIB + 512)]
    {
        assert_eq!(block_size(bytes, &plain), expected, "{bytes}");
    }
    // 1200 would go to 1280 with 4 divisions, but such small sizes are rounded to 512 in any case.
    for (bytes, expected) in [(1200, 1536), (2049, 2560), (5000, 5120), (5121, 6144), (7 * MIB, 7 * MIB)] {
        assert_eq!(block_size(bytes, &four), expected, "{bytes}");
    }
    for (size, expected) in [
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ] {
        assert_eq!(segment_size(size), expected, "{size}");
    }
}

#[test]
fn a_large_block_keeps_up_to_a_mebibyte_that_nobody_asked_for() {
    let mut allocator = with("", u64::MAX);
    let block = allocator.malloc(11 * MIB, 0).unwrap();
    assert_eq!(allocator.place(block).unwrap().1, 12 * MIB, "a rest of 1 MiB is not split off");
    assert_eq!(allocator.statistics().allocated.current, 12 * MIB);
    assert_eq!(allocator.statistics().requested.current, 11 * MIB);
    let block = allocator.malloc(11 * MIB - 512, 0).unwrap();
    assert_eq!(allocator.place(block).unwrap().1, 11 * MIB - 512, "a larger rest is");
}

#[test]
fn best_fit_takes_the_smallest_then_the_lowest_of_its_stream() {
    let mut allocator = with("", u64::MAX);
    let blocks: Vec<_> = [40, 30, 30, 25].map(|mib| allocator.malloc(mib * MIB, 0).unwrap()).into();
    let places: Vec<_> = blocks.iter().map(|&block| allocator.place(block).unwrap().0).collect();
    blocks.into_iter().for_each(|block| allocator.free(block));
    let other = allocator.malloc(25 * MIB, 1).unwrap();
    assert!(allocator.place(other).unwrap().0 > places[3], "another stream reuses nothing");
    let block = allocator.malloc(28 * MIB, 0).unwrap();
    assert_eq!(allocator.place(block).unwrap().0, places[1]);
}

#[test]
fn freeing_gives_nothing_back_and_the_cache_gives_whole_segments() {
    let mut allocator = with("", u64::MAX);
    let kept = allocator.malloc(3 * MIB, 0).unwrap();
    let blocks = [3 * MIB, 64 * MIB, 700].map(|bytes| allocator.malloc(bytes, 0).unwrap());
    blocks.into_iter().for_each(|block| allocator.free(block));
    assert_eq!(allocator.statistics().reserved.current, 86 * MIB);
    allocator.empty_cache();
    assert_eq!(allocator.statistics().reserved.current, 20 * MIB, "one block holds its segment");
    allocator.free(kept);
    allocator.empty_cache();
    assert_eq!((allocator.statistics().reserved.current, allocator.statistics().segments.freed), (0, 3));
}

#[test]
fn a_failed_request_frees_the_cache_and_tries_again() {
    let mut allocator = with("", 100 * MIB);
    let cached = allocator.malloc(60 * MIB, 1).unwrap();
    allocator.free(cached);
    allocator.malloc(80 * MIB, 0).unwrap();
    let statistics = *allocator.statistics();
    assert_eq!((statistics.num_alloc_retries, statistics.num_ooms), (1, 0));
    let error = allocator.malloc(21 * MIB, 0).unwrap_err();
    assert_eq!(
        error,
        OutOfMemory { asked: 21 * MIB, allocated: 80 * MIB, reserved: 80 * MIB, capacity: 100 * MIB }
    );
    assert_eq!(allocator.statistics().num_ooms, 1);
    assert!(allocator.malloc(u64::MAX, 0).is_err(), "more than an exabyte");
}

#[test]
fn fragments_make_a_run_fail_that_fits_by_allocated_bytes() {
    // 5 segments of 20 MiB with 2 MiB in use each: 10 MiB of 100, and no room for 30.
    let run = |text| {
        let mut allocator = with(text, 100 * MIB);
        let blocks: Vec<_> = (0..50).map(|_| allocator.malloc(2 * MIB, 0).unwrap()).collect();
        for (at, block) in blocks.into_iter().enumerate() {
            if at % 10 != 0 {
                allocator.free(block);
            }
        }
        assert_eq!(allocator.statistics().allocated.current, 10 * MIB);
        allocator.malloc(30 * MIB, 0).is_ok()
    };
    assert!(!run(""));
    // A page with a block in it cannot be given back either.
    assert!(!run("expandable_segments:True"));
}

#[test]
fn blocks_above_max_split_size_stay_whole() {
    let mut allocator = with("max_split_size_mb:32", u64::MAX);
    let large = allocator.malloc(64 * MIB, 0).unwrap();
    allocator.free(large);
    allocator.malloc(16 * MIB, 0).unwrap();
    assert_eq!(
        allocator.statistics().reserved.current,
        80 * MIB,
        "a small request does not take the large block"
    );
    let again = allocator.malloc(50 * MIB, 0).unwrap();
    assert_eq!(allocator.place(again).unwrap().1, 64 * MIB, "within 20 MiB a large one does, whole");
    allocator.free(again);
    allocator.malloc(44 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 124 * MIB, "further away it does not");
    assert_eq!(allocator.statistics().oversize_segments.current, 2);
}

#[test]
fn the_oldest_segments_are_collected_above_the_threshold() {
    let mut allocator = with("garbage_collection_threshold:0.5,per_process_memory_fraction:1", 200 * MIB);
    let small = allocator.malloc(512, 0).unwrap();
    allocator.free(small);
    let blocks = [60, 40, 30].map(|mib| allocator.malloc(mib * MIB, 0).unwrap());
    allocator.free(blocks[0]);
    for _ in 0..8 {
        let block = allocator.malloc(512, 0).unwrap();
        let large = allocator.malloc(2 * MIB, 0).unwrap();
        allocator.free(large);
        allocator.free(block);
    }
    // 60 MiB were free; small requests split that segment, and it is whole again. 132 MiB are reserved, 100 are the threshold.
    allocator.free(blocks[2]);
    assert_eq!(allocator.statistics().reserved.current, 132 * MIB);
    allocator.malloc(64 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().num_alloc_retries, 0);
    assert_eq!(allocator.statistics().reserved.current, (132 - 30 - 60 + 64) * MIB);
}

#[test]
fn expandable_segments_grow_by_pages() {
    let mut allocator = with("expandable_segments:True", 1 << 30);
    allocator.malloc(1, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 2 * MIB, "a page of the small pool");
    let block = allocator.malloc(21 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 42 * MIB, "two pages of the large pool");
    let next = allocator.malloc(25 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 62 * MIB, "what is free of the second page counts");
    assert_eq!(allocator.place(next).unwrap().0, allocator.place(block).unwrap().0 + 21 * MIB);
    allocator.free(block);
    allocator.empty_cache();
    assert_eq!(
        allocator.statistics().reserved.current,
        42 * MIB,
        "the first page of 20 MiB is free as a whole"
    );
    assert_eq!(allocator.statistics().inactive_split.peak, 0);
    let tail = allocator.malloc(10 * MIB, 0).unwrap();
    assert!(
        allocator.place(tail).unwrap().0 > allocator.place(next).unwrap().0,
        "what has memory comes first"
    );
    let hole = allocator.malloc(10 * MIB, 0).unwrap();
    assert!(allocator.place(hole).unwrap().0 < allocator.place(next).unwrap().0, "the hole is filled first");
}

#[test]
fn a_block_of_another_stream_waits_by_the_rule_that_is_set() {
    for (rule, reserved) in [(CrossStreamReuse::NextRequest, 30), (CrossStreamReuse::Synchronisation, 60)] {
        let settings = Settings { cross_stream_reuse: rule, ..Settings::default() };
        let mut allocator = CachingAllocator::new(settings, u64::MAX);
        let block = allocator.malloc(30 * MIB, 0).unwrap();
        allocator.record_stream(block, 0);
        allocator.record_stream(block, 1);
        allocator.free(block);
        assert_eq!(allocator.statistics().allocated.current, 0);
        assert_eq!(allocator.statistics().active.current, 30 * MIB);
        let block = allocator.malloc(30 * MIB, 0).unwrap();
        assert_eq!(allocator.statistics().reserved.current, reserved * MIB);
        allocator.synchronize();
        allocator.free(block);
        allocator.malloc(30 * MIB, 0).unwrap();
        assert_eq!(allocator.statistics().active.current, 30 * MIB, "after a synchronisation both are free");
    }
}

#[test]
fn the_trace_has_every_step_with_its_tag() {
    let mut allocator = with("", 100 * MIB);
    allocator.record_history(5);
    allocator.set_tag(TraceTag(7));
    let block = allocator.malloc(700, 0).unwrap();
    allocator.set_tag(TraceTag(8));
    allocator.free(block);
    let names: Vec<_> = allocator.history().map(|e| (e.action.name(), e.size, e.tag.0)).collect();
    let expected = [
        ("segment_alloc", 2 * MIB, 7),
        ("alloc", 700, 7),
        ("free_requested", 700, 8),
        ("free_completed", 700, 8),
    ];
    assert_eq!(names, expected);
    allocator.malloc(200 * MIB, 0).unwrap_err();
    let names: Vec<_> = allocator.history().map(|e| e.action.name()).collect();
    assert_eq!(
        names,
        ["alloc", "free_requested", "free_completed", "segment_free", "oom"],
        "the latest five"
    );
}

#[test]
fn peaks_begin_again_where_they_are_reset() {
    let mut allocator = with("", u64::MAX);
    let block = allocator.malloc(30 * MIB, 0).unwrap();
    allocator.free(block);
    allocator.reset_peaks();
    let statistics = allocator.statistics();
    assert_eq!((statistics.allocated.peak, statistics.reserved.peak), (0, 30 * MIB));
    assert_eq!(statistics.large.allocated.allocated, 30 * MIB);
    let named: std::collections::HashMap<_, _> = statistics.named().into_iter().collect();
    assert_eq!(named["reserved_bytes.large_pool.current"], 30 * MIB);
    assert_eq!(named["segment.all.allocated"], 1);
}
