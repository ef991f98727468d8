//! Other programs' configuration files as keys of a request: TrainingArguments, accelerate, DeepSpeed, axolotl, LLaMA-Factory, torchtune,
//! PEFT's adapter_config, BitsAndBytesConfig, and the command line of a training script.
//!
//! How such files are read and known by their keys is `plimsoll_plan`'s; here stands what a key says about memory in *that* program.

mod keys;

use std::path::Path;

use plimsoll_plan::config::{ConfigError, ForeignFile, ForeignKey};
use serde_json::{Map, Value, json};

use keys::{Draft, KEYS};

/// What a file says of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// Whose file it is.
    pub program: String,
    /// Keys of [`Request`](crate::Request) with their values.
    pub keys: Map<String, Value>,
    /// What says nothing about memory here: its place, key and value.
    pub left: Vec<String>,
}

/// A file that says what model it is, and nothing else.
const MODEL: &str = "a model's config.json";

impl Imported {
    /// Reads a file, which is known by its keys. A DeepSpeed file that it names is read too, from its folder on.
    ///
    /// # Errors
    /// The file cannot be read or is none of these.
    pub fn from_file(path: &Path) -> Result<Imported, ConfigError> {
        let file = ForeignFile::read(path)?;
        let has = |key: &str| file.keys.iter().any(|one| one.key == key);
        if has("model_type") && !has("base_model") {
            let keys = [("model".to_owned(), json!(path.display().to_string()))].into_iter().collect();
            return Ok(Imported { program: MODEL.to_owned(), keys, left: Vec::new() });
        }
        let program = match file.program {
            _ if has("peft_type") => "PEFT's adapter_config",
            "TrainingArguments" if has("bnb_4bit_quant_type") || has("load_in_4bit") => "BitsAndBytesConfig",
            known => known,
        };
        let mut draft = Draft::new(program);
        let mut left = Vec::new();
        for key in &file.keys {
            if !take(&mut draft, key) {
                left.push(key.shown());
            }
        }
        let mut keys = draft.finish();
        // transformers names DeepSpeed's file in its own.
        let named = file.keys.iter().find(|one| one.key == "deepspeed" && one.value.ends_with(".json"));
        if let (Some(named), Some(folder)) = (named, path.parent()) {
            let inner = Imported::from_file(&folder.join(&named.value))?;
            left.retain(|line| *line != named.shown());
            left.extend(inner.left);
            for (key, value) in inner.keys {
                keys.entry(key).or_insert(value);
            }
        }
        Ok(Imported { program: program.to_owned(), keys, left })
    }
}

/// Takes what a key says; `false` where that is nothing.
fn take(draft: &mut Draft, key: &ForeignKey) -> bool {
    let name = ["deepspeed.", "fsdp_config.fsdp_", "fsdp_config.", "parallelism_config.parallelism_config_"]
        .iter()
        .find_map(|prefix| key.key.strip_prefix(prefix))
        .unwrap_or(&key.key);
    let of_fsdp = name.len() < key.key.len() && key.key.starts_with("fsdp_config.");
    let name = if of_fsdp { format!("fsdp_{}", name.trim_start_matches("fsdp_")) } else { name.to_owned() };
    if key.value == "auto" || key.value == "null" {
        return true;
    }
    match KEYS.iter().find(|(theirs, _)| *theirs == name) {
        Some((_, takes)) => takes(draft, &key.value).is_some(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, text: &str, program: &str, keys: Value, left: usize) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let found = Imported::from_file(&path).unwrap();
        assert_eq!((found.program.as_str(), Value::Object(found.keys)), (program, keys), "{:?}", found.left);
        assert_eq!(found.left.len(), left, "{:?}", found.left);
    }

    #[test]
    fn a_config_json_is_a_model_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, r#"{"model_type": "llama", "hidden_size": 64}"#).unwrap();
        let found = Imported::from_file(&path).unwrap();
        assert_eq!(found.keys.keys().collect::<Vec<_>>(), ["model"]);
        assert_eq!(found.program, MODEL);
    }

    #[test]
    fn a_deepspeed_file_that_is_named_is_read_too() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ds.json"), r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
        let path = folder.path().join("args.json");
        std::fs::write(&path, r#"{"optim": "sgd", "deepspeed": "ds.json"}"#).unwrap();
        let found = Imported::from_file(&path).unwrap();
        assert_eq!(found.keys["zero_stage"], 2);
        assert!(found.left.is_empty(), "{:?}", found.left);
        std::fs::write(&path, r#"{"optim": "sgd", "deepspeed": "no.json"}"#).unwrap();
        assert!(Imported::from_file(&path).is_err());
    }

    #[test]
    fn files_of_each_program_are_read_in_its_words() {
        check(
            "args.json",
            r#"{"per_device_train_batch_size": 4, "optim": "paged_adamw_8bit", "bf16": true, "gradient_checkpointing": true,
                "gradient_checkpointing_kwargs": {"use_reentrant": true}, "max_grad_norm": 0.0, "learning_rate": 1e-4}"#,
            "TrainingArguments",
            json!({"batch_size": 4, "optimizer": "paged_adamw_8bit", "precision": "bf16-amp", "gradient_checkpointing": true,
                "use_reentrant": true, "clip": false, "stack": "hf"}),
            1,
        );
        check(
            "adapter_config.json",
            r#"{"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05, "use_dora": false,
                "base_model_name_or_path": "meta-llama/Llama-3.2-1B", "modules_to_save": null}"#,
            "PEFT's adapter_config",
            json!({"model": "meta-llama/Llama-3.2-1B", "stack": "hf",
                "lora": {"rank": 16, "target_modules": ["q_proj", "v_proj"], "dropout": 0.05}}),
            0,
        );
        check(
            "bnb.json",
            r#"{"load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": true,
                "bnb_4bit_compute_dtype": "bfloat16"}"#,
            "BitsAndBytesConfig",
            json!({"quantization": "fp4", "double_quantization": true, "compute_dtype": "bfloat16", "stack": "hf"}),
            0,
        );
        check(
            "ds.json",
            r#"{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}"#,
            "DeepSpeed's JSON",
            json!({"batch_size": 2, "precision": "bf16", "clip": true, "zero_stage": 3, "offload": "all",
                "stack": "deepspeed"}),
            0,
        );
        check(
            "accelerate.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  \
             fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_offload_params: true\n",
            "accelerate",
            json!({"precision": "bf16-amp", "devices": 8, "fsdp": "full_shard", "fsdp_version": 2, "offload": "all",
                "stack": "hf"}),
            1,
        );
        check(
            "axolotl.yaml",
            "base_model: org/m\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\nsequence_len: 1024\n\
             micro_batch_size: 2\noptimizer: adamw_bnb_8bit\nfp16: auto\nbf16: true\nflash_attention: true\n",
            "axolotl",
            json!({"model": "org/m", "quantization": "nf4", "lora": {"rank": 8, "target_modules": ["all-linear"]},
                "sequence_length": 1024, "batch_size": 2, "optimizer": "adamw_bnb_8bit", "precision": "bf16-amp",
                "dtype": "bf16", "attention": "flash_attention_2", "stack": "hf"}),
            0,
        );
        check(
            "llama_factory.yaml",
            "model_name_or_path: org/m\nfinetuning_type: lora\nlora_target: q_proj,v_proj\nlora_rank: 8\nquantization_bit: 4\n\
             cutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\nflash_attn: fa2\n",
            "LLaMA-Factory",
            json!({"model": "org/m", "lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}, "quantization": "nf4",
                "sequence_length": 2048, "batch_size": 1, "precision": "bf16-amp", "dtype": "bf16",
                "attention": "flash_attention_2", "gradient_checkpointing": true, "double_quantization": true,
                "stack": "hf"}),
            0,
        );
        check(
            "torchtune.yaml",
            "model:\n  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b\n  lora_attn_modules: [q_proj, output_proj]\n  \
             apply_lora_to_mlp: True\n  lora_rank: 8\noptimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit}\nbatch_size: 2\ndtype: bf16\n\
             enable_activation_checkpointing: True\ntokenizer: {max_seq_len: 4096}\ncompile: False\n",
            "torchtune",
            json!({"model": "llama-3.1-8b", "quantization": "nf4", "double_quantization": true,
                "lora": {"rank": 8, "target_modules": ["q_proj", "output_proj", "mlp"]},
                "optimizer": "bitsandbytes.optim.PagedAdamW8bit", "batch_size": 2, "precision": "bf16",
                "gradient_checkpointing": true, "sequence_length": 4096, "stack": "torchtune"}),
            0,
        );
    }
}
