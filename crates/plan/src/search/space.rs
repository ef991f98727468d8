//! The space of a search: every axis that the configuration leaves open, and what a point of it means.

use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, WeightSource};
use plimsoll_step::{Checkpointing, StepError, StepSettings, TrainingMethod};

use super::axes::{self, Setting, Value};
use super::measure::changed;
use crate::config::{Method, OffloadTarget, OptimizerOptions, Quality, RawConfig};
use crate::limits::Limits;
use crate::method::{Layouts, method_among, training_method};
use crate::offload::TensorKind;
use crate::resolve::{batches, settled};
use crate::runs::Wanted;

/// Axes at most.
pub(super) const AXES: usize = 16;

/// The coupled axes behind that of divisions.
const PRECISION: usize = 1;
const STORAGE: usize = 2;
const BATCH: usize = 3;
const UPDATE: usize = 4;

/// A value on every axis, by its number; 0 on axes that there are not. The first value of an axis is the plain one: fast, and without
/// regard to memory.
pub(super) type Point = [u16; AXES];

/// Everything that a search may decide.
pub(super) struct Space<'a> {
    config: RawConfig,
    pub spec: &'a ModelSpec,
    pub axes: Vec<Vec<Value>>,
    /// What is trained, by the number of the value on the axis of storage.
    methods: Vec<Result<TrainingMethod, String>>,
    /// Micro-batches of a step, where that is not on an axis.
    steps: u64,
    /// The axes whose values change what the others do: of each combination a search begins anew.
    pub coupled: usize,
    /// The combinations of those.
    pub roots: Vec<Point>,
    /// Whether runs take long, as those through every stage of a pipeline do.
    pub is_long: bool,
}

impl<'a> Space<'a> {
    /// The axes that a configuration leaves open, with the values that a class allows.
    pub fn new(
        config: &RawConfig,
        spec: &'a ModelSpec,
        stored: Option<&WeightSource>,
        limits: Limits,
        quality: Quality,
        divisions: &[RawConfig],
    ) -> Result<Space<'a>, StepError> {
        let mut config = config.for_chunks().into_owned();
        config.planning = Default::default();
        let training = &config.training;
        let splits: Vec<Vec<(u64, u64)>> = divisions.iter().map(splits).collect();
        let mut all: Vec<(u64, u64)> = splits.iter().flatten().copied().collect();
        all.sort_by_key(|(size, steps)| std::cmp::Reverse((*size, *steps)));
        all.dedup();
        let largest = all.first().map_or(1, |(size, _)| *size);
        let tokens = largest.saturating_mul(config.data.sequence_length());
        let own_layers = spec.num_layers;
        let adapts = training.method() != Method::Full;
        let is_free = |key: bool, values: Vec<Value>| if key { values } else { Vec::new() };
        let plain_options = training.optimizer_options == OptimizerOptions::default();
        let mut axes = vec![
            is_free(
                divisions.len() > 1,
                axes::divisions(divisions.iter().map(|division| division.parallel.clone())),
            ),
            axes::precisions(&config, limits.narrow),
            is_free(
                training.method() == Method::Lora && training.quantization().set().is_none(),
                axes::storages(),
            ),
            is_free(all.len() > 1, axes::batches(all.clone())),
            is_free(
                training.optimizer_in_backward.is_none()
                    && training.in_backward_clipping.is_none()
                    && !adapts,
                axes::updates(training.max_gradient_norm() > 0.0),
            ),
        ];
        let in_memory = |kind: TensorKind| -> Vec<Value> {
            // What adapters train is small: their states and gradients stay.
            let small = adapts && matches!(kind, TensorKind::Optimizer | TensorKind::Gradients);
            is_free(
                kind.is_open(&config.memory) && !small,
                axes::places(kind, limits.lower_tiers(), own_layers),
            )
        };
        let coupled = axes.len();
        let steps = all.iter().map(|(_, steps)| *steps).max().unwrap_or(1);
        axes.extend([
            is_free(
                training.gradient_checkpointing().set().is_none_or(is_within),
                axes::checkpointings(own_layers),
            ),
            is_free(training.optimizer.is_none() && plain_options, axes::optimizers()),
            is_free(training.activation_compression.is_none(), axes::compressions()),
            is_free(training.attention().set().is_none(), axes::attentions()),
            is_free(training.loss_chunk_tokens().set().is_none(), axes::loss_chunks(tokens)),
            is_free(training.mlp_chunk_tokens.is_none(), axes::mlp_chunks(tokens)),
        ]);
        axes.extend(TensorKind::IN_ORDER.map(in_memory));
        axes.push(is_free(training.micro_batches_per_pass().set().is_none(), axes::togethers(steps)));
        for values in &mut axes {
            values.retain(|value| value.quality <= quality);
        }
        // Exchanges behind the computation are tried of what is found.
        let is_long = divisions.iter().any(|division| division.parallel.pipeline_parallel() > 1);
        let (methods, roots) = (Vec::new(), Vec::new());
        let mut space = Space { spec, axes, methods, steps, coupled, roots, is_long, config };
        space.methods = space.all_methods(stored)?;
        space.roots = space.all_roots(&splits, &all);
        Ok(space)
    }

    fn all_methods(
        &self,
        stored: Option<&WeightSource>,
    ) -> Result<Vec<Result<TrainingMethod, String>>, StepError> {
        let storages = self.axes.get(STORAGE).map_or(&[][..], Vec::as_slice);
        if storages.is_empty() {
            return Ok(vec![Ok(training_method(&self.config, self.spec, stored)?)]);
        }
        let layouts = Layouts::default();
        let of = |value: &Value| {
            let mut config = self.config.clone();
            value.setting.apply(&mut config);
            method_among(&layouts, &config, self.spec, stored).map_err(|error| error.to_string())
        };
        Ok(storages.iter().map(of).collect())
    }

    /// Every combination on the coupled axes that can be.
    fn all_roots(&self, splits: &[Vec<(u64, u64)>], all: &[(u64, u64)]) -> Vec<Point> {
        let count = |axis: usize| self.axes.get(axis).map_or(1, |values| values.len().max(1)) as u16;
        let mut roots = Vec::new();
        for (division, own) in (0u16..).zip(splits) {
            for precision in 0..count(PRECISION) {
                for storage in 0..count(STORAGE) {
                    for (batch, _) in (0u16..).zip(all).filter(|(_, split)| own.contains(split)) {
                        for update in 0..count(UPDATE) {
                            let mut point = [0; AXES];
                            let values = [division, precision, storage, batch, update];
                            point.iter_mut().zip(values).for_each(|(place, value)| *place = value);
                            roots.push(point);
                        }
                    }
                }
            }
        }
        roots
    }

    /// The value that a point has on an axis.
    pub fn value(&self, point: &Point, axis: usize) -> Option<&Value> {
        let place = usize::from(point.get(axis).copied().unwrap_or(0));
        self.axes.get(axis)?.get(place)
    }

    /// The configuration of a point.
    pub fn config(&self, point: &Point) -> RawConfig {
        let mut config = self.config.clone();
        for axis in 0..self.axes.len() {
            if let Some(value) = self.value(point, axis) {
                value.setting.apply(&mut config);
            }
        }
        config
    }

    /// The step of a point, where there can be one.
    pub fn wanted(&self, point: &Point) -> Option<Wanted> {
        let config = self.config(point);
        config.validate().is_ok().then_some(())?;
        let storage = point.get(STORAGE).copied().unwrap_or(0);
        let method = self.methods.get(usize::from(storage))?.as_ref().ok()?;
        settled(&config, self.spec, method)
    }

    /// The point of a step that was found in another way, if it is one of this space.
    pub fn point_of(&mut self, (settings, accumulation): &Wanted) -> Option<Point> {
        let mut point = [0; AXES];
        for (axis, place) in point.iter_mut().enumerate() {
            let Some(first) = self.axes.get(axis).and_then(|values| values.first()) else { continue };
            let own = match first.setting {
                Setting::Batch(..) => Setting::Batch(settings.batch_size, *accumulation),
                Setting::Checkpointing(_) => Setting::Checkpointing(settings.checkpointing),
                Setting::Attention(_) => Setting::Attention(settings.attention),
                Setting::Together(_) => Setting::Together(settings.micro_batches_per_pass),
                Setting::Place(kind, ..) => {
                    let kept = u64::from(kind.kept(settings.kept_layers));
                    Setting::Place(kind, kind.tier(settings.offload), kept)
                }
                _ => continue,
            };
            *place = self.number(axis, &own)?;
        }
        let precisions = self.axes.get(PRECISION).map_or(1, |values| values.len().max(1)) as u16;
        (0..precisions).map(|precision| changed(point, PRECISION, precision)).find(|point| {
            self.wanted(point).is_some_and(|(own, steps)| {
                // Exchanges behind the computation are no axis.
                let overlap_communication = settings.overlap_communication;
                steps == *accumulation && StepSettings { overlap_communication, ..own } == *settings
            })
        })
    }

    /// The least class that allows a point.
    pub fn quality(&self, point: &Point) -> Quality {
        let all = (0..self.axes.len()).filter_map(|axis| Some(self.value(point, axis)?.quality));
        all.max().unwrap_or(Quality::Lossless)
    }

    /// The number of a value on an axis, which becomes one of its values if it is not.
    pub fn number(&mut self, axis: usize, setting: &Setting) -> Option<u16> {
        let values = self.axes.get_mut(axis)?;
        let known = values.iter().position(|value| value.setting == *setting);
        let place = known.unwrap_or_else(|| {
            values.push(Value { setting: setting.clone(), quality: Quality::Lossless });
            values.len() - 1
        });
        u16::try_from(place).ok()
    }

    /// Micro-batches of a step.
    pub fn steps(&self, point: &Point) -> u64 {
        match self.value(point, BATCH).map(|value| &value.setting) {
            Some(Setting::Batch(_, steps)) => *steps,
            _ => self.steps,
        }
    }

    /// Whether passes bring weights or gradients from elsewhere.
    pub fn brings(&self, point: &Point) -> bool {
        let away = |axis| match self.value(point, axis).map(|value| &value.setting) {
            Some(Setting::Place(TensorKind::Parameters | TensorKind::Gradients, tier, _)) => {
                *tier != Tier::Device
            }
            _ => false,
        };
        let said = [self.config.memory.offload.parameters(), self.config.memory.offload.gradients()];
        let said_away = |target: crate::config::Auto<OffloadTarget>| {
            target.set().is_some_and(|target| target != OffloadTarget::Device)
        };
        (0..self.axes.len()).any(away) || said.into_iter().any(said_away)
    }

    /// On how many coupled axes two points have the same value; the batch counts least.
    pub fn alike(&self, one: &Point, other: &Point) -> usize {
        let same = |axis: &usize| one.get(*axis) == other.get(*axis);
        (0..self.coupled).filter(same).map(|axis| if axis == BATCH { 1 } else { 2 }).sum()
    }

    /// Whether two points have the same values on the coupled axes but that of batches.
    pub fn is_alike(&self, one: &Point, other: &Point) -> bool {
        (0..self.coupled).filter(|axis| *axis != BATCH).all(|axis| one.get(axis) == other.get(axis))
    }

    /// Those of the roots that have the shortest batch.
    pub fn shortest(&self, roots: &[Point]) -> Vec<Point> {
        let batch = |root: &Point| root.get(BATCH).copied().unwrap_or(0);
        let last = roots.iter().map(batch).max();
        roots.iter().copied().filter(|root| Some(batch(root)) == last).collect()
    }

    /// Points of a root that take little: checkpointed in these forms, and everything on one lower tier after the other.
    pub fn light(&self, root: &Point, forms: &[Checkpointing]) -> Vec<Point> {
        let forms: Vec<Setting> = forms.iter().copied().map(Setting::Checkpointing).collect();
        let find = |axis: usize, wanted: &dyn Fn(&Setting) -> bool| {
            let values = self.axes.get(axis)?;
            u16::try_from(values.iter().position(|value| wanted(&value.setting))?).ok()
        };
        let mut all = Vec::new();
        for tier in [Tier::Device, Tier::Host, Tier::Disk] {
            for form in &forms {
                let mut point = *root;
                for (axis, place) in point.iter_mut().enumerate().skip(self.coupled) {
                    let light = find(axis, &|setting| match setting {
                        Setting::Place(_, own, kept) => *own == tier && *kept == 0,
                        setting => setting == form,
                    });
                    *place = light.unwrap_or(*place);
                }
                if !all.contains(&point) {
                    all.push(point);
                }
            }
        }
        all
    }

    /// All of them, but for mixes of two ways of checkpointing.
    pub fn every_point(&self) -> Vec<Point> {
        let mut all = self.roots.clone();
        for (axis, values) in self.axes.iter().enumerate().skip(self.coupled) {
            let numbers = 0..values.len().max(1) as u16;
            let with =
                |point: &Point| numbers.clone().map(move |number| (*point, number)).collect::<Vec<_>>();
            let further = all.iter().flat_map(with).map(|(mut point, number)| {
                if let Some(place) = point.get_mut(axis) {
                    *place = number;
                }
                point
            });
            all = further.collect();
        }
        all
    }

    /// The axis of checkpointing, where that is open.
    pub fn checkpointing_axis(&self) -> Option<usize> {
        let is_form = |values: &Vec<Value>| {
            matches!(values.first(), Some(Value { setting: Setting::Checkpointing(_), .. }))
        };
        self.axes.iter().position(is_form)
    }

    /// Points in all, with every mix of two ways of checkpointing.
    pub fn size(&self) -> f64 {
        let layers = f64::from(self.spec.num_layers);
        let form = self.checkpointing_axis();
        let values = |(axis, values): (usize, &Vec<Value>)| {
            let count = values.len().max(1) as f64;
            let whole = values.iter().filter(|value| mixes(&value.setting)).count() as f64;
            match Some(axis) == form {
                true => count + whole * (whole - 1.0) * (layers - 1.0),
                false => count,
            }
        };
        let others: f64 = self.axes.iter().enumerate().skip(self.coupled).map(values).product();
        others * self.roots.len() as f64
    }
}

/// The forms of checkpointing that keep least.
pub(super) const LIGHT: [Checkpointing; 2] = [Checkpointing::Full, Checkpointing::Sqrt];

/// Whether some layers can be checkpointed in this way and the others in another.
pub(super) fn mixes(setting: &Setting) -> bool {
    use Checkpointing::{Full, None, Selective};
    matches!(setting, Setting::Checkpointing(None | Full | Selective(_)))
}

fn is_within(form: crate::config::GradientCheckpointing) -> bool {
    matches!(form, crate::config::GradientCheckpointing::Within(_))
}

/// Batches and accumulations that the user's words leave open.
fn splits(config: &RawConfig) -> Vec<(u64, u64)> {
    batches(config).into_iter().next().unwrap_or_default()
}
