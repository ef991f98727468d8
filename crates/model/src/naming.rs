//! What blocks and weights are called in ledgers and messages, and the numbers that stand for them.

use std::fmt;

use crate::parameters::{BlockId, LoraPart, Role};

/// In words.
impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockId::Embedding => f.write_str("the embedding"),
            BlockId::Head => f.write_str("the head"),
            BlockId::Layer(layer) => write!(f, "layer {layer}"),
        }
    }
}

impl BlockId {
    /// The number of a layer; `None` for what is no layer.
    pub fn layer(self) -> Option<u32> {
        match self {
            BlockId::Layer(layer) => Some(layer),
            BlockId::Embedding | BlockId::Head => None,
        }
    }

    /// A number of its own for every parameter of a model.
    pub fn parameter_number(self, role: Role) -> u64 {
        let block = match self {
            BlockId::Embedding => 0,
            BlockId::Head => 1,
            BlockId::Layer(layer) => 2 + u64::from(layer),
        };
        block << 8 | role.number()
    }
}

impl Role {
    /// The short name of a weight: the same for a weight and its bias.
    pub fn name(self) -> &'static str {
        match self {
            Role::TokenEmbedding => "embed_tokens",
            Role::PositionEmbedding => "embed_positions",
            Role::AttentionNorm | Role::AttentionNormBias => "input_layernorm",
            Role::QProj | Role::QBias => "q_proj",
            Role::KProj | Role::KBias => "k_proj",
            Role::VProj | Role::VBias => "v_proj",
            Role::OProj | Role::OBias => "o_proj",
            Role::QNorm => "q_norm",
            Role::KNorm => "k_norm",
            Role::QDownProj => "q_a_proj",
            Role::QUpProj => "q_b_proj",
            Role::KvDownProj => "kv_a_proj_with_mqa",
            Role::KvUpProj => "kv_b_proj",
            Role::Sinks => "sinks",
            Role::PostAttentionNorm => "attention_out_layernorm",
            Role::MlpNorm | Role::MlpNormBias => "mlp_layernorm",
            Role::PostMlpNorm => "mlp_out_layernorm",
            Role::GateProj | Role::GateBias => "gate_proj",
            Role::UpProj | Role::UpBias => "up_proj",
            Role::DownProj | Role::DownBias => "down_proj",
            Role::Router | Role::RouterBias => "router",
            Role::RouterCorrection => "router_correction",
            Role::RouterLoad => "router_load",
            Role::RouterResidual => "router_residual",
            Role::ConstantGate => "constant_gate",
            Role::ConstantVectors => "constant_vectors",
            Role::SharedGateProj => "shared_gate_proj",
            Role::SharedUpProj => "shared_up_proj",
            Role::SharedDownProj => "shared_down_proj",
            Role::SharedRouter => "shared_router",
            Role::FinalNorm | Role::FinalNormBias => "norm",
            Role::LmHead => "lm_head",
            Role::Lora(LoraPart::A, _) => "lora_A",
            Role::Lora(LoraPart::B, _) => "lora_B",
            Role::Lora(LoraPart::Magnitude, _) => "lora_magnitude_vector",
            Role::Lora(LoraPart::Squares, _) => "dora.squares",
            Role::Lora(LoraPart::Offsets, _) => "dora.offsets",
        }
    }

    /// The same for ever: runs must repeat.
    fn number(self) -> u64 {
        match self {
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
            // Latent attention has these in the place of others.
            Role::KvDownProj => Role::KProj.number(),
            Role::KvUpProj => Role::VProj.number(),
            Role::QDownProj => Role::QBias.number(),
            Role::QUpProj => Role::KBias.number(),
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
            Role::Router => 27,
            Role::SharedGateProj => 28,
            Role::SharedUpProj => 29,
            Role::SharedDownProj => 30,
            Role::SharedRouter => 31,
            // Behind all parts of adapters.
            Role::RouterCorrection => 5 << 5,
            Role::RouterLoad => 6 << 5,
            Role::RouterResidual => 7 << 5 | 16,
            Role::ConstantGate => 7 << 5 | 17,
            Role::ConstantVectors => 7 << 5 | 18,
            Role::Sinks => 5 << 5 | 16,
            Role::RouterBias => 6 << 5 | 16,
            // Weights with adapters are below 32.
            Role::Lora(part, adapted) => (1 + part as u64) << 5 | adapted.role().number(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::Adapted;

    #[test]
    fn the_ledger_calls_weights_what_files_call_them() {
        let names = [
            (Role::TokenEmbedding, "embed_tokens"),
            (Role::QProj, "q_proj"),
            (Role::QBias, "q_proj"),
            (Role::MlpNorm, "mlp_layernorm"),
            (Role::FinalNorm, "norm"),
            (Role::LmHead, "lm_head"),
            (Role::Lora(LoraPart::B, Adapted::QProj), "lora_B"),
        ];
        for (role, name) in names {
            assert_eq!(role.name(), name);
        }
    }

    /// Runs repeat as long as these stay what they are.
    #[test]
    fn the_numbers_of_parameters_stay_what_they_are() {
        let of = BlockId::parameter_number;
        assert_eq!(of(BlockId::Embedding, Role::TokenEmbedding), 0);
        assert_eq!(of(BlockId::Head, Role::LmHead), 256 + 26);
        assert_eq!(of(BlockId::Layer(0), Role::QProj), 2 * 256 + 4);
        assert_eq!(of(BlockId::Layer(7), Role::DownProj), 9 * 256 + 19);
        let lora = |part| of(BlockId::Layer(1), Role::Lora(part, Adapted::QProj));
        let parts = [LoraPart::A, LoraPart::B, LoraPart::Magnitude].map(lora);
        assert_eq!(parts, [32, 64, 96].map(|part| 3 * 256 + part + 4));
    }

    /// Roles that share numbers are never in one model.
    #[test]
    fn every_parameter_of_latent_attention_has_a_number_of_its_own() {
        let mut numbers = HashSet::new();
        for p in crate::catalogue::find("deepseek-v3").unwrap().parameters() {
            assert!(numbers.insert(p.block.parameter_number(p.role)), "{}", p.name);
            if let Some(adapted) = Adapted::of(p.role) {
                for part in [LoraPart::A, LoraPart::B, LoraPart::Magnitude] {
                    assert!(
                        numbers.insert(p.block.parameter_number(Role::Lora(part, adapted))),
                        "{}",
                        p.name
                    );
                }
            }
        }
    }

    #[test]
    fn every_parameter_has_a_number_of_its_own() {
        let blocks = [BlockId::Embedding, BlockId::Head].into_iter().chain((0..40).map(BlockId::Layer));
        let adapted =
            [Adapted::QProj, Adapted::KProj, Adapted::VProj, Adapted::OProj, Adapted::TokenEmbedding];
        let mut numbers = HashSet::new();
        for block in blocks {
            for of in adapted {
                assert!(numbers.insert(block.parameter_number(of.role())), "{block:?} {of:?}");
                for part in [LoraPart::A, LoraPart::B, LoraPart::Magnitude] {
                    let new = numbers.insert(block.parameter_number(Role::Lora(part, of)));
                    assert!(new, "{block:?} {part:?} {of:?}");
                }
            }
        }
    }
}
