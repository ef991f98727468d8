//! A machine, or several, that a plan can be made for.

use plimsoll_memory::ByteSize;
use serde::{Deserialize, Serialize};

use super::device::{DeviceModel, MeasuredCpu, Price};
use super::file::MachineText;
use crate::load_line::ProcessLimits;
use crate::time::{DiskRates, Network, Rates};
use crate::training_plan::Machine;

/// Bytes/s to other machines of a machine of which that is not known: common Ethernet.
const DEFAULT_NETWORK: f64 = 1.25e8;

/// A disk for tensors that are offloaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spill {
    /// What may be used of it.
    pub size: ByteSize,
    /// Bytes/s.
    pub read: f64,
    /// Bytes/s.
    pub write: f64,
}

impl Spill {
    /// What cannot be, in words.
    pub(super) fn fault(&self) -> Option<String> {
        let is_rate = |rate: f64| rate.is_finite() && rate >= 1.0;
        (!(is_rate(self.read) && is_rate(self.write)))
            .then(|| "a disk reads and writes at no rate".to_owned())
    }
}

/// Machines of devices that are alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Target {
    /// What it is asked for by.
    pub name: String,
    /// What it is.
    pub title: String,
    /// One of its devices.
    pub device: DeviceModel,
    /// Devices of a machine.
    pub devices_of_machine: u64,
    /// Machines.
    pub nodes: u64,
    /// Host memory of a machine.
    pub host_memory: ByteSize,
    /// A machine's disk, where it is known.
    pub disk: Option<Spill>,
    /// Bytes/s between devices of a machine, each way.
    pub link: f64,
    /// Bytes/s of a device to other machines, each way.
    pub network: f64,
    /// US dollars an hour and device.
    pub price: Option<Price>,
}

impl Target {
    /// A machine of so many devices, as is common with them.
    pub(super) fn of(device: DeviceModel, devices: u64) -> Target {
        let title = match devices {
            1 => device.title.clone(),
            _ => format!("{devices} x {}", device.title),
        };
        Target {
            name: device.name.clone(),
            title,
            devices_of_machine: devices,
            nodes: 1,
            host_memory: ByteSize(device.host_memory.0.saturating_mul(devices)),
            disk: None,
            link: device.neighbour_link(),
            network: device.network_link(),
            price: device.price.clone(),
            device,
        }
    }

    /// A machine that computes on its CPU, as it was measured.
    pub fn of_cpu(name: &str, memory: ByteSize, cpu: MeasuredCpu, disk: Option<Spill>) -> Target {
        let Rates { matmul_f32, matmul_bf16, matmul_fp8, memory_bandwidth, wiring, .. } = cpu.measured.rates;
        let device = DeviceModel {
            name: name.to_owned(),
            title: format!("{name}, {} threads", cpu.threads),
            memory,
            bandwidth: memory_bandwidth,
            f32: matmul_f32,
            half: matmul_bf16,
            bf16: true,
            fp8: Some(matmul_fp8),
            multiprocessors: cpu.threads as u64,
            reached: None,
            capability: None,
            host_link: memory_bandwidth / 2.0,
            link: None,
            host_memory: ByteSize(0),
            network: DEFAULT_NETWORK,
            price: None,
            source: Vec::new(),
            cpu: Some(cpu),
        };
        Target { disk, link: wiring.rank_link, ..Target::of(device, 1) }
    }

    /// The file that describes this machine: `--hardware FILE` reads it as the same.
    ///
    /// # Errors
    /// In words: a value cannot be written.
    pub fn to_yaml(&self) -> Result<String, String> {
        serde_saphyr::to_string(&MachineText::of(self)).map_err(|error| error.to_string())
    }

    /// So many of these machines.
    pub(super) fn times(self, nodes: u64) -> Target {
        let title = match nodes {
            1 => self.title,
            _ => format!("{nodes} machines of {}", self.title),
        };
        Target { title, nodes: nodes.saturating_mul(self.nodes), ..self }
    }

    /// The same with so much host memory in each machine.
    #[must_use]
    pub fn with_host_memory(self, bytes: ByteSize) -> Target {
        Target { host_memory: bytes, ..self }
    }

    /// All devices.
    pub fn devices(&self) -> u64 {
        self.devices_of_machine.saturating_mul(self.nodes)
    }

    /// What the planner needs to know of one of its devices. A rank has a device, and its part of the machine's host memory and disk.
    pub fn machine(&self, host_bytes_per_token: u64) -> Machine {
        let disk = self.disk.as_ref().map_or(DiskRates::USUAL, |disk| {
            let share = |rate: f64| rate / self.devices_of_machine.max(1) as f64;
            DiskRates { read: share(disk.read), write: share(disk.write) }
        });
        let ranks_of_machine = u32::try_from(self.devices_of_machine).unwrap_or(u32::MAX);
        let network = (self.nodes > 1).then_some(Network { rate: self.network, ranks_of_machine });
        let of_rank = |bytes: u64| bytes / self.devices_of_machine.max(1);
        Machine {
            rates: self.device.rates(disk, self.link, network),
            limits: ProcessLimits::NONE,
            overhead_bytes: self.device.overhead_bytes(self.devices()),
            host_bytes_per_token,
            worker_bytes: Machine::WORKER_BYTES,
            disk_available: self.disk.as_ref().map(|disk| of_rank(disk.size.0)),
            disk_reserved: 0,
            device_bytes: Some(self.device.memory.0),
            // A CPU's memory is the host's.
            host_bytes: self.device.cpu.is_none().then(|| of_rank(self.host_memory.0)),
        }
    }

    /// Dollars an hour for all devices, from the lowest price to the highest.
    pub fn dollars_an_hour(&self) -> Option<[f64; 2]> {
        let price = self.price.as_ref()?;
        Some([price.low, price.high].map(|price| price * self.devices() as f64))
    }
}
