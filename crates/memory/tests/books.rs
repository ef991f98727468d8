//! The arena's offsets and the ledger's books in numbers that were worked out by hand: a plan is made of them.

use std::collections::BTreeMap;

use plimsoll_memory::{
    Arena, Block, CountedEvents, Ledger, MemoryEvent, OutOfMemory, Phase, Tag, TagBytes, Tier,
};

fn arena(capacity: u64) -> Arena {
    Arena::new(Tier::Device, capacity)
}

fn take(arena: &Arena, bytes: u64) -> Block {
    arena.alloc(bytes, Tag::Workspace, "x").unwrap()
}

fn tags(bytes: &TagBytes) -> Vec<(Tag, u64)> {
    bytes.iter().collect()
}

/// Holes of 256, 128 and 192 bytes, with the end behind them.
fn with_holes(arena: &Arena) -> Vec<Block> {
    let blocks: Vec<Block> = [256, 64, 128, 64, 192, 64].map(|bytes| take(arena, bytes)).into();
    let kept = |(i, block)| (i % 2 == 1).then_some(block);
    blocks.into_iter().enumerate().filter_map(kept).collect()
}

#[test]
fn the_smallest_hole_that_fits_is_taken() {
    for (bytes, offset) in [(64, 320), (128, 320), (129, 512), (192, 512), (193, 0), (256, 0), (257, 768)] {
        let arena = arena(1 << 20);
        let _kept = with_holes(&arena);
        assert_eq!(take(&arena, bytes).offset(), offset, "{bytes}");
        assert_eq!(arena.high_water(), if bytes == 257 { 768 + 320 } else { 768 });
    }
}

#[test]
fn among_equal_holes_the_first_is_taken_and_what_is_left_of_it_next() {
    let arena = arena(1 << 20);
    let mut blocks: Vec<Block> = (0..5).map(|_| take(&arena, 128)).collect();
    blocks.remove(3);
    blocks.remove(1);
    let first = take(&arena, 64);
    let second = take(&arena, 64);
    let third = take(&arena, 128);
    assert_eq!([first.offset(), second.offset(), third.offset()], [128, 192, 384]);
}

#[test]
fn neighbours_that_come_back_are_one_hole() {
    for order in [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]] {
        let arena = arena(1024);
        let mut blocks: Vec<Option<Block>> = (0..3).map(|_| Some(take(&arena, 128))).collect();
        let last = take(&arena, 640);
        assert_eq!(last.offset() + last.size(), 1024);
        for index in order {
            drop(blocks[index].take());
        }
        assert_eq!(take(&arena, 384).offset(), 0, "{order:?}");
        drop(last);
        assert_eq!(take(&arena, 1024).offset(), 0);
    }
}

#[test]
fn sizes_are_whole_cache_lines() {
    let arena = arena(1000);
    assert_eq!(arena.capacity(), 960);
    for (bytes, size) in [(0, 64), (1, 64), (64, 64), (65, 128)] {
        assert_eq!(take(&arena, bytes).size(), size);
    }
    assert_eq!(self::arena(63).capacity(), 0);
    assert_eq!(self::arena(0).alloc(1, Tag::Data, "x").unwrap_err().largest_free, 0);
    let block = arena.alloc(10, Tag::Logits, "logits").unwrap();
    assert_eq!((block.tag(), block.name(), block.offset()), (Tag::Logits, "logits", 0));
    assert!(block.is_in(&arena) && block.is_in(&arena.clone()) && !block.is_in(&self::arena(960)));
}

#[test]
fn what_is_over_says_what_there_is() {
    let arena = arena(1024);
    let _kept = with_holes(&arena);
    let error = arena.alloc(300, Tag::KvCache, "cache").unwrap_err();
    let live = Box::new(arena.ledger().live());
    let expected = OutOfMemory {
        tier: Tier::Device,
        requested: 320,
        tag: Tag::KvCache,
        name: "cache",
        capacity: 1024,
        largest_free: 256,
        live,
    };
    assert_eq!(error, expected);
    assert_eq!(error.live.total(), 192);
    // What could not be had is in no book.
    assert_eq!((arena.high_water(), arena.ledger().most(Tag::KvCache)), (768, 0));
    assert_eq!(Arena::unbounded(Tier::Host).capacity(), u64::MAX / 2 / 64 * 64);
}

/// The peak is where it was first reached; to reach it again changes nothing.
#[test]
fn the_peak_is_the_first_moment_of_the_most() {
    let arena = arena(1 << 20);
    let at = |phase, layer, tag| {
        arena.enter(phase, layer);
        arena.alloc(128, tag, "x").unwrap()
    };
    let weights = at(Phase::Setup, None, Tag::Weights);
    let first = at(Phase::Forward, Some(1), Tag::Activations);
    drop(first);
    let second = at(Phase::Backward, Some(2), Tag::Gradients);
    let peak = arena.ledger().at_peak().clone();
    assert_eq!((peak.peak, peak.phase, peak.layer, peak.gaps()), (256, Phase::Forward, Some(1), 0));
    assert_eq!(tags(&peak.by_tag), [(Tag::Weights, 128), (Tag::Activations, 128)]);
    drop(weights);
    let third = at(Phase::Loss, None, Tag::Logits);
    assert_eq!(third.offset(), 0);
    let fourth = at(Phase::Optimizer, Some(0), Tag::Optimizer);
    drop((third, fourth));
    let fifth = arena.alloc(320, Tag::Workspace, "x").unwrap();
    let peak = arena.ledger().at_peak().clone();
    assert_eq!((peak.peak, peak.phase, peak.layer), (576, Phase::Optimizer, Some(0)));
    assert_eq!(tags(&peak.by_tag), [(Tag::Gradients, 128), (Tag::Workspace, 320)]);
    assert_eq!(peak.gaps(), 128);
    drop((second, fifth));
    let ledger = arena.ledger();
    assert_eq!((ledger.live().total(), ledger.at_peak().peak, arena.high_water()), (0, 576, 576));
}

#[test]
fn the_most_of_a_kind_may_be_at_another_moment_than_the_peak() {
    let arena = arena(1 << 20);
    let alloc = |bytes, tag| arena.alloc(bytes, tag, "x").unwrap();
    let two = [alloc(64, Tag::Staging), alloc(64, Tag::Staging)];
    drop(two);
    let _one = alloc(64, Tag::Staging);
    let _large = alloc(1024, Tag::Logits);
    let ledger = arena.ledger();
    assert_eq!([ledger.most(Tag::Staging), ledger.most(Tag::Logits), ledger.most(Tag::Data)], [128, 1024, 0]);
    assert_eq!(ledger.at_peak().by_tag.get(Tag::Staging), 64);
    assert_eq!(tags(&ledger.live()), [(Tag::Logits, 1024), (Tag::Staging, 64)]);
    assert_eq!(ledger.live().total(), 1088);
}

#[test]
fn recorded_events_say_everything_and_nothing_is_recorded_unasked() {
    let arena = Arena::recording(Tier::Device);
    arena.enter(Phase::Forward, Some(4));
    let first = arena.alloc(64, Tag::Activations, "q").unwrap();
    arena.enter(Phase::Backward, Some(3));
    let second = arena.alloc(128, Tag::Gradients, "dq").unwrap();
    drop(first);
    let third = arena.alloc(64, Tag::Activations, "again").unwrap();
    drop(second);
    let mut number = 0..;
    let mut event = |phase, layer, owner, tag, name, offset, delta, live, raised_peak| MemoryEvent {
        number: number.next().unwrap(),
        seconds: None,
        phase,
        layer,
        owner,
        tag,
        name,
        offset,
        delta,
        live,
        raised_peak,
    };
    let (forward, backward) = (Phase::Forward, Phase::Backward);
    let expected = [
        event(forward, Some(4), Some(4), Tag::Activations, "q", 0, 64, 64, true),
        event(backward, Some(3), Some(3), Tag::Gradients, "dq", 64, 128, 192, true),
        event(backward, Some(3), Some(4), Tag::Activations, "q", 0, -64, 128, false),
        event(backward, Some(3), Some(3), Tag::Activations, "again", 0, 64, 192, false),
        event(backward, Some(3), Some(3), Tag::Gradients, "dq", 64, -128, 64, false),
    ];
    let ledger = arena.ledger();
    assert_eq!(ledger.events(), expected);
    let by_layer = |ledger: &Ledger| -> BTreeMap<Option<u32>, Vec<(Tag, u64)>> {
        ledger.at_peak_by_layer().iter().map(|(layer, bytes)| (*layer, tags(bytes))).collect()
    };
    let at_peak = [(Some(3), vec![(Tag::Gradients, 128)]), (Some(4), vec![(Tag::Activations, 64)])];
    assert_eq!(by_layer(&ledger), at_peak.into());
    assert_eq!(ledger.live().total(), 64);
    drop(third);
    // Nothing is recorded where nobody asked for it; layers are known all the same.
    for plain in [self::arena(64), Arena::unbounded(Tier::Device)] {
        plain.enter(Phase::Forward, Some(2));
        let block = take(&plain, 1);
        drop(block);
        assert!(plain.ledger().events().is_empty());
        assert_eq!(by_layer(&plain.ledger()).keys().copied().collect::<Vec<_>>(), [Some(2)]);
    }
}

/// Arenas that record together have one numbering and one time; marks and counted iterations refer to it.
#[test]
fn arenas_beside_each_other_share_numbers_and_time() {
    let device = Arena::recording(Tier::Device);
    let host = device.beside(Tier::Host);
    device.mark("load");
    let weight = device.alloc(64, Tag::Weights, "w").unwrap();
    let home = host.alloc(64, Tag::Optimizer, "m").unwrap();
    device.mark("step");
    device.tell_time(1.5);
    let first = device.next_event();
    drop((weight, home));
    device.count_again(first, 7);
    device.count_again(device.next_event(), 3);
    let moments = |arena: &Arena| -> Vec<(u64, Option<f64>)> {
        arena.ledger().events().iter().map(|event| (event.number, event.seconds)).collect()
    };
    assert_eq!(moments(&device), [(0, None), (2, Some(1.5))]);
    assert_eq!(moments(&host), [(1, None), (3, Some(1.5))]);
    let ledger = device.ledger();
    let marks: Vec<(&str, u64)> = ledger.marks().iter().map(|mark| (mark.name, mark.event)).collect();
    assert_eq!(marks, [("load", 0), ("step", 2)]);
    assert_eq!(ledger.counted(), [CountedEvents { first: 2, end: 4, times: 7 }]);
    // Beside an arena that records nothing, nothing is recorded.
    let plain = Arena::unbounded(Tier::Device);
    let below = plain.beside(Tier::Disk);
    plain.mark("load");
    plain.tell_time(1.0);
    drop(take(&below, 1));
    assert_eq!((below.ledger().events(), plain.ledger().marks(), plain.next_event()), (&[][..], &[][..], 0));
}

#[test]
fn kinds_have_names_of_their_own() {
    let names: Vec<&str> = Tag::ALL.iter().map(|tag| tag.name()).collect();
    let expected = [
        "weights",
        "master_weights",
        "gradients",
        "optimizer",
        "adapters",
        "activations",
        "attention",
        "logits",
        "kv_cache",
        "communication",
        "staging",
        "workspace",
        "data",
    ];
    assert_eq!(names, expected);
    assert_eq!(Tag::ALL.map(|tag| tag as usize), std::array::from_fn(|i| i));
    assert_eq!(format!("{:>9}|{}", Tag::Logits, Tag::KvCache), "   logits|kv_cache");
    let phases =
        [Phase::Setup, Phase::Forward, Phase::Loss, Phase::Backward, Phase::Optimizer, Phase::Generate];
    assert_eq!(
        phases.map(|phase| phase.to_string()),
        ["setup", "forward", "loss", "backward", "optimizer", "generate"]
    );
    assert_eq!(
        [Tier::Device, Tier::Host, Tier::Disk].map(|tier| tier.to_string()),
        ["device", "host", "disk"]
    );
}
