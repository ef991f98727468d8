//! Tensors that the planner offloaded come back as far as there is room, so that automatic choices use the load line.

use plimsoll_memory::Tier;
use plimsoll_step::{Checkpointing, KeptLayers, StepError, StepSettings};

use crate::limits::Limits;
use crate::offload::TensorKind;
use crate::resolve::{Choice, Search};
use crate::runs::Wanted;

impl Search<'_> {
    /// Where nothing fits: one that does when as many layers stay as the memory has room for, which a small disk may
    /// need, or the nearest.
    pub fn nearest(&self) -> Result<Choice, StepError> {
        let smallest = self.smallest()?;
        let room = self.limits.room_bytes;
        let any_disk = Search { limits: Limits { disk_bytes: u64::MAX, ..self.limits }, ..*self };
        let fitting = smallest.iter().filter(|choice| any_disk.fits(choice, room));
        let least_disk = fitting.min_by_key(|choice| choice.dry_run.disk_bytes());
        // What comes back leaves the disk and takes as much memory, whole pages aside.
        let may_do = |choice: &&Choice| {
            let short = choice.dry_run.disk_bytes().saturating_sub(self.limits.disk_bytes);
            short / 2 <= room.saturating_sub(self.limits.memory(choice))
        };
        if let Some(choice) = least_disk.filter(may_do) {
            let filled = any_disk.filled_to(choice.clone(), room)?;
            if self.fits(&filled, room) {
                return Ok(filled);
            }
        }
        // Every list has at least one entry; among equals the first is the one with the least offload.
        let nearest = smallest.into_iter().min_by_key(|choice| self.limits.distance(choice));
        nearest.ok_or(StepError::BatchShape { got: 0, batch_size: 0, sequence_length: 0 })
    }

    /// The lightest forms, in their order, but for those that are known without a run to be neither nearest nor fitting.
    fn smallest(&self) -> Result<Vec<Choice>, StepError> {
        let Limits { room_bytes, disk_bytes, .. } = self.limits;
        let first_form = self.ladder.first().map(|(settings, _)| settings.checkpointing);
        let over_disk = |settings: &StepSettings| {
            let on_disk =
                settings.offload.parameters == Tier::Disk && settings.kept_layers == KeptLayers::NONE;
            disk_bytes == 0 && on_disk
        };
        // What keeps the least comes first: it says most of the others.
        let mut order: Vec<(usize, &Wanted)> = self.ladder.iter().enumerate().collect();
        order.sort_by_cached_key(|(_, (settings, _))| {
            let other_form = Some(settings.checkpointing) != first_form;
            (over_disk(settings), other_form, self.least_bytes(settings, None))
        });
        let may_fit = |settings: &StepSettings| self.least_bytes(settings, None) <= room_bytes;
        let ahead = order.iter().filter(|(_, (settings, _))| {
            Some(settings.checkpointing) == first_form && may_fit(settings) && !over_disk(settings)
        });
        self.runs.ahead(ahead.map(|(_, wanted)| (*wanted).clone()));
        let mut found: Vec<(usize, Choice)> = Vec::new();
        for (place, (settings, accumulation)) in order {
            let is_like = |choice: &&Choice| {
                let other = StepSettings { checkpointing: settings.checkpointing, ..choice.settings.clone() };
                other == *settings && choice.settings.checkpointing == Checkpointing::Full
            };
            let like = found.iter().map(|(_, choice)| choice).find(is_like);
            let least = self.least_bytes(settings, like);
            let distance = (over_disk(settings), least);
            let nearer = |(_, choice): &(usize, Choice)| self.limits.distance(choice) < distance;
            // A step of no bytes at all does not fit in no room.
            if least.max(1) > room_bytes && found.iter().any(nearer) {
                continue;
            }
            found.push((place, self.runs.of(settings.clone(), *accumulation)?));
        }
        found.sort_by_key(|(place, _)| *place);
        Ok(found.into_iter().map(|(_, choice)| choice).collect())
    }

    /// The same step with what the planner has sent away brought back as far as automatic choices may fill the memory.
    pub fn filled(&self, choice: Choice) -> Result<Choice, StepError> {
        self.filled_to(choice, self.limits.target_bytes)
    }

    /// The same up to `room`: kind by kind, first the one that spares most waiting for a byte of memory; all of it, or that
    /// of as many layers as there is room for.
    fn filled_to(&self, choice: Choice, room: u64) -> Result<Choice, StepError> {
        let away = |kind: &TensorKind| {
            kind.is_open(&self.config.memory) && kind.tier(choice.settings.offload) == Tier::Disk
        };
        let kinds: Vec<TensorKind> = TensorKind::IN_ORDER.into_iter().filter(away).collect();
        if kinds.is_empty() || !self.fits(&choice, room) {
            return Ok(choice);
        }
        self.runs.ahead(kinds.iter().map(|kind| (with_home(&choice, *kind), choice.accumulation)));
        let mut by_worth = Vec::new();
        for kind in kinds {
            let home = self.again(&choice, with_home(&choice, kind))?;
            let seconds = choice.time.step_seconds - home.time.step_seconds;
            let bytes = self.limits.memory(&home).saturating_sub(self.limits.memory(&choice));
            by_worth.push((kind, seconds / bytes.max(1) as f64, home));
        }
        by_worth.sort_by(|(_, a, _), (_, b, _)| b.total_cmp(a));
        let (before, mut filled) = (choice.settings.clone(), choice);
        for (kind, _, home) in by_worth {
            // What was far too much then is too much now.
            let is_as_before = filled.settings == before || self.limits.memory(&home) / 2 > room;
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
    /// there, does not fit. Memory grows by about as much with each layer: that says where to look next.
    fn with_kept(
        &self,
        from: Choice,
        kind: TensorKind,
        home: &Choice,
        room: u64,
    ) -> Result<Choice, StepError> {
        let memory = |choice: &Choice| self.limits.memory(choice);
        // `low` layers fit, `high` do not.
        let (mut low, mut high) = (0, self.runs.spec.num_layers.saturating_add(1));
        let (mut least, mut most) = (memory(&from), memory(home));
        let (base, mut filled, mut guesses) = (from.settings.clone(), from, 0);
        let layer_bytes = most.saturating_sub(least) / u64::from(high);
        // Of what is not there all the time, the first layers may take less than their share: they are not there at the peak.
        let even = kind != TensorKind::Activations;
        if even && least.saturating_add(layer_bytes / 4) > room {
            return Ok(filled);
        }
        while low + 1 < high {
            let share = room.saturating_sub(least) as f64 / most.saturating_sub(least).max(1) as f64;
            let guess = low + (f64::from(high - low) * share.min(1.0)) as u32;
            // Where guesses do not come near, halves do.
            let guess = if guesses < 4 { guess } else { low.midpoint(high) };
            guesses += 1;
            let layers = guess.clamp(low + 1, high - 1);
            let with = |layers: u32| {
                let mut kept_layers = base.kept_layers;
                *kind.kept_mut(&mut kept_layers) = layers;
                StepSettings { kept_layers, ..base.clone() }
            };
            // If so many fit, perhaps one more does; if not, perhaps one less.
            let next =
                [layers, layers + 1, layers - 1].into_iter().filter(|next| (low + 1..high).contains(next));
            self.runs.ahead_of_first(next.map(|next| (with(next), filled.accumulation)));
            let other = self.again(&filled, with(layers))?;
            if self.fits(&other, room) {
                (low, least, filled) = (layers, memory(&other), other);
            } else {
                (high, most) = (layers, memory(&other));
            }
        }
        Ok(filled)
    }

    fn again(&self, choice: &Choice, settings: StepSettings) -> Result<Choice, StepError> {
        self.runs.of(settings, choice.accumulation)
    }
}

/// The same step with a kind of tensor on the device.
fn with_home(choice: &Choice, kind: TensorKind) -> StepSettings {
    let mut settings = choice.settings.clone();
    *kind.tier_mut(&mut settings.offload) = Tier::Device;
    settings
}
