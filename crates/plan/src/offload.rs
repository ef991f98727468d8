//! What may leave the device, and in which order the planner lets it go.

use plimsoll_memory::Tier;
use plimsoll_step::Offload;

use crate::config::{Auto, OffloadConfig, OffloadTarget};

/// A kind of tensor that may live below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Optimizer,
    Gradients,
    Activations,
    Parameters,
}

impl Kind {
    /// The order in which they leave: first what is used once a step, last what every pass reads.
    pub const IN_ORDER: [Kind; 4] = [Kind::Optimizer, Kind::Gradients, Kind::Activations, Kind::Parameters];

    /// Its key in `memory.offload`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Optimizer => "optimizer",
            Kind::Gradients => "gradients",
            Kind::Activations => "activations",
            Kind::Parameters => "parameters",
        }
    }

    fn said(self, config: &OffloadConfig) -> Auto<OffloadTarget> {
        match self {
            Kind::Optimizer => config.optimizer(),
            Kind::Gradients => config.gradients(),
            Kind::Activations => config.activations(),
            Kind::Parameters => config.parameters(),
        }
    }

    pub fn tier_mut(self, offload: &mut Offload) -> &mut Tier {
        match self {
            Kind::Optimizer => &mut offload.optimizer,
            Kind::Gradients => &mut offload.gradients,
            Kind::Activations => &mut offload.activations,
            Kind::Parameters => &mut offload.parameters,
        }
    }
}

/// What the user said, and everything that was left open on the device.
pub(crate) fn as_said(config: &OffloadConfig) -> Offload {
    let mut offload = Offload::NONE;
    for kind in Kind::IN_ORDER {
        if let Auto::Set(target) = kind.said(config) {
            *kind.tier_mut(&mut offload) = target.into();
        }
    }
    offload
}

/// Further and further offload to disk of what the user left open, a kind more each time.
pub(crate) fn stages(config: &OffloadConfig) -> Vec<Offload> {
    let open = Kind::IN_ORDER.into_iter().filter(|kind| kind.said(config) == Auto::Auto);
    let stages = open.scan(as_said(config), |offload, kind| {
        *kind.tier_mut(offload) = Tier::Disk;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_open_leaves_in_order_and_what_was_said_stays() {
        let config =
            OffloadConfig { gradients: Some(Auto::Set(OffloadTarget::Host)), ..OffloadConfig::default() };
        let (host, disk, device) = (Tier::Host, Tier::Disk, Tier::Device);
        let offload = |optimizer, activations, parameters| Offload {
            optimizer,
            gradients: host,
            activations,
            parameters,
        };
        assert_eq!(as_said(&config), offload(device, device, device));
        assert_eq!(
            stages(&config),
            [offload(disk, device, device), offload(disk, disk, device), offload(disk, disk, disk)]
        );
        assert!(stages(&resolved(Offload::NONE)).is_empty());
    }
}
