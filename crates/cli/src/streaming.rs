//! Weights and caches that do not fit in memory: opens the disk for them, says so, and reports what was read.

use std::sync::Arc;

use plimsoll_device::Device;
use plimsoll_disk::{IoMeter, LowerTiers, MadeFolders, SpillSettings, default_folder, is_in_memory};
use plimsoll_memory::{ByteSize, Tag};
use plimsoll_plan::DryRun;
use plimsoll_plan::hardware::disk_space;
use plimsoll_step::{ExpertTraffic, Residency};
use serde_json::{Value, json};

use crate::args::DiskArgs;
use crate::failure::Failure;
use crate::output::errln;

/// What is streamed, and what of it was read so far.
pub struct Streaming {
    meter: IoMeter,
    bytes_per_pass: u64,
    resident_layers: u32,
    layers: u32,
    spilled_bytes: u64,
    /// Bytes of a key-value cache on disk.
    cache_bytes: Option<u64>,
    /// The folder of files without a name, until the end of what is streamed.
    _made: Option<MadeFolders>,
}

/// Opens the disk for what a plan leaves there, and says what that is and why. Where everything is in memory there is
/// nothing to open.
pub fn open(
    device: &dyn Device,
    dry_run: &DryRun,
    residency: Option<Residency>,
    disk: &DiskArgs,
    (layers, quiet): (u32, bool),
) -> Result<(Arc<LowerTiers>, Option<Streaming>), Failure> {
    let on_disk = |tag| dry_run.disk.most(tag);
    let (spilled_bytes, cache_bytes) = (on_disk(Tag::Weights), on_disk(Tag::KvCache));
    if residency.is_none() && cache_bytes == 0 {
        return Ok((Arc::default(), None));
    }
    let resident_layers = residency.map_or(layers, |residency| residency.layers(layers));
    let folder = disk.disk_path.clone().unwrap_or_else(default_folder);
    if residency.is_some() && !quiet {
        let read = ByteSize(dry_run.moved.read);
        match residency.map_or(0, Residency::expert_slots) {
            0 => errln!(
                "memory holds {resident_layers} of {layers} layers at once; {read} are read from disk in every pass"
            ),
            slots => errln!(
                "memory holds {resident_layers} of {layers} layers without their experts, and {slots} experts; where tokens go to any \
                 experts alike, each reads about {read} from disk"
            ),
        }
    }
    if spilled_bytes > 0 {
        let free = disk_space(&folder).ok().map(|space| space.available);
        if let Some(free) = free.filter(|free| free.0 < spilled_bytes) {
            return Err(Failure::does_not_fit(format!(
                "weights of {} have to be converted into {}, which has {free} free; name another folder with --disk-path",
                ByteSize(spilled_bytes),
                folder.display()
            )));
        }
        if !quiet {
            errln!(
                "{} of them are converted first, into a file in {}{}",
                ByteSize(spilled_bytes),
                folder.display(),
                if is_in_memory(&folder) {
                    ", which is in memory: it counts against the limits there"
                } else {
                    ""
                }
            );
        }
    }
    if cache_bytes > 0 && !quiet {
        errln!("the key-value cache, {}, is kept in a file in {}", ByteSize(cache_bytes), folder.display());
    }
    let settings = SpillSettings { folder, budget: disk.disk_budget.map(|budget| budget.0), direct: true };
    let made = (dry_run.disk_bytes() > 0).then(|| MadeFolders::missing(&settings.folder));
    let host = device.host_memory(dry_run.host_bytes())?;
    let tiers = Arc::new(LowerTiers::open(host, dry_run.disk_bytes(), &settings)?);
    let streaming = tiers.meter().map(|meter| Streaming {
        meter,
        bytes_per_pass: dry_run.moved.read,
        resident_layers,
        layers,
        spilled_bytes,
        cache_bytes: (cache_bytes > 0).then_some(cache_bytes),
        _made: made,
    });
    Ok((tiers, streaming))
}

/// Says where direct I/O is refused, once the files are open.
pub fn report_buffered(tiers: &LowerTiers) {
    if let Some(file) = tiers.buffered_file() {
        errln!(
            "direct I/O is refused for {}: it is read through the page cache, which is emptied of it again",
            file.path().display()
        );
    }
}

impl Streaming {
    /// What was read so far, for machines.
    pub fn document(&self) -> Value {
        let totals = self.meter.totals();
        json!({
            "resident_layers": self.resident_layers,
            "layers": self.layers,
            "bytes_per_pass": self.bytes_per_pass,
            "spilled_bytes": self.spilled_bytes,
            "cache_bytes": self.cache_bytes,
            "bytes_written": totals.bytes_written,
            "bytes_read": totals.bytes_read,
            "io_seconds": totals.io_seconds,
            "waited_seconds": totals.waited_seconds,
            "hidden_share": totals.hidden_share(),
        })
    }

    /// The same for people.
    pub fn report(&self) {
        let totals = self.meter.totals();
        if let Some(hidden) = totals.hidden_share() {
            errln!(
                "{} were read from disk in {:.2} s, {:.0} % of it behind the computation",
                ByteSize(totals.bytes_read),
                totals.io_seconds,
                hidden * 100.0
            );
        }
    }
}

/// Says how many experts had to be read.
pub fn report_experts(traffic: ExpertTraffic) {
    let ExpertTraffic { used, read, bytes } = traffic;
    errln!(
        "{:.0} % of the experts' matrices that tokens were sent to had to be read: {read} of {used}, {}",
        100.0 * read as f64 / used.max(1) as f64,
        ByteSize(bytes)
    );
}
