//! A device as data.

use plimsoll_device::{DType, DeviceTraits};
use plimsoll_memory::ByteSize;
use serde::{Deserialize, Serialize};

use crate::measured::Measured;
use crate::time::{DiskRates, Network, Rates, Wiring};

/// Share of its stated rate that a device reaches in large products, and of its stated bandwidth in what is bound by memory: what
/// LLMQ's and llama.cpp's measurements come to.
const OF_PEAK: f64 = 0.75;
const OF_BANDWIDTH: f64 = 0.88;

/// Share of a stated link that messages reach.
const OF_LINK: f64 = 0.8;

/// Seconds until an operation has begun, which is a kernel or several: a step of many small ones took as much on an H200.
const SECONDS_PER_LAUNCH: f64 = 8e-6;

/// Evaluations of exp for each f32 operation of the vector units: 16 and 256 a multiprocessor and cycle.
const EXPS_PER_FLOP: f64 = 1.0 / 16.0;

/// What a context takes for each multiprocessor: 107 MiB were seen with 34, 256 with 82, 426 with 142, 555 with 188.
const CONTEXT_PER_MULTIPROCESSOR: u64 = 3 << 20;

/// Kernels, and what the library of products keeps.
const KERNELS: u64 = 96 << 20;

/// What whole tiles take beside that on compute capability 9.0: where operands are rounded, and contexts that are larger. 601 MiB were seen
/// in all with 132 multiprocessors.
const WHOLE_TILES: u64 = 128 << 20;

/// What a communicator between devices takes: 1.06 GiB were seen on eight of them.
const COMMUNICATOR: u64 = 1100 << 20;

/// Tensors on a GPU begin at multiples of so many bytes.
const ALIGNMENT: u64 = 256;

/// A device, as its vendor and others describe it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceModel {
    /// What it is asked for by.
    #[serde(default)]
    pub name: String,
    /// What it is called.
    #[serde(default)]
    pub title: String,
    /// What the driver shows of its memory.
    pub memory: ByteSize,
    /// Bytes/s of that memory.
    pub bandwidth: f64,
    /// FLOP/s of dense products in f32.
    pub f32: f64,
    /// In bf16, or in fp16 where it has no bf16; sums in f32.
    pub half: f64,
    /// Whether it has bf16.
    #[serde(default = "yes")]
    pub bf16: bool,
    /// In fp8, where it has that.
    #[serde(default)]
    pub fp8: Option<f64>,
    /// Streaming multiprocessors, or compute units.
    pub multiprocessors: u64,
    /// What kernels were measured to reach of the rates above, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached: Option<Reached>,
    /// CUDA's compute capability.
    #[serde(default)]
    pub capability: Option<String>,
    /// Bytes/s that copies from and to pinned host memory reach, each way.
    pub host_link: f64,
    /// Bytes/s to a neighbour in the same machine, each way, as stated; `None`: through the host.
    #[serde(default)]
    pub link: Option<f64>,
    /// Host memory of a common machine, for each device.
    pub host_memory: ByteSize,
    /// Bytes/s to another machine, each way.
    pub network: f64,
    /// US dollars an hour.
    #[serde(default)]
    pub price: Option<Price>,
    /// The names of the sources.
    #[serde(default)]
    pub source: Vec<String>,
    /// What `plimsoll calibrate` has found of a CPU. Then the device is that CPU with its memory, and the figures above are for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<MeasuredCpu>,
}

/// Shares of what is stated that kernels were measured to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reached {
    /// In products, of a whole step.
    pub products: f64,
    /// In what memory bounds, of a whole step.
    pub bandwidth: f64,
}

/// A CPU as it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCpu {
    /// Threads that have computed.
    pub threads: usize,
    /// Whether it has units for bf16, whatever they were measured to do; in older files the speeds say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units_for_bf16: Option<bool>,
    /// What the process takes outside of any arena.
    pub overhead: ByteSize,
    /// How fast it is, and when that was found.
    pub measured: Measured<Rates>,
}

/// What a device costs, in US dollars an hour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// The lowest offer.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// When it was seen: a month, `2026-05`.
    #[serde(default)]
    pub date: String,
    /// Where.
    #[serde(default)]
    pub source: String,
}

fn yes() -> bool {
    true
}

impl DeviceModel {
    /// Memory that nobody can use for tensors: the context, kernels, and what a communicator takes where there are several devices.
    pub fn overhead_bytes(&self, devices: u64) -> u64 {
        if let Some(cpu) = &self.cpu {
            return cpu.overhead.0;
        }
        let context = self.multiprocessors.saturating_mul(CONTEXT_PER_MULTIPROCESSOR);
        let hopper = self.capability.as_deref().is_some_and(|capability| capability == "9.0");
        let beside =
            KERNELS + if hopper { WHOLE_TILES } else { 0 } + if devices > 1 { COMMUNICATOR } else { 0 };
        context.saturating_add(beside)
    }

    /// How fast it is: shares of what is stated, as measured elsewhere.
    pub fn rates(&self, disk: DiskRates, rank_link: f64, network: Option<Network>) -> Rates {
        if let Some(cpu) = &self.cpu {
            let narrow = match cpu.units_for_bf16 {
                Some(has_units) => has_units.then_some(DType::Bf16),
                None => cpu.measured.rates.narrow_of_cpu(),
            };
            let wiring = Wiring { rank_link, network, narrow, ..Wiring::CPU };
            return Rates { disk, wiring, ..cpu.measured.rates };
        }
        let half = if self.has_tensor_cores() { self.half } else { self.f32 };
        let usual = Reached { products: OF_PEAK, bandwidth: OF_BANDWIDTH };
        let reached = self.reached.unwrap_or(usual);
        let products = [reached.products * self.f32, reached.products * half];
        let memory_bandwidth = reached.bandwidth * self.bandwidth;
        Rates {
            matmul_fp8: reached.products * self.fp8.unwrap_or(half),
            seconds_per_operation: SECONDS_PER_LAUNCH,
            disk,
            wiring: Wiring {
                device: DeviceTraits { unified: false, alignment: ALIGNMENT, cuda: false },
                host_link: Some(self.host_link),
                rank_link,
                network,
                narrow: Some(if self.bf16 { DType::Bf16 } else { DType::F16 }),
            },
            ..Rates::of_cpu(products, memory_bandwidth, EXPS_PER_FLOP * self.f32)
        }
    }

    /// Whether products in 16 bits go on tensor cores: there are kernels for those of compute capability 8.0 and later. On older cards
    /// such products go on the units of f32.
    pub fn has_tensor_cores(&self) -> bool {
        let major = |capability: &str| capability.split('.').next().and_then(|major| major.parse().ok());
        self.capability.as_deref().and_then(major).is_none_or(|major: u32| major >= 8)
    }

    /// Bytes/s to a neighbour in the same machine; through the host, two copies share the way.
    pub fn neighbour_link(&self) -> f64 {
        self.link.map_or(self.host_link / 2.0, |link| OF_LINK * link)
    }

    /// Bytes/s to another machine.
    pub fn network_link(&self) -> f64 {
        OF_LINK * self.network
    }

    /// What cannot be, in words.
    pub(super) fn fault(&self) -> Option<String> {
        let rates = [
            ("bandwidth", self.bandwidth),
            ("f32", self.f32),
            ("half", self.half),
            ("host_link", self.host_link),
            ("network", self.network),
            ("fp8", self.fp8.unwrap_or(1.0)),
            ("link", self.link.unwrap_or(1.0)),
        ];
        let odd = rates.into_iter().find(|(_, rate)| !(rate.is_finite() && *rate >= 1.0));
        let rate =
            odd.map(|(key, rate)| format!("{key} is {rate}; it is a rate in bytes or operations a second"));
        let memory = || {
            (self.memory.0 < 1 << 20).then(|| format!("memory is {}; write for example 24GiB", self.memory))
        };
        let price = || self.price.as_ref().and_then(Price::fault);
        let measured = || {
            self.cpu
                .as_ref()
                .and_then(|measured| Some(format!("measured: {}", measured.measured.rates.fault()?)))
        };
        let reached = || {
            let Reached { products, bandwidth } = self.reached?;
            let odd = [products, bandwidth].into_iter().find(|share| !(*share >= 0.001 && *share <= 2.0))?;
            Some(format!("reached is {odd}; it is a share of a stated rate, as 0.7"))
        };
        rate.or_else(memory).or_else(reached).or_else(price).or_else(measured)
    }
}

/// No device costs more dollars an hour.
pub const MOST_DOLLARS: f64 = 1e9;

impl Price {
    /// What cannot be, in words.
    pub(super) fn fault(&self) -> Option<String> {
        let is_price = |price: f64| (0.0..=MOST_DOLLARS).contains(&price);
        let sound = is_price(self.low) && is_price(self.high) && self.low <= self.high;
        (!sound).then(|| {
            format!(
                "price goes from {:?} to {:?}; write dollars an hour, from 0 to {MOST_DOLLARS}, the lower first",
                self.low, self.high
            )
        })
    }
}
