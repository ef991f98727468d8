//! Seeds of random numbers from counters: what a number is for decides it, so that runs repeat.

use plimsoll_model::{BlockId, Role};

/// A number of its own for every parameter of a model.
pub(crate) fn parameter_number(block: BlockId, role: Role) -> u64 {
    block_number(block) << 8 | role_number(role)
}

/// The number of a role, the same for ever: runs must repeat.
fn role_number(role: Role) -> u64 {
    match role {
        Role::TokenEmbedding => 0,
        Role::PositionEmbedding => 1,
        Role::AttentionNorm => 2,
        Role::AttentionNormBias => 3,
        Role::QProj => 4,
        Role::KProj => 5,
        Role::VProj => 6,
        Role::OProj => 7,
        Role::QBias => 8,
        Role::KBias => 9,
        Role::VBias => 10,
        Role::OBias => 11,
        Role::QNorm => 12,
        Role::KNorm => 13,
        Role::PostAttentionNorm => 14,
        Role::MlpNorm => 15,
        Role::MlpNormBias => 16,
        Role::GateProj => 17,
        Role::UpProj => 18,
        Role::DownProj => 19,
        Role::GateBias => 20,
        Role::UpBias => 21,
        Role::DownBias => 22,
        Role::PostMlpNorm => 23,
        Role::FinalNorm => 24,
        Role::FinalNormBias => 25,
        Role::LmHead => 26,
        // Weights with adapters are below 32.
        Role::Lora(part, adapted) => (1 + part as u64) << 5 | role_number(adapted.role()),
    }
}

fn block_number(block: BlockId) -> u64 {
    match block {
        BlockId::Embedding => 0,
        BlockId::Head => 1,
        BlockId::Layer(i) => 2 + u64::from(i),
    }
}

/// SplitMix64's finaliser over a sum: well-mixed seeds from counters.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_add(b.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use plimsoll_model::{Adapted, LoraPart};

    use super::*;

    /// Runs repeat as long as these stay what they are.
    #[test]
    fn the_numbers_of_parameters_stay_what_they_are() {
        let of = parameter_number;
        assert_eq!(of(BlockId::Embedding, Role::TokenEmbedding), 0);
        assert_eq!(of(BlockId::Head, Role::LmHead), 256 + 26);
        assert_eq!(of(BlockId::Layer(0), Role::QProj), 2 * 256 + 4);
        assert_eq!(of(BlockId::Layer(7), Role::DownProj), 9 * 256 + 19);
        let lora = |part| of(BlockId::Layer(1), Role::Lora(part, Adapted::QProj));
        let parts = [LoraPart::A, LoraPart::B, LoraPart::Magnitude].map(lora);
        assert_eq!(parts, [32, 64, 96].map(|part| 3 * 256 + part + 4));
    }

    #[test]
    fn every_parameter_has_a_number_of_its_own() {
        let blocks = [BlockId::Embedding, BlockId::Head].into_iter().chain((0..40).map(BlockId::Layer));
        let adapted =
            [Adapted::QProj, Adapted::KProj, Adapted::VProj, Adapted::OProj, Adapted::TokenEmbedding];
        let mut numbers = HashSet::new();
        for block in blocks {
            for of in adapted {
                assert!(numbers.insert(parameter_number(block, of.role())), "{block:?} {of:?}");
                for part in [LoraPart::A, LoraPart::B, LoraPart::Magnitude] {
                    let new = numbers.insert(parameter_number(block, Role::Lora(part, of)));
                    assert!(new, "{block:?} {part:?} {of:?}");
                }
            }
        }
    }
}
