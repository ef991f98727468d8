//! What may leave the device, and in which order the planner lets it go.

use plimsoll_memory::Tier;
use plimsoll_step::{KeptLayers, Offload};

use crate::config::{Auto, KeptLayersConfig, MemoryConfig, OffloadConfig, OffloadTarget};

/// A kind of tensor that may live below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    Optimizer,
    Gradients,
    Activations,
    Parameters,
}

impl TensorKind {
    /// The order in which kinds are offloaded: first what is used once a step, last what every pass reads.
    pub const IN_ORDER: [TensorKind; 4] =
        [TensorKind::Optimizer, TensorKind::Gradients, TensorKind::Activations, TensorKind::Parameters];

    /// Its key in `memory.offload`.
    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Optimizer => "optimizer",
            TensorKind::Gradients => "gradients",
            TensorKind::Activations => "activations",
            TensorKind::Parameters => "parameters",
        }
    }

    /// What it holds.
    pub fn words(self) -> &'static str {
        match self {
            TensorKind::Optimizer => "optimizer states",
            TensorKind::Gradients => "gradients",
            TensorKind::Activations => "activations",
            TensorKind::Parameters => "weights",
        }
    }

    /// What the user says of its place.
    pub fn said(self, config: &OffloadConfig) -> Auto<OffloadTarget> {
        match self {
            TensorKind::Optimizer => config.optimizer(),
            TensorKind::Gradients => config.gradients(),
            TensorKind::Activations => config.activations(),
            TensorKind::Parameters => config.parameters(),
        }
    }

    fn said_kept(self, config: &KeptLayersConfig) -> Auto<u64> {
        match self {
            TensorKind::Optimizer => config.optimizer(),
            TensorKind::Gradients => config.gradients(),
            TensorKind::Activations => config.activations(),
            TensorKind::Parameters => config.parameters(),
        }
    }

    /// Says that it lives on a tier, but for so many layers.
    pub fn say(self, config: &mut MemoryConfig, target: OffloadTarget, kept: u64) {
        let MemoryConfig { offload, kept_layers, .. } = config;
        let (place, layers) = match self {
            TensorKind::Optimizer => (&mut offload.optimizer, &mut kept_layers.optimizer),
            TensorKind::Gradients => (&mut offload.gradients, &mut kept_layers.gradients),
            TensorKind::Activations => (&mut offload.activations, &mut kept_layers.activations),
            TensorKind::Parameters => (&mut offload.parameters, &mut kept_layers.parameters),
        };
        (*place, *layers) = (Some(Auto::Set(target)), Some(Auto::Set(kept)));
    }

    /// Whether all that concerns its place is left to the planner.
    pub fn is_open(self, config: &MemoryConfig) -> bool {
        self.said(&config.offload) == Auto::Auto && self.said_kept(&config.kept_layers) == Auto::Auto
    }

    pub fn tier(self, mut offload: Offload) -> Tier {
        *self.tier_mut(&mut offload)
    }

    pub fn kept(self, mut kept: KeptLayers) -> u32 {
        *self.kept_mut(&mut kept)
    }

    pub fn kept_mut(self, kept: &mut KeptLayers) -> &mut u32 {
        match self {
            TensorKind::Optimizer => &mut kept.optimizer,
            TensorKind::Gradients => &mut kept.gradients,
            TensorKind::Activations => &mut kept.activations,
            TensorKind::Parameters => &mut kept.parameters,
        }
    }

    pub fn tier_mut(self, offload: &mut Offload) -> &mut Tier {
        match self {
            TensorKind::Optimizer => &mut offload.optimizer,
            TensorKind::Gradients => &mut offload.gradients,
            TensorKind::Activations => &mut offload.activations,
            TensorKind::Parameters => &mut offload.parameters,
        }
    }
}

/// What the user said, and everything that was left open on the device and prefetched.
pub(crate) fn as_said(config: &MemoryConfig) -> Offload {
    let mut offload = Offload { prefetch: config.prefetch().set().unwrap_or(true), ..Offload::NONE };
    for kind in TensorKind::IN_ORDER {
        if let Auto::Set(target) = kind.said(&config.offload) {
            *kind.tier_mut(&mut offload) = target.into();
        }
    }
    offload
}

/// What the user said, and more and more of it where that is left open. Where prefetching is left open, too, the last of each tier comes
/// without it behind that, and at the end what the user said.
pub(crate) fn offloads(config: &MemoryConfig, tiers: &[Tier]) -> Vec<Offload> {
    let (said, further) = (as_said(config), stages(config, tiers));
    let open = config.prefetch().set().is_none();
    let waiting = |offload: &Offload| open.then_some(Offload { prefetch: false, ..*offload });
    let mut all = vec![said];
    for of_tier in further.chunks((further.len() / tiers.len().max(1)).max(1)) {
        all.extend_from_slice(of_tier);
        all.extend(of_tier.last().and_then(waiting));
    }
    all.extend(waiting(&said).filter(|_| !said.is_none()));
    all
}

/// The layers that the user leaves out of the offload.
pub(crate) fn kept_as_said(config: &KeptLayersConfig) -> KeptLayers {
    let mut kept = KeptLayers::NONE;
    for kind in TensorKind::IN_ORDER {
        if let Auto::Set(layers) = kind.said_kept(config) {
            *kind.kept_mut(&mut kept) = u32::try_from(layers).unwrap_or(u32::MAX);
        }
    }
    kept
}

/// Further and further offload of what the user left open, a kind more each time, first to the first of these tiers.
fn stages(config: &MemoryConfig, tiers: &[Tier]) -> Vec<Offload> {
    let open: Vec<TensorKind> =
        TensorKind::IN_ORDER.into_iter().filter(|kind| kind.said(&config.offload) == Auto::Auto).collect();
    let steps = tiers.iter().flat_map(|tier| open.iter().map(move |kind| (*kind, *tier)));
    let stages = steps.scan(as_said(config), |offload, (kind, tier)| {
        *kind.tier_mut(offload) = tier;
        Some(*offload)
    });
    stages.collect()
}

/// The configuration that says where everything lives.
pub(crate) fn resolved(offload: Offload) -> OffloadConfig {
    let target = |tier: Tier| Some(Auto::Set(OffloadTarget::from(tier)));
    OffloadConfig {
        optimizer: target(offload.optimizer),
        parameters: target(offload.parameters),
        activations: target(offload.activations),
        gradients: target(offload.gradients),
    }
}

/// The configuration that says which layers are left out of it.
pub(crate) fn kept_resolved(kept: KeptLayers) -> KeptLayersConfig {
    let layers = |layers: u32| Some(Auto::Set(u64::from(layers)));
    let KeptLayers { parameters, gradients, optimizer, activations } = kept;
    KeptLayersConfig {
        optimizer: layers(optimizer),
        parameters: layers(parameters),
        activations: layers(activations),
        gradients: layers(gradients),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_open_leaves_in_order_and_what_was_said_stays() {
        let of = |offload| MemoryConfig { offload, ..MemoryConfig::default() };
        let gradients = Some(Auto::Set(OffloadTarget::Host));
        let config = of(OffloadConfig { gradients, ..OffloadConfig::default() });
        let (host, disk, device) = (Tier::Host, Tier::Disk, Tier::Device);
        let offload = |optimizer, activations, parameters| Offload {
            optimizer,
            gradients: host,
            activations,
            parameters,
            prefetch: true,
        };
        assert_eq!(as_said(&config), offload(device, device, device));
        assert_eq!(
            stages(&config, &[disk]),
            [offload(disk, device, device), offload(disk, disk, device), offload(disk, disk, disk)]
        );
        assert_eq!(
            stages(&config, &[host, disk]),
            [
                offload(host, device, device),
                offload(host, host, device),
                offload(host, host, host),
                offload(disk, host, host),
                offload(disk, disk, host),
                offload(disk, disk, disk)
            ]
        );
        assert!(stages(&of(resolved(Offload::NONE)), &[host, disk]).is_empty());
    }

    #[test]
    fn what_is_not_prefetched_comes_last() {
        let mut config = MemoryConfig { offload: resolved(Offload::NONE), ..MemoryConfig::default() };
        assert_eq!(offloads(&config, &[Tier::Disk]), [Offload::NONE]);
        config.offload.optimizer = None;
        let away = Offload { optimizer: Tier::Disk, ..Offload::NONE };
        let waits = Offload { prefetch: false, ..away };
        assert_eq!(offloads(&config, &[Tier::Disk]), [Offload::NONE, away, waits]);
        assert_eq!(offloads(&config, &[]), [Offload::NONE]);
        let host = Offload { optimizer: Tier::Host, ..Offload::NONE };
        let both = [Offload::NONE, host, Offload { prefetch: false, ..host }, away, waits];
        assert_eq!(offloads(&config, &[Tier::Host, Tier::Disk]), both);
        // What is said is tried without, too.
        config.offload = OffloadConfig { gradients: None, ..resolved(away) };
        let all = Offload { gradients: Tier::Disk, ..away };
        let further = [away, all, Offload { prefetch: false, ..all }, waits];
        assert_eq!(offloads(&config, &[Tier::Disk]), further);
        config.offload = OffloadConfig { optimizer: None, ..resolved(Offload::NONE) };
        config.prefetch = Some(Auto::Set(true));
        assert_eq!(offloads(&config, &[Tier::Disk]), [Offload::NONE, away]);
        config.prefetch = Some(Auto::Set(false));
        assert_eq!(offloads(&config, &[Tier::Disk])[1..], [waits]);
    }
}
