//! The texts that devices and machines come from.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use plimsoll_memory::ByteSize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::device::{DeviceModel, Price};
use super::target::{Spill, Target};
use super::{Catalogue, CatalogueError, MOST};

/// The longest text that is read, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// The catalogue's text.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Content {
    pub sources: BTreeMap<String, String>,
    pub devices: Vec<DeviceModel>,
    pub machines: Vec<MachineText>,
}

/// A machine as a text describes it: what it leaves away is a common machine's with such a device.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachineText {
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    title: String,
    device: DeviceText,
    #[serde(default = "one")]
    devices: u64,
    #[serde(default = "one")]
    nodes: u64,
    #[serde(default)]
    host_memory: Option<ByteSize>,
    #[serde(default)]
    disk: Option<Spill>,
    /// Bytes/s between neighbours, each way, as they are reached.
    #[serde(default)]
    link: Option<f64>,
    /// Bytes/s of each device to other machines.
    #[serde(default)]
    network: Option<f64>,
    /// Dollars an hour and device.
    #[serde(default)]
    price: Option<Price>,
}

/// A device of the catalogue, or one that is described.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(untagged)]
enum DeviceText {
    Name(String),
    Own(Box<DeviceModel>),
}

impl<'de> Deserialize<'de> for DeviceText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl<'de> Visitor<'de> for Text {
            type Value = DeviceText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a device's name, or its memory, bandwidth, f32, half and so on")
            }
            fn visit_u64<E>(self, name: u64) -> Result<DeviceText, E> {
                Ok(DeviceText::Name(name.to_string()))
            }
            fn visit_str<E>(self, name: &str) -> Result<DeviceText, E> {
                Ok(DeviceText::Name(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeviceText, A::Error> {
                let own = DeviceModel::deserialize(MapAccessDeserializer::new(map))?;
                Ok(DeviceText::Own(Box::new(own)))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

fn one() -> u64 {
    1
}

impl MachineText {
    /// The text of a machine.
    pub fn of(target: &Target) -> MachineText {
        MachineText {
            name: target.name.clone(),
            title: target.title.clone(),
            device: DeviceText::Own(Box::new(target.device.clone())),
            devices: target.devices_of_machine,
            nodes: target.nodes,
            host_memory: Some(target.host_memory),
            disk: target.disk.clone(),
            link: Some(target.link),
            network: Some(target.network),
            price: target.price.clone(),
        }
    }

    /// What it describes.
    pub fn target(&self, catalogue: &Catalogue) -> Result<Target, CatalogueError> {
        let (device, title) = match &self.device {
            DeviceText::Name(name) => {
                let device = catalogue.device(name, name)?.clone();
                let title = format!("{} x {}", self.devices, device.title);
                (device, title)
            }
            DeviceText::Own(own) => ((**own).clone(), own.title.clone()),
        };
        let mut target = Target::of(device, self.devices);
        if let Some(bytes) = self.host_memory {
            target.host_memory = bytes;
        }
        target.link = self.link.unwrap_or(target.link);
        target.network = self.network.unwrap_or(target.network);
        target.price = self.price.clone().or(target.price);
        target.disk = self.disk.clone();
        target.title = if self.title.is_empty() { title } else { self.title.clone() };
        target.name.clone_from(&self.name);
        Ok(target.times(self.nodes))
    }

    /// What cannot be, in words.
    fn fault(&self) -> Option<String> {
        let counts = [("devices", self.devices), ("nodes", self.nodes)];
        let count = counts.into_iter().find(|(_, count)| !(1..=MOST).contains(count));
        let count = count.map(|(key, count)| format!("{key} is {count}; it is 1 to {MOST}"));
        let all = || {
            (self.devices.saturating_mul(self.nodes) > MOST)
                .then(|| format!("there are more than {MOST} devices"))
        };
        let links = || {
            let rates = [("link", self.link), ("network", self.network)];
            let odd = rates
                .into_iter()
                .find(|(_, rate)| rate.is_some_and(|rate| !(rate.is_finite() && rate >= 1.0)));
            odd.map(|(key, _)| format!("{key} is no rate in bytes a second"))
        };
        let device = || match &self.device {
            DeviceText::Name(_) => None,
            DeviceText::Own(device) => device.fault(),
        };
        let disk = || self.disk.as_ref().and_then(Spill::fault);
        let price = || self.price.as_ref().and_then(Price::fault);
        count.or_else(all).or_else(links).or_else(device).or_else(disk).or_else(price)
    }
}

/// A file's text.
pub(super) fn read(path: &Path) -> Result<String, CatalogueError> {
    let failed = |source| CatalogueError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    match text.len() as u64 > MOST_BYTES {
        true => {
            let what = "the file is larger than 1 MiB, which no description of a machine is".to_owned();
            Err(CatalogueError::Content { path: path.to_owned(), what })
        }
        false => Ok(text),
    }
}

/// The catalogue of a text; in words what is wrong with it.
pub(super) fn parse(text: &str) -> Result<Content, String> {
    let content: Content = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    let device = content.devices.iter().find_map(|device| Some((&device.name, device.fault()?)));
    let machine = || content.machines.iter().find_map(|machine| Some((&machine.name, machine.fault()?)));
    match device.or_else(machine) {
        Some((name, fault)) => Err(format!("{name}: {fault}")),
        None => Ok(content),
    }
}

/// A machine of a text; in words what is wrong with it.
pub(super) fn parse_machine(text: &str) -> Result<MachineText, String> {
    let machine: MachineText = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    machine.fault().map_or(Ok(machine), Err)
}
