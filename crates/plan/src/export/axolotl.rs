//! Axolotl's configuration. ZeRO is written in DeepSpeed's words inside of it.

use plimsoll_memory::Tier;
use plimsoll_model::adapter::{AdapterStart, TargetModules};
use plimsoll_step::{AttentionKind, ZeroStage};
use serde_json::{Value, json};

use super::bitsandbytes::{Storage, storage};
use super::sheet::{Page, Sheet, Warmup, whole};
use super::trainer::{optimizer, schedule};
use super::transformers::put_workers;
use super::{ExportError, deepspeed};
use crate::config::{DataFormat, MasterWeights, MixedPrecision, TrainOn, TrainingLength, Truncation};

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    sheet.head("Start with: axolotl train FILE.");
    sheet.say_ranks();
    let mut page = Page::default();
    page.put("base_model", sheet.model_path("axolotl begins with a model that is there; set model.path")?);
    put_adapter(sheet, &mut page)?;
    put_data(sheet, &mut page);
    put_training(sheet, &mut page);
    put_memory(sheet, &mut page);
    put_output(sheet, &mut page);
    sheet.carry(&["model.path", "parallel.sequence_parallel"]);
    sheet.leave(&["training.", "parallel.", "data."]);
    Ok(page)
}

fn put_adapter(sheet: &mut Sheet<'_>, page: &mut Page) -> Result<(), ExportError> {
    let storage = storage(sheet)?;
    sheet.carry(&["training.method", "training.quantization", "training.lora."]);
    let Ok(lora) = sheet.adapter_config() else { return Ok(()) };
    let four_bit = matches!(storage, Some(Storage::FourBit { .. }));
    page.put("adapter", if four_bit { "qlora" } else { "lora" });
    match storage {
        Some(Storage::FourBit { kind, double }) => {
            page.put("load_in_4bit", true);
            page.put(
                "bnb_config_kwargs",
                json!({ "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double }),
            );
        }
        Some(Storage::EightBit) => page.put("load_in_8bit", true),
        None => {}
    }
    page.put("lora_r", lora.rank);
    page.put("lora_alpha", whole(lora.alpha));
    page.put("lora_dropout", lora.dropout);
    match &lora.target_modules {
        TargetModules::AllLinear => page.put("lora_target_linear", true),
        TargetModules::Names(names) => page.put("lora_target_modules", names),
        TargetModules::Pattern(pattern) => page.put("lora_target_modules", pattern),
    }
    if !lora.modules_to_save.is_empty() {
        page.put("lora_modules_to_save", &lora.modules_to_save);
    }
    if !lora.rank_pattern.is_empty() {
        page.put("lora_rank_pattern", &lora.rank_pattern);
    }
    if !lora.alpha_pattern.is_empty() {
        let patterns = lora.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), whole(*alpha)));
        page.put("lora_alpha_pattern", Value::Object(patterns.collect()));
    }
    page.put("peft_use_dora", lora.use_dora);
    page.put("peft_use_rslora", lora.use_rslora);
    match lora.start {
        AdapterStart::Kaiming => {}
        AdapterStart::Gaussian => page.put("peft_init_lora_weights", "gaussian"),
        AdapterStart::Pissa { power_iterations: None } => page.put("peft_init_lora_weights", "pissa"),
        AdapterStart::Pissa { power_iterations: Some(count) } => {
            page.put("peft_init_lora_weights", format!("pissa_niter_{count}"));
        }
    }
    if sheet.training().lora.bias.is_some() {
        sheet.note("training.lora.bias", "axolotl trains no biases beside adapters.");
    }
    let ratio = sheet.training().lora.loraplus_lr_ratio();
    if ratio != 1.0 {
        page.put("loraplus_lr_ratio", ratio);
    }
    Ok(())
}

fn put_data(sheet: &mut Sheet<'_>, page: &mut Page) {
    let data = &sheet.config().data;
    sheet.carry(&["data.train", "data.validation", "data.format", "data.text_field", "data.columns."]);
    sheet.carry(&[
        "data.train_on",
        "data.sequence_length",
        "data.packing",
        "data.truncation",
        "data.shuffle",
    ]);
    let sets = |paths: &crate::config::Paths| -> Vec<Value> {
        paths.patterns().iter().map(|path| dataset(path, data)).collect()
    };
    match &data.train {
        Some(paths) => page.put("datasets", sets(paths)),
        None => sheet.say("data.train is not set: add datasets, without which axolotl begins nothing."),
    }
    page.put_some("test_datasets", data.validation.as_ref().map(sets));
    page.put("sequence_len", sheet.settings().sequence_length);
    page.put("sample_packing", data.packing());
    page.put("pad_to_sequence_len", data.packing());
    if data.has_samples() {
        page.put("train_on_inputs", data.train_on() == TrainOn::All);
    }
    match data.truncation() {
        Truncation::Right => page.put("excess_length_strategy", "truncate"),
        Truncation::Left => sheet.note("data.truncation", "axolotl cuts on the right, or drops."),
        Truncation::Drop => page.put("excess_length_strategy", "drop"),
        Truncation::Error => page.put("excess_length_strategy", "raise"),
    }
    page.put("shuffle_merged_datasets", data.shuffle());
    put_workers(sheet, page);
}

fn dataset(path: &str, data: &crate::config::DataConfig) -> Value {
    let columns = &data.columns;
    let mut set = Page::default();
    set.put("path", path);
    set.put(
        "ds_type",
        if path.ends_with(".parquet") {
            "parquet"
        } else if path.ends_with(".txt") || path.ends_with(".md") {
            "text"
        } else {
            "json"
        },
    );
    match data.format() {
        DataFormat::Text => {
            set.put("type", "completion");
            set.put("field", data.text_field());
        }
        DataFormat::Chat => {
            set.put("type", "chat_template");
            set.put("field_messages", columns.messages.as_deref().unwrap_or("messages"));
            let role = columns.role.as_deref().unwrap_or("role");
            let content = columns.content.as_deref().unwrap_or("content");
            set.put("message_property_mappings", json!({ "role": role, "content": content }));
        }
        DataFormat::Instruction => {
            set.put(
                "type",
                json!({
                    "field_instruction": columns.instruction.as_deref().unwrap_or("instruction"),
                    "field_input": columns.input.as_deref().unwrap_or("input"),
                    "field_output": columns.output.as_deref().unwrap_or("output"),
                    "field_system": columns.system.as_deref().unwrap_or("system"),
                    "format": "{instruction}\n{input}",
                    "no_input_format": "{instruction}",
                }),
            );
        }
    }
    Value::Object(set.0)
}

fn put_training(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.batch_size", "training.gradient_accumulation_steps", "training.seed"]);
    page.put("micro_batch_size", sheet.settings().batch_size);
    page.put("gradient_accumulation_steps", sheet.plan.choice.accumulation);
    match sheet.length() {
        TrainingLength::Steps(steps) => page.put("max_steps", steps),
        TrainingLength::Epochs(epochs) => page.put("num_epochs", epochs),
    }
    let own = optimizer(sheet);
    page.put("optimizer", own.name);
    page.put_some("optim_args", own.joined_args());
    page.put_some("optim_target_modules", own.targets.map(|_| "all_linear"));
    if let Some([first, second]) = own.betas {
        page.put("adam_beta1", first);
        page.put("adam_beta2", second);
    }
    page.put_some("adam_epsilon", own.epsilon);
    page.put("learning_rate", sheet.learning_rate());
    sheet.carry(&["training.weight_decay", "training.decay_norms_and_biases"]);
    page.put("weight_decay", sheet.settings().optimizer.weight_decay);
    if sheet.training().decay_norms_and_biases() {
        sheet.note("training.decay_norms_and_biases", "axolotl never decays norms and biases.");
    }
    page.put("max_grad_norm", whole(sheet.clipping()));
    let (kind, further) = schedule(sheet);
    page.put("lr_scheduler", kind);
    if !further.0.is_empty() {
        page.put("lr_scheduler_kwargs", further);
    }
    match sheet.warmup() {
        Warmup::Steps(steps) => page.put("warmup_steps", steps),
        Warmup::Share(share) => page.put("warmup_ratio", share),
    }
    page.put("seed", sheet.training().seed());
    put_precision(sheet, page);
}

fn put_precision(sheet: &mut Sheet<'_>, page: &mut Page) {
    let precision = sheet.precision();
    sheet.carry(&["training.master_weights", "training.gradient_dtype"]);
    let no_masters = sheet.training().master_weights().set() == Some(MasterWeights::None);
    let is_full = sheet.adapters().is_none();
    match precision {
        MixedPrecision::F32 => page.put("float32", true),
        // Without automatic casts: the weights themselves are bfloat16.
        MixedPrecision::Bf16 if no_masters && is_full => {
            page.put("bfloat16", true);
            sheet.note(
                "training.master_weights",
                "the weights are bfloat16; updates are rounded to the nearest and not stochastically.",
            );
        }
        MixedPrecision::Bf16 => page.put("bf16", true),
        MixedPrecision::Fp16 => page.put("fp16", true),
        MixedPrecision::Fp8 => {
            page.put("bf16", true);
            page.put("fp8", true);
        }
    }
}

fn put_memory(sheet: &mut Sheet<'_>, page: &mut Page) {
    let checkpointing = sheet.full_checkpointing();
    page.put("gradient_checkpointing", checkpointing);
    if checkpointing {
        page.put("gradient_checkpointing_kwargs", json!({ "use_reentrant": false }));
    }
    sheet.carry(&["training.attention"]);
    match sheet.settings().attention {
        AttentionKind::Flash => page.put("flash_attention", true),
        AttentionKind::Standard => page.put("eager_attention", true),
        AttentionKind::SlidingWindow(_) | AttentionKind::BlockSparse(_) => {
            page.put("flash_attention", true);
            sheet.note(
                "training.attention",
                "the pattern is not carried over; the model's own attention takes more time.",
            );
        }
    }
    if let Some(tokens) = sheet.loss_chunk() {
        let all = sheet.settings().batch_size.saturating_mul(sheet.settings().sequence_length);
        page.put("chunked_cross_entropy", true);
        page.put("chunked_cross_entropy_num_chunks", all.div_ceil(tokens.max(1)));
    }
    let offload = sheet.settings().offload;
    if offload.activations != Tier::Device && checkpointing {
        let disk = offload.activations == Tier::Disk;
        page.put("activation_offloading", if disk { json!("disk") } else { json!(true) });
        sheet.carry(&["memory.offload.activations"]);
    }
    let mesh = sheet.settings().ranks.mesh;
    sheet.carry(&["parallel.data_parallel", "parallel.zero_stage", "parallel.sharding_strategy"]);
    let tiers = [offload.parameters, offload.gradients, offload.optimizer];
    if sheet.stage() > ZeroStage::Nothing && sheet.ranks() > 1
        || tiers.iter().any(|tier| *tier != Tier::Device)
    {
        page.put("deepspeed", deepspeed::for_trainer(sheet));
    }
    if mesh.tensor > 1 {
        page.put("tensor_parallel_size", mesh.tensor);
    }
    if mesh.context > 1 {
        page.put("context_parallel_size", mesh.context);
    }
    sheet.carry(&["parallel.tensor_parallel", "parallel.context_parallel", "parallel.pipeline_schedule"]);
    if mesh.pipeline > 1 {
        sheet.note("parallel.pipeline_parallel", "axolotl has no stages.");
    }
    if mesh.tensor > 1 || mesh.context > 1 {
        sheet.say("axolotl has tensor and context parallelism with FSDP 2: take fsdp_version: 2 and fsdp_config in place of deepspeed.");
    }
}

fn put_output(sheet: &mut Sheet<'_>, page: &mut Page) {
    let output = &sheet.config().output;
    page.put("output_dir", output.dir());
    page.put("logging_steps", output.logging_steps());
    if output.save_steps() > 0 {
        page.put("save_steps", output.save_steps());
        page.put("save_total_limit", output.save_total_limit());
    }
    let batch = sheet.evaluated();
    if batch.is_some() && output.eval_steps() > 0 {
        page.put("eval_steps", output.eval_steps());
    }
    page.put_some("eval_batch_size", batch);
}
