//! TorchTitan's TOML, which it read up to version 0.2; from 0.3 on the same sections are Python.

use plimsoll_memory::Tier;
use plimsoll_step::{Checkpointing, Group, OptimizerKind, ZeroStage};
use serde_json::json;

use super::sheet::{Page, Sheet, Warmup};
use super::{ExportError, known};
use crate::config::{LrSchedule, MasterWeights, MixedPrecision, TrainingLength};

/// Models of ours with their names there.
const MODELS: [(&str, &str, &str); 11] = [
    ("llama-3.1-8b", "llama3", "8B"),
    ("llama-3.1-70b", "llama3", "70B"),
    ("llama-3.1-405b", "llama3", "405B"),
    ("meta-llama-3-8b", "llama3", "8B"),
    ("meta-llama-3-70b", "llama3", "70B"),
    ("qwen3-0.6b", "qwen3", "0.6B"),
    ("qwen3-1.7b", "qwen3", "1.7B"),
    ("qwen3-4b", "qwen3", "4B"),
    ("qwen3-8b", "qwen3", "8B"),
    ("qwen3-14b", "qwen3", "14B"),
    ("qwen3-32b", "qwen3", "32B"),
];

/// Steps of a file that has to name some.
const STEPS: u64 = 1000;

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    if sheet.adapters().is_some() {
        return Err(ExportError::Adapters { format: sheet.format });
    }
    let spec = &sheet.plan.spec;
    let model = known::entry(spec, &MODELS, |model| model.0).ok_or_else(|| ExportError::Model {
        format: sheet.format,
        model: spec.name.clone(),
        known: MODELS.iter().map(|model| model.0).collect::<Vec<_>>().join(", "),
    })?;
    sheet.head("For TorchTitan 0.2: CONFIG_FILE=FILE ./run_train.sh. From 0.3 on its configuration is Python, with the same sections and names.");
    let mut page = Page::default();
    put_model(sheet, &mut page, model);
    put_optimizer(sheet, &mut page);
    put_training(sheet, &mut page);
    put_parallel(sheet, &mut page);
    put_checkpointing(sheet, &mut page);
    sheet.whole_logits("compile.enable with the component loss fuses their copies.");
    sheet.leave(&["training.", "parallel.", "data."]);
    Ok(page)
}

fn put_model(sheet: &mut Sheet<'_>, page: &mut Page, model: &(&str, &str, &str)) {
    let output = &sheet.config().output;
    page.put("job", json!({ "dump_folder": output.dir(), "description": sheet.plan.spec.name }));
    page.put("metrics", json!({ "log_freq": output.logging_steps() }));
    let mut own = Page::default();
    own.put("name", model.1);
    own.put("flavor", model.2);
    let mut checkpoint = Page::default();
    checkpoint.put("enable", true);
    if output.save_steps() > 0 {
        checkpoint.put("interval", output.save_steps());
    }
    checkpoint.put("keep_latest_k", output.save_total_limit().max(2));
    match sheet.model_path("") {
        Ok(path) => {
            own.put("hf_assets_path", &path);
            checkpoint.put("initial_load_in_hf", true);
            checkpoint.put("initial_load_path", path);
        }
        Err(_) => sheet.say("model.hf_assets_path: name the folder of a tokenizer."),
    }
    checkpoint.put("last_save_in_hf", output.final_model());
    if sheet.precision() == MixedPrecision::Fp8 {
        own.put("converters", ["quantize.linear.float8"]);
        page.put("quantize", json!({ "linear": { "float8": { "recipe_name": "tensorwise" } } }));
    }
    page.put("model", own);
    page.put("checkpoint", checkpoint);
}

fn put_optimizer(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.optimizer";
    sheet.carry(&[key, "training.optimizer_options.", "training.adam_beta1", "training.adam_beta2"]);
    sheet.carry(&["training.adam_epsilon", "training.weight_decay", "training.decay_norms_and_biases"]);
    let settings = &sheet.settings().optimizer;
    let mut own = Page::default();
    own.put("name", "AdamW");
    own.put("lr", sheet.learning_rate());
    match &settings.kind {
        OptimizerKind::AdamW(adam) => {
            own.put("beta1", adam.beta1);
            own.put("beta2", adam.beta2);
            own.put("eps", adam.epsilon);
        }
        _ => sheet.note(
            key,
            "TorchTitan has Adam and AdamW; the file says AdamW, with 8 bytes of states a parameter.",
        ),
    }
    own.put("weight_decay", settings.weight_decay);
    if settings.weight_decay > 0.0 && !settings.decay_norms_and_biases {
        sheet.say("training.weight_decay: norms and biases decay, too.");
    }
    own.put("early_step_in_backward", sheet.training().optimizer_in_backward());
    sheet.carry(&["training.optimizer_in_backward"]);
    page.put("optimizer", own);
    put_schedule(sheet, page);
}

fn put_schedule(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.lr_schedule";
    sheet.carry(&[key, "training.decay_ratio", "training.min_lr_ratio"]);
    let mut own = Page::default();
    match sheet.warmup() {
        Warmup::Steps(steps) => own.put("warmup_steps", steps),
        Warmup::Share(share) => own.put("warmup_steps", (share * STEPS as f64).ceil() as u64),
    }
    match sheet.training().lr_schedule() {
        LrSchedule::Constant => own.put("decay_ratio", 0.0),
        LrSchedule::Linear => own.put("decay_type", "linear"),
        LrSchedule::Cosine => own.put("decay_type", "cosine"),
        LrSchedule::Wsd => {
            own.put("decay_ratio", sheet.training().decay_ratio());
            own.put("decay_type", "linear");
        }
        LrSchedule::InverseSqrt => {
            own.put("decay_ratio", 0.0);
            sheet.note(key, "TorchTitan has none of that form; the learning rate stays after its warm-up.");
        }
    }
    own.put("min_lr_factor", sheet.training().min_lr_ratio());
    page.put("lr_scheduler", own);
}

fn put_training(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.batch_size", "training.gradient_accumulation_steps", "training.seed"]);
    sheet.carry(&["data.sequence_length", "training.master_weights", "training.gradient_dtype"]);
    let (micro, accumulation) = (sheet.settings().batch_size, sheet.plan.choice.accumulation);
    let staged = sheet.settings().ranks.mesh.pipeline > 1;
    let mut own = Page::default();
    // A pipeline's micro-batches are parts of a rank's batch.
    own.put("local_batch_size", if staged { micro.saturating_mul(accumulation) } else { micro });
    own.put("global_batch_size", sheet.plan.choice.sequences());
    own.put("seq_len", sheet.settings().sequence_length);
    own.put("max_norm", sheet.clipping());
    match sheet.length() {
        TrainingLength::Steps(steps) => own.put("steps", steps),
        TrainingLength::Epochs(_) => {
            own.put("steps", STEPS);
            sheet.say(format!(
                "training.epochs: TorchTitan counts steps; the file says {STEPS} as an example."
            ));
        }
    }
    let precision = sheet.precision();
    let no_masters = sheet.training().master_weights().set() == Some(MasterWeights::None);
    let is_bf16 = no_masters && precision != MixedPrecision::F32;
    own.put("dtype", if is_bf16 { "bfloat16" } else { "float32" });
    own.put("mixed_precision_param", if precision == MixedPrecision::F32 { "float32" } else { "bfloat16" });
    if is_bf16 {
        sheet.note(
            "training.master_weights",
            "the weights are bfloat16; updates are rounded to the nearest and not stochastically.",
        );
    }
    if precision == MixedPrecision::Fp16 {
        sheet.note(
            "training.mixed_precision",
            "the file says bfloat16: TorchTitan has no 16-bit floats with a scaled loss.",
        );
    }
    let offload = sheet.settings().offload;
    let tiers = [
        ("memory.offload.parameters", offload.parameters),
        ("memory.offload.gradients", offload.gradients),
        ("memory.offload.optimizer", offload.optimizer),
    ];
    let any = tiers.iter().any(|(_, tier)| *tier != Tier::Device);
    // Offload is FSDP's: ranks that only repeat each other have none.
    let shares = sheet.stage() > ZeroStage::Nothing && sheet.settings().ranks.mesh.data > 1;
    own.put("enable_cpu_offload", any && shares);
    for (key, tier) in tiers.into_iter().filter(|_| any) {
        match tier {
            Tier::Device if !shares => {}
            _ if !shares => sheet.note(
                key,
                "TorchTitan offloads by FSDP alone; set parallel.zero_stage to 2 or 3 on several devices.",
            ),
            Tier::Host => sheet.carry(&[key]),
            Tier::Disk => {
                sheet.note(key, "FSDP offloads to the host alone, and the host has to have room for it.")
            }
            Tier::Device => {
                sheet.note(key, "FSDP offloads weights, gradients and optimizer states together.")
            }
        }
    }
    own.put("dataset", "c4");
    sheet.carry(&["data.train", "data.validation", "data.format", "data.packing", "data.text_field"]);
    sheet.say("data.train: TorchTitan has data sets by name; the file says c4. Register your own in hf_datasets, or set training.dataset_path.");
    page.put("training", own);
    page.put("debug", json!({ "seed": sheet.training().seed() }));
}

fn put_parallel(sheet: &mut Sheet<'_>, page: &mut Page) {
    let mesh = sheet.settings().ranks.mesh;
    // Ranks with different experts share out everything else among themselves there.
    let (experts, groups) = (mesh.expert.max(1), mesh.data / mesh.expert.max(1));
    let shared = match sheet.stage() {
        ZeroStage::Nothing => 1,
        _ => sheet.settings().sharding.among.unwrap_or(groups).min(groups).max(1),
    };
    if experts > 1 && sheet.stage() == ZeroStage::Nothing {
        sheet.note("parallel.expert_parallel", "FSDP shares out everything but experts among these ranks.");
    }
    let shared = shared * experts;
    if sheet.stage() == ZeroStage::States {
        sheet.note("parallel.zero_stage", "FSDP shares out gradients with the optimizer states (ZeRO 2).");
    }
    let mut own = Page::default();
    own.put("data_parallel_replicate_degree", mesh.data / shared);
    own.put("data_parallel_shard_degree", shared);
    own.put(
        "fsdp_reshard_after_forward",
        if sheet.stage() == ZeroStage::Weights { "always" } else { "never" },
    );
    own.put("tensor_parallel_degree", mesh.tensor);
    own.put("pipeline_parallel_degree", mesh.pipeline);
    if mesh.pipeline > 1 {
        let form = sheet.config().parallel.pipeline_schedule().to_string();
        let schedule = match form.as_str() {
            "gpipe" => "GPipe",
            "interleaved" => "Interleaved1F1B",
            _ => "1F1B",
        };
        own.put("pipeline_parallel_schedule", schedule);
        if form == "interleaved" {
            let stages = u64::from(mesh.pipeline) * sheet.config().parallel.virtual_stages();
            let layers = u64::from(sheet.plan.spec.num_layers);
            own.put("pipeline_parallel_layers_per_stage", layers.div_ceil(stages.max(1)));
        }
        own.put("pipeline_parallel_microbatch_size", sheet.settings().batch_size);
    }
    own.put("context_parallel_degree", mesh.context);
    if mesh.expert > 1 {
        own.put("expert_parallel_degree", mesh.expert);
    }
    sheet.carry(&["parallel."]);
    page.put("parallelism", own);
}

fn put_checkpointing(sheet: &mut Sheet<'_>, page: &mut Page) {
    let layers = f64::from(sheet.plan.spec.num_layers);
    let key = "training.gradient_checkpointing";
    let mut own = Page::default();
    match sheet.settings().checkpointing {
        // Every so-many-th layer is recomputed.
        Checkpointing::Ratio(share) if share * layers >= 0.5 && share < 1.0 => {
            own.put("mode", "selective");
            own.put("selective_ac_option", (1.0 / share).round().max(1.0).to_string());
            sheet.note(key, "every so-many-th layer is recomputed, and not the first ones.");
        }
        Checkpointing::Selective(groups)
            if groups.iter().all(|group| matches!(group, Group::Norms | Group::Swiglu)) =>
        {
            own.put("mode", "selective");
            own.put("selective_ac_option", "op");
            sheet.note(key, "the file says op, which keeps every second product and what attention made.");
        }
        _ => own.put("mode", if sheet.full_checkpointing() { "full" } else { "none" }),
    }
    sheet.carry(&[key]);
    page.put("activation_checkpoint", own);
}
