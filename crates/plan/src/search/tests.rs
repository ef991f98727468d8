//! The search beside brute force: on grids where every configuration is run dry one by one, it is within 3 % of the best and under
//! the line, its front holds that of the grid, and it is the same on any number of threads.

use plimsoll_memory::Tier;
use plimsoll_model::catalogue;

use super::*;
use crate::runs::tests::RATES;

const SLACK: f64 = 1.03;

/// Keys that leave a grid of a few hundred configurations open.
const NARROW: &str = "training.attention=flash; training.micro_batches_per_pass=1; training.optimizer_in_backward=false; \
                      memory.offload={gradients: device, parameters: device, activations: device}";

struct Grid {
    spec: ModelSpec,
    set: String,
    quality: Quality,
    limits: Limits,
}

impl Grid {
    fn new(layers: u32, set: &str, quality: Quality) -> Grid {
        let spec = ModelSpec { num_layers: layers, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() };
        let limits = Limits { disk_bytes: 1 << 50, ..Limits::endless() };
        Grid { spec, set: format!("data.sequence_length=128; {set}"), quality, limits }
    }

    fn walk(&self) -> Walk<'_> {
        let mut config = RawConfig::from_str("model: m", "test").unwrap();
        for set in self.set.split("; ") {
            config.apply_set(set).unwrap_or_else(|error| panic!("{error}"));
        }
        let divisions = [config.clone()];
        let space = Space::new(&config, &self.spec, None, self.limits, self.quality, &divisions).unwrap();
        Walk::new(space, &RATES, self.limits)
    }

    /// Every point of the space, with a few mixes, run.
    fn brute_force(&self) -> Walk<'_> {
        let mut walk = self.walk();
        let layers = self.spec.num_layers;
        if let Some(axis) = walk.space.checkpointing_axis() {
            let forms: Vec<plimsoll_step::Groups> = (walk.space.axes[axis].iter())
                .filter_map(|value| match value.setting {
                    axes::Setting::Checkpointing(plimsoll_step::Checkpointing::Selective(groups)) => Some(groups),
                    axes::Setting::Checkpointing(plimsoll_step::Checkpointing::None) => Some(plimsoll_step::Groups::NONE),
                    axes::Setting::Checkpointing(plimsoll_step::Checkpointing::Full) => Some(plimsoll_step::Groups::BLOCK),
                    _ => None,
                })
                .collect();
            for first in &forms {
                for others in forms.iter().step_by(3).filter(|others| *others != first) {
                    let form = plimsoll_step::Checkpointing::Mixed { layers: layers / 2, first: *first, others: *others };
                    walk.space.number(axis, &axes::Setting::Checkpointing(form)).unwrap();
                }
            }
        }
        let all = walk.space.every_point();
        walk.run(&all);
        walk
    }

    /// Holds the search against the grid, with room for shares of what the plainest point takes.
    fn check(&self) {
        let grid = self.brute_force();
        let bytes = |made: &Made| made.footprint.under_the_line(&self.limits);
        let least = grid.all().map(|(_, made)| bytes(made)).fold(f64::INFINITY, f64::min);
        let most = grid.all().map(|(_, made)| bytes(made)).fold(0.0, f64::max);
        eprintln!("{}: {} points, {least} to {most}", self.set, grid.order.len());
        for share in [0.02, 0.2, 0.5, 0.8, 1.0] {
            let room = (least * (most / least).powf(share)) as u64;
            let aim = grid.aim(Merit::Seconds, room, self.quality);
            let (best_point, best) = grid.best(&aim, |_| true).unwrap();
            let mut walk = self.walk();
            walk.everywhere(&aim);
            let (point, found) = walk.chosen(&aim).unwrap_or_else(|| panic!("nothing at {room}"));
            assert!(bytes(&found) <= room as f64);
            let ratio = found.footprint.seconds() / best.footprint.seconds();
            eprintln!("  {share}: {} runs, {ratio:.4}", walk.order.len());
            assert!(
                ratio <= SLACK,
                "{share}: {ratio}\n{:#?}\n{:#?}",
                grid.space.config(&best_point).training,
                walk.space.config(&point).training
            );
        }
        let aim = grid.aim(Merit::Seconds, u64::MAX, self.quality);
        let mut walk = self.walk();
        walk.everywhere(&aim);
        walk.along_the_front(self.quality, u64::MAX);
        let front = walk.front();
        eprintln!("  front: {} runs, {} points", walk.order.len(), front.len());
        for (point, made) in grid.front() {
            let class = grid.space.quality(&point);
            let covered = front.iter().any(|(own, other)| {
                walk.space.quality(own) <= class
                    && other.device_bytes as f64 <= made.device_bytes as f64 * SLACK
                    && other.footprint.seconds() <= made.footprint.seconds() * SLACK
            });
            assert!(covered, "{made:?} {class}\n{:#?}", grid.space.config(&point));
        }
    }
}

#[test]
fn what_is_found_is_as_good_as_brute_force() {
    Grid::new(6, NARROW, Quality::Lossless).check();
    let few = "training.gradient_checkpointing=full; training.mlp_chunk_tokens=256; training.attention=flash; training.micro_batches_per_pass=1; training.loss_chunk_tokens=256; memory.kept_layers={optimizer: 0, gradients: 0, activations: 0, parameters: 0}";
    Grid::new(5, few, Quality::Proven).check();
    assert_eq!(Tier::Device, Tier::Device);
}
