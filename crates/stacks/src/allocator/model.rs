//! The rules of the allocator once more, written to be read: lists, linear searches, no statistics on the way. Every request of a random
//! program must get the same address and size from both, and every counter must be what the lists add up to.

use proptest::prelude::*;

use super::sizes::{LARGE_BUFFER, SMALL_BUFFER};
use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    address: u64,
    size: u64,
    state: State,
    requested: u64,
    elsewhere: bool,
    freed_at: u64,
}

#[derive(Clone, Debug)]
struct Range {
    stream: Stream,
    small: bool,
    expandable: bool,
    parts: Vec<Part>,
}

impl Range {
    fn page(&self) -> u64 {
        if self.small { SMALL_BUFFER } else { LARGE_BUFFER }
    }

    /// Neighbours that are both free, or both without memory, become one; the later of the two times counts.
    fn join(&mut self) {
        let mut at = 0;
        while at + 1 < self.parts.len() {
            let (left, right) = (self.parts[at], self.parts[at + 1]);
            if left.state == right.state && matches!(left.state, State::Free | State::Unmapped) {
                self.parts[at].size += right.size;
                self.parts[at].freed_at = left.freed_at.max(right.freed_at);
                self.parts.remove(at + 1);
            } else {
                at += 1;
            }
        }
    }

    /// Makes `[from, to)` of part `at` a part of its own with that state.
    fn carve(&mut self, at: usize, from: u64, to: u64, state: State, now: u64) {
        let part = self.parts[at];
        let piece = |from, to, state| Part { address: from, size: to - from, state, freed_at: now, ..part };
        let end = part.address + part.size;
        let pieces =
            [piece(part.address, from, part.state), piece(from, to, state), piece(to, end, part.state)];
        self.parts.splice(at..=at, pieces.into_iter().filter(|piece| piece.size > 0));
    }
}

struct Model {
    settings: Settings,
    capacity: u64,
    allowed: u64,
    next_address: u64,
    ranges: Vec<Range>,
    searches: [u64; 2],
    synchronised: bool,
    retries: u64,
}

impl Model {
    fn new(settings: Settings, capacity: u64) -> Self {
        let allowed =
            settings.memory_fraction.map_or(u64::MAX, |fraction| (fraction * capacity as f64) as u64);
        Model {
            settings,
            capacity,
            allowed,
            next_address: FIRST_ADDRESS,
            ranges: Vec::new(),
            searches: [0; 2],
            synchronised: false,
            retries: 0,
        }
    }

    fn sum(&self, counts: impl Fn(&Range, &Part) -> u64) -> u64 {
        self.ranges.iter().flat_map(|range| range.parts.iter().map(|part| counts(range, part))).sum()
    }

    fn reserved(&self) -> u64 {
        self.sum(|_, part| if part.state == State::Unmapped { 0 } else { part.size })
    }

    fn with_garbage_collection(&self) -> bool {
        self.settings.memory_fraction.is_some() && self.settings.garbage_collection_threshold.is_some()
    }

    fn malloc(&mut self, bytes: u64, stream: Stream) -> Option<(u64, u64)> {
        if self.synchronised || self.settings.cross_stream_reuse == CrossStreamReuse::NextRequest {
            self.end_pending();
        }
        let size = block_size(bytes, &self.settings);
        let small = size <= 1 << 20;
        self.searches[usize::from(small)] += u64::from(self.with_garbage_collection());
        let place = self.best_fit(size, stream, small).or_else(|| self.fresh(size, stream, small))?;
        let (range, at) = place;
        let now = self.searches[usize::from(small)];
        let part = self.ranges[range].parts[at];
        let rest = part.size - size;
        let cut = if small || self.settings.expandable_segments {
            rest >= 512
        } else {
            self.settings.max_split_size.is_none_or(|limit| size < limit) && rest > 1 << 20
        };
        let size = if cut { size } else { part.size };
        self.ranges[range].carve(at, part.address, part.address + size, State::Allocated, now);
        self.ranges[range].parts[at].requested = bytes;
        Some((part.address, size))
    }

    fn free_parts(&self, stream: Stream, small: bool) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for (at_range, range) in self.ranges.iter().enumerate() {
            for (at, part) in range.parts.iter().enumerate() {
                if range.stream == stream && range.small == small && part.state == State::Free {
                    found.push((at_range, at));
                }
            }
        }
        found.sort_by_key(|&(range, at)| {
            let part = self.ranges[range].parts[at];
            (part.size, part.address)
        });
        found
    }

    fn best_fit(&self, size: u64, stream: Stream, small: bool) -> Option<(usize, usize)> {
        let part = |place: (usize, usize)| self.ranges[place.0].parts[place.1];
        let room = |place: (usize, usize)| {
            let next = self.ranges[place.0].parts.get(place.1 + 1);
            part(place).size + next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
        };
        let mut candidates =
            self.free_parts(stream, small).into_iter().skip_while(|&place| part(place).size < size);
        let mut best = candidates.next()?;
        for candidate in candidates {
            if !self.ranges[best.0].expandable || room(candidate) >= room(best) {
                break;
            }
            best = candidate;
        }
        let rounding = self.settings.max_non_split_rounding.unwrap_or(20 << 20);
        match self.settings.max_split_size {
            Some(limit) if size < limit && part(best).size >= limit => None,
            Some(limit) if size >= limit && part(best).size >= size + rounding => None,
            _ => Some(best),
        }
    }

    fn fresh(&mut self, size: u64, stream: Stream, small: bool) -> Option<(usize, usize)> {
        if self.with_garbage_collection() {
            self.collect_garbage();
        }
        if let Some(place) = self.segment(size, stream, small) {
            return Some(place);
        }
        if let Some(limit) = self.settings.max_split_size
            && self.release_oversize(size.max(limit), limit, stream, small)
            && let Some(place) = self.segment(size, stream, small)
        {
            return Some(place);
        }
        self.empty_cache();
        self.retries += 1;
        self.segment(size, stream, small)
    }

    fn segment(&mut self, size: u64, stream: Stream, small: bool) -> Option<(usize, usize)> {
        let bytes = match size {
            _ if small => 2 << 20,
            size if size < 10 << 20 => 20 << 20,
            size => size.div_ceil(2 << 20) * (2 << 20),
        };
        if self.reserved() + bytes > self.allowed {
            return None;
        }
        if self.settings.expandable_segments {
            return self.expand(size, stream, small);
        }
        if self.reserved() + bytes > self.capacity {
            return None;
        }
        self.add_range(bytes, stream, small, State::Free);
        Some((self.ranges.len() - 1, 0))
    }

    fn add_range(&mut self, size: u64, stream: Stream, small: bool, state: State) {
        let (address, freed_at) = (self.next_address, self.searches[usize::from(small)]);
        self.next_address += size;
        let part = Part { address, size, state, requested: 0, elsewhere: false, freed_at };
        self.ranges.push(Range { stream, small, expandable: state == State::Unmapped, parts: vec![part] });
    }

    fn expand(&mut self, size: u64, stream: Stream, small: bool) -> Option<(usize, usize)> {
        let usable = |part: &Part| matches!(part.state, State::Free | State::Unmapped);
        let mut place = None;
        for (at_range, range) in self.ranges.iter().enumerate() {
            if !range.expandable || range.stream != stream || range.small != small {
                continue;
            }
            for (mut at, part) in range.parts.iter().enumerate() {
                if part.state != State::Unmapped {
                    continue;
                }
                at -= usize::from(at > 0 && usable(&range.parts[at - 1]));
                let room: u64 =
                    range.parts[at..].iter().take_while(|part| usable(part)).map(|part| part.size).sum();
                if room >= size {
                    place = place.or(Some((at_range, at)));
                }
            }
        }
        let (range, at) = place.unwrap_or_else(|| {
            let page = if small { SMALL_BUFFER } else { LARGE_BUFFER };
            self.add_range(
                (self.capacity + self.capacity / 8).div_ceil(page) * page,
                stream,
                small,
                State::Unmapped,
            );
            (self.ranges.len() - 1, 0)
        });
        let start = self.ranges[range].parts[at].address;
        loop {
            let at = self.ranges[range].parts.iter().position(|part| part.address == start)?;
            let Part { size: has, state, .. } = self.ranges[range].parts[at];
            if state == State::Free && has >= size {
                return Some((range, at));
            }
            let (at, missing) = if state == State::Free { (at + 1, size - has) } else { (at, size) };
            let unmapped = self.ranges[range].parts[at];
            let page = self.ranges[range].page();
            let bytes = missing.min(unmapped.size).div_ceil(page) * page;
            if self.reserved() + bytes > self.capacity {
                return None;
            }
            let now = self.searches[usize::from(small)];
            self.ranges[range].carve(at, unmapped.address, unmapped.address + bytes, State::Free, now);
            self.ranges[range].join();
        }
    }

    fn at(&self, address: u64) -> (usize, usize) {
        let of = |range: &Range| range.parts.iter().position(|part| part.address == address);
        self.ranges.iter().enumerate().find_map(|(at, range)| Some((at, of(range)?))).expect("a part")
    }

    fn free(&mut self, address: u64) {
        let (range, at) = self.at(address);
        let part = &mut self.ranges[range].parts[at];
        part.state = State::Pending;
        if !part.elsewhere {
            self.end(range, at);
        }
        self.synchronised = false;
    }

    fn end(&mut self, range: usize, at: usize) {
        let freed_at = self.searches[usize::from(self.ranges[range].small)];
        let part = &mut self.ranges[range].parts[at];
        *part = Part { state: State::Free, elsewhere: false, requested: 0, freed_at, ..*part };
        self.ranges[range].join();
    }

    fn end_pending(&mut self) {
        self.synchronised = false;
        while let Some((range, at)) = self.ranges.iter().enumerate().find_map(|(at, range)| {
            Some((at, range.parts.iter().position(|part| part.state == State::Pending)?))
        }) {
            self.end(range, at);
        }
    }

    fn whole(&self, range: &Range) -> bool {
        !range.expandable && range.parts.len() == 1 && range.parts[0].state == State::Free
    }

    fn empty_cache(&mut self) {
        self.end_pending();
        let whole: Vec<bool> = self.ranges.iter().map(|range| self.whole(range)).collect();
        let mut whole = whole.into_iter();
        self.ranges.retain(|_| whole.next() == Some(false));
        let untouched: Vec<bool> = self.ranges.iter().map(|range| range.parts.len() == 1).collect();
        for range in self.ranges.iter_mut().filter(|range| range.expandable) {
            let (base, page) = (range.parts[0].address, range.page());
            let mut at = 0;
            while at < range.parts.len() {
                let Part { address, size, state, freed_at, .. } = range.parts[at];
                let from = base + (address - base).div_ceil(page) * page;
                let to = base + (address + size - base) / page * page;
                if state == State::Free && from < to {
                    range.carve(at, from, to, State::Unmapped, freed_at);
                    at += 1;
                }
                at += 1;
            }
            range.join();
        }
        // One that never had memory stays.
        let empty = |range: &Range| range.parts.len() == 1 && range.parts[0].state == State::Unmapped;
        let mut untouched = untouched.into_iter();
        self.ranges.retain(|range| untouched.next() == Some(true) || !empty(range));
    }

    fn release_oversize(&mut self, wanted: u64, limit: u64, stream: Stream, small: bool) -> bool {
        let candidates: Vec<(u64, u64)> = self
            .free_parts(stream, small)
            .into_iter()
            .map(|(range, at)| (self.ranges[range].parts[at].address, self.ranges[range].parts[at].size))
            .collect();
        if let Some((address, _)) = candidates.iter().find(|(_, size)| *size >= wanted) {
            let (range, _) = self.at(*address);
            self.ranges.remove(range);
            return true;
        }
        let mut released = 0;
        for (address, size) in candidates.into_iter().rev() {
            if released >= wanted || size < limit {
                break;
            }
            released += size;
            let (range, _) = self.at(address);
            self.ranges.remove(range);
        }
        released >= wanted
    }

    fn collect_garbage(&mut self) {
        let threshold = (self.settings.garbage_collection_threshold.unwrap() * self.allowed as f64) as u64;
        let excess = self.reserved().saturating_sub(threshold);
        let mut reclaimed = 0;
        while reclaimed < excess {
            let age = |range: &Range| self.searches[0] - range.parts[0].freed_at;
            let candidates: Vec<&Range> =
                self.ranges.iter().filter(|range| !range.small && self.whole(range)).collect();
            let average =
                candidates.iter().map(|range| age(range)).sum::<u64>() as f64 / candidates.len() as f64;
            let old: Vec<u64> = candidates
                .into_iter()
                .filter(|range| age(range) as f64 >= average)
                .map(|range| range.parts[0].address)
                .collect();
            if old.is_empty() {
                return;
            }
            for address in old {
                let (range, at) = self.at(address);
                reclaimed += self.ranges[range].parts[at].size;
                self.ranges.remove(range);
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Malloc { bytes: u64, stream: Stream },
    Free { which: usize },
    RecordStream { which: usize, stream: Stream },
    Synchronize,
    EmptyCache,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    const MIB: u64 = 1 << 20;
    let bytes = prop_oneof![
        4 => 0..4096u64,
        3 => 4096..MIB + 1024,
        3 => MIB..12 * MIB,
        2 => (1..40u64).prop_map(|n| n * MIB),
        1 => 20 * MIB..90 * MIB,
    ];
    let stream = prop_oneof![5 => Just(0u32), 1 => Just(1u32)];
    let step = prop_oneof![
        12 => (bytes, stream.clone()).prop_map(|(bytes, stream)| Step::Malloc { bytes, stream }),
        10 => any::<usize>().prop_map(|which| Step::Free { which }),
        2 => (any::<usize>(), stream).prop_map(|(which, stream)| Step::RecordStream { which, stream }),
        1 => Just(Step::Synchronize),
        1 => Just(Step::EmptyCache),
    ];
    proptest::collection::vec(step, 1..150)
}

const SETTINGS: &[&str] = &[
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:24",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8,max_split_size_mb:40",
    "per_process_memory_fraction:0.7,expandable_segments:True",
    "roundup_power2_divisions:[1:0,4:2,>:8]",
    "roundup_power2_divisions:4,expandable_segments:True",
];

fn settings() -> impl Strategy<Value = Settings> {
    (proptest::sample::select(SETTINGS), any::<bool>()).prop_map(|(text, late)| Settings {
        cross_stream_reuse: if late {
            CrossStreamReuse::Synchronisation
        } else {
            CrossStreamReuse::NextRequest
        },
        ..Settings::parse(text).unwrap()
    })
}

fn check_counters(real: &CachingAllocator, model: &Model) {
    let statistics = real.statistics();
    let is = |part: &Part, states: &[State]| states.contains(&part.state);
    assert_eq!(statistics.reserved.current, model.reserved());
    assert_eq!(statistics.num_alloc_retries, model.retries);
    let pools = [(None, **statistics), (Some(true), statistics.small), (Some(false), statistics.large)];
    for (small, counters) in pools {
        let sum = |states: &[State], value: fn(&Part) -> u64| {
            model.sum(|range, part| {
                let counts = small.is_none_or(|small| range.small == small) && is(part, states);
                if counts { value(part) } else { 0 }
            })
        };
        let active = [State::Allocated, State::Pending];
        assert_eq!(counters.allocated.current, sum(&active[..1], |part| part.size));
        assert_eq!(counters.allocations.current, sum(&active[..1], |_| 1));
        assert_eq!(counters.active.current, sum(&active, |part| part.size));
        assert_eq!(counters.active_blocks.current, sum(&active, |_| 1));
        assert_eq!(counters.requested.current, sum(&active, |part| part.requested));
        assert_eq!(counters.reserved.current, sum(&[active[0], active[1], State::Free], |part| part.size));
        let of_pool = |range: &&Range| small.is_none_or(|small| range.small == small) && !range.expandable;
        let segments = model.ranges.iter().filter(of_pool);
        let split = segments.clone().filter(|range| range.parts.len() > 1).flat_map(|range| &range.parts);
        let free: Vec<u64> = split.filter(|part| part.state == State::Free).map(|part| part.size).collect();
        assert_eq!(counters.inactive_split_blocks.current, free.len() as u64);
        assert_eq!(counters.inactive_split.current, free.iter().sum::<u64>());
        assert_eq!(counters.segments.current, segments.count() as u64);
    }
}

/// What is there is what came and did not go.
fn check_totals(statistics: &Statistics) {
    let named = statistics.named();
    for (name, value) in &named {
        if let Some(base) = name.strip_suffix(".current") {
            let of = |kind: &str| {
                let wanted = format!("{base}.{kind}");
                named.iter().find(|(name, _)| *name == wanted).unwrap().1
            };
            assert_eq!(*value, of("allocated") - of("freed"), "{base}");
            assert!(*value <= of("peak"), "{base}");
        }
    }
}

/// The segments of the real allocator, as the model's mapped parts.
fn check_segments(real: &CachingAllocator, model: &Model) {
    let mut parts: Vec<_> = model
        .ranges
        .iter()
        .flat_map(|range| range.parts.iter().filter(|part| part.state != State::Unmapped))
        .map(|part| (part.address, part.size, part.state))
        .collect();
    parts.sort_by_key(|part| part.0);
    let mut found = Vec::new();
    for segment in real.segments() {
        let mut address = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, address, "blocks of a segment lie behind each other");
            address += block.size;
            let state = match block.state {
                BlockState::Allocated => State::Allocated,
                BlockState::PendingFree => State::Pending,
                BlockState::Inactive => State::Free,
            };
            found.push((block.address, block.size, state));
        }
        let free = |pair: &[SegmentBlock]| pair.iter().all(|block| block.state == BlockState::Inactive);
        assert!(!segment.blocks.windows(2).any(free), "free neighbours are one block");
        assert_eq!(address, segment.address + segment.size);
    }
    assert_eq!(found, parts);
}

/// A trace of everything must add up to what is live and reserved.
fn check_trace(real: &CachingAllocator) {
    let (mut requested, mut active, mut reserved) = (0i128, 0i128, 0i128);
    for entry in real.history() {
        let size = i128::from(entry.size);
        match entry.action {
            Action::Alloc => (requested, active) = (requested + size, active + size),
            Action::FreeRequested => requested -= size,
            Action::FreeCompleted => active -= size,
            Action::SegmentAlloc | Action::SegmentMap => reserved += size,
            Action::SegmentFree | Action::SegmentUnmap => reserved -= size,
            Action::OutOfMemory => {}
        }
    }
    let handed_out: u64 = real
        .segments()
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Allocated)
        .map(|block| block.requested)
        .sum();
    assert_eq!(requested, i128::from(handed_out));
    assert_eq!(active, i128::from(real.statistics().requested.current));
    assert_eq!(reserved, i128::from(real.statistics().reserved.current));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_request_gets_what_the_plain_rules_give_it(
        settings in settings(),
        capacity in prop_oneof![Just(64u64 << 20), Just(200 << 20), Just(1 << 30)],
        steps in steps(),
    ) {
        let mut real = CachingAllocator::new(settings.clone(), capacity);
        let mut model = Model::new(settings, capacity);
        real.record_history(usize::MAX);
        let mut live: Vec<(BlockId, u64)> = Vec::new();
        let mut freed = Vec::new();
        for step in steps {
            match step {
                Step::Malloc { bytes, stream } => {
                    let block = real.malloc(bytes, stream);
                    let expected = model.malloc(bytes, stream);
                    prop_assert_eq!(block.ok().and_then(|block| real.place(block)), expected);
                    live.extend(block.ok().zip(expected.map(|(address, _)| address)));
                }
                Step::Free { which } if !live.is_empty() => {
                    let (block, address) = live.swap_remove(which % live.len());
                    real.free(block);
                    model.free(address);
                    freed.push(block);
                }
                Step::RecordStream { which, stream } if !live.is_empty() => {
                    let (block, address) = live[which % live.len()];
                    real.record_stream(block, stream);
                    let (range, at) = model.at(address);
                    let other = model.ranges[range].stream != stream;
                    model.ranges[range].parts[at].elsewhere |= other;
                }
                Step::Synchronize => {
                    real.synchronize();
                    // The model knows only all or nothing: it sees the end of all streams at once.
                    let _ = real.malloc(0, 9);
                    model.synchronised = true;
                    model.malloc(0, 9);
                }
                Step::EmptyCache => {
                    real.empty_cache();
                    model.empty_cache();
                }
                Step::Free { .. } | Step::RecordStream { .. } => {}
            }
            check_counters(&real, &model);
        }
        check_totals(real.statistics());
        check_segments(&real, &model);
        check_trace(&real);
        let before = *real.statistics();
        for block in freed {
            real.free(block);
            real.record_stream(block, 7);
        }
        prop_assert_eq!(*real.statistics(), before, "a block that is not handed out is ignored");
    }
}
