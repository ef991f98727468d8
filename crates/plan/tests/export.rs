//! What `plimsoll export` writes: the values of the plan in other programs' words, and what they have no word for.

use plimsoll_plan::config::{Auto, RawConfig};
use plimsoll_plan::{Catalogue, ExportError, ExportFormat, Exported, ModelOrigin, TrainingPlan};
use serde_json::{Value, json};

/// A plan for a machine of the catalogue, exported.
fn export(format: ExportFormat, machine: &str, settings: &[&str]) -> Result<Exported, ExportError> {
    let target = Catalogue::known().target(machine).unwrap();
    let mut config = RawConfig::from_overrides(["model.path=llama-3.1-8b"]).unwrap();
    config.parallel.data_parallel = Some(Auto::Set(target.devices()));
    for setting in settings {
        config.apply_set(setting).unwrap();
    }
    config.validate().unwrap();
    let origin = ModelOrigin::find(&config).unwrap();
    let plan = TrainingPlan::for_model(&config, &origin, &target.machine(64)).unwrap();
    assert!(plan.fits(), "{:?}", plan.misfits());
    plan.export(format, target.nodes)
}

fn document(format: ExportFormat, machine: &str, settings: &[&str]) -> Value {
    Value::Object(export(format, machine, settings).unwrap().document)
}

/// Whether a note begins so.
#[track_caller]
fn notes(exported: &Exported, beginning: &str) {
    let found = exported.notes.iter().any(|note| note.starts_with(beginning));
    assert!(found, "{beginning}: {:#?}", exported.notes);
}

const FULL: [&str; 8] = [
    "training.steps=1000",
    "training.batch_size=2",
    "training.gradient_accumulation_steps=4",
    "training.mixed_precision=bf16",
    "training.warmup_ratio=0.0305",
    "training.learning_rate=0.00002",
    "data.sequence_length=1024",
    "training.gradient_checkpointing=full",
];

fn full<'a>(further: &[&'a str]) -> Vec<&'a str> {
    FULL.iter().copied().chain(further.iter().copied()).collect()
}

#[test]
fn deepspeed_has_stage_buckets_and_batch() {
    let ds = document(ExportFormat::DeepSpeed, "8xa100-80", &full(&["parallel.zero_stage=3"]));
    assert_eq!(
        [&ds["train_batch_size"], &ds["train_micro_batch_size_per_gpu"], &ds["gradient_accumulation_steps"]],
        [64, 2, 4]
    );
    assert_eq!(ds["bf16"], json!({ "enabled": true }));
    let zero = &ds["zero_optimization"];
    // 4096 x 4096, nine tenths of it, ten times 4096.
    assert_eq!(
        [
            &zero["stage"],
            &zero["reduce_bucket_size"],
            &zero["stage3_prefetch_bucket_size"],
            &zero["stage3_param_persistence_threshold"]
        ],
        [3, 16_777_216, 15_099_494, 40_960]
    );
    assert_eq!(ds["optimizer"]["type"], "AdamW");
    assert_eq!(ds["optimizer"]["params"]["lr"], 2e-5);
    let scheduler = &ds["scheduler"];
    assert_eq!(scheduler["type"], "WarmupDecayLR");
    // A share of the steps is rounded up.
    assert_eq!(
        [&scheduler["params"]["warmup_num_steps"], &scheduler["params"]["total_num_steps"]],
        [31, 1000]
    );
}

#[test]
fn deepspeed_offloads_weights_under_stage_3_alone_and_says_so() {
    let offload = "memory.offload={optimizer: disk, parameters: host, gradients: host, activations: device}";
    let settings = full(&[offload, "memory.disk_path=/fast", "training.optimizer=adamw_8bit"]);
    let exported = export(ExportFormat::DeepSpeed, "h100", &settings).unwrap();
    let zero = &exported.document["zero_optimization"];
    assert_eq!(zero["stage"], 3);
    assert_eq!(zero["offload_param"]["device"], "cpu");
    assert_eq!(
        [&zero["offload_optimizer"]["device"], &zero["offload_optimizer"]["nvme_path"]],
        ["nvme", "/fast"]
    );
    notes(&exported, "zero_optimization.stage is 3, and parallel.zero_stage 0");
    notes(&exported, "training.optimizer (adamw_8bit): DeepSpeed has none of that name");
    assert!(!exported.document.contains_key("optimizer"));
    assert_eq!(exported.document["zero_allow_untested_optimizer"], true);
    let in_memory = document(ExportFormat::DeepSpeed, "h100", &full(&["memory.offload={optimizer: host}"]));
    assert_eq!(in_memory["zero_optimization"]["stage"], 1);
    // A buffer for weights on a disk takes the largest of them: the embedding of 128,256 x 4,096.
    let weights = full(&["memory.offload={parameters: disk, optimizer: disk, gradients: disk}"]);
    let on_disk = document(ExportFormat::DeepSpeed, "h100", &weights);
    assert_eq!(on_disk["zero_optimization"]["offload_param"]["buffer_size"], 128_256 * 4096);
}

#[test]
fn half_precision_scales_its_loss_and_pure_bf16_has_no_masters() {
    let half = document(ExportFormat::DeepSpeed, "8xa100-80", &full(&["training.mixed_precision=fp16"]));
    assert_eq!([&half["fp16"]["initial_scale_power"], &half["fp16"]["loss_scale_window"]], [16, 2000]);
    let pure =
        export(ExportFormat::DeepSpeed, "8xa100-80", &full(&["training.master_weights=none"])).unwrap();
    assert_eq!(pure.document["bf16"]["bf16_master_weights_and_grads"], true);
    notes(&pure, "training.master_weights (none)");
}

#[test]
fn accelerate_has_fsdp_and_ways_of_the_mesh() {
    let of = |settings: &[&str]| document(ExportFormat::Accelerate, "2x8xh100", &full(settings));
    let sharded = of(&["parallel.zero_stage=3"]);
    assert_eq!(sharded["distributed_type"], "FSDP");
    assert_eq!([&sharded["num_processes"], &sharded["num_machines"]], [16, 2]);
    let fsdp = &sharded["fsdp_config"];
    assert_eq!([&fsdp["fsdp_reshard_after_forward"], &fsdp["fsdp_activation_checkpointing"]], [true, true]);
    assert!(sharded.get("parallelism_config").is_none());
    assert_eq!(of(&["parallel.zero_stage=2"])["fsdp_config"]["fsdp_reshard_after_forward"], false);
    let hybrid = of(&["parallel.zero_stage=3", "parallel.shard_size=8"]);
    let ways = &hybrid["parallelism_config"];
    assert_eq!(
        [&ways["parallelism_config_dp_replicate_size"], &ways["parallelism_config_dp_shard_size"]],
        [2, 8]
    );
    let alone = document(ExportFormat::Accelerate, "a100-80", &full(&["training.method=lora"]));
    assert_eq!([&alone["distributed_type"], &alone["mixed_precision"]], ["NO", "bf16"]);
    // A text, which YAML would otherwise take for false.
    let text = export(
        ExportFormat::Accelerate,
        "8xh100",
        &full(&["training.mixed_precision=f32", "parallel.zero_stage=3"]),
    );
    let text = text.unwrap().text().unwrap();
    assert!(text.contains("mixed_precision: \"no\"") || text.contains("mixed_precision: 'no'"), "{text}");
}

#[test]
fn trainer_has_names_for_optimizers_and_schedules() {
    let lora = ["training.method=lora", "data.sequence_length=512", "training.steps=200"];
    let of = |settings: &[&str]| {
        let settings: Vec<&str> = lora.iter().chain(settings).copied().collect();
        document(ExportFormat::Transformers, "a100-80", &settings)
    };
    for (ours, theirs) in [
        ("adamw", "adamw_torch"),
        ("adamw_8bit", "adamw_bnb_8bit"),
        ("lion", "lion_32bit"),
        ("lion_8bit", "lion_8bit"),
        ("adalomo", "adalomo"),
        ("sgd", "sgd"),
    ] {
        assert_eq!(of(&[&format!("training.optimizer={ours}")])["optim"], theirs);
    }
    let lion = of(&["training.optimizer=lion", "training.optimizer_options.beta2=0.95"]);
    assert_eq!([&lion["adam_beta1"], &lion["adam_beta2"]], [0.9, 0.95]);
    let cosine = of(&["training.lr_schedule=cosine", "training.min_lr_ratio=0.1"]);
    assert_eq!(cosine["lr_scheduler_type"], "cosine_with_min_lr");
    assert_eq!(cosine["lr_scheduler_kwargs"], json!({ "min_lr_rate": 0.1 }));
    let wsd = of(&["training.lr_schedule=wsd", "training.warmup_steps=5"]);
    assert_eq!(wsd["lr_scheduler_kwargs"]["num_decay_steps"], 20);
    assert_eq!(wsd["warmup_steps"], 5);
    let scaled = of(&[
        "training.effective_batch_size=16",
        "training.learning_rate_scaling=sqrt",
        "training.reference_batch_size=4",
        "training.learning_rate=0.0001",
    ]);
    assert_eq!(scaled["learning_rate"], 2e-4);
    let galore = document(
        ExportFormat::Transformers,
        "8xa100-80",
        &full(&["training.optimizer=galore", "training.optimizer_options.rank=64", "parallel.zero_stage=0"]),
    );
    assert_eq!(galore["optim_args"], "rank=64,update_proj_gap=200,scale=0.25");
}

const QLORA: [&str; 6] = [
    "training.method=qlora",
    "training.lora.rank=8",
    "training.lora.use_rslora=true",
    "training.lora.init_lora_weights=gaussian",
    "training.lora.modules_to_save=[lm_head]",
    "data.sequence_length=512",
];

#[test]
fn adapters_and_their_base_are_peft_and_bitsandbytes() {
    let adapter = document(ExportFormat::Peft, "rtx-4090", &QLORA);
    assert_eq!([&adapter["r"], &adapter["lora_alpha"]], [8, 16]);
    assert_eq!([&adapter["use_rslora"], &adapter["inference_mode"]], [true, false]);
    assert_eq!(adapter["init_lora_weights"], "gaussian");
    assert_eq!(adapter["modules_to_save"], json!(["lm_head"]));
    let base = document(ExportFormat::BitsAndBytes, "rtx-4090", &QLORA);
    assert_eq!(base["bnb_4bit_quant_type"], "nf4");
    assert_eq!([&base["load_in_4bit"], &base["bnb_4bit_use_double_quant"]], [true, true]);
    let single = [&QLORA[..], &["training.quantization=fp4_f32"]].concat();
    let single = document(ExportFormat::BitsAndBytes, "rtx-4090", &single);
    assert_eq!(
        [&single["bnb_4bit_quant_type"], &single["bnb_4bit_use_double_quant"]],
        [&json!("fp4"), &json!(false)]
    );
    // Ranks that share weights out need them in the type of the others.
    let sharded = [&QLORA[..], &["parallel.zero_stage=3", "training.mixed_precision=bf16"]].concat();
    let sharded = document(ExportFormat::BitsAndBytes, "8xh100", &sharded);
    assert_eq!(sharded["bnb_4bit_quant_storage"], "bfloat16");
}

#[test]
fn what_cannot_be_said_is_an_error() {
    let error =
        |format, machine, settings: &[&str]| export(format, machine, settings).unwrap_err().to_string();
    let refused = |format, settings: &[&str], words: &str| {
        let said = error(format, "8xh100", settings);
        assert!(said.contains(words), "{said}");
    };
    let zero3 = full(&["parallel.zero_stage=3"]);
    refused(ExportFormat::Peft, &zero3, "set training.method to lora or qlora");
    refused(ExportFormat::BitsAndBytes, &zero3, "no weight is quantised");
    refused(ExportFormat::Torchtitan, &QLORA, "trains all weights");
    let gguf = [&QLORA[..], &["training.quantization=q4_k"]].concat();
    refused(ExportFormat::BitsAndBytes, &gguf, "frozen weights are q4_k");
    let other = full(&["parallel.zero_stage=3", "model.path=qwen3-8b"]);
    refused(ExportFormat::Torchtune, &other, "none of the sizes of qwen3-8b");
    // What LLaMA-Factory's own parser refuses.
    for (settings, words) in [
        (&["training.method=lora", "training.optimizer=galore"][..], "refuses LoRA with GaLore"),
        (
            &["training.method=qlora", "training.quantization=int8", "parallel.zero_stage=3"],
            "refuses weights in 8 bits with ZeRO 3",
        ),
        (
            &["training.method=lora", "training.lora.init_lora_weights=pissa", "parallel.zero_stage=3"],
            "refuses pissa_init with ZeRO 3",
        ),
    ] {
        refused(ExportFormat::LlamaFactory, &full(settings), words);
    }
}

/// What says how ranks speak goes over, and what a file cannot say of ranks is noted.
#[test]
fn ranks_are_carried_over_or_noted() {
    let overlap = |value: &str| {
        let settings = full(&["parallel.zero_stage=2", value]);
        document(ExportFormat::DeepSpeed, "8xh100", &settings)["zero_optimization"]["overlap_comm"].clone()
    };
    assert_eq!(overlap("parallel.overlap_communication=false"), false);
    assert_eq!(overlap("parallel.overlap_communication=true"), true);
    for format in [ExportFormat::Axolotl, ExportFormat::LlamaFactory] {
        let settings =
            full(&["parallel.zero_stage=2", "training.gradient_dtype=f32", "training.mixed_precision=bf16"]);
        let exported = export(format, "8xh100", &settings).unwrap();
        assert_eq!(exported.document["deepspeed"]["data_types"]["grad_accum_dtype"], "fp32");
        notes(&exported, "ranks: the file is for 8 processes");
    }
    let staged = full(&[
        "parallel.data_parallel=4",
        "parallel.pipeline_parallel=2",
        "parallel.zero_stage=1",
        "parallel.pipeline_schedule=interleaved",
        "parallel.virtual_stages=4",
        "training.gradient_accumulation_steps=4",
    ]);
    let parallel = &document(ExportFormat::Torchtitan, "8xh100", &staged)["parallelism"];
    assert_eq!(parallel["pipeline_parallel_schedule"], "Interleaved1F1B");
    assert_eq!(parallel["pipeline_parallel_layers_per_stage"], 4);
    // Without FSDP there is no offload.
    let settings = full(&["parallel.zero_stage=0", "memory.offload.optimizer=host"]);
    let whole = export(ExportFormat::Torchtitan, "8xh100", &settings).unwrap();
    assert_eq!(whole.document["training"]["enable_cpu_offload"], false);
    notes(&whole, "memory.offload.optimizer (host): TorchTitan offloads by FSDP alone");
}

#[test]
fn whole_programs_have_model_data_adapters_and_sharding() {
    let data = ["data.train=[a/chats.jsonl]", "data.format=chat"];
    let settings =
        [&QLORA[..], &data, &["memory.offload.activations=host", "training.gradient_checkpointing=full"]]
            .concat();
    let axolotl = document(ExportFormat::Axolotl, "rtx-4090", &settings);
    assert_eq!([&axolotl["adapter"], &axolotl["base_model"]], ["qlora", "llama-3.1-8b"]);
    assert_eq!([&axolotl["lora_target_linear"], &axolotl["activation_offloading"]], [true, true]);
    assert_eq!(axolotl["datasets"][0]["type"], "chat_template");
    let factory = document(ExportFormat::LlamaFactory, "rtx-4090", &settings);
    assert_eq!([&factory["stage"], &factory["dataset"], &factory["lora_target"]], ["sft", "chats", "all"]);
    assert_eq!([&factory["quantization_bit"], &factory["cutoff_len"]], [4, 512]);
    assert!(factory.get("gradient_checkpointing").is_none());
    let sharded = full(&["parallel.zero_stage=2", "training.optimizer=adam_mini"]);
    let factory = export(ExportFormat::LlamaFactory, "8xh100", &sharded).unwrap();
    assert_eq!(factory.document["deepspeed"]["zero_optimization"]["stage"], 2);
    assert_eq!(factory.document["use_adam_mini"], true);
    // It refuses weights without masters with ZeRO 3.
    let pure = |stage: &str| {
        let settings = full(&["training.master_weights=none", stage]);
        document(ExportFormat::LlamaFactory, "8xh100", &settings).get("pure_bf16").is_some()
    };
    assert!(pure("parallel.zero_stage=2") && !pure("parallel.zero_stage=3"));
    assert!(!factory.notes.iter().any(|note| note.starts_with("training.optimizer")), "{:#?}", factory.notes);
}

#[test]
fn torchtune_and_torchtitan_make_models_by_name() {
    let settings = [&QLORA[..], &["training.lora.target_modules=[q_proj, o_proj, up_proj]"]].concat();
    let tune = export(ExportFormat::Torchtune, "rtx-4090", &settings).unwrap();
    let model = &tune.document["model"];
    assert_eq!(model["_component_"], "torchtune.models.llama3_1.lora_llama3_1_8b");
    assert_eq!(model["lora_attn_modules"], json!(["q_proj", "output_proj"]));
    assert_eq!([&model["apply_lora_to_mlp"], &model["quantize_base"]], [true, true]);
    notes(&tune, "training.lora.target_modules (q_proj, o_proj, up_proj): torchtune adapts all linears");
    notes(&tune, "training.lora.use_rslora (true): torchtune has none.");
    let titan = export(
        ExportFormat::Torchtitan,
        "8xh100",
        &full(&[
            "parallel.zero_stage=2",
            "parallel.shard_size=4",
            "training.gradient_checkpointing={ratio: 0.5}",
        ]),
    );
    let titan = titan.unwrap();
    let parallel = &titan.document["parallelism"];
    assert_eq!(
        [&parallel["data_parallel_replicate_degree"], &parallel["data_parallel_shard_degree"]],
        [2, 4]
    );
    assert_eq!(titan.document["activation_checkpoint"]["selective_ac_option"], "2");
    let text = titan.text().unwrap();
    assert!(text.contains("\n[model]\nname = \"llama3\"\nflavor = \"8B\"\n"), "{text}");
    let comments: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
    assert!(comments.len() > 4 && comments.iter().all(|line| line.starts_with('#')), "{text}");
}

/// What a step is asked for and no other program knows is never lost without a word.
#[test]
fn nothing_is_lost_silently() {
    let settings = full(&[
        "parallel.zero_stage=2",
        "training.mlp_chunk_tokens=256",
        "training.activation_compression=int8",
        "training.attention={sliding_window: 256}",
        "training.parameter_groups=[{pattern: \"*.mlp.*\", learning_rate_scale: 2}]",
        "training.not_finite=skip",
        "memory.offload={optimizer: host, gradients: host}",
        "memory.kept_layers.optimizer=3",
        "training.gradient_checkpointing={every: 4}",
    ]);
    let keys = [
        "training.mlp_chunk_tokens",
        "training.activation_compression",
        "training.attention",
        "training.parameter_groups",
        "training.not_finite",
        "training.gradient_checkpointing",
    ];
    for format in [
        ExportFormat::DeepSpeed,
        ExportFormat::Transformers,
        ExportFormat::Axolotl,
        ExportFormat::LlamaFactory,
        ExportFormat::Torchtune,
        ExportFormat::Torchtitan,
    ] {
        let exported = export(format, "8xh100", &settings).unwrap();
        for key in keys {
            assert!(
                exported.notes.iter().any(|note| note.starts_with(key)),
                "{format} {key}: {:#?}",
                exported.notes
            );
        }
        let kept = exported.notes.iter().any(|note| note.starts_with("memory.kept_layers.optimizer"));
        // The launcher's, as its note says.
        assert!(kept || format == ExportFormat::Transformers, "{format}: {:#?}", exported.notes);
    }
}

#[test]
fn a_text_reads_back_as_what_was_exported() {
    let settings =
        full(&["parallel.zero_stage=3", "output.dir='a: #b'", "training.learning_rate=0.00000003"]);
    for format in [ExportFormat::Accelerate, ExportFormat::Axolotl, ExportFormat::LlamaFactory] {
        let exported = export(format, "8xh100", &settings).unwrap();
        let read: Value = serde_saphyr::from_str(&exported.text().unwrap()).unwrap();
        assert_eq!(read, Value::Object(exported.document), "{format}");
    }
    for format in ExportFormat::ALL {
        assert_eq!(format.name().parse(), Ok(format));
    }
    assert!("gpt-neox".parse::<ExportFormat>().unwrap_err().contains("llama-factory"));
}

/// Validation has its own batch there too, and workers make as many batches ahead.
#[test]
fn batches_of_validation_and_workers_are_carried_over() {
    let data = [
        "data.train=a.jsonl",
        "data.validation=b.jsonl",
        "data.num_workers=3",
        "data.prefetch_factor=5",
        "data.shuffle=false",
        "data.seed=7",
        "training.eval_batch_size=6",
        "output.eval_steps=50",
    ];
    let settings = full(&[&data[..], &["training.method=lora"]].concat());
    for (format, key) in [
        (ExportFormat::Transformers, "per_device_eval_batch_size"),
        (ExportFormat::LlamaFactory, "per_device_eval_batch_size"),
        (ExportFormat::Axolotl, "eval_batch_size"),
    ] {
        let exported = export(format, "a100-80", &settings).unwrap();
        let own = &exported.document;
        assert_eq!([&own[key], &own["eval_steps"]], [6, 50], "{format}");
        assert_eq!([&own["dataloader_num_workers"], &own["dataloader_prefetch_factor"]], [3, 5], "{format}");
        for key in ["training.eval_batch_size", "data.num_workers", "data.prefetch_factor"] {
            assert!(!exported.notes.iter().any(|note| note.starts_with(key)), "{:#?}", exported.notes);
        }
        match format {
            ExportFormat::LlamaFactory => assert_eq!(own["disable_shuffling"], true),
            ExportFormat::Axolotl => assert_eq!(own["shuffle_merged_datasets"], false),
            _ => {
                for key in ["data.train (", "data.validation (", "data.shuffle (false)"] {
                    notes(&exported, key);
                }
            }
        }
        // Without validation data there is no such batch, and without workers none is made ahead.
        let alone = full(&["data.num_workers=0", "training.method=lora"]);
        let alone = document(format, "a100-80", &alone);
        assert!(alone.get(key).is_none() && alone.get("dataloader_prefetch_factor").is_none(), "{alone}");
    }
}

#[test]
fn a_learning_rate_that_is_scaled_is_noted_once() {
    let settings = full(&[
        "training.learning_rate_scaling=sqrt",
        "training.reference_batch_size=4",
        "training.lr_schedule=cosine",
        "training.min_lr_ratio=0.1",
    ]);
    for format in [ExportFormat::Transformers, ExportFormat::Axolotl, ExportFormat::DeepSpeed] {
        let exported = export(format, "8xa100-80", &settings).unwrap();
        let said = exported.notes.iter().filter(|note| note.starts_with("training.learning_rate "));
        assert_eq!(said.count(), 1, "{format}: {:#?}", exported.notes);
    }
}
