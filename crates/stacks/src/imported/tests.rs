//! Files of other programs, and what is read of them.

use super::*;

/// A file with those that it names.
fn from_file(path: &Path) -> Result<Imported, String> {
    Imported::from_files(&[path.to_owned()], &Map::new()).map_err(|error| error.to_string())
}

#[track_caller]
fn check(name: &str, text: &str, program: &str, keys: Value, left: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let found = from_file(&path).unwrap();
    assert_eq!(
        (found.programs, Value::Object(found.keys)),
        (vec![program.to_owned()], keys),
        "{:?}",
        found.left
    );
    assert_eq!(found.left.len(), left, "{:?}", found.left);
}

#[test]
fn a_config_json_is_a_model_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, r#"{"model_type": "llama", "hidden_size": 64}"#).unwrap();
    let found = from_file(&path).unwrap();
    assert_eq!(found.keys.keys().collect::<Vec<_>>(), ["model"]);
    assert_eq!(found.programs, [MODEL]);
}

#[test]
fn a_deepspeed_file_that_is_named_is_read_too() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ds.json"), r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
    let path = folder.path().join("args.json");
    std::fs::write(&path, r#"{"optim": "sgd", "deepspeed": "ds.json"}"#).unwrap();
    let found = from_file(&path).unwrap();
    assert_eq!(found.keys["zero_stage"], 2);
    assert!(found.left.is_empty(), "{:?}", found.left);
    // The optimizer of DeepSpeed's file is the one that is made.
    let with_optimizer = r#"{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}"#;
    std::fs::write(folder.path().join("ds.json"), with_optimizer).unwrap();
    assert_eq!(from_file(&path).unwrap().keys["optimizer"], "fused_adam");
    // accelerate names it, too; one that names itself ends.
    let accelerate = folder.path().join("accelerate.yaml");
    let text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n";
    std::fs::write(&accelerate, text).unwrap();
    assert_eq!(from_file(&accelerate).unwrap().keys["zero_stage"], 2);
    let itself = folder.path().join("itself.json");
    std::fs::write(&itself, r#"{"optim": "sgd", "deepspeed": "itself.json"}"#).unwrap();
    assert_eq!(from_file(&itself).unwrap().keys["optimizer"], "sgd");
    std::fs::write(&path, r#"{"optim": "sgd", "deepspeed": "no.json"}"#).unwrap();
    assert!(from_file(&path).is_err());
}

#[test]
fn a_script_is_read_with_the_file_of_its_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let accelerate = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_offload_params: true}\n";
    std::fs::write(folder.path().join("fsdp.yaml"), accelerate).unwrap();
    let path = folder.path().join("run.sh");
    let text = "accelerate launch --config_file fsdp.yaml train.py --model_max_length 512 --bf16\n";
    std::fs::write(&path, text).unwrap();
    let found = from_file(&path).unwrap();
    let keys = json!({"devices": 8, "fsdp": "full_shard", "offload": "all", "sequence_length": 512, "precision": "bf16-amp",
        "stack": "hf"});
    assert_eq!(Value::Object(found.keys), keys, "{:?}", found.left);
    std::fs::write(&path, "deepspeed --include localhost:0,2 train.py --bf16\n").unwrap();
    assert_eq!(from_file(&path).unwrap().keys["devices"], 2);
    let text = "llamafactory-cli train --finetuning_type lora --lora_rank 8 --quantization_bit 4\n";
    std::fs::write(&path, text).unwrap();
    let found = from_file(&path).unwrap();
    assert_eq!(found.programs, ["LLaMA-Factory"]);
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
        let error = from_file(&path).unwrap_err();
        assert!(error.contains("another kind of run"), "{error}");
    }
    std::fs::write(&path, "finetuning_type: full\nuse_badam: true\n").unwrap();
    assert_eq!(from_file(&path).unwrap().keys["optimizer"], "badam");
}

#[test]
fn what_makes_adapters_unlike_each_other_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_config.json");
    let text =
        r#"{"peft_type": "LORA", "r": 16, "rank_pattern": {"q_proj": 4}, "layers_to_transform": [0, 1]}"#;
    std::fs::write(&path, text).unwrap();
    let left = from_file(&path).unwrap().left;
    let ends = ["every adapter is counted with r", "adapters are counted in every layer"];
    assert!(left.len() == 2 && left.iter().zip(ends).all(|(line, end)| line.ends_with(end)), "{left:?}");
    std::fs::write(&path, text.replace("LORA", "ADALORA")).unwrap();
    let error = from_file(&path).unwrap_err();
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

fn read(files: &[(&str, &str)]) -> Result<Imported, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    from_file(&folder.path().join(files[0].0))
}

/// What a key is in a file that has it first.
#[track_caller]
fn key(files: &[(&str, &str)], key: &str) -> Value {
    let found = read(files).unwrap_or_else(|error| panic!("{files:?}: {error}"));
    found.keys.get(key).cloned().unwrap_or_default()
}

#[track_caller]
fn refused(files: &[(&str, &str)], words: &[&str]) {
    let error = read(files).expect_err("contradicts itself");
    assert!(words.iter().all(|word| error.contains(word)), "{files:?}: {error}");
}

/// LLaMA-Factory's own: LoRA of rank 8 in all linear layers. axolotl has no rank.
#[test]
fn adapters_without_a_rank_have_that_of_the_program() {
    let usual = json!({"rank": 8, "target_modules": ["all-linear"]});
    for (text, lora) in [
        ("model_name_or_path: m\ncutoff_len: 512\n", usual.clone()),
        ("finetuning_type: lora\n", usual),
        ("finetuning_type: lora\nlora_target: q_proj\n", json!({"rank": 8, "target_modules": ["q_proj"]})),
        ("finetuning_type: full\nlora_rank: 4\n", Value::Null),
    ] {
        assert_eq!(key(&[("a.yaml", text)], "lora"), lora, "{text}");
    }
    for adapter in ["lora", "qlora"] {
        let text = format!("base_model: m\nadapter: {adapter}\n");
        refused(&[("a.yaml", &text)], &["'lora_r' is not set", "a.yaml", "axolotl"]);
    }
    assert_eq!(key(&[("a.yaml", "base_model: m\nadapter:\n")], "lora"), Value::Null);
}

#[test]
fn switches_of_16_bits_say_the_precision_when_they_are_off_too() {
    for (text, precision) in [
        (r#"{"output_dir": "o", "bf16": false, "fp16": false}"#, json!("f32")),
        (r#"{"output_dir": "o", "fp16": false}"#, json!("f32")),
        (r#"{"output_dir": "o", "fp16": true, "bf16": false}"#, json!("fp16-amp")),
        (r#"{"output_dir": "o"}"#, Value::Null),
        (r#"{"base_model": "m", "bf16": "auto", "fp16": false}"#, Value::Null),
        (r#"{"base_model": "m", "bf16": false, "fp16": null}"#, json!("f32")),
        (r#"{"base_model": "m", "bf16": "full"}"#, json!("bf16")),
        (
            r#"{"zero_optimization": {"stage": 1}, "bf16": {"enabled": false}, "fp16": {"enabled": false}}"#,
            json!("f32"),
        ),
        (r#"{"bf16": {"enabled": false}, "fp16": {"enabled": false}}"#, json!("f32")),
        (r#"{"bf16": {"enabled": true}}"#, json!("bf16")),
        (r#"{"bf16": {"enabled": "auto"}, "fp16": {"enabled": false}}"#, Value::Null),
        (r#"{"mixed_precision": "bf16", "distributed_type": "NO", "fp16": false}"#, json!("bf16-amp")),
        // LLaMA-Factory's, before and behind the other.
        (r#"{"cutoff_len": 8, "pure_bf16": true, "bf16": true}"#, json!("bf16")),
        (r#"{"cutoff_len": 8, "bf16": true, "pure_bf16": true}"#, json!("bf16")),
        (r#"{"cutoff_len": 8, "bf16": true, "pure_bf16": false}"#, json!("bf16-amp")),
    ] {
        assert_eq!(key(&[("a.json", text)], "precision"), precision, "{text}");
    }
}

#[test]
fn neither_switch_of_checkpointing_turns_the_other_one_off() {
    for (text, on) in [
        (
            r#"{"gradient_checkpointing": true, "fsdp_config": {"activation_checkpointing": false}}"#,
            json!(true),
        ),
        (
            r#"{"gradient_checkpointing": false, "fsdp_config": {"activation_checkpointing": true}}"#,
            json!(true),
        ),
        (
            r#"{"fsdp_config": {"activation_checkpointing": true}, "gradient_checkpointing": false}"#,
            json!(true),
        ),
        (
            r#"{"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": false}}"#,
            Value::Null,
        ),
        (
            r#"{"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": true}}"#,
            json!(true),
        ),
    ] {
        assert_eq!(key(&[("a.json", text)], "gradient_checkpointing"), on, "{text}");
    }
}

/// DeepSpeed's `train_batch_size` is that of all devices and micro-batches.
#[test]
fn a_batch_of_all_devices_is_shared_out() {
    let with = |arguments: &str, deepspeed: &str| {
        let script = format!("deepspeed {arguments} --deepspeed ds.json\n");
        let stage = r#""zero_optimization": {"stage": 2}"#;
        let deepspeed = format!("{{{stage}, {deepspeed}}}");
        read(&[("run.sh", &script), ("ds.json", &deepspeed)])
    };
    let shared = |arguments: &str, deepspeed: &str| {
        let keys = with(arguments, deepspeed).unwrap().keys;
        ["batch_size", "gradient_accumulation_steps"].map(|key| keys.get(key).and_then(Value::as_u64))
    };
    let eight = "--num_gpus 8 train.py";
    let all = r#""train_batch_size": 64"#;
    assert_eq!(shared(eight, all), [Some(8), None]);
    let steps = format!(r#"{all}, "gradient_accumulation_steps": 4"#);
    assert_eq!(shared(eight, &steps), [Some(2), Some(4)]);
    let automatic = format!(r#"{steps}, "train_micro_batch_size_per_gpu": "auto""#);
    assert_eq!(shared(eight, &automatic), [Some(2), Some(4)]);
    let micro = format!(r#"{all}, "train_micro_batch_size_per_gpu": 4"#);
    assert_eq!(shared(eight, &micro), [Some(4), Some(2)]);
    let whole = format!(r#"{steps}, "train_micro_batch_size_per_gpu": 2"#);
    assert_eq!(shared(eight, &whole), [Some(2), Some(4)]);
    // As many devices as it takes; and two machines of eight.
    assert_eq!(shared("train.py", &whole), [Some(2), Some(4)]);
    assert_eq!(shared("--num_gpus 8 --num_nodes 2 train.py", &whole), [Some(2), Some(4)]);
    for (arguments, deepspeed) in [
        ("--num_gpus 4 train.py", &whole),
        ("--num_gpus 3 train.py", &steps),
        ("--num_gpus 3 train.py", &micro),
    ] {
        let error = with(arguments, deepspeed).unwrap_err();
        let words = ["ds.json:1:", "train_batch_size (64): this is no product of", "devices"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let unsaid = with("train.py", all).unwrap();
    assert!(
        unsaid.left.iter().any(|line| line.contains("of how many devices is not said")),
        "{:?}",
        unsaid.left
    );
    // Within the arguments of the trainer; and in another script, where it is a device's own.
    let inline = r#"{"output_dir": "o", "num_processes": 8, "deepspeed": {"train_batch_size": 32}}"#;
    assert_eq!(key(&[("a.json", inline)], "batch_size"), 4);
    let script = "accelerate launch --num_processes 8 train.py --train_batch_size 4 --bf16\n";
    assert_eq!(key(&[("run.sh", script)], "batch_size"), Value::Null);
}

#[test]
fn values_that_are_no_numbers_are_refused_with_their_place() {
    for (name, value) in [
        ("per_device_train_batch_size", "-3"),
        ("per_device_train_batch_size", "1e400"),
        ("per_device_train_batch_size", "\"abc\""),
        ("per_device_train_batch_size", "2.5"),
        ("gradient_accumulation_steps", "-1"),
        ("max_grad_norm", "1e400"),
        ("lora_r", "\"many\""),
        ("lora_dropout", "\"some\""),
        ("quantization_bit", "\"few\""),
    ] {
        let text = format!("{{\"output_dir\": \"o\", \"{name}\": {value}}}");
        refused(&[("a.json", &text)], &["a.json:1:", name, value.trim_matches('"'), "number"]);
    }
    for value in ["\"auto\"", "null", "\"\"", "\"None\"", "\"$BATCH\""] {
        let text = format!("{{\"output_dir\": \"o\", \"per_device_train_batch_size\": {value}}}");
        assert_eq!(key(&[("a.json", &text)], "batch_size"), Value::Null, "{value}");
    }
    let text = r#"{"output_dir": "o", "per_device_train_batch_size": 2e1}"#;
    assert_eq!(key(&[("a.json", text)], "batch_size"), 20);
    let script = "torchrun --nproc_per_node gpu train.py --bf16\n";
    assert_eq!(key(&[("run.sh", script)], "devices"), Value::Null);
}

#[test]
fn switches_that_exclude_each_other_are_refused() {
    for (text, words) in [
        (r#"{"output_dir": "o", "bf16": true, "fp16": true}"#, ["bf16 (true)", "fp16 (true)"]),
        (r#"{"bf16": {"enabled": true}, "fp16": {"enabled": true}}"#, ["bf16.enabled", "fp16.enabled"]),
        (r#"{"load_in_4bit": true, "load_in_8bit": true}"#, ["load_in_4bit (true)", "load_in_8bit (true)"]),
    ] {
        refused(&[("a.json", text)], &words);
        refused(&[("a.json", text)], &["a.json:1:", "exclude each other"]);
    }
}

#[test]
fn a_file_and_the_one_that_names_it_agree() {
    let with = |arguments: &str, deepspeed: &str| {
        let arguments = format!(r#"{{"deepspeed": "ds.json", {arguments}}}"#);
        [
            ("a.json", arguments),
            ("ds.json", format!(r#"{{"zero_optimization": {{"stage": 2}}, {deepspeed}}}"#)),
        ]
    };
    for (arguments, deepspeed, words) in [
        (
            r#""per_device_train_batch_size": 2"#,
            r#""train_micro_batch_size_per_gpu": 4"#,
            ["train_micro_batch_size_per_gpu 4", "per_device_train_batch_size 2", "batch_size"],
        ),
        (
            r#""max_grad_norm": 0.0"#,
            r#""gradient_clipping": 1.0"#,
            ["gradient_clipping 1.0", "max_grad_norm 0.0", "clip"],
        ),
        (r#""bf16": true"#, r#""fp16": {"enabled": true}"#, ["fp16.enabled true", "bf16 true", "precision"]),
        (
            r#""bf16": true"#,
            r#""bf16": {"enabled": false}"#,
            ["bf16.enabled false", "bf16 true", "precision"],
        ),
        (
            r#""bf16": false, "fp16": false"#,
            r#""bf16": {"enabled": true}"#,
            ["bf16.enabled true", "bf16 false", "precision"],
        ),
    ] {
        let files = with(arguments, deepspeed);
        let files = files.each_ref().map(|(name, text)| (*name, text.as_str()));
        let [theirs, own, key] = words;
        let both = format!("both are {key}; make the two agree, set one to auto, or let a flag decide");
        refused(&files, &["ds.json:1:", theirs, " does not go with ", "a.json:1:", own, &both]);
    }
    for (arguments, deepspeed, name, value) in [
        (
            r#""per_device_train_batch_size": 2"#,
            r#""train_micro_batch_size_per_gpu": "auto""#,
            "batch_size",
            json!(2),
        ),
        (r#""bf16": true"#, r#""bf16": {"enabled": true}"#, "precision", json!("bf16-amp")),
        (r#""bf16": true"#, r#""bf16": {"enabled": "auto"}"#, "precision", json!("bf16-amp")),
        (r#""bf16": true"#, r#""fp16": {"enabled": false}"#, "precision", json!("bf16-amp")),
        (r#""fp16": false"#, r#""bf16": {"enabled": true}"#, "precision", json!("bf16")),
        (r#""bf16": false"#, r#""fp16": {"enabled": false}"#, "precision", json!("f32")),
    ] {
        let files = with(arguments, deepspeed);
        assert_eq!(
            key(&files.each_ref().map(|(name, text)| (*name, text.as_str())), name),
            value,
            "{files:?}"
        );
    }
    // A command goes over the file of its launcher.
    let script = "accelerate launch --config_file a.yaml --num_processes 4 train.py --bf16 false\n";
    let files = [
        ("run.sh", script),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n"),
    ];
    assert_eq!((key(&files, "devices"), key(&files, "precision")), (json!(4), json!("bf16-amp")));
}

/// The same words as where Plimsoll reads the two files as its own: but for the key, which is called as each of the two does.
#[track_caller]
fn agrees_with_the_planner(files: &[(&str, &str)], folder: &Path) -> Option<String> {
    for (name, text) in files {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let path = folder.join(files[0].0);
    let planned = plimsoll_plan::config::Imported::from_file(&path, &Default::default());
    let planned =
        planned.err().map(|error| error.to_string().replace("training.mixed_precision", "precision"));
    assert_eq!(from_file(&path).err(), planned, "{files:?}");
    planned
}

#[test]
fn files_named_and_side_by_side_are_held_to_one_rule_about_16_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (own, theirs, precision) in [
        (r#""bf16": true"#, r#""bf16": {"enabled": false}"#, None),
        (r#""bf16": true"#, r#""fp16": {"enabled": true}"#, None),
        (r#""bf16": false"#, r#""bf16": {"enabled": true}"#, None),
        (r#""bf16": false, "fp16": false"#, r#""fp16": {"enabled": true}"#, None),
        (r#""bf16": true"#, r#""fp16": {"enabled": false}"#, Some("bf16-amp")),
        (r#""bf16": true"#, r#""bf16": {"enabled": true}"#, Some("bf16-amp")),
        (r#""fp16": false"#, r#""bf16": {"enabled": true}"#, Some("bf16")),
        (r#""bf16": "auto", "fp16": false"#, r#""bf16": {"enabled": true}"#, Some("bf16")),
        (r#""bf16": false"#, r#""fp16": {"enabled": false}"#, Some("f32")),
    ] {
        let named = format!(r#"{{"output_dir": "o", "learning_rate": 1e-4, "deepspeed": "ds.json", {own}}}"#);
        let alone = named.replace(r#""deepspeed": "ds.json""#, r#""seed_of_nothing": "ds.json""#);
        let deepspeed = format!(r#"{{"zero_optimization": {{"stage": 2}}, {theirs}}}"#);
        let refused = agrees_with_the_planner(&[("a.json", &named), ("ds.json", &deepspeed)], folder.path());
        assert_eq!(refused.is_none(), precision.is_some(), "{own} {theirs}: {refused:?}");
        std::fs::write(folder.path().join("a.json"), alone).unwrap();
        let mut paths = ["a.json", "ds.json"].map(|name| folder.path().join(name));
        for _ in 0..2 {
            paths.reverse();
            let found = Imported::from_files(&paths, &Map::new());
            match (found, &refused) {
                (Ok(found), None) => {
                    assert_eq!(found.keys["precision"].as_str(), precision, "{own} {theirs}")
                }
                (Err(error), Some(refused)) => {
                    // The place of a key in the one file has moved.
                    let words = |text: &str| {
                        let parts =
                            text.split(':').map(|part| part.trim_matches(|c: char| c.is_ascii_digit()));
                        parts.collect::<Vec<_>>().join(":")
                    };
                    assert_eq!(words(&error.to_string()), words(refused));
                }
                (found, refused) => panic!("{own} {theirs}: {found:?} {refused:?}"),
            }
            let flags = json!({"precision": "fp16"});
            let found = Imported::from_files(&paths, flags.as_object().unwrap()).unwrap();
            assert_eq!(found.keys["precision"], "fp16");
        }
    }
}

/// accelerate's file beside the trainer's is what it is where a command names it: 16 bits that are on count, and those that are off do
/// not turn the launcher's off.
#[test]
fn the_file_of_a_launcher_yields() {
    for (own, launcher, precision) in [
        ("true", "no", "bf16-amp"),
        ("false", "bf16", "bf16-amp"),
        ("true", "fp16", "bf16-amp"),
        ("false", "no", "f32"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(r#"{{"output_dir": "o", "gradient_accumulation_steps": 4, "bf16": {own}}}"#);
        std::fs::write(folder.path().join("a.json"), text).unwrap();
        let text =
            format!("distributed_type: NO\nmixed_precision: {launcher}\ngradient_accumulation_steps: 2\n");
        std::fs::write(folder.path().join("a.yaml"), &text).unwrap();
        let paths = ["a.yaml", "a.json"].map(|name| folder.path().join(name));
        let found = Imported::from_files(&paths, &Map::new()).unwrap();
        let keys = ["precision", "gradient_accumulation_steps"].map(|key| found.keys[key].clone());
        assert_eq!(keys, [json!(precision), json!(4)], "{own} {launcher}");
        assert!(found.left.iter().any(|line| line.ends_with("gradient_accumulation_steps 4 counts)")));
        // Two of the same kind have to agree.
        std::fs::write(folder.path().join("b.yaml"), text.replace("steps: 2", "steps: 3")).unwrap();
        let paths = ["a.yaml", "b.yaml"].map(|name| folder.path().join(name));
        let error = Imported::from_files(&paths, &Map::new()).unwrap_err().to_string();
        assert!(error.contains("both are gradient_accumulation_steps"), "{error}");
    }
}

#[test]
fn a_flag_decides_where_two_files_disagree() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        (
            "a.json",
            r#"{"output_dir": "o", "per_device_train_batch_size": 2, "bf16": true, "deepspeed": "ds.json"}"#,
        ),
        ("ds.json", r#"{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": false}}"#),
        ("one.json", r#"{"peft_type": "LORA", "r": 8}"#),
        ("two.json", r#"{"peft_type": "LORA", "r": 16, "lora_dropout": 0.1}"#),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let read = |files: &[&str], flags: Value| {
        let paths: Vec<PathBuf> = files.iter().map(|name| folder.path().join(name)).collect();
        let found = Imported::from_files(&paths, flags.as_object().unwrap());
        found.map(|found| Value::Object(found.keys)).map_err(|error| error.to_string())
    };
    let both = json!({"batch_size": 8, "precision": "fp16"});
    let found = read(&["a.json"], both.clone()).unwrap();
    assert_eq!([&found["batch_size"], &found["precision"]], [&both["batch_size"], &both["precision"]]);
    // Of what it does not say, the two have to agree.
    for (flags, key) in
        [(json!({"batch_size": 8}), "precision"), (json!({"precision": "bf16"}), "batch_size")]
    {
        assert!(read(&["a.json"], flags).unwrap_err().contains(&format!("both are {key};")));
    }
    let rank = json!({"lora": {"rank": 4}});
    assert!(read(&["one.json", "two.json"], rank.clone()).unwrap_err().contains("both are lora;"));
    let all = json!({"lora": {"rank": 4, "dropout": 0.0}});
    assert_eq!(read(&["one.json", "two.json"], all.clone()).unwrap()["lora"], all["lora"]);
    assert_eq!(read(&["two.json"], rank).unwrap()["lora"], json!({"rank": 4, "dropout": 0.1}));
}

/// With the whole batch and the devices, the micro-batch and their number say each other, whoever says them.
#[test]
fn devices_of_flags_reach_the_whole_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    let read = |deepspeed: &str, flags: Value| {
        let text = format!(r#"{{"zero_optimization": {{"stage": 2}}, "train_batch_size": 64{deepspeed}}}"#);
        std::fs::write(&path, text).unwrap();
        let found = Imported::from_files(std::slice::from_ref(&path), flags.as_object().unwrap());
        found.map_err(|error| error.to_string())
    };
    let shared = |deepspeed: &str, flags: Value| {
        let keys = read(deepspeed, flags).unwrap().keys;
        ["batch_size", "gradient_accumulation_steps"].map(|key| keys.get(key).and_then(Value::as_u64))
    };
    let (micro, steps) =
        (r#", "train_micro_batch_size_per_gpu": 2"#, r#", "gradient_accumulation_steps": 4"#);
    for flags in [json!({"devices": 8}), json!({"hardware": "8xa100-80"}), json!({"hardware": "8x RTX 4090"})]
    {
        assert_eq!(shared("", flags.clone()), [Some(8), None], "{flags}");
        assert_eq!(shared(micro, flags.clone()), [Some(2), Some(4)], "{flags}");
        assert_eq!(shared(steps, flags.clone()), [Some(2), Some(4)], "{flags}");
    }
    assert_eq!(shared("", json!({"devices": 8, "gradient_accumulation_steps": 2})), [Some(4), Some(2)]);
    assert_eq!(shared("", json!({"devices": 8, "batch_size": 4})), [Some(4), Some(2)]);
    // A name of a card says nothing of how many there are.
    let unsaid = read("", json!({"hardware": "a100-80"})).unwrap();
    assert!(unsaid.left[0].contains("of how many devices is not said"), "{:?}", unsaid.left);
    // What nothing but the whole batch says has to be a whole number; else the flags count.
    let error = read("", json!({"devices": 3})).unwrap_err();
    assert!(error.contains("train_batch_size (64): this is no product of 3 devices"), "{error}");
    let other = read(&format!("{micro}{steps}"), json!({"devices": 4})).unwrap();
    assert_eq!(other.keys["batch_size"], 2);
    assert!(
        other.left.iter().any(|line| line.ends_with("4 devices, and the flags count")),
        "{:?}",
        other.left
    );
    // Those of a file beside it, too.
    read("", json!({"devices": 8})).unwrap();
    let beside = folder.path().join("accelerate.yaml");
    std::fs::write(&beside, "distributed_type: DEEPSPEED\nnum_processes: 16\n").unwrap();
    let found = Imported::from_files(&[path.clone(), beside], &Map::new()).unwrap();
    assert_eq!(found.keys["batch_size"], 4);
}
