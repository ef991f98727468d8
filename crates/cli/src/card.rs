//! `--device`: the CPU, or which NVIDIA card; and what the planner has to know of a card that is there.

use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use plimsoll_device::cuda::{Card, CardLink, Driver, GRAPH_HOST_BYTES, Nccl, OpenCard, UniqueId};
use plimsoll_device::{CudaError, DeviceTraits};
use plimsoll_memory::ByteSize;
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::{
    Catalogue, DeviceModel, DiskRates, LimitedBy, LoadLine, Network, ProcessLimits, Rates, Wiring,
};

use crate::failure::Failure;
use crate::output::errln;
use crate::ranks;

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

/// What computes, and how.
#[derive(Clone, Copy, Debug, Args)]
pub struct DeviceArgs {
    /// What computes: cpu, cuda or cuda:N, or auto: a card that can be used, if there is one (docs/gpu.md)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// On a card, launch each kernel by itself: no CUDA graphs
    #[arg(long)]
    pub no_cuda_graphs: bool,
    /// Have what ranks send from card to card go by way of the host: no NCCL
    #[arg(long)]
    pub no_nccl: bool,
}

/// The card that a rank computes on.
pub struct OfRank {
    pub card: Arc<OpenCard>,
    /// Whether it reaches those of other ranks without the hosts.
    pub linked: bool,
}

/// The card that is to be used; none for the CPU. Each of several ranks has one of its own, and those reach each other. Either all ranks
/// have one, or none has.
pub fn open(args: DeviceArgs, ranks: &dyn Communicator) -> Result<Option<OfRank>, Failure> {
    let choice = args.device;
    let first = match choice {
        DeviceChoice::Cpu => return Ok(None),
        DeviceChoice::Auto => 0,
        DeviceChoice::Cuda(first) => first,
    };
    let place = if ranks.is_alone() { 0 } else { ranks::place_on_this_machine(ranks)? };
    let opened = Driver::load().and_then(|driver| choose(&driver, first, place));
    let (own, mut fault) = match opened {
        Ok(card) => (Some(card), None),
        // No card is what most machines have.
        Err(CudaError::NoDriver(_) | CudaError::NoCard) if choice == DeviceChoice::Auto => (None, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let mut together = !ranks::any(ranks, own.is_none())?;
    if let (Some(card), true, false) = (&own, together, ranks.is_alone()) {
        fault = are_unlike(ranks, card)?;
        together = !ranks::any(ranks, fault.is_some())?;
    }
    match (own, fault) {
        (Some(card), None) if together => {
            if args.no_cuda_graphs {
                card.make_no_graphs();
            }
            let linked = !ranks.is_alone() && !args.no_nccl && link(ranks, &card)?;
            Ok(Some(OfRank { card, linked }))
        }
        (_, Some(why)) if choice == DeviceChoice::Auto => {
            errln!("the CPU computes: {why}");
            Ok(None)
        }
        (_, Some(why)) => Err(Failure::other(format!("--device cuda: {why}"))),
        (_, None) if choice == DeviceChoice::Auto => Ok(None),
        (_, None) => {
            // What another rank lacks it says itself, and ends all.
            ranks::any(ranks, false)?;
            Ok(None)
        }
    }
}

/// The card of the rank that has this place on its machine, open. A rank that a launcher lets see but one has that one.
fn choose(driver: &Driver, first: u32, place: u32) -> Result<Arc<OpenCard>, CudaError> {
    let alone = driver.cards()?.len() == 1 && first == 0;
    OpenCard::new(driver, if alone { 0 } else { first.saturating_add(place) })
}

/// Why ranks that have the same card, or cards of different kinds, do not compute together.
fn are_unlike(ranks: &dyn Communicator, open: &OpenCard) -> Result<Option<String>, Failure> {
    let card = open.card();
    let same = ranks::beside(ranks, &card.bus)?;
    let unlike = ranks::first_unlike(ranks, &open.kind())?;
    if same.len() > 1 {
        let ranks: Vec<String> = same.iter().map(usize::to_string).collect();
        return Ok(Some(format!(
            "ranks {} have the same card, {} at {}: start as many ranks on a machine as it has cards",
            ranks.join(" and "),
            card.name,
            card.bus
        )));
    }
    Ok(unlike.map(|other| {
        format!(
            "this rank has {card}, and rank {other} has another kind of card or another driver: ranks compute on cards of one kind with one \
             version of the driver, or results depend on who computes"
        )
    }))
}

/// Has the cards of all ranks reach each other by NCCL, where every rank has it. Else their bytes go by way of the hosts.
fn link(ranks: &dyn Communicator, card: &Arc<OpenCard>) -> Result<bool, Failure> {
    let nccl = Nccl::load();
    let version = nccl.as_ref().map_or(0, Nccl::version);
    let unlike = ranks::first_unlike(ranks, &version)?;
    let nccl = match (nccl, unlike) {
        (Ok(nccl), None) => nccl,
        (found, _) => {
            if ranks.rank() == 0 {
                let other = unlike.unwrap_or_default();
                let of_other = || format!("rank {other} has another version of NCCL than rank 0, or none");
                let why = found.err().map_or_else(of_other, |error| error.to_string());
                errln!("cards reach each other by way of the host, which is slower: {why}");
            }
            return Ok(false);
        }
    };
    let failed = |error: CudaError| {
        Failure::other(format!(
            "--device cuda: {error}; NCCL_DEBUG=WARN has {nccl} say more, and with --no-nccl bytes go by way of the hosts"
        ))
    };
    let id = if ranks.rank() == 0 { nccl.unique_id().map_err(failed)?.to_bytes() } else { Vec::new() };
    let id = ranks.broadcast(id)?;
    let id = UniqueId::of_bytes(&id).ok_or_else(|| Failure::other("NCCL's id did not arrive"))?;
    let link = CardLink::join(&nccl, card, id, (ranks.rank(), ranks.size()), &mut || ()).map_err(failed)?;
    ranks.link_cards(Arc::new(link));
    Ok(true)
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

/// Host memory that a tier below a card may take: what the machine can give to this process, but for what graphs are to take.
pub fn host_room(limits: ProcessLimits, resident: u64) -> u64 {
    limits.load_line(None).bytes.saturating_sub(resident).saturating_sub(GRAPH_HOST_BYTES)
}

/// How fast a card is: as the catalogue has it, or as its multiprocessors let expect. What goes to other ranks crosses both links to the
/// host where cards are not `linked`, and the network where only some of the ranks are `here`.
pub fn rates(card: &OpenCard, disk: DiskRates, linked: bool, [here, all]: [u32; 2]) -> Rates {
    let described = card.card();
    let multiprocessors = u64::from(described.multiprocessors.max(1));
    let known = Catalogue::known().of_driver(&described.name, described.memory, multiprocessors);
    let unknown = unknown(described, multiprocessors as f64);
    let model = known.unwrap_or(&unknown);
    let network = (here < all).then(|| Network { rate: model.network_link(), ranks_of_machine: here.max(1) });
    let rates = model.rates(disk, model.neighbour_link(), network);
    let by_host = rates.wiring.host_link.unwrap_or(HOST_LINK) / 2.0;
    let rank_link = if linked { rates.wiring.rank_link } else { rates.wiring.rank_link.min(by_host) };
    Rates { wiring: Wiring { device: DeviceTraits::CUDA, rank_link, ..rates.wiring }, ..rates }
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
    match lines.len() {
        1 => return Err(CudaError::NoCard),
        // One card has no other to reach.
        2 => {}
        _ => lines.push(match Nccl::load() {
            Ok(nccl) => format!("{nccl}: the cards of several ranks reach each other (--ranks)"),
            Err(error) => format!("cards of several ranks reach each other by way of the host: {error}"),
        }),
    }
    Ok(lines)
}
