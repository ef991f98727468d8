//! The search beside brute force: on grids where every configuration is run dry one by one, what is found is within 3 % of the best
//! and under the line, and the front holds that of the grid within 4 %. It is the same on any number of threads.

use plimsoll_model::catalogue;
use plimsoll_step::Checkpointing;

use super::axes::Setting;
use super::*;
use crate::catalogue::Catalogue;
use crate::runs::tests::RATES;
use crate::time::Rates;

/// What a search may be slower, or larger, than the best.
const SLACK: f64 = 1.03;
/// The same of a point of the front.
const FRONT_SLACK: f64 = 1.04;

/// Keys that are not searched unless a grid says so.
const FIXED: &str = "data.sequence_length=128; training.attention=flash; training.micro_batches_per_pass=1; \
                     training.loss_chunk_tokens=128; training.mlp_chunk_tokens=64";

struct Grid {
    spec: ModelSpec,
    set: &'static str,
    quality: Quality,
    limits: Limits,
    rates: Rates,
}

impl Grid {
    fn new(layers: u32, set: &'static str, quality: Quality) -> Grid {
        let spec =
            ModelSpec { num_layers: layers, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() };
        let limits = Limits { disk_bytes: 1 << 50, ..Limits::endless() };
        Grid { spec, set, quality, limits, rates: RATES }
    }

    /// The same on a device with memory of its own.
    fn apart(self) -> Grid {
        let rates = Catalogue::known().target("rtx-4090").unwrap().machine(0).rates;
        let limits = Limits { is_apart: true, host_bytes: Some(1 << 40), ..self.limits };
        Grid { rates, limits, ..self }
    }

    fn walk(&self) -> Walk<'_> {
        let mut config = RawConfig::from_str("model: m", "test").unwrap();
        for set in FIXED.split("; ").chain(self.set.split("; ")) {
            config.apply_set(set).unwrap_or_else(|error| panic!("{error}"));
        }
        let divisions = [config.clone()];
        let space = Space::new(&config, &self.spec, None, self.limits, self.quality, &divisions).unwrap();
        Walk::new(space, &self.rates, self.limits)
    }

    /// Every point of the space run, with some mixes of every way of checkpointing.
    fn brute_force(&self) -> Walk<'_> {
        let mut walk = self.walk();
        if let Some(axis) = walk.space.checkpointing_axis() {
            let forms: Vec<plimsoll_step::Groups> =
                walk.space.axes[axis].iter().filter_map(|value| measure::groups(&value.setting)).collect();
            let layers = self.spec.num_layers / 2;
            for first in forms.iter().step_by(4) {
                for others in forms.iter().step_by(3).filter(|others| *others != first) {
                    let (first, others) = (*first, *others);
                    let form = Checkpointing::Mixed { layers, first, others };
                    walk.space.number(axis, &Setting::Checkpointing(form)).unwrap();
                }
            }
        }
        let all = walk.space.every_point();
        walk.run(&all);
        walk
    }

    fn check(&self) {
        self.check_beside(&self.brute_force(), FRONT_SLACK);
    }

    /// Holds the search against a grid of which every point was run, and the front against the grid's.
    fn check_beside(&self, grid: &Walk<'_>, front_slack: f64) {
        let mut worst = (1.0f64, 1.0f64);
        let bytes = |made: &Made| made.footprint.under_the_line(&self.limits);
        let least = grid.all().map(|(_, made)| bytes(made)).fold(f64::INFINITY, f64::min);
        let most = grid.all().map(|(_, made)| bytes(made)).fold(0.0, f64::max);
        for share in [0.1, 0.25, 0.5, 0.8, 1.0] {
            let room = (least * (most / least).powf(share)) as u64;
            let aim = grid.aim(Merit::Seconds, room, self.quality);
            let (best, made) = grid.best(&aim, |_| true).unwrap();
            let mut walk = self.walk();
            walk.everywhere(&aim);
            let config = |walk: &Walk<'_>, point: &Point| walk.space.config(point).to_yaml().unwrap();
            let nothing = || panic!("{}: nothing at {share}\n{}", self.set, config(grid, &best));
            let (point, found) = walk.chosen(&aim).unwrap_or_else(nothing);
            assert!(bytes(&found) <= room as f64);
            let ratio = found.footprint.seconds() / made.footprint.seconds();
            assert!(
                ratio <= SLACK,
                "{} at {share}: {ratio}\n{}\n{}",
                self.set,
                config(grid, &best),
                config(&walk, &point)
            );
            worst.0 = worst.0.max(ratio);
            assert!(walk.order.len() < grid.order.len() / 3, "{}: {}", self.set, walk.order.len());
        }
        worst.1 = self.check_front(grid, front_slack);
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        println!(
            "{} settings of {} layers, {}: answers within {:.2} % of the best, the front within {:.2} %",
            grid.order.len(),
            self.spec.num_layers,
            self.set,
            percent(worst.0),
            percent(worst.1)
        );
    }

    /// By what share a point of the grid's front lies beyond the search's, at most.
    fn check_front(&self, grid: &Walk<'_>, slack: f64) -> f64 {
        let aim = grid.aim(Merit::Seconds, u64::MAX, self.quality);
        let mut walk = self.walk();
        walk.everywhere(&aim);
        walk.along_the_front(self.quality, u64::MAX);
        let front = walk.front();
        for (point, made) in &front {
            let quality = walk.space.quality(point);
            let beaten = front.iter().any(|(other, less)| {
                walk.space.quality(other) <= quality
                    && less.device_bytes <= made.device_bytes
                    && less.footprint.seconds() <= made.footprint.seconds()
                    && other != point
            });
            assert!(!beaten, "{}", self.set);
        }
        let mut worst = 1.0f64;
        for (point, made) in grid.front() {
            let class = grid.space.quality(&point);
            // Of classes that allow less than was asked for, the front has what the search came by.
            if class < self.quality {
                continue;
            }
            let own = front.iter().filter(|(own, _)| walk.space.quality(own) <= class);
            let over = own.map(|(_, other)| {
                let bytes = other.device_bytes as f64 / made.device_bytes as f64;
                bytes.max(other.footprint.seconds() / made.footprint.seconds())
            });
            let over = over.fold(f64::INFINITY, f64::min);
            let config = || grid.space.config(&point).to_yaml().unwrap();
            assert!(over <= slack, "{}: {over} {made:?} {class}\n{}", self.set, config());
            worst = worst.max(over);
        }
        worst
    }
}

const AT_HOME: &str = "training.optimizer_in_backward=false; \
                       memory.offload={gradients: device, parameters: device, activations: device}";

#[test]
fn forms_of_checkpointing_and_batches_are_as_good_as_brute_force() {
    Grid::new(4, AT_HOME, Quality::Lossless).check();
}

#[test]
fn types_optimizers_and_places_are_as_good_as_brute_force() {
    let set = "training.gradient_checkpointing=full; memory.offload={gradients: device, activations: device}";
    Grid::new(4, set, Quality::Proven).check();
    Grid::new(4, set, Quality::Lossless).check();
}

#[test]
fn adapters_beside_stored_weights_are_as_good_as_brute_force() {
    let set = "training.method=lora; training.batch_size=2; training.gradient_accumulation_steps=2; \
               memory.offload={parameters: device, activations: device}";
    Grid::new(4, set, Quality::Anything).check();
}

#[test]
fn activations_beside_a_device_are_as_good_as_brute_force() {
    let set = "training.batch_size=4; training.gradient_accumulation_steps=1; training.optimizer_in_backward=false; \
               memory.offload={gradients: device, parameters: device, optimizer: device}";
    Grid::new(4, set, Quality::Lossless).apart().check();
}

/// Some minutes: `cargo test --release -p plimsoll-plan --lib -- --ignored --nocapture ten_thousand`.
#[test]
#[ignore = "runs tens of thousands of settings dry"]
fn on_grids_of_ten_thousand_settings_no_answer_is_far_from_the_best() {
    let places =
        "training.gradient_checkpointing=full; memory.offload={gradients: device, activations: device}";
    let adapters = "training.method=lora; memory.offload={parameters: device}";
    let beside = "training.optimizer_in_backward=false; \
                  memory.offload={gradients: device, parameters: device, optimizer: device}";
    for (grid, beside_a_device) in [
        (Grid::new(4, AT_HOME, Quality::Proven), false),
        (Grid::new(5, AT_HOME, Quality::Proven), false),
        (Grid::new(4, places, Quality::Anything), false),
        (Grid::new(4, adapters, Quality::Proven), false),
        (Grid::new(4, beside, Quality::Proven), true),
    ] {
        let grid = if beside_a_device { grid.apart() } else { grid };
        let all = grid.brute_force();
        println!("{}: {} settings were run dry", grid.set, all.order.len());
        // How far the front is off is said, and what is answered is held to its share.
        grid.check_beside(&all, f64::INFINITY);
    }
}

#[test]
fn a_search_is_the_same_on_any_number_of_threads() {
    let grid = Grid::new(4, AT_HOME, Quality::Proven);
    let found = [1, 2, 5].map(|threads| {
        let mut walk = grid.walk().on_threads(threads);
        let aim = walk.aim(Merit::Seconds, 200 << 20, Quality::Proven);
        walk.everywhere(&aim);
        walk.along_the_front(Quality::Proven, 200 << 20);
        let front: Vec<Point> = walk.front().into_iter().map(|(point, _)| point).collect();
        (walk.order.clone(), walk.chosen(&aim).map(|(point, _)| point), front)
    });
    assert!(found.iter().all(|one| *one == found[0]));
}
