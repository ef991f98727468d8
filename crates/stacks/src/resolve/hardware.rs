//! A card by whatever name a program or a table gives it: `rtx-4090`, `NVIDIA A100-SXM4-80GB`, `2x RTX 3090/4090 24GB`.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Catalogue, CatalogueError, DeviceModel, Target};

use crate::request::RequestError;
use crate::run::Card;

/// What makers and forms add to a model's name.
const ADDED: [&str; 16] = [
    "nvidia",
    "geforce",
    "tesla",
    "quadro",
    "gpu",
    "gpus",
    "sxm",
    "sxm2",
    "sxm4",
    "sxm5",
    "pcie",
    "generation",
    "hbm2",
    "hbm2e",
    "hbm3",
    "hbm3e",
];

/// The card that is taken where none is named.
pub const USUAL: &str = "a100-80";

/// A machine by a name.
pub fn target(name: &str) -> Result<Target, RequestError> {
    let catalogue = Catalogue::known();
    let unknown = match catalogue.target(name.trim()) {
        Ok(target) => return Ok(target),
        Err(error @ CatalogueError::Unknown { .. }) => error,
        Err(error) => return Err(refused(name, &error)),
    };
    let asked = Asked::of(name);
    let devices = asked.devices.unwrap_or(1);
    let found = match asked.device(catalogue) {
        Some(device) => Some(device),
        None if asked.words.is_empty() => asked.memory.and_then(|bytes| Some(catalogue.like(bytes)?.device)),
        None => None,
    };
    let device = found.ok_or_else(|| refused(name, &unknown))?;
    let base =
        catalogue.target(&format!("{devices}x{}", device.name)).map_err(|error| refused(name, &error))?;
    Ok(Target { name: name.to_owned(), device, ..base })
}

fn refused(name: &str, error: &CatalogueError) -> RequestError {
    let reason = error.to_string();
    let expected = match error {
        CatalogueError::Unknown { near, .. } if !near.is_empty() => near.join(", "),
        _ => "a card that plimsoll hardware lists, or a .yaml file that describes one".to_owned(),
    };
    match error {
        CatalogueError::Read { .. } | CatalogueError::Content { .. } => RequestError::Contradiction(reason),
        _ => RequestError::Value { key: "hardware", value: name.to_owned(), expected },
    }
}

/// The parts of a name.
struct Asked {
    /// Whether it is a card for a slot, where the model has another form too.
    pcie: bool,
    devices: Option<u64>,
    words: Vec<String>,
    memory: Option<u64>,
}

impl Asked {
    fn of(name: &str) -> Asked {
        // Of several cards the first stands for all.
        let lower = name.to_ascii_lowercase();
        let (first, rest) = match lower.split_once('/') {
            Some((first, rest)) => (first.to_owned(), rest.split_once(' ').map_or("", |(_, rest)| rest)),
            None => (lower.clone(), ""),
        };
        let text = format!("{first} {rest}");
        let pcie = lower.contains("pcie");
        let mut asked = Asked { pcie, devices: None, words: Vec::new(), memory: None };
        for word in text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
            let number =
                |suffix: &str| word.strip_suffix(suffix).and_then(|digits| digits.parse::<u64>().ok());
            match (number("gb").or(number("gib")), number("x")) {
                (Some(memory), _) => asked.memory = memory.checked_mul(1 << 30),
                (None, Some(count)) => asked.devices = Some(count),
                (None, None) if ADDED.contains(&word) => {}
                (None, None) => asked.words.push(word.to_owned()),
            }
        }
        if let ([count, ..], true) = (&asked.words[..], asked.words.len() > 1)
            && let Ok(count) = count.parse::<u64>()
            && count <= 64
        {
            asked.devices = Some(count);
            asked.words.remove(0);
        } else if let [count] = &asked.words[..]
            && let Ok(count) = count.parse::<u64>()
            && count <= 64
        {
            asked.devices = Some(count);
            asked.words.clear();
        }
        asked
    }

    /// The device whose name has these words and whose memory is nearest; with the memory that was named, where a card of that name has
    /// another.
    fn device(&self, catalogue: &Catalogue) -> Option<DeviceModel> {
        let wanted = self.words.concat();
        if wanted.is_empty() {
            return None;
        }
        let is_it = |device: &&DeviceModel| {
            let own: String =
                [&device.name, &device.title].map(|name| Asked::of(name).words.concat())[0].clone();
            // a100 of a100-80; laptop4090 and 4090laptop.
            own == wanted
                || own.trim_end_matches(|c: char| c.is_ascii_digit()) == wanted
                || sized(&device.name) == Some(wanted.clone())
                || sorted(&device.name) == sorted_words(&self.words)
        };
        let distance = |device: &DeviceModel| match self.memory {
            Some(bytes) => device.memory.0.abs_diff(bytes),
            // Of two sizes the larger.
            None => u64::MAX - device.memory.0,
        };
        let order = |device: &&DeviceModel| (distance(device), device.name.contains("pcie") != self.pcie);
        let device = catalogue.devices().iter().filter(is_it).min_by_key(order)?.clone();
        Some(match self.memory {
            // What a driver shows of a card is a few per cent below its name.
            Some(bytes) if device.memory.0.abs_diff(bytes) > bytes / 10 => {
                let title = device.title.rsplit_once(' ').filter(|(_, size)| size.ends_with("GB"));
                let title = title.map_or(device.title.as_str(), |(title, _)| title);
                let title = format!("{title} with {}", ByteSize(bytes));
                DeviceModel { memory: ByteSize(bytes), title, ..device }
            }
            _ => device,
        })
    }
}

/// The model of a name that ends in a size: `a100` of `a100-80`.
fn sized(name: &str) -> Option<String> {
    let (model, size) = name.rsplit_once('-')?;
    size.bytes().all(|byte| byte.is_ascii_digit()).then(|| model.replace('-', ""))
}

fn sorted(name: &str) -> Vec<String> {
    sorted_words(&Asked::of(name).words)
}

fn sorted_words(words: &[String]) -> Vec<String> {
    let mut words: Vec<String> = words.iter().filter(|word| *word != "rtx").cloned().collect();
    words.sort();
    words
}

/// What of a device decides about memory.
pub fn card(device: &DeviceModel) -> Card {
    let capability = device.capability.as_deref().and_then(|text| {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    Card {
        name: device.title.clone(),
        memory: device.memory.0,
        // A device without one is no NVIDIA GPU; PyTorch takes the kernels of A100s' time for it.
        capability: capability.unwrap_or((8, 0)),
        multiprocessors: device.multiprocessors,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name; the device, how many, and its memory in GiB.
    #[test]
    fn cards_are_found_however_they_are_named() {
        for (name, device, count, memory) in [
            ("rtx-4090", "rtx-4090", 1, 24),
            ("NVIDIA GeForce RTX 4090", "rtx-4090", 1, 24),
            ("Tesla T4", "t4", 1, 15),
            ("A100-SXM4-80GB", "a100-80", 1, 80),
            ("NVIDIA A100-SXM4-80GB", "a100-80", 1, 80),
            ("A100-SXM4-40GB", "a100-40", 1, 40),
            ("A100-80GB", "a100-80", 1, 80),
            ("A100", "a100-80", 1, 80),
            ("2x A100-PCIE-40GB", "a100-40", 2, 40),
            ("8x H100 80GB", "h100", 8, 80),
            ("8xh100", "h100", 8, 80),
            ("512x H100 96GB", "h100", 512, 96),
            ("V100 16GB", "v100", 1, 16),
            ("NVIDIA H100 80GB HBM3", "h100", 1, 80),
            ("A10G 24GB", "a10g", 1, 22),
            ("4x A10G 24GB", "a10g", 4, 22),
            ("RTX A6000", "a6000", 1, 48),
            ("NVIDIA L40S 48GB", "l40s", 1, 45),
            ("2x RTX 3090/4090 24GB", "rtx-3090", 2, 24),
            ("RTX 4090 Laptop", "laptop-4090", 1, 16),
            ("2x 24GB", "rtx-4090", 2, 24),
        ] {
            let found = target(name).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(found.devices(), count, "{name}");
            let gib = (found.device.memory.0 as f64 / f64::from(1 << 30)).round() as u64;
            let known = found.device.name == device || name == "2x 24GB";
            assert!(known && gib == memory, "{name}: {} of {gib} GiB", found.device.name);
        }
    }

    #[test]
    fn an_unknown_card_is_refused_with_what_is_like_it() {
        let error = target("rtx-4091").unwrap_err().to_string();
        assert!(
            error.starts_with("hardware: rtx-4091 is not known") && error.contains("rtx-4090"),
            "{error}"
        );
        assert!(target("see source").is_err());
        assert!(target("0x h100").is_err());
    }
}
