//! What the allocator counts, as `torch.cuda.memory_stats` has it.

use std::ops::Deref;

/// A count of bytes or of things: now, at most since it was reset, and all that came and went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Now.
    pub current: u64,
    /// At most.
    pub peak: u64,
    /// All that was added.
    pub allocated: u64,
    /// All that was taken away.
    pub freed: u64,
}

impl Counter {
    pub(crate) fn add(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
        self.allocated += amount;
    }

    pub(crate) fn subtract(&mut self, amount: u64) {
        self.current -= amount;
        self.freed += amount;
    }
}

/// The counters of a pool, or of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// `allocated_bytes`: blocks handed out.
    pub allocated: Counter,
    /// `reserved_bytes`: segments, or mapped pages.
    pub reserved: Counter,
    /// `requested_bytes`: what was asked for.
    pub requested: Counter,
    /// `active_bytes`: blocks handed out, and those freed that another stream still uses.
    pub active: Counter,
    /// `inactive_split_bytes`: free parts of segments that are partly in use. Expandable segments do not count.
    pub inactive_split: Counter,
    /// `allocation`: blocks handed out, as a number.
    pub allocations: Counter,
    /// `segment`: segments, as a number. Expandable segments do not count.
    pub segments: Counter,
    /// `active`: active blocks, as a number.
    pub active_blocks: Counter,
    /// `inactive_split`: inactive parts, as a number.
    pub inactive_split_blocks: Counter,
}

impl PoolStatistics {
    fn named(&mut self) -> [(&'static str, &mut Counter); 9] {
        [
            ("active", &mut self.active_blocks),
            ("active_bytes", &mut self.active),
            ("allocated_bytes", &mut self.allocated),
            ("allocation", &mut self.allocations),
            ("inactive_split", &mut self.inactive_split_blocks),
            ("inactive_split_bytes", &mut self.inactive_split),
            ("requested_bytes", &mut self.requested),
            ("reserved_bytes", &mut self.reserved),
            ("segment", &mut self.segments),
        ]
    }

    pub(super) fn block_handed_out(&mut self, size: u64, requested: u64) {
        self.allocations.add(1);
        self.allocated.add(size);
        self.active_blocks.add(1);
        self.active.add(size);
        self.requested.add(requested);
    }

    pub(super) fn block_taken_back(&mut self, size: u64) {
        self.allocations.subtract(1);
        self.allocated.subtract(size);
    }

    pub(super) fn block_inactive(&mut self, size: u64, requested: u64) {
        self.active_blocks.subtract(1);
        self.active.subtract(size);
        self.requested.subtract(requested);
    }
}

/// `torch.cuda.memory_stats`. What both pools have together is reached directly: `statistics.allocated.peak`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    all: PoolStatistics,
    /// Of the small pool.
    pub small: PoolStatistics,
    /// Of the large pool.
    pub large: PoolStatistics,
    /// `oversize_allocations`: blocks handed out that `max_split_size` forbids to split.
    pub oversize_allocations: Counter,
    /// `oversize_segments`
    pub oversize_segments: Counter,
    /// `num_alloc_retries`: requests that were tried again after everything cached had been given back.
    pub num_alloc_retries: u64,
    /// `num_ooms`
    pub num_ooms: u64,
    /// `num_sync_all_streams`
    pub num_sync_all_streams: u64,
    /// `num_device_alloc`: calls of `cudaMalloc`, or of `cuMemMap`.
    pub num_device_alloc: u64,
    /// `num_device_free`
    pub num_device_free: u64,
}

impl Deref for Statistics {
    type Target = PoolStatistics;

    fn deref(&self) -> &PoolStatistics {
        &self.all
    }
}

impl Statistics {
    pub(super) fn each(&mut self, small: bool, change: impl Fn(&mut PoolStatistics)) {
        change(&mut self.all);
        change(if small { &mut self.small } else { &mut self.large });
    }

    pub(super) fn reset_peaks(&mut self) {
        for pool in [&mut self.all, &mut self.small, &mut self.large] {
            for (_, counter) in pool.named() {
                counter.peak = counter.current;
            }
        }
        for counter in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            counter.peak = counter.current;
        }
    }

    /// Every counter under PyTorch's name: `allocated_bytes.all.peak` and so on, sorted.
    pub fn named(&self) -> Vec<(String, u64)> {
        let mut copy = *self;
        let mut named = Vec::new();
        let mut push = |name: &str, counter: &Counter| {
            let Counter { current, peak, allocated, freed } = *counter;
            for (kind, value) in
                [("allocated", allocated), ("current", current), ("freed", freed), ("peak", peak)]
            {
                named.push((format!("{name}.{kind}"), value));
            }
        };
        for (pool, counters) in
            [("all", &mut copy.all), ("large_pool", &mut copy.large), ("small_pool", &mut copy.small)]
        {
            for (name, counter) in counters.named() {
                push(&format!("{name}.{pool}"), counter);
            }
        }
        push("oversize_allocations", &self.oversize_allocations);
        push("oversize_segments", &self.oversize_segments);
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
        ] {
            named.push((name.to_owned(), value));
        }
        named.sort();
        named
    }
}
