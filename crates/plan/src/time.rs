//! How long things take: arithmetic and bytes against what the machine was measured to do.

use plimsoll_device::{DType, DeviceTraits, Lines, Pace, Tally, Times, Transferred};
use serde::{Deserialize, Serialize};

/// What a machine does, as measured or as told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// f32 matrix products, FLOP/s.
    pub matmul_f32: f64,
    /// bf16 matrix products, FLOP/s.
    pub matmul_bf16: f64,
    /// Matrix products of 8-bit floats, FLOP/s.
    pub matmul_fp8: f64,
    /// f32 products with a side shorter than [`THIN`](plimsoll_device::THIN), FLOP/s, where their operands are at hand.
    pub thin_f32: f64,
    /// The same in narrower types.
    pub thin_bf16: f64,
    /// Attention in f32, FLOP/s.
    pub attention_f32: f64,
    /// Attention in bf16, FLOP/s.
    pub attention_bf16: f64,
    /// Memory, bytes/s.
    pub memory_bandwidth: f64,
    /// exp and the like, evaluations/s.
    pub exps: f64,
    /// 16-bit floats that operations other than products and attention read and write, elements/s: a CPU computes in f32. The largest
    /// rate where that takes no time of its own.
    #[serde(default = "free")]
    pub conversions: f64,
    /// Starting an operation takes about this long, whatever its size.
    pub seconds_per_operation: f64,
    /// The disk for offloaded tensors, bytes read and written in a second.
    pub disk: DiskRates,
    /// What device it is, and how it is connected.
    #[serde(skip)]
    pub wiring: Wiring,
}

/// What kind of device a machine has, and how that is connected to the host and to other ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wiring {
    /// What the device is.
    pub device: DeviceTraits,
    /// Bytes/s of copies between host and device, each way; `None` where they are copies within the device's memory.
    pub host_link: Option<f64>,
    /// Bytes/s to another rank of the same machine.
    pub rank_link: f64,
    /// What is between machines, where there are several.
    pub network: Option<Network>,
    /// The 16-bit type that the device is made to train in; `None` where it is about as good in f32.
    pub narrow: Option<DType>,
}

/// What is between machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Bytes/s of a rank, each way.
    pub rate: f64,
    /// Ranks of each machine, neighbours.
    pub ranks_of_machine: u32,
}

impl Wiring {
    /// A CPU's: processes of one machine reach about this.
    pub const CPU: Wiring =
        Wiring { device: DeviceTraits::CPU, host_link: None, rank_link: 2e9, network: None, narrow: None };
}

impl Default for Wiring {
    fn default() -> Wiring {
        Wiring::CPU
    }
}

/// What a disk does, in bytes/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRates {
    /// Read.
    pub read: f64,
    /// Written.
    pub write: f64,
}

impl DiskRates {
    /// A common NVMe disk's, for plans that are made for no disk in particular.
    pub const USUAL: DiskRates = DiskRates { read: 2e9, write: 1e9 };

    pub(crate) fn is_sound(&self) -> bool {
        is_rate(self.read) && is_rate(self.write)
    }
}

/// More than any machine does.
const LARGEST_RATE: f64 = 1e18;

/// The rate of what takes no time.
fn free() -> f64 {
    LARGEST_RATE
}

/// From one in a second to the largest.
pub(crate) fn is_rate(rate: f64) -> bool {
    (1.0..=LARGEST_RATE).contains(&rate)
}

/// Share of the product rate that attention reaches on its smaller tiles, where it was not measured.
const ATTENTION_EFFICIENCY: f64 = 0.6;

/// How much faster bf16 products are where there are units for them. Vectors of bf16 hold twice as many values: up to 2 on an
/// EPYC; with AMX 3.6 to 5 were measured.
const MADE_FOR_BF16: f64 = 2.5;

/// An operation of a CPU waits for all threads: what that takes, where it was not measured.
const SECONDS_PER_OPERATION: f64 = 3e-5;

/// What operations take at least on a machine, by what holds them back most: the roofline of Williams, Waterman and Patterson (2009).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Seconds at least.
    pub seconds: f64,
    /// What they are bound by.
    pub by: BoundBy,
}

/// What operations can be bound by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// Multiplying, at the speed of the machine's best products of that type.
    Products,
    /// Reading and writing memory.
    Memory,
    /// exp and the like.
    Exponentials,
}

impl BoundBy {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            BoundBy::Products => "products",
            BoundBy::Memory => "memory",
            BoundBy::Exponentials => "exps",
        }
    }
}

/// An estimate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeEstimate {
    /// Seconds of one optimizer step: its operations, and what it waits for the disk.
    pub step_seconds: f64,
    /// Seconds in which the disk is busy with what a step moves, most of them behind the computation.
    pub disk_seconds: f64,
    /// Seconds for which a step waits, for the disk or for copies from and to the host.
    pub waiting_seconds: f64,
    /// Tokens of a step over that time.
    pub tokens_per_second: f64,
    /// Floating-point operations of a step's matrix products and attention.
    pub flops_per_step: u64,
}

impl TimeEstimate {
    /// That of a step that handles `tokens` tokens.
    pub fn new(times: Times, tally: &Tally, tokens: u64) -> TimeEstimate {
        TimeEstimate {
            step_seconds: times.elapsed,
            disk_seconds: times.busy.disk,
            waiting_seconds: times.waited,
            tokens_per_second: tokens as f64 / times.elapsed.max(f64::MIN_POSITIVE),
            flops_per_step: tally.flops(),
        }
    }
}

fn at_rate(count: u64, rate: f64) -> f64 {
    // Most operations do next to nothing of what there is to do, and are asked millions of times.
    if count == 0 { 0.0 } else { count as f64 / rate.max(1.0) }
}

impl Rates {
    /// Those of a CPU of which only its large products in f32 and bf16, its memory and its exps are known.
    pub const fn of_cpu([matmul_f32, matmul_bf16]: [f64; 2], memory_bandwidth: f64, exps: f64) -> Rates {
        Rates {
            matmul_f32,
            matmul_bf16,
            matmul_fp8: matmul_bf16,
            thin_f32: matmul_f32,
            thin_bf16: matmul_bf16,
            attention_f32: matmul_f32 * ATTENTION_EFFICIENCY,
            attention_bf16: matmul_bf16 * ATTENTION_EFFICIENCY,
            memory_bandwidth,
            exps,
            conversions: LARGEST_RATE,
            seconds_per_operation: SECONDS_PER_OPERATION,
            disk: DiskRates::USUAL,
            wiring: Wiring::CPU,
        }
    }

    /// The type that a CPU of these speeds is made to train in, where its instructions are not known: bf16 if its
    /// products are by far the fastest.
    pub(crate) fn narrow_of_cpu(&self) -> Option<DType> {
        (self.matmul_bf16 >= MADE_FOR_BF16 * self.matmul_f32).then_some(DType::Bf16)
    }

    /// What cannot be, in words.
    pub(crate) fn fault(&self) -> Option<String> {
        let odd = self.of_arithmetic().into_iter().find(|(_, rate)| !is_rate(*rate));
        let start = self.seconds_per_operation;
        let odd = odd.or(Some(("seconds_per_operation", start)).filter(|_| !(0.0..=10.0).contains(&start)));
        odd.map(|(key, rate)| format!("{key} is {rate}, which no machine does"))
            .or_else(|| (!self.disk.is_sound()).then(|| "disk: it reads and writes at no rate".to_owned()))
    }

    /// All that are not those of a disk.
    pub(crate) fn of_arithmetic(&self) -> [(&'static str, f64); 10] {
        [
            ("matmul_f32", self.matmul_f32),
            ("matmul_bf16", self.matmul_bf16),
            ("matmul_fp8", self.matmul_fp8),
            ("thin_f32", self.thin_f32),
            ("thin_bf16", self.thin_bf16),
            ("attention_f32", self.attention_f32),
            ("attention_bf16", self.attention_bf16),
            ("memory_bandwidth", self.memory_bandwidth),
            ("exps", self.exps),
            ("conversions", self.conversions),
        ]
    }

    /// Matrix products of f16, FLOP/s: those of bf16 on a card, which multiplies both alike; a CPU widens them to f32.
    fn matmul_f16(&self) -> f64 {
        if self.wiring.device.unified { self.matmul_f32 } else { self.matmul_bf16 }
    }

    /// Seconds that the arithmetic of matrix products takes, and that of attention.
    fn arithmetic(&self, tally: &Tally) -> [f64; 2] {
        let matmul = at_rate(tally.matmul_f32, self.matmul_f32)
            + at_rate(tally.matmul_f16, self.matmul_f16())
            + at_rate(tally.matmul_bf16, self.matmul_bf16)
            + at_rate(tally.matmul_fp8, self.matmul_fp8)
            + at_rate(tally.thin_f32, self.thin_f32)
            + at_rate(tally.thin_bf16, self.thin_bf16);
        let attention = at_rate(tally.attention_f32, self.attention_f32)
            + at_rate(tally.attention_bf16, self.attention_bf16);
        [matmul, attention]
    }

    /// What operations of one kind take at least. Thin products and attention are held against the best products, too. What lies in a
    /// cache is read faster than memory, so that small operations can take less.
    pub fn bound(&self, tally: &Tally) -> Bound {
        let products = at_rate(
            tally.matmul_f32.saturating_add(tally.thin_f32).saturating_add(tally.attention_f32),
            self.matmul_f32,
        ) + at_rate(
            tally.matmul_bf16.saturating_add(tally.thin_bf16).saturating_add(tally.attention_bf16),
            self.matmul_bf16,
        ) + at_rate(tally.matmul_f16, self.matmul_f16())
            + at_rate(tally.matmul_fp8, self.matmul_fp8);
        let memory = at_rate(tally.bytes.saturating_add(tally.matmul_bytes), self.memory_bandwidth);
        let exps = at_rate(tally.exps, self.exps);
        let all = [(products, BoundBy::Products), (memory, BoundBy::Memory), (exps, BoundBy::Exponentials)];
        let (seconds, by) =
            all.into_iter().fold((0.0, BoundBy::Memory), |most, own| if own.0 > most.0 { own } else { most });
        Bound { seconds, by }
    }

    /// Seconds that operations take at least: the arithmetic of their products, which a token adds to whatever comes with it.
    pub(crate) fn products(&self, tally: &Tally) -> f64 {
        self.arithmetic(tally).iter().sum()
    }

    /// The same without those of attention.
    pub(crate) fn matrix_products(&self, tally: &Tally) -> f64 {
        let [matmul, _] = self.arithmetic(tally);
        matmul
    }
}

impl Pace for Rates {
    fn operations(&self, tally: &Tally) -> f64 {
        let [matmul, attention] = self.arithmetic(tally);
        // Products overlap their own traffic unless they are all traffic, as in decoding.
        let matmul = matmul.max(at_rate(tally.matmul_bytes, self.memory_bandwidth));
        let rest = at_rate(tally.bytes, self.memory_bandwidth)
            + at_rate(tally.exps, self.exps)
            + at_rate(tally.conversions, self.conversions);
        matmul + attention + rest + tally.operations as f64 * self.seconds_per_operation
    }

    fn transfer(&self, bytes: Transferred) -> Lines {
        let disk = at_rate(bytes.read, self.disk.read) + at_rate(bytes.written, self.disk.write);
        let copies = |bytes: u64| match self.wiring.host_link {
            Some(rate) => at_rate(bytes, rate),
            // A copy reads and writes.
            None => at_rate(2 * bytes, self.memory_bandwidth),
        };
        let far = bytes.sent.between_machines();
        let network = self.wiring.network.map_or(self.wiring.rank_link, |network| network.rate);
        let near = at_rate(bytes.sent.total_bytes().saturating_sub(far), self.wiring.rank_link);
        let links = near + at_rate(far, network);
        Lines { disk, copies_in: copies(bytes.copied_in), copies_out: copies(bytes.copied_out), links }
    }

    fn held_up(&self, moved: Lines) -> f64 {
        // Copies within the device's memory are made by its cores.
        if self.wiring.host_link.is_some() { 0.0 } else { moved.copies_in + moved.copies_out }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_bound_by_what_takes_longest() {
        let rates = Rates::of_cpu([100.0, 200.0], 10.0, 5.0);
        let tally = Tally { thin_bf16: 400, attention_bf16: 200, matmul_bytes: 20, ..Tally::default() };
        assert_eq!(rates.bound(&tally), Bound { seconds: 3.0, by: BoundBy::Products });
        let moved = Tally { bytes: 30, ..tally };
        assert_eq!(rates.bound(&moved), Bound { seconds: 5.0, by: BoundBy::Memory });
        let exps = Tally { exps: 50, ..moved };
        assert_eq!(rates.bound(&exps), Bound { seconds: 10.0, by: BoundBy::Exponentials });
        assert_eq!(rates.bound(&Tally::default()).seconds, 0.0);
    }
}
