//! Other programs' configuration files as keys of a request: TrainingArguments, accelerate, DeepSpeed, axolotl, LLaMA-Factory, torchtune,
//! PEFT's adapter_config, BitsAndBytesConfig, and the command line of a training script.
//!
//! How such files are read and known by their keys is `plimsoll_plan`'s; here stands what a key says about memory in *that* program.

mod keys;

use std::path::Path;

use plimsoll_plan::config::{ConfigError, ForeignFile, ForeignKey, NAMED_FILES};
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

/// Whose file it is that has an optimizer which counts before that of others.
pub const DEEPSPEED: &str = "DeepSpeed's JSON";

/// What makes adapters of one model unlike each other, and what is taken instead.
const UNIFORM: [(&str, &str); 5] = [
    ("layers_to_transform", "adapters are counted in every layer"),
    ("layers_pattern", "adapters are counted in every layer"),
    ("exclude_modules", "adapters are counted in all of target_modules"),
    ("rank_pattern", "every adapter is counted with r"),
    ("target_parameters", "adapters of parameters are not counted"),
];

/// Values that say nothing.
const NOTHING: [&str; 5] = ["", "{}", "[]", "null", "None"];

/// A file that says what model it is, and nothing else.
const MODEL: &str = "a model's config.json";

impl Imported {
    /// Reads a file, which is known by its keys. A DeepSpeed file that it names is read too, from its folder on.
    ///
    /// # Errors
    /// The file cannot be read or is none of these.
    pub fn from_file(path: &Path) -> Result<Imported, ConfigError> {
        Imported::read(path, NAMED_FILES)
    }

    /// The same, with files that it names, and those that they name, so many times.
    fn read(path: &Path, further: u32) -> Result<Imported, ConfigError> {
        let file = ForeignFile::read(path)?;
        let has = |key: &str| file.keys.iter().any(|one| one.key == key);
        if has("model_type") && !has("base_model") {
            let keys = [("model".to_owned(), json!(path.display().to_string()))].into_iter().collect();
            return Ok(Imported { program: MODEL.to_owned(), keys, left: Vec::new() });
        }
        let of_bits = ["bnb_4bit_quant_type", "load_in_4bit", "load_in_8bit"].into_iter().any(has);
        let program = match file.program {
            "TrainingArguments" if of_bits && !has("per_device_train_batch_size") && !has("output_dir") => {
                "BitsAndBytesConfig"
            }
            known => known,
        };
        let mut draft = Draft::new(program, file.has_fsdp);
        let mut left = Vec::new();
        for key in &file.keys {
            let of_key = |name: &str| key.key.split('.').next() == Some(name);
            let note = UNIFORM.iter().find(|(name, _)| of_key(name)).map(|(_, note)| *note);
            match note.filter(|_| !NOTHING.contains(&key.value.as_str())) {
                Some(note) => left.push(format!("{}: {note}", key.shown())),
                None if take(&mut draft, key) => {}
                None => left.push(key.shown()),
            }
        }
        let mut keys = draft.finish();
        // transformers names DeepSpeed's file in its own, and a launcher accelerate's.
        let folder = path.parent().unwrap_or(Path::new(""));
        let named = file.keys.iter().filter_map(|one| Some((one, one.named_file(folder)?)));
        for (named, inner) in named.filter(|_| further > 0) {
            let inner = Imported::read(&inner, further - 1)?;
            left.retain(|line| *line != named.shown());
            left.extend(inner.left);
            for (key, value) in inner.keys {
                match key.as_str() {
                    // An optimizer in DeepSpeed's file is the one that is made.
                    "optimizer" if inner.program == DEEPSPEED => drop(keys.insert(key, value)),
                    _ => drop(keys.entry(key).or_insert(value)),
                }
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
        // The optimizer of DeepSpeed's file is the one that is made.
        let with_optimizer = r#"{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}"#;
        std::fs::write(folder.path().join("ds.json"), with_optimizer).unwrap();
        assert_eq!(Imported::from_file(&path).unwrap().keys["optimizer"], "fused_adam");
        // accelerate names it, too; one that names itself ends.
        let accelerate = folder.path().join("accelerate.yaml");
        let text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n";
        std::fs::write(&accelerate, text).unwrap();
        assert_eq!(Imported::from_file(&accelerate).unwrap().keys["zero_stage"], 2);
        let itself = folder.path().join("itself.json");
        std::fs::write(&itself, r#"{"optim": "sgd", "deepspeed": "itself.json"}"#).unwrap();
        assert_eq!(Imported::from_file(&itself).unwrap().keys["optimizer"], "sgd");
        std::fs::write(&path, r#"{"optim": "sgd", "deepspeed": "no.json"}"#).unwrap();
        assert!(Imported::from_file(&path).is_err());
    }

    #[test]
    fn a_script_is_read_with_the_file_of_its_launcher() {
        let folder = tempfile::tempdir().unwrap();
        let accelerate =
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_offload_params: true}\n";
        std::fs::write(folder.path().join("fsdp.yaml"), accelerate).unwrap();
        let path = folder.path().join("run.sh");
        let text = "accelerate launch --config_file fsdp.yaml train.py --model_max_length 512 --bf16\n";
        std::fs::write(&path, text).unwrap();
        let found = Imported::from_file(&path).unwrap();
        let keys = json!({"devices": 8, "fsdp": "full_shard", "offload": "all", "sequence_length": 512, "precision": "bf16-amp",
            "stack": "hf"});
        assert_eq!(Value::Object(found.keys), keys, "{:?}", found.left);
        std::fs::write(&path, "deepspeed --include localhost:0,2 train.py --bf16\n").unwrap();
        assert_eq!(Imported::from_file(&path).unwrap().keys["devices"], 2);
        let text = "llamafactory-cli train --finetuning_type lora --lora_rank 8 --quantization_bit 4\n";
        std::fs::write(&path, text).unwrap();
        let found = Imported::from_file(&path).unwrap();
        assert_eq!(found.program, "LLaMA-Factory");
        assert_eq!(found.keys["gradient_checkpointing"], true);
    }

    #[test]
    fn keys_of_the_loss_and_of_offload_are_read_and_other_kinds_of_runs_are_refused() {
        check(
            "axolotl.yaml",
            "base_model: org/m\nmicro_batch_size: 1\ncut_cross_entropy: true\ngradient_checkpointing: offload\nval_set_size: 0.1\n\
             eval_batch_size: 4\n",
            "axolotl",
            json!({"model": "org/m", "batch_size": 1, "loss": "cce", "gradient_checkpointing": true,
                "activation_offloading": true, "eval_batch_size": 4, "stack": "hf"}),
            0,
        );
        check(
            "ds.json",
            r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e6, "overlap_comm": true}}"#,
            "DeepSpeed's JSON",
            json!({"zero_stage": 2, "reduce_bucket_size": 5_000_000, "overlap_comm": true, "stack": "deepspeed"}),
            0,
        );
        check(
            "hybrid.yaml",
            "distributed_type: FSDP\nnum_processes: 16\nfsdp_config: {fsdp_version: 2}\nparallelism_config: \
             {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 8}\n",
            "accelerate",
            json!({"devices": 16, "fsdp_version": 2, "fsdp": "hybrid_shard", "shard_size": 8, "stack": "hf"}),
            0,
        );
        check(
            "off.json",
            r#"{"per_device_train_batch_size": 4, "fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": false}}"#,
            "TrainingArguments",
            json!({"batch_size": 4, "stack": "hf"}),
            2,
        );
        check(
            "on.json",
            r#"{"per_device_train_batch_size": 4, "fsdp": "auto_wrap offload"}"#,
            "TrainingArguments",
            json!({"batch_size": 4, "fsdp": "full_shard", "offload": "all", "stack": "hf"}),
            0,
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("factory.yaml");
        for other in ["finetuning_type: freeze\n", "finetuning_type: lora\nstage: dpo\n"] {
            std::fs::write(&path, other).unwrap();
            let error = Imported::from_file(&path).unwrap_err().to_string();
            assert!(error.contains("another kind of run"), "{error}");
        }
        std::fs::write(&path, "finetuning_type: full\nuse_badam: true\n").unwrap();
        assert_eq!(Imported::from_file(&path).unwrap().keys["optimizer"], "badam");
    }

    #[test]
    fn what_makes_adapters_unlike_each_other_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter_config.json");
        let text =
            r#"{"peft_type": "LORA", "r": 16, "rank_pattern": {"q_proj": 4}, "layers_to_transform": [0, 1]}"#;
        std::fs::write(&path, text).unwrap();
        let left = Imported::from_file(&path).unwrap().left;
        let ends = ["every adapter is counted with r", "adapters are counted in every layer"];
        assert!(left.len() == 2 && left.iter().zip(ends).all(|(line, end)| line.ends_with(end)), "{left:?}");
        std::fs::write(&path, text.replace("LORA", "ADALORA")).unwrap();
        let error = Imported::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("peft_type ADALORA is another kind of run"), "{error}");
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
            "bnb8.json",
            r#"{"load_in_8bit": true, "llm_int8_threshold": 6.0}"#,
            "BitsAndBytesConfig",
            json!({"quantization": "int8", "stack": "hf"}),
            1,
        );
        check(
            "axolotl_fsdp.yaml",
            "base_model: org/m\nmicro_batch_size: 1\nfsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n",
            "axolotl",
            json!({"model": "org/m", "batch_size": 1, "fsdp": "full_shard", "offload": "all", "stack": "hf"}),
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
