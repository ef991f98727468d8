//! Which layers have an adapter, and in which type.

use plimsoll_model::ModelSpec;

use super::versions::Version;
use super::words::{TYPES, word};
use crate::request::{Lora, RequestError};
use crate::run::{Adapter, Stack, TorchType};

/// From this version on PEFT makes adapters of 16-bit models f32 (`autocast_adapter_dtype`, release notes of 0.12.0).
const PEFT_CASTS: Version = (0, 12);

/// Up to this version they were f32, as `nn.Linear` makes them; from it on of the base's type (`update_layer`, 0.6.0).
const PEFT_FOLLOWS: Version = (0, 6);

/// No matrix has more rows.
const MOST_RANK: u64 = 1 << 20;

/// What decides about an adapter beside the request.
pub struct Context<'a> {
    pub stack: Stack,
    pub model: &'a ModelSpec,
    pub peft: Version,
    pub weights: TorchType,
    pub quantised: bool,
}

impl Context<'_> {
    /// The adapter of a request.
    pub fn adapter(&self, lora: &Lora) -> Result<Adapter, RequestError> {
        if !(1..=MOST_RANK).contains(&lora.rank) {
            let expected = format!("1 to {MOST_RANK}");
            return Err(RequestError::Value { key: "lora.rank", value: lora.rank.to_string(), expected });
        }
        if !(0.0..=1.0).contains(&lora.dropout) {
            let expected = "0 to 1".to_owned();
            return Err(RequestError::Value {
                key: "lora.dropout",
                value: lora.dropout.to_string(),
                expected,
            });
        }
        let mut targets: Vec<String> = Vec::new();
        for name in self.asked(lora) {
            for target in self.named(&name)? {
                if !targets.iter().any(|known| known == target) {
                    targets.push(target.to_owned());
                }
            }
        }
        Ok(Adapter {
            rank: lora.rank,
            targets,
            dropout: lora.dropout > 0.0,
            dtype: match &lora.dtype {
                Some(dtype) => word("lora.dtype", dtype, &TYPES)?,
                None => self.dtype(),
            },
            dora: lora.use_dora,
            trained_whole: lora.modules_to_save.clone(),
        })
    }

    /// The names that were written, or the stack's own.
    fn asked(&self, lora: &Lora) -> Vec<String> {
        if !lora.target_modules.is_empty() {
            return lora.target_modules.clone();
        }
        match self.stack {
            // Unsloth's notebooks name all layers, torchtune's recipes all but k; PEFT has a table of families, litgpt adapts q and v.
            Stack::Unsloth => vec!["all-linear".to_owned()],
            Stack::Torchtune => ["q_proj", "v_proj", "output_proj", "mlp"].map(str::to_owned).to_vec(),
            _ => default_targets(self.architecture()).iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    /// PEFT's adapters over a quantised base were f32 in every version: the base has no floating-point type to take over.
    fn dtype(&self) -> TorchType {
        match self.stack {
            Stack::Torchtune | Stack::Litgpt => self.weights,
            Stack::Unsloth => TorchType::F32,
            Stack::Plain | Stack::Transformers if self.quantised => TorchType::F32,
            Stack::Plain | Stack::Transformers if (PEFT_FOLLOWS..PEFT_CASTS).contains(&self.peft) => {
                self.weights
            }
            Stack::Plain | Stack::Transformers => TorchType::F32,
        }
    }

    /// The family's linear layers; litgpt has the same ones for all models.
    fn architecture(&self) -> &str {
        match (self.stack, self.model.architecture.as_str()) {
            (Stack::Litgpt, "phi3") => "llama",
            (_, architecture) => architecture,
        }
    }

    /// The linear layers of the family that a name means.
    fn named(&self, name: &str) -> Result<Vec<&'static str>, RequestError> {
        let linears = linears(self.architecture());
        let last = name.rsplit('.').next().unwrap_or(name);
        if ["all-linear", "all"].contains(&last) {
            return Ok(linears.to_vec());
        }
        let fused = linears.contains(&"qkv_proj");
        let meant: &[&str] = match last {
            "q" | "lora_query" | "q_proj" if !fused => &["q_proj"],
            "k" | "lora_key" | "k_proj" if !fused => &["k_proj"],
            "v" | "lora_value" | "v_proj" if !fused => &["v_proj"],
            "q" | "k" | "v" | "q_proj" | "k_proj" | "v_proj" | "qkv" => &["qkv_proj"],
            "o" | "output_proj" | "lora_projection" | "wo" => &["o_proj"],
            // The first Qwen's names, whose gate is w2.
            "c_attn" if !linears.contains(&"c_attn") => &["q_proj", "k_proj", "v_proj"],
            "c_proj" if !linears.contains(&"c_proj") => &["o_proj", "down_proj"],
            "w1" if is_first_qwen(self.model) => &["up_proj"],
            "w2" if is_first_qwen(self.model) => &["gate_proj"],
            // Meta's and torchtune's.
            "w1" => &["gate_proj"],
            "w2" => &["down_proj"],
            "w3" => &["up_proj"],
            "gate" | "gate_proj" | "up" | "up_proj" if fused => &["gate_up_proj"],
            "lora_head" | "head" | "lm_head" | "output" => return Ok(vec!["lm_head"]),
            "gate" => &["gate_proj"],
            "up" => &["up_proj"],
            "down" => &["down_proj"],
            "lora_mlp" | "mlp" if fused => &["gate_up_proj", "down_proj"],
            "lora_mlp" | "mlp" => &["gate_proj", "up_proj", "down_proj"],
            other => &[other],
        };
        let known = |name: &&str| linears.iter().copied().find(|linear| linear == name);
        let found: Vec<&'static str> = meant.iter().filter_map(known).collect();
        if found.len() == meant.len() {
            return Ok(found);
        }
        Err(RequestError::Value {
            key: "lora.target_modules",
            value: name.to_owned(),
            expected: format!("{} or all-linear", linears.join(", ")),
        })
    }
}

/// The first Qwen, whose code comes with its weights.
pub fn is_first_qwen(model: &ModelSpec) -> bool {
    model.name.starts_with("qwen-")
}

/// The linear layers of a block.
fn linears(architecture: &str) -> &'static [&'static str] {
    match architecture {
        "phi3" => &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "gpt2" => &["c_attn", "c_proj", "c_fc"],
        _ => &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }
}

/// PEFT's `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
fn default_targets(architecture: &str) -> &'static [&'static str] {
    match architecture {
        "phi3" => &["qkv_proj"],
        "gpt2" => &["c_attn"],
        _ => &["q_proj", "v_proj"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(model: &str, written: &[&str], targets: &[&str]) {
        let model = plimsoll_model::catalogue::find(model).unwrap();
        let context = Context {
            stack: Stack::Plain,
            model: &model,
            peft: (0, 20),
            weights: TorchType::Bf16,
            quantised: false,
        };
        let target_modules = written.iter().map(|name| (*name).to_owned()).collect();
        let lora = Lora { rank: 8, target_modules, ..Lora::default() };
        assert_eq!(context.adapter(&lora).unwrap().targets, targets, "{written:?}");
    }

    #[test]
    fn names_of_other_programs_mean_layers_of_the_family() {
        check("llama-3.2-1b", &[], &["q_proj", "v_proj"]);
        check("llama-3.2-1b", &["q", "k", "v", "o"], &["q_proj", "k_proj", "v_proj", "o_proj"]);
        check("llama-3.2-1b", &["q_proj", "output_proj", "w2"], &["q_proj", "o_proj", "down_proj"]);
        check("llama-3.2-1b", &["model.layers.0.self_attn.q_proj"], &["q_proj"]);
        check("phi-3-mini", &[], &["qkv_proj"]);
        check("phi-3-mini", &["q_proj", "k_proj", "gate_proj"], &["qkv_proj", "gate_up_proj"]);
        check("gpt2", &["all-linear"], &["c_attn", "c_proj", "c_fc"]);
        let all = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj"];
        check("qwen-7b", &["c_attn", "c_proj", "w1", "w2"], &all);
    }

    #[test]
    fn types_follow_the_library() {
        let model = plimsoll_model::catalogue::find("llama-3.2-1b").unwrap();
        for (stack, peft, quantised, dtype) in [
            (Stack::Transformers, (0, 20), false, TorchType::F32),
            (Stack::Transformers, (0, 10), false, TorchType::Bf16),
            (Stack::Transformers, (0, 5), false, TorchType::F32),
            (Stack::Transformers, (0, 10), true, TorchType::F32),
            (Stack::Torchtune, (0, 20), false, TorchType::Bf16),
            (Stack::Litgpt, (0, 20), true, TorchType::Bf16),
        ] {
            let context = Context { stack, model: &model, peft, weights: TorchType::Bf16, quantised };
            let lora = Lora { rank: 8, ..Lora::default() };
            assert_eq!(context.adapter(&lora).unwrap().dtype, dtype, "{stack:?} {peft:?} {quantised}");
        }
    }

    #[test]
    fn layers_that_are_not_there_are_refused() {
        let model = plimsoll_model::catalogue::find("gpt2").unwrap();
        let (weights, quantised) = (TorchType::F32, false);
        let context = Context { stack: Stack::Plain, model: &model, peft: (0, 20), weights, quantised };
        let lora = Lora { rank: 8, target_modules: vec!["q_proj".to_owned()], ..Lora::default() };
        let error = context.adapter(&lora).unwrap_err().to_string();
        assert_eq!(
            error,
            "lora.target_modules: q_proj is not known; it can be c_attn, c_proj, c_fc or all-linear"
        );
        assert!(context.adapter(&Lora::default()).is_err());
    }
}
