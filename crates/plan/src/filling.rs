//! Tensors that the planner offloaded come back as far as there is room, so that automatic choices use the load line.

use plimsoll_memory::Tier;
use plimsoll_model::ModelSpec;
use plimsoll_step::{StepError, StepSettings};

use crate::limits::Limits;
use crate::offload::TensorKind;
use crate::resolve::{Choice, Search};
use crate::runs::Wanted;

/// Steps that do not fit count as equally near where one takes no more than this share of the other: the first that is found is
/// taken.
const AS_NEAR: f64 = 1.01;

impl Search<'_> {
    /// Where nothing fits: one that does when as many layers stay as the memory has room for, which a small disk may
    /// need, or the nearest.
    pub fn nearest(&self) -> Result<Choice, StepError> {
        let mut found: Vec<(usize, Choice)> = Vec::new();
        let first = self.ladder.first().map(|(settings, _)| settings.checkpointing);
        // Forms that recompute more are for where those that recompute less do not do.
        for is_first in [true, false] {
            let of_form =
                |(_, wanted): &(usize, &Wanted)| (Some(wanted.0.checkpointing) == first) == is_first;
            let ladder = || self.ladder.iter().enumerate().filter(of_form);
            let known = || found.iter().map(|(_, choice)| choice);
            let may_fit =
                |wanted: &Wanted| !(self.cannot_fit(wanted, []) || self.is_hopeless(wanted, known()));
            let may_fit = ladder().filter(|(_, wanted)| may_fit(wanted));
            self.runs.ahead(may_fit.map(|(_, wanted)| wanted.clone()));
            let before = found.len();
            for (place, wanted) in ladder() {
                if !self.is_hopeless(wanted, found.iter().map(|(_, choice)| choice)) {
                    found.push((place, self.runs.of(wanted.0.clone(), wanted.1)?));
                }
            }
            if let Some(filled) = self.with_less_disk(found.iter().skip(before).map(|(_, choice)| choice))? {
                return Ok(filled);
            }
        }
        self.add_nearer(&mut found)?;
        // There is at least one; among equals the first is the one with the least offload.
        let nearest = found.into_iter().min_by_key(|(place, choice)| (self.limits.distance(choice), *place));
        let nearest = nearest.map(|(_, choice)| choice);
        nearest.ok_or(StepError::BatchShape { got: 0, batch_size: 0, sequence_length: 0 })
    }

    /// Adds those of the lightest forms that may be nearer to what there is room for than what was found.
    fn add_nearer(&self, found: &mut Vec<(usize, Choice)>) -> Result<(), StepError> {
        let missing = self.ladder.iter().enumerate();
        let missing = missing.filter(|(place, _)| found.iter().all(|(other, _)| other != place));
        // What keeps the least comes first: it says most of the others.
        let known = || found.iter().map(|(_, choice)| choice);
        let mut missing: Vec<(usize, &Wanted)> = missing.collect();
        missing.sort_by_cached_key(|(_, wanted)| self.least_distance(wanted, known()));
        for (place, wanted) in missing {
            let known = || found.iter().map(|(_, choice)| choice);
            let (over_disk, bytes) = self.least_distance(wanted, known());
            let distance = (over_disk, (bytes as f64 * AS_NEAR) as u64);
            if known().all(|choice| self.limits.distance(choice) >= distance) {
                found.push((place, self.runs.of(wanted.0.clone(), wanted.1)?));
            }
        }
        Ok(())
    }

    /// What the distance of a step is at least, as far as that is known without running it.
    fn least_distance<'c>(
        &self,
        wanted: &Wanted,
        known: impl IntoIterator<Item = &'c Choice>,
    ) -> (bool, u64) {
        let over_disk = self.least_disk_bytes(&wanted.0) > self.limits.disk_bytes;
        (over_disk, self.least_bytes(wanted, known))
    }

    /// Whether a step is known not to fit, however much of what is on disk comes back.
    fn is_hopeless<'c>(&self, wanted: &Wanted, known: impl IntoIterator<Item = &'c Choice>) -> bool {
        let Limits { room_bytes, disk_bytes, .. } = self.limits;
        let short_of_disk = self.least_disk_bytes(&wanted.0).saturating_sub(disk_bytes);
        // A step of no bytes at all does not fit in no room.
        short_of_disk / 2 > room_bytes || self.least_bytes(wanted, known).max(1) > room_bytes
    }

    /// Of steps that need more disk than there is, the one that needs least of it, with as much in memory as fits; `None` where
    /// that is not enough.
    fn with_less_disk<'c>(
        &self,
        smallest: impl Iterator<Item = &'c Choice>,
    ) -> Result<Option<Choice>, StepError> {
        let room = self.limits.room_bytes;
        let any_disk = Search { limits: Limits { disk_bytes: u64::MAX, ..self.limits }, ..*self };
        let fitting = smallest.filter(|choice| any_disk.fits(choice, room));
        let least_disk = fitting.min_by_key(|choice| choice.dry_run.disk_bytes());
        // What comes back leaves the disk and takes as much memory, whole pages aside.
        let may_do = |choice: &&Choice| {
            let short = choice.dry_run.disk_bytes().saturating_sub(self.limits.disk_bytes);
            short / 2 <= room.saturating_sub(self.limits.memory(choice))
        };
        let Some(choice) = least_disk.filter(may_do) else { return Ok(None) };
        let filled = any_disk.filled_to(choice.clone(), room)?;
        Ok(self.fits(&filled, room).then_some(filled))
    }

    /// The same step with what the planner has sent away brought back as far as automatic choices may fill the memory.
    pub fn filled(&self, choice: Choice) -> Result<Choice, StepError> {
        self.filled_to(choice, self.limits.target_bytes)
    }

    /// The same up to `room`. Where more experts could come by themselves than a layer has, some layers may as well stay whole: the
    /// faster of the two.
    fn filled_to(&self, choice: Choice, room: u64) -> Result<Choice, StepError> {
        let filled = self.filled_by_kind(choice.clone(), room)?;
        if !self.has_slots_to_spare(&filled) {
            return Ok(filled);
        }
        let whole = self.again(&choice, StepSettings { expert_slots: 0, ..choice.settings.clone() })?;
        if !self.fits(&whole, room) {
            return Ok(filled);
        }
        let whole = self.filled_by_kind(whole, room)?;
        Ok(if whole.time.step_seconds < filled.time.step_seconds { whole } else { filled })
    }

    /// Kind by kind, first the one that spares most waiting for a byte of memory; all of it, or that of as many layers as there is room
    /// for.
    fn filled_by_kind(&self, choice: Choice, room: u64) -> Result<Choice, StepError> {
        let away = |kind: &TensorKind| {
            kind.is_open(&self.config.memory) && kind.tier(choice.settings.offload) != Tier::Device
        };
        let kinds: Vec<TensorKind> = TensorKind::IN_ORDER.into_iter().filter(away).collect();
        let choice = self.with_slots(choice, room)?;
        if kinds.is_empty() || !self.fits(&choice, room) {
            return Ok(choice);
        }
        let with_home = |choice: &Choice, kind| with_home(self.runs.spec, choice, kind);
        self.runs.ahead(kinds.iter().map(|kind| (with_home(&choice, *kind), choice.accumulation)));
        let mut by_worth = Vec::new();
        for kind in kinds {
            let home = self.again(&choice, with_home(&choice, kind))?;
            let seconds = choice.time.step_seconds - home.time.step_seconds;
            let bytes = self.limits.spared(&home).saturating_sub(self.limits.spared(&choice));
            by_worth.push((kind, seconds / bytes.max(1) as f64, home));
        }
        by_worth.sort_by(|(_, a, _), (_, b, _)| b.total_cmp(a));
        let (before, mut filled) = (choice.settings.clone(), choice);
        for (kind, _, home) in by_worth {
            // What was far too much then is too much now.
            let is_as_before = filled.settings == before || self.limits.spared(&home) / 2 > room;
            let home = match is_as_before {
                true => home,
                false => self.again(&filled, with_home(&filled, kind))?,
            };
            if self.fits(&home, room) {
                filled = home;
                continue;
            }
            filled = self.with_kept(filled, kind, &home, room)?;
        }
        Ok(filled)
    }

    /// The same step with a kind of tensor on the device for as many layers as there is room for; `home`, with all of it
    /// there, does not fit.
    fn with_kept(
        &self,
        from: Choice,
        kind: TensorKind,
        home: &Choice,
        room: u64,
    ) -> Result<Choice, StepError> {
        let all = self.runs.spec.num_layers.saturating_add(1);
        let (least, most) = (self.limits.spared(&from), self.limits.spared(home));
        let layer_bytes = most.saturating_sub(least) / u64::from(all);
        // Of what is not there all the time, the first layers may take less than their share: they are not there at the peak.
        let even = kind != TensorKind::Activations;
        if even && least.saturating_add(layer_bytes / 4) > room {
            return Ok(from);
        }
        let base = from.settings.clone();
        self.most_that_fit((0, from), (all, home), room, |layers| {
            let mut kept_layers = base.kept_layers;
            *kind.kept_mut(&mut kept_layers) = layers;
            StepSettings { kept_layers, ..base.clone() }
        })
    }

    /// The step with the largest number that fits; `low` is known to fit, and `high` is not to. Memory grows by about as much with each:
    /// that says where to look next.
    pub(crate) fn most_that_fit(
        &self,
        (mut low, mut found): (u32, Choice),
        (mut high, over): (u32, &Choice),
        room: u64,
        with: impl Fn(u32) -> StepSettings,
    ) -> Result<Choice, StepError> {
        let memory = |choice: &Choice| self.limits.spared(choice);
        let (mut least, mut most, mut guesses) = (memory(&found), memory(over), 0);
        while low + 1 < high {
            let share = room.saturating_sub(least) as f64 / most.saturating_sub(least).max(1) as f64;
            let guess = low + (f64::from(high - low) * share.min(1.0)) as u32;
            // Where guesses do not come near, halves do.
            let guess = if guesses < 4 { guess } else { low.midpoint(high) };
            guesses += 1;
            let number = guess.clamp(low + 1, high - 1);
            // If so many fit, perhaps one more does; if not, perhaps one less.
            let next = [number, number + 1, number - 1];
            let next = next.into_iter().filter(|next| (low + 1..high).contains(next));
            self.runs.ahead_of_first(next.map(|next| (with(next), found.accumulation)));
            let other = self.again(&found, with(number))?;
            if self.fits(&other, room) {
                (low, least, found) = (number, memory(&other), other);
            } else {
                (high, most) = (number, memory(&other));
            }
        }
        Ok(found)
    }

    fn again(&self, choice: &Choice, settings: StepSettings) -> Result<Choice, StepError> {
        self.runs.of(settings, choice.accumulation)
    }
}

/// The same step with a kind of tensor on the device; of weights whose experts come by themselves, all layers but for experts.
fn with_home(spec: &ModelSpec, choice: &Choice, kind: TensorKind) -> StepSettings {
    let mut settings = choice.settings.clone();
    match kind {
        TensorKind::Parameters if settings.expert_slots > 0 => {
            settings.kept_layers.parameters = spec.num_layers;
        }
        kind => *kind.tier_mut(&mut settings.offload) = Tier::Device,
    }
    settings
}
