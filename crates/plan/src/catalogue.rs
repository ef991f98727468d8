//! Machines that plans can be made for and that are not here: devices by name, and machines made of them.
//!
//! The figures are data (`catalogue/devices.yaml`), each with its source; a user's own machine is a file of the same keys.

mod device;
mod file;
mod target;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use plimsoll_memory::ByteSize;

pub use device::{DeviceModel, MOST_DOLLARS, MeasuredCpu, Price, Reached};
pub use target::{Spill, Target};

use file::Content;

/// The catalogue's own text.
const TEXT: &str = include_str!("catalogue/devices.yaml");

/// Devices of a machine, and machines of a fleet, at most.
const MOST: u64 = 65_536;

/// Why there is no such machine.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// No device and no machine has the name.
    #[error("hardware {name:?}: there is no such device; plimsoll hardware lists them, and a .yaml file describes any other{}", plimsoll_model::catalogue::did_you_mean(.near))]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names that are like it.
        near: Vec<String>,
    },
    /// A number of devices or machines is none.
    #[error("hardware {name:?}: {what}; write for example 8xh100, or 16x8xh100 for 16 machines of 8")]
    Count {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file says something that cannot be.
    #[error("{}: {what}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong, with its place.
        what: String,
    },
}

/// Every device and machine that is known by name.
#[derive(Debug)]
pub struct Catalogue {
    content: Content,
}

impl Catalogue {
    /// The one of this version.
    pub fn known() -> &'static Catalogue {
        static KNOWN: OnceLock<Catalogue> = OnceLock::new();
        // A test reads it.
        KNOWN.get_or_init(|| Catalogue { content: file::parse(TEXT).unwrap_or_default() })
    }

    /// The devices, in the order in which they are listed.
    pub fn devices(&self) -> &[DeviceModel] {
        &self.content.devices
    }

    /// The machines with names of their own.
    pub fn machines(&self) -> impl Iterator<Item = Target> {
        self.content.machines.iter().filter_map(|machine| machine.target(self).ok())
    }

    /// Where figures come from: a name and what it stands for.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.content.sources.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }

    /// The same for so many ranks, where the name is that of a device: each has one.
    ///
    /// # Errors
    /// There is no such device.
    pub fn target_of(&self, device: &str, ranks: u32) -> Result<Target, CatalogueError> {
        match ranks {
            1 => self.target(device),
            ranks => self.target(&format!("{ranks}x{device}")),
        }
    }

    /// A machine by what `--hardware` says: the name of a device or a machine, with a number of devices (`8xh100`) and of machines
    /// (`16x8xh100`) before it, or a file.
    ///
    /// # Errors
    /// There is no such device, or the file describes none.
    pub fn target(&self, name: &str) -> Result<Target, CatalogueError> {
        let path = Path::new(name);
        if path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|known| ending == *known))
        {
            return self.file(path);
        }
        let (counts, device) = counted(name)?;
        let (devices, nodes) = match counts[..] {
            [] => (None, None),
            [devices] => (Some(devices), None),
            [nodes, devices] => (Some(devices), Some(nodes)),
            _ => {
                return Err(CatalogueError::Count {
                    name: name.to_owned(),
                    what: "there are too many numbers",
                });
            }
        };
        let machine = self.content.machines.iter().find(|machine| is_called(&machine.name, device));
        let target = match machine {
            Some(machine) if counts.len() < 2 => {
                // A number before a machine is that of machines.
                let one = machine.target(self)?;
                let nodes = devices.unwrap_or(1);
                one.times(nodes)
            }
            Some(_) => {
                let what = "a machine has as many devices as it has";
                return Err(CatalogueError::Count { name: name.to_owned(), what });
            }
            None => {
                Target::of(self.device(device, name)?.clone(), devices.unwrap_or(1)).times(nodes.unwrap_or(1))
            }
        };
        match target.devices() <= MOST {
            true => Ok(Target { name: name.to_owned(), ..target }),
            false => Err(CatalogueError::Count {
                name: name.to_owned(),
                what: "there are more than 65536 devices",
            }),
        }
    }

    /// A machine with a device of just so much memory, and the figures of the device that is nearest: programs see less than all of one's
    /// memory. Of several that are about as near the first counts, and a laptop's last. `None` where there is no device.
    pub fn like(&self, bytes: u64) -> Option<Target> {
        let slack = bytes / 64;
        let enough = || self.devices().iter().filter(|device| device.memory.0.saturating_add(slack) >= bytes);
        let least = enough().map(|device| device.memory.0).min().unwrap_or_default();
        let nearest = enough()
            .filter(|device| device.memory.0 - least <= least / 32)
            .min_by_key(|device| device.name.starts_with("laptop"))
            .or(self.devices().iter().max_by_key(|device| device.memory));
        let device = DeviceModel { memory: ByteSize(bytes), ..nearest?.clone() };
        let title = format!("a device of {} with the rates of {}", device.memory, device.title);
        Some(Target { title, ..Target::of(device, 1) })
    }

    fn file(&self, path: &Path) -> Result<Target, CatalogueError> {
        let text = file::read(path)?;
        let content = |what: String| CatalogueError::Content { path: path.to_owned(), what };
        let machine = file::parse_machine(&text).map_err(content)?;
        let target = machine.target(self).map_err(|error| content(error.to_string()))?;
        let name = if target.name.is_empty() { path.display().to_string() } else { target.name.clone() };
        let title = if target.title.trim().is_empty() { name.clone() } else { target.title.clone() };
        Ok(Target { name, title, ..target })
    }

    /// The device that a driver calls so, with so much memory and so many multiprocessors. Drivers say neither the form of a card as the
    /// catalogue does nor always its memory: `NVIDIA H100 80GB HBM3`, `NVIDIA A100-SXM4-40GB`, `NVIDIA H200`.
    pub fn of_driver(&self, name: &str, memory: u64, multiprocessors: u64) -> Option<&DeviceModel> {
        let called = telling_words(name);
        let near = |a: u64, b: u64| a.abs_diff(b) <= a.max(b) / 16;
        let is_it = |device: &&DeviceModel| {
            let title = telling_words(&device.title);
            let other = |word: &String| VARIANTS.contains(&word.as_str()) && !title.contains(word);
            !title.is_empty()
                && title.iter().all(|word| called.contains(word))
                && !called.iter().any(other)
                && near(device.memory.0, memory)
                && near(device.multiprocessors, multiprocessors)
        };
        self.devices().iter().filter(is_it).max_by_key(|device| telling_words(&device.title).len())
    }

    /// A device by name; `asked` is what the user wrote.
    fn device(&self, name: &str, asked: &str) -> Result<&DeviceModel, CatalogueError> {
        let is_it = |device: &&DeviceModel| is_called(&device.name, name) || is_called(&device.title, name);
        if let Some(device) = self.devices().iter().find(is_it) {
            return Ok(device);
        }
        let wanted = plain(name);
        let mut near: Vec<(f64, &str)> = self
            .devices()
            .iter()
            .map(|device| (strsim::jaro_winkler(&plain(&device.name), &wanted), device.name.as_str()))
            .filter(|(likeness, _)| *likeness > 0.85)
            .collect();
        near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let near = near.into_iter().take(3).map(|(_, name)| name.to_owned()).collect();
        Err(CatalogueError::Unknown { name: asked.to_owned(), near })
    }
}

/// Words that make another device of one.
const VARIANTS: [&str; 5] = ["ti", "super", "laptop", "ada", "max"];

/// The words of a device's name but for the vendor's, its form's and its memory's.
fn telling_words(name: &str) -> Vec<String> {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
    let plain = ["", "nvidia", "geforce", "tesla", "gpu", "generation", "pcie"];
    let is_form = |word: &str| word.starts_with("sxm") || word.starts_with("hbm");
    let is_size = |word: &str| word.strip_suffix("gb").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    words.filter(|word| !plain.contains(&word.as_str()) && !is_form(word) && !is_size(word)).collect()
}

/// The numbers before a name, and the name.
fn counted(name: &str) -> Result<(Vec<u64>, &str), CatalogueError> {
    let (mut counts, mut rest) = (Vec::new(), name);
    while let Some((count, behind)) = rest.split_once(['x', 'X'])
        && !count.is_empty()
        && count.bytes().all(|byte| byte.is_ascii_digit())
        && !behind.is_empty()
    {
        let count = count.parse().ok().filter(|count| (1..=MOST).contains(count));
        let what = "a number of devices is 1 to 65536";
        counts.push(count.ok_or_else(|| CatalogueError::Count { name: name.to_owned(), what })?);
        rest = behind;
    }
    Ok((counts, rest))
}

/// Whether a device is what somebody calls `name`: RTX 4090, 4090, rtx_4090, NVIDIA GeForce RTX 4090.
fn is_called(known: &str, name: &str) -> bool {
    plain(known) == plain(name)
}

/// A name without what is left away or added by some.
fn plain(name: &str) -> String {
    let lower: String =
        name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    let mut rest = lower.as_str();
    for prefix in ["nvidia", "amd", "geforce", "tesla", "instinct", "rtx"] {
        rest = rest.strip_prefix(prefix).unwrap_or(rest);
    }
    for suffix in ["gb", "sxm", "sxm5"] {
        rest = rest.strip_suffix(suffix).unwrap_or(rest);
    }
    rest.to_owned()
}

#[cfg(test)]
mod tests;
