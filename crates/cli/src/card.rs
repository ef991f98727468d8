//! `--device`: the CPU, or which NVIDIA card; and what the planner has to know of a card that is there.

use std::str::FromStr;
use std::sync::Arc;

use plimsoll_device::cuda::{Card, Driver, OpenCard};
use plimsoll_device::{CudaError, DeviceTraits};
use plimsoll_memory::ByteSize;
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::{Catalogue, DeviceModel, DiskRates, LimitedBy, LoadLine, ProcessLimits, Rates, Wiring};

use crate::failure::Failure;
use crate::output::errln;

/// Cycles a second of an unknown card, and f32 operations of each multiprocessor in a cycle: those of a small one.
const CYCLES: f64 = 1.5e9;
const F32_PER_CYCLE: f64 = 256.0;
/// Bytes a second of its link to the host.
const HOST_LINK: f64 = 12e9;

/// 16-bit operations of each multiprocessor in a cycle, and bytes a second of memory for each, by compute capability: cards of data centres
/// have far more of both.
fn of_multiprocessor(capability: u32) -> [f64; 2] {
    match capability {
        80 => [2048.0, 14e9],
        90 => [4096.0, 17e9],
        100..=109 => [8192.0, 50e9],
        _ => [512.0, 8e9],
    }
}

/// What `--device` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A card where there is one that can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A card by its number.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "cuda" => Ok(DeviceChoice::Cuda(0)),
            other => match other.strip_prefix("cuda:").and_then(|number| number.parse().ok()) {
                Some(index) => Ok(DeviceChoice::Cuda(index)),
                None => Err("must be auto, cpu, cuda or cuda:N".to_owned()),
            },
        }
    }
}

/// The card that is to be used; none for the CPU.
pub fn open(choice: DeviceChoice, ranks: &dyn Communicator) -> Result<Option<Arc<OpenCard>>, Failure> {
    let opened = match choice {
        DeviceChoice::Cpu => return Ok(None),
        DeviceChoice::Auto if !ranks.is_alone() => return Ok(None),
        DeviceChoice::Cuda(_) if !ranks.is_alone() => {
            return Err(Failure::usage("--device cuda: several ranks work on the CPU alone yet"));
        }
        DeviceChoice::Auto => Driver::load().and_then(|driver| OpenCard::new(&driver, 0)),
        DeviceChoice::Cuda(index) => Driver::load().and_then(|driver| OpenCard::new(&driver, index)),
    };
    match (opened, choice) {
        (Ok(card), _) => Ok(Some(card)),
        // No card is what most machines have.
        (Err(CudaError::NoDriver(_) | CudaError::NoCard), DeviceChoice::Auto) => Ok(None),
        (Err(error), DeviceChoice::Auto) => {
            errln!("the CPU computes: {error}");
            Ok(None)
        }
        (Err(error), _) => Err(Failure::other(format!("--device cuda: {error}"))),
    }
}

/// The line of a command on a card: a budget, if it is stated and the card has as much, else the card's memory.
pub fn line(card: &OpenCard, stated: Option<ByteSize>) -> LoadLine {
    let memory = card.card().memory;
    match stated.filter(|stated| stated.0 <= memory) {
        Some(stated) => LoadLine { bytes: stated.0, by: LimitedBy::Budget },
        None => LoadLine { bytes: memory, by: LimitedBy::Device },
    }
}

/// What a card keeps from any arena: contexts, kernels and workspace, and what other programs hold.
pub fn overhead_bytes(card: &OpenCard) -> Result<u64, Failure> {
    Ok(card.taken_bytes().map_err(plimsoll_device::DeviceError::from)?)
}

/// Host memory that a tier below a card may take: what the machine can give to this process.
pub fn host_room(resident: u64) -> u64 {
    ProcessLimits::detect().load_line(None).bytes.saturating_sub(resident)
}

/// How fast a card is: as the catalogue has it, or as its multiprocessors let expect.
pub fn rates(card: &OpenCard, disk: DiskRates) -> Rates {
    let described = card.card();
    let multiprocessors = u64::from(described.multiprocessors.max(1));
    let known = Catalogue::known().of_driver(&described.name, described.memory, multiprocessors);
    let rates = match known {
        Some(known) => known.rates(disk, known.neighbour_link(), None),
        None => unknown(described, multiprocessors as f64).rates(disk, HOST_LINK, None),
    };
    Rates { wiring: Wiring { device: DeviceTraits::CUDA, ..rates.wiring }, ..rates }
}

/// A card of which nothing but its size and its generation is known.
fn unknown(card: &Card, multiprocessors: f64) -> DeviceModel {
    let [half, bandwidth] = of_multiprocessor(card.capability);
    DeviceModel {
        name: String::new(),
        title: String::new(),
        memory: ByteSize(card.memory),
        bandwidth: bandwidth * multiprocessors,
        f32: F32_PER_CYCLE * CYCLES * multiprocessors,
        half: half * CYCLES * multiprocessors,
        bf16: true,
        fp8: None,
        multiprocessors: multiprocessors as u64,
        reached: None,
        capability: Some(format!("{}.{}", card.capability / 10, card.capability % 10)),
        host_link: HOST_LINK,
        link: None,
        host_memory: ByteSize(0),
        network: HOST_LINK,
        price: None,
        source: Vec::new(),
        cpu: None,
    }
}

/// The driver and its cards, for `doctor`: each that can be used, and why another cannot.
pub fn described() -> Result<Vec<String>, CudaError> {
    let driver = Driver::load()?;
    let version = driver.version();
    let mut lines = vec![format!("the driver is for CUDA {}.{}", version / 1000, version % 1000 / 10)];
    for card in driver.cards()? {
        lines.push(match card.usable() {
            Ok(()) => format!("{card}: can be used (--device cuda:{})", card.index),
            Err(error) => format!("{card}: cannot be used: {error}"),
        });
    }
    if lines.len() == 1 {
        return Err(CudaError::NoCard);
    }
    Ok(lines)
}
