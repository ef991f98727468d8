//! Weights that do not fit in memory: opened to be read when they are needed, with a word about it; and what that cost.

use plimsoll_disk::{IoMeter, IoStatistics, LowerTiers, SpillSettings, default_folder, is_in_memory};
use plimsoll_memory::{ByteSize, Tier};
use plimsoll_model::{BlockId, Staging, StreamPlan, WeightStream};
use plimsoll_plan::GenerationPlan;
use plimsoll_plan::hardware::disk_space;
use plimsoll_train::TrainError;
use serde_json::{Value, json};

use crate::args::DiskArgs;
use crate::failure::Failure;
use crate::output::errln;
use crate::weights::Weights;

/// What is streamed, and what of it was read so far.
pub struct Streaming {
    meter: IoMeter,
    bytes_per_pass: u64,
    resident_layers: u32,
    layers: u32,
    spilled_bytes: u64,
    /// Bytes of a key-value cache on disk, and what was moved of it.
    cache: Option<(u64, IoMeter)>,
}

/// Opens the weights of a staging to be read, and says what is left on disk and why.
pub fn open(
    weights: &Weights,
    plan: &StreamPlan,
    staging: &Staging,
    disk: &DiskArgs,
) -> Result<(WeightStream, Streaming), Failure> {
    let spilled_bytes = plan.spill_bytes(staging);
    let folder = disk.disk_path.clone().unwrap_or_else(default_folder);
    let streamed = staging.blocks.iter().filter(|b| matches!(b.block, BlockId::Layer(_))).count() as u32;
    let resident_layers = plan.layers().saturating_sub(streamed);
    errln!(
        "memory holds {resident_layers} of {} layers at once; {} are read from disk in every pass",
        plan.layers(),
        ByteSize(staging.bytes_per_pass())
    );
    if spilled_bytes > 0 {
        let free = disk_space(&folder).ok().map(|space| space.available);
        if let Some(free) = free.filter(|free| free.0 < spilled_bytes) {
            return Err(Failure::does_not_fit(format!(
                "weights of {} have to be converted into {}, which has {free} free; name another folder with --disk-path",
                ByteSize(spilled_bytes),
                folder.display()
            )));
        }
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
    let settings = SpillSettings { folder, budget: disk.disk_budget.map(|budget| budget.0), direct: true };
    let stream = WeightStream::open::<Failure>(plan, staging, &settings, |p, rows, dtype, out| {
        weights.read_rows_into(p, rows, dtype, out).map_err(|error: TrainError| error.into())
    })?;
    if let Some(file) = stream.buffered_file() {
        errln!(
            "direct I/O is refused for {}: it is read through the page cache, which is emptied of it again",
            file.display()
        );
    }
    let meter = stream.meter();
    let bytes_per_pass = staging.bytes_per_pass();
    let layers = plan.layers();
    Ok((stream, Streaming { meter, bytes_per_pass, resident_layers, layers, spilled_bytes, cache: None }))
}

/// The tiers of a decoder: room on disk for its cache where that does not fit in memory, with a word about it.
pub fn cache_tiers(plan: &GenerationPlan, disk: &DiskArgs) -> Result<LowerTiers, Failure> {
    let bytes = plan.dry_run.disk_bytes();
    if plan.settings.cache_tier == Tier::Device {
        return Ok(LowerTiers::none());
    }
    let folder = disk.disk_path.clone().unwrap_or_else(default_folder);
    errln!(
        "the cache of {} positions, {}, is kept in a file in {}",
        plan.settings.context,
        ByteSize(bytes),
        folder.display()
    );
    let settings = SpillSettings { folder, budget: disk.disk_budget.map(|budget| budget.0), direct: true };
    Ok(LowerTiers::open(0, bytes, &settings)?)
}

impl Streaming {
    /// Counts a cache on disk with it.
    pub fn with_cache(self, tiers: &LowerTiers) -> Streaming {
        let cache = tiers.meter().map(|meter| (tiers.disk().high_water(), meter));
        Streaming { cache, ..self }
    }

    /// What was moved so far.
    fn totals(&self) -> IoStatistics {
        let weights = self.meter.totals();
        let Some((_, meter)) = &self.cache else { return weights };
        let cache = meter.totals();
        IoStatistics {
            bytes_read: weights.bytes_read + cache.bytes_read,
            bytes_written: weights.bytes_written + cache.bytes_written,
            io_seconds: weights.io_seconds + cache.io_seconds,
            waited_seconds: weights.waited_seconds + cache.waited_seconds,
        }
    }

    /// What was read so far, for machines.
    pub fn document(&self) -> Value {
        let totals = self.totals();
        json!({
            "resident_layers": self.resident_layers,
            "layers": self.layers,
            "bytes_per_pass": self.bytes_per_pass,
            "spilled_bytes": self.spilled_bytes,
            "cache_bytes": self.cache.as_ref().map(|(bytes, _)| bytes),
            "bytes_written": totals.bytes_written,
            "bytes_read": totals.bytes_read,
            "io_seconds": totals.io_seconds,
            "waited_seconds": totals.waited_seconds,
            "hidden_share": totals.hidden_share(),
        })
    }

    /// The same for people.
    pub fn report(&self) {
        let totals = self.totals();
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
