//! Pictures of a small timeline, to the letter: `small.svg` with seconds, `events.svg` with the numbers of events.

use std::path::Path;

use plimsoll_memory::{Arena, Block, CountedEvents, Ledger};

use super::*;

/// Work that keeps what it takes until it is told to give it back.
struct Work {
    arena: Arena,
    blocks: Vec<(&'static str, Block)>,
}

impl Work {
    fn take(&mut self, tag: Tag, name: &'static str, bytes: u64) {
        self.blocks.push((name, self.arena.alloc(bytes, tag, name).unwrap()));
    }

    fn give_back(&mut self, name: &str) {
        self.blocks.retain(|(own, _)| *own != name);
    }
}

/// A load, two steps and an evaluation of a model of two layers. A step's forward pass takes a second, its loss half a
/// second, its backward pass two, its update a quarter. The second layer's norm is too small to be seen.
fn device(has_seconds: bool) -> Ledger {
    let mut work = Work { arena: Arena::recording(Tier::Device), blocks: Vec::new() };
    let at = |work: &Work, phase, layer, seconds| {
        work.arena.enter(phase, layer);
        if has_seconds {
            work.arena.tell_time(seconds);
        }
    };
    work.arena.mark("load");
    at(&work, Phase::Setup, None, 0.0);
    work.take(Tag::Weights, "embedding", 3 << 20);
    work.take(Tag::Optimizer, "momentum", 2 << 20);
    for (name, begin) in [("step", 0.5), ("next step", 4.5)] {
        work.arena.mark(name);
        at(&work, Phase::Forward, None, begin);
        work.take(Tag::Data, "tokens", 64);
        for (layer, q, norm) in [(0, "q", "norm"), (1, "second q", "second norm")] {
            at(&work, Phase::Forward, Some(layer), begin + 0.5 * f64::from(layer));
            work.take(Tag::Activations, q, (2 + u64::from(layer)) << 20);
            work.take(Tag::Activations, norm, 256);
        }
        at(&work, Phase::Loss, None, begin + 1.0);
        work.take(Tag::Logits, "logits", 4 << 20);
        at(&work, Phase::Backward, Some(1), begin + 1.5);
        work.give_back("logits");
        work.give_back("second norm");
        work.take(Tag::Gradients, "second gradient", 3 << 19);
        work.give_back("second q");
        at(&work, Phase::Backward, Some(0), begin + 2.5);
        work.take(Tag::Gradients, "gradient", 3 << 19);
        work.give_back("q");
        work.give_back("norm");
        at(&work, Phase::Optimizer, None, begin + 3.5);
        work.give_back("gradient");
        work.give_back("second gradient");
        work.give_back("tokens");
    }
    at(&work, Phase::Forward, None, 8.25);
    work.arena.mark("evaluation");
    work.take(Tag::Activations, "residual", 1 << 20);
    work.give_back("residual");
    work.arena.ledger()
}

fn host() -> Ledger {
    let mut work = Work { arena: Arena::recording(Tier::Host), blocks: Vec::new() };
    work.take(Tag::Optimizer, "variance", 5 << 20);
    work.arena.ledger()
}

fn timeline(has_seconds: bool) -> Timeline {
    let lines = [
        (Tier::Device, 15 << 20, "load line, less the overhead"),
        (Tier::Host, 1 << 30, "memory.host_budget"),
    ];
    let names = ("small <& model>".to_owned(), "1 x 64 tokens".to_owned());
    let ledgers = [&device(has_seconds), &host(), &Ledger::default()];
    let counted = |first: u64| CountedEvents { first, end: first + 3, times: 7 };
    // The first is before the part that is drawn; of the others three are named.
    let counted = [3, 22, 25, 28, 31].map(counted).to_vec();
    Timeline { counted, ..Timeline::of_ledgers(ledgers, &lines, names) }
}

fn check(file: &str, picture: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/timeline/picture").join(file);
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = expected.lines().zip(picture.lines()).find(|(old, new)| old != new);
    assert!(
        expected == picture,
        "{file} is another picture now (`-- --ignored` writes it anew, to be looked at). First difference: {differs:#?}"
    );
}

#[test]
fn pictures_are_what_they_were() {
    check("small.svg", &draw(&timeline(true)));
    check("events.svg", &draw(&timeline(false)));
}

#[test]
#[ignore = "writes small.svg and events.svg anew"]
fn write_the_pictures_anew() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/timeline/picture");
    std::fs::write(folder.join("small.svg"), draw(&timeline(true))).unwrap();
    std::fs::write(folder.join("events.svg"), draw(&timeline(false))).unwrap();
}

/// What reaches the edge of a part and no further is not in it.
#[test]
fn what_ends_where_a_part_begins_is_outside() {
    let part = Part {
        what: "step",
        begin: Moment { event: 10, micros: 10.0 },
        end: Moment { event: 20, micros: 20.0 },
    };
    let mut own = timeline(true).tiers.remove(0).allocations.remove(0);
    let mut lives = |birth, death| {
        (own.birth.event, own.death.event) = (birth, death);
        own.is_in(&part)
    };
    assert_eq!([lives(0, 10), lives(0, 11), lives(19, 30), lives(20, 30)], [false, true, true, false]);
}

/// Three counted loops are all named; what is counted beyond them is said to be there.
#[test]
fn a_few_counted_loops_are_named() {
    let mut timeline = timeline(true);
    let part = timeline.shown();
    let first = part.begin.event;
    let all = |timeline: &Timeline| notes(timeline, &part, 9, 0).pop().unwrap();
    timeline.counted =
        [0, 2, 4].map(|n| CountedEvents { first: first + n, end: first + n + 2, times: 5 }).to_vec();
    assert!(!all(&timeline).contains("others"), "{}", all(&timeline));
    assert!(all(&timeline).contains(&format!("events {} to {}: 5 times more", first + 4, first + 5)));
    timeline.counted.push(CountedEvents { first: first + 6, end: first + 8, times: 1 });
    assert!(all(&timeline).ends_with(", and others)."), "{}", all(&timeline));
    timeline.counted = vec![CountedEvents { first: part.end.event - 1, end: part.end.event + 1, times: 1 }];
    assert_eq!(notes(&timeline, &part, 9, 0).len(), 2);
}

#[test]
fn axes_have_round_numbers_and_the_decimals_that_they_need() {
    assert_eq!([0.03, 0.2, 0.21, 1.0, 3.0, 7.0].map(nice_step), [0.05, 0.2, 0.5, 1.0, 5.0, 10.0]);
    assert_eq!(
        [(1.5, 0.5), (2.0, 1.0), (20.0, 10.0), (0.004, 0.002)].map(|(time, step)| seconds(time, step)),
        ["1.5 s", "2 s", "20 s", "0.004 s"]
    );
    assert_eq!(byte_ticks(16.0, 4.0), [0.0, 4.0, 8.0, 12.0, 16.0]);
    assert_eq!(byte_ticks(15.0, 2.0), [0.0, 4.0, 8.0, 12.0]);
}
