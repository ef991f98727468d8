//! How ranks share the model, and what is on the host.

use super::contradiction;
use super::words::word;
use crate::request::{Request, RequestError};
use crate::run::{Offload, Sharding, Stack};

const OFFLOADS: [(&str, Offload); 6] = [
    ("none", Offload { optimizer: false, parameters: false }),
    ("optimizer", Offload { optimizer: true, parameters: false }),
    ("parameters", Offload { optimizer: false, parameters: true }),
    ("all", Offload { optimizer: true, parameters: true }),
    ("cpu", Offload { optimizer: true, parameters: true }),
    ("param", Offload { optimizer: false, parameters: true }),
];

/// What FSDP does with gathered weights between forward and backward.
#[derive(Clone, Copy)]
enum Strategy {
    Full,
    KeepGathered,
    None,
}

const STRATEGIES: [(&str, Strategy); 7] = [
    ("full_shard", Strategy::Full),
    ("shard_grad_op", Strategy::KeepGathered),
    ("no_shard", Strategy::None),
    // Within a machine it is the full form.
    ("hybrid_shard", Strategy::Full),
    ("hybrid_shard_zero2", Strategy::KeepGathered),
    ("true", Strategy::Full),
    ("fsdp2", Strategy::Full),
];

/// Reads `zero_stage`, `fsdp` and `offload`.
pub fn sharding(request: &Request, stack: Stack) -> Result<Sharding, RequestError> {
    let offload = match &request.offload {
        Some(name) => word("offload", name, &OFFLOADS)?,
        None => Offload::default(),
    };
    let named_fsdp = request.stack == "fsdp";
    let sharding = match (request.zero_stage, &request.fsdp) {
        (Some(_), Some(_)) => return Err(contradiction("zero_stage and fsdp exclude each other")),
        (Some(0), None) => Sharding::None,
        (Some(stage @ 1..=3), None) => Sharding::Zero { stage, offload },
        (Some(stage), None) => {
            let expected = "0, 1, 2, 3".to_owned();
            return Err(RequestError::Value { key: "zero_stage", value: stage.to_string(), expected });
        }
        (None, None) if !named_fsdp => Sharding::None,
        (None, strategy) => {
            let strategy = match strategy {
                Some(name) => word("fsdp", name, &STRATEGIES)?,
                None => Strategy::Full,
            };
            // torchtune shards with fully_shard from 0.2 on; accelerate's fsdp_version is 1 by default.
            let by_name = request.fsdp.as_deref() == Some("fsdp2") || stack == Stack::Torchtune;
            let second = match request.fsdp_version {
                None => by_name,
                Some(1) => false,
                Some(2) => true,
                Some(other) => {
                    let expected = "1, 2".to_owned();
                    return Err(RequestError::Value {
                        key: "fsdp_version",
                        value: other.to_string(),
                        expected,
                    });
                }
            };
            match (strategy, second) {
                (Strategy::None, _) => Sharding::FsdpWhole,
                (strategy, true) => {
                    Sharding::Fsdp2 { keep_gathered: matches!(strategy, Strategy::KeepGathered), offload }
                }
                (strategy, false) => {
                    Sharding::Fsdp1 { keep_gathered: matches!(strategy, Strategy::KeepGathered), offload }
                }
            }
        }
    };
    if offload != Offload::default() && matches!(sharding, Sharding::None | Sharding::FsdpWhole) {
        return Err(contradiction("offload is of zero_stage 1 to 3 or of fsdp; say which shards the model"));
    }
    if let Sharding::Zero { stage: 1 | 2, offload: Offload { parameters: true, .. } } = sharding {
        return Err(contradiction("offload: ZeRO takes parameters to the host at stage 3 alone"));
    }
    Ok(sharding)
}
