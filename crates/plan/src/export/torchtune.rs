//! A configuration for torchtune's recipes (0.6), which make models by name.

use plimsoll_memory::Tier;
use plimsoll_model::adapter::TargetModules;
use plimsoll_step::{OptimizerKind, ZeroStage};
use serde_json::{Value, json};

use super::bitsandbytes::{Storage, storage};
use super::sheet::{Page, Sheet, Warmup, whole};
use super::{ExportError, known};
use crate::config::{DataFormat, LrSchedule, MasterWeights, MixedPrecision, TrainOn, TrainingLength};

/// A model of ours, its package and builder there, what its checkpoints are called, and the file of its tokenizer.
struct Known {
    name: &'static str,
    package: &'static str,
    builder: &'static str,
    model_type: &'static str,
    tokenizer: Tokenizer,
}

/// Packages that have a tokenizer: its component and its files beside the weights.
enum Tokenizer {
    SentencePiece(&'static str),
    Llama3,
    Qwen(&'static str),
}

const fn known(
    name: &'static str,
    package: &'static str,
    builder: &'static str,
    model_type: &'static str,
    tokenizer: Tokenizer,
) -> Known {
    Known { name, package, builder, model_type, tokenizer }
}

use Tokenizer::{Llama3, Qwen, SentencePiece};

const MODELS: [Known; 27] = [
    known("llama-2-7b", "llama2", "llama2_7b", "LLAMA2", SentencePiece("llama2.llama2_tokenizer")),
    known("llama-2-13b", "llama2", "llama2_13b", "LLAMA2", SentencePiece("llama2.llama2_tokenizer")),
    known("llama-2-70b", "llama2", "llama2_70b", "LLAMA2", SentencePiece("llama2.llama2_tokenizer")),
    known("meta-llama-3-8b", "llama3", "llama3_8b", "LLAMA3", Llama3),
    known("meta-llama-3-70b", "llama3", "llama3_70b", "LLAMA3", Llama3),
    known("llama-3.1-8b", "llama3_1", "llama3_1_8b", "LLAMA3", Llama3),
    known("llama-3.1-70b", "llama3_1", "llama3_1_70b", "LLAMA3", Llama3),
    known("llama-3.1-405b", "llama3_1", "llama3_1_405b", "LLAMA3", Llama3),
    known("llama-3.3-70b", "llama3_3", "llama3_3_70b", "LLAMA3", Llama3),
    known("llama-3.2-1b", "llama3_2", "llama3_2_1b", "LLAMA3_2", Llama3),
    known("llama-3.2-3b", "llama3_2", "llama3_2_3b", "LLAMA3_2", Llama3),
    known("mistral-7b-v0.1", "mistral", "mistral_7b", "MISTRAL", SentencePiece("mistral.mistral_tokenizer")),
    known("qwen2-0.5b", "qwen2", "qwen2_0_5b", "QWEN2", Qwen("qwen2.qwen2_tokenizer")),
    known("qwen2-1.5b", "qwen2", "qwen2_1_5b", "QWEN2", Qwen("qwen2.qwen2_tokenizer")),
    known("qwen2-7b", "qwen2", "qwen2_7b", "QWEN2", Qwen("qwen2.qwen2_tokenizer")),
    known("qwen2.5-0.5b", "qwen2_5", "qwen2_5_0_5b", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-1.5b", "qwen2_5", "qwen2_5_1_5b_base", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-3b", "qwen2_5", "qwen2_5_3b", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-7b", "qwen2_5", "qwen2_5_7b_base", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-14b", "qwen2_5", "qwen2_5_14b_base", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-32b", "qwen2_5", "qwen2_5_32b_base", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("qwen2.5-72b", "qwen2_5", "qwen2_5_72b_base", "QWEN2", Qwen("qwen2_5.qwen2_5_tokenizer")),
    known("gemma-2b", "gemma", "gemma_2b", "GEMMA", SentencePiece("gemma.gemma_tokenizer")),
    known("gemma-7b", "gemma", "gemma_7b", "GEMMA", SentencePiece("gemma.gemma_tokenizer")),
    known("gemma-2-2b", "gemma2", "gemma2_2b", "GEMMA2", SentencePiece("gemma.gemma_tokenizer")),
    known("gemma-2-9b", "gemma2", "gemma2_9b", "GEMMA2", SentencePiece("gemma.gemma_tokenizer")),
    known("gemma-2-27b", "gemma2", "gemma2_27b", "GEMMA2", SentencePiece("gemma.gemma_tokenizer")),
];

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    let spec = &sheet.plan.spec;
    let model = known::entry(spec, &MODELS, |model| model.name).ok_or_else(|| ExportError::Model {
        format: sheet.format,
        model: spec.name.clone(),
        known: MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", "),
    })?;
    let method = if sheet.adapters().is_some() { "lora" } else { "full" };
    sheet.head(match sheet.ranks() {
        1 => format!("Start with: tune run {method}_finetune_single_device --config FILE."),
        ranks => format!(
            "Start with: tune run --nproc_per_node {} {method}_finetune_distributed --config FILE.",
            u64::from(ranks) / sheet.machines.max(1)
        ),
    });
    let folder = sheet.model_path("torchtune begins with a model that is there; set model.path")?;
    sheet.say("checkpointer.checkpoint_files: write the names of the model's .safetensors files.");
    let mut page = Page::default();
    page.put("output_dir", sheet.config().output.dir());
    page.put("tokenizer", tokenizer(sheet, model, &folder));
    page.put("model", built(sheet, model)?);
    let checkpointer = json!({
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": folder,
        "checkpoint_files": [],
        "recipe_checkpoint": null,
        "output_dir": "${output_dir}",
        "model_type": model.model_type,
    });
    page.put("checkpointer", checkpointer);
    page.put("resume_from_checkpoint", false);
    put_data(sheet, &mut page);
    put_optimizer(sheet, &mut page);
    put_run(sheet, &mut page);
    put_memory(sheet, &mut page);
    sheet.leave(&["training.", "parallel.", "data."]);
    Ok(page)
}

fn tokenizer(sheet: &Sheet<'_>, model: &Known, folder: &str) -> Value {
    let length = sheet.settings().sequence_length;
    match model.tokenizer {
        Tokenizer::SentencePiece(component) => json!({
            "_component_": format!("torchtune.models.{component}"),
            "path": format!("{folder}/tokenizer.model"),
            "max_seq_len": length,
        }),
        Tokenizer::Llama3 => json!({
            "_component_": "torchtune.models.llama3.llama3_tokenizer",
            "path": format!("{folder}/original/tokenizer.model"),
            "max_seq_len": length,
        }),
        Tokenizer::Qwen(component) => json!({
            "_component_": format!("torchtune.models.{component}"),
            "path": format!("{folder}/vocab.json"),
            "merges_file": format!("{folder}/merges.txt"),
            "max_seq_len": length,
        }),
    }
}

/// The model, or the model with adapters.
fn built(sheet: &mut Sheet<'_>, model: &Known) -> Result<Page, ExportError> {
    let mut page = Page::default();
    let Known { package, builder, .. } = model;
    sheet.carry(&["training.method", "training.quantization", "training.lora."]);
    let Ok(lora) = sheet.adapter_config() else {
        page.put("_component_", format!("torchtune.models.{package}.{builder}"));
        return Ok(page);
    };
    page.put("_component_", format!("torchtune.models.{package}.lora_{builder}"));
    let (attention, mlp, output) = targets(sheet, &lora.target_modules);
    page.put("lora_attn_modules", attention);
    page.put("apply_lora_to_mlp", mlp);
    if output || !matches!(*package, "gemma" | "gemma2" | "llama3_2" | "qwen2" | "qwen2_5") {
        page.put("apply_lora_to_output", output);
    }
    page.put("lora_rank", lora.rank);
    page.put("lora_alpha", whole(lora.alpha));
    page.put("lora_dropout", lora.dropout);
    page.put("use_dora", lora.use_dora);
    match storage(sheet)? {
        None => {}
        Some(Storage::FourBit { kind: "nf4", double: true }) => page.put("quantize_base", true),
        Some(_) => {
            page.put("quantize_base", true);
            sheet.note(
                "training.quantization",
                "torchtune's frozen weights are nf4 with double quantisation.",
            );
        }
    }
    let left = [
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "modules_to_save",
        "init_lora_weights",
        "loraplus_lr_ratio",
    ];
    sheet.leave_lora(&left, "torchtune has none.");
    Ok(page)
}

/// Names of attention's linears there, and whether the feed-forward part and the head have adapters.
fn targets(sheet: &mut Sheet<'_>, modules: &TargetModules) -> (Vec<&'static str>, bool, bool) {
    let all = vec!["q_proj", "k_proj", "v_proj", "output_proj"];
    let key = "training.lora.target_modules";
    let TargetModules::Names(names) = modules else {
        if let TargetModules::Pattern(_) = modules {
            sheet.note(key, "torchtune takes names and no expression; the file adapts all linears.");
        }
        return (all, true, false);
    };
    let has = |name: &str| names.iter().any(|own| own.rsplit('.').next() == Some(name));
    let pairs = [("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("o_proj", "output_proj")];
    let attention = pairs.into_iter().filter(|(own, _)| has(own)).map(|(_, there)| there).collect();
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(has);
    if mlp.contains(&true) && mlp.contains(&false) {
        sheet.note(key, "torchtune adapts all linears of the feed-forward part or none; the file says all.");
    }
    (attention, mlp.contains(&true), has("lm_head"))
}

fn put_data(sheet: &mut Sheet<'_>, page: &mut Page) {
    let data = &sheet.config().data;
    sheet.carry(&["data.train", "data.format", "data.text_field", "data.columns.", "data.sequence_length"]);
    sheet.carry(&["data.packing", "data.shuffle", "data.train_on"]);
    let mut set = Page::default();
    match data.format() {
        DataFormat::Text => {
            set.put("_component_", "torchtune.datasets.text_completion_dataset");
            set.put("column", data.text_field());
        }
        DataFormat::Chat => {
            set.put("_component_", "torchtune.datasets.chat_dataset");
            let column = data.columns.messages.as_deref().unwrap_or("messages");
            set.put("conversation_column", column);
            set.put("conversation_style", if column == "conversations" { "sharegpt" } else { "openai" });
            set.put("train_on_input", data.train_on() == TrainOn::All);
        }
        DataFormat::Instruction => {
            set.put("_component_", "torchtune.datasets.instruct_dataset");
            let input = data.columns.instruction.as_deref().unwrap_or("instruction");
            let output = data.columns.output.as_deref().unwrap_or("output");
            set.put("column_map", json!({ "input": input, "output": output }));
            set.put("train_on_input", data.train_on() == TrainOn::All);
        }
    }
    match &data.train {
        Some(paths) => {
            let files = paths.patterns();
            let is_text = files.iter().all(|path| path.ends_with(".txt") || path.ends_with(".md"));
            set.put("source", if is_text { "text" } else { "json" });
            set.put("data_files", files);
        }
        None => {
            set.put("source", "json");
            sheet.say("data.train is not set: add dataset.data_files.");
        }
    }
    set.put("split", "train");
    set.put("packed", data.packing());
    page.put("dataset", set);
    page.put("seed", sheet.training().seed());
    page.put("shuffle", data.shuffle());
    sheet.carry(&["training.seed"]);
}

fn put_optimizer(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.optimizer";
    sheet.carry(&[key, "training.optimizer_options.", "training.adam_beta1", "training.adam_beta2"]);
    sheet.carry(&["training.adam_epsilon", "training.weight_decay"]);
    let settings = &sheet.settings().optimizer;
    let mut own = Page::default();
    let adam = |own: &mut Page, class: &str, adam: &plimsoll_step::AdamSettings| {
        own.put("_component_", class);
        own.put("betas", [adam.beta1, adam.beta2]);
        own.put("eps", adam.epsilon);
    };
    match &settings.kind {
        OptimizerKind::AdamW(numbers) => adam(&mut own, "torch.optim.AdamW", numbers),
        OptimizerKind::AdamW8bit(numbers, _) => adam(&mut own, "bitsandbytes.optim.AdamW8bit", numbers),
        OptimizerKind::AdamWBf16(numbers) => {
            adam(&mut own, "torch.optim.AdamW", numbers);
            sheet.note(key, "the file says AdamW, whose states have the type of the weights; with dtype bf16 they are bfloat16, rounded to the nearest.");
        }
        OptimizerKind::Lion(lion) | OptimizerKind::Lion8bit(lion, _) => {
            let is_8bit = matches!(settings.kind, OptimizerKind::Lion8bit(..));
            own.put(
                "_component_",
                if is_8bit { "bitsandbytes.optim.Lion8bit" } else { "bitsandbytes.optim.Lion" },
            );
            own.put("betas", [lion.beta1, lion.beta2]);
        }
        OptimizerKind::Sgd(sgd) => {
            own.put("_component_", "torch.optim.SGD");
            own.put("momentum", sgd.momentum);
            own.put("dampening", sgd.dampening);
            own.put("nesterov", sgd.nesterov);
        }
        OptimizerKind::Adafactor(adafactor) | OptimizerKind::AdaLomo(adafactor) => {
            own.put("_component_", "torch.optim.Adafactor");
            own.put("beta2_decay", adafactor.decay_rate);
            own.put("d", adafactor.clip_threshold);
            sheet.note(key, "torch.optim.Adafactor always scales by the parameter and has no momentum.");
        }
        OptimizerKind::AdamMini(numbers) => {
            adam(&mut own, "torch.optim.AdamW", numbers);
            sheet.note(
                key,
                "the file says AdamW, with twice the states; adam_mini.Adam_mini takes other arguments.",
            );
        }
        OptimizerKind::GaLore(low) | OptimizerKind::Apollo(low, _) => {
            adam(&mut own, "torch.optim.AdamW", &low.adam);
            sheet.note(key, "the file says AdamW: recipes make one group of all parameters, and low-rank optimizers need one of the linears.");
        }
    }
    own.put("lr", sheet.learning_rate());
    own.put("weight_decay", settings.weight_decay);
    if settings.weight_decay > 0.0 && !settings.decay_norms_and_biases {
        sheet.say("training.weight_decay: recipes decay norms and biases, too.");
    }
    sheet.carry(&["training.decay_norms_and_biases"]);
    page.put("optimizer", own);
    put_schedule(sheet, page);
}

fn put_schedule(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.lr_schedule";
    sheet.carry(&[key, "training.min_lr_ratio", "training.decay_ratio"]);
    let warmup = sheet.warmup();
    let form = sheet.training().lr_schedule();
    match form {
        LrSchedule::Constant if !warmup.is_any() => return,
        LrSchedule::Cosine => {}
        LrSchedule::Linear => {
            sheet.note(key, "recipes have the cosine alone, which the file says: it ends at 0 as well.")
        }
        LrSchedule::Constant | LrSchedule::InverseSqrt | LrSchedule::Wsd => {
            return sheet.note(
                key,
                "recipes have the cosine alone; the file has no schedule, so that the learning rate stays.",
            );
        }
    }
    if sheet.training().min_lr_ratio() > 0.0 {
        sheet.note("training.min_lr_ratio", "the cosine ends at 0.");
    }
    let steps = match warmup {
        Warmup::Steps(steps) => steps,
        Warmup::Share(_) => {
            sheet.note(
                "training.warmup_ratio",
                "the number of steps is not known: set num_warmup_steps, which is 0 in the file.",
            );
            0
        }
    };
    page.put(
        "lr_scheduler",
        json!({
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": steps,
        }),
    );
}

fn put_run(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.batch_size", "training.gradient_accumulation_steps"]);
    page.put("batch_size", sheet.settings().batch_size);
    page.put("gradient_accumulation_steps", sheet.plan.choice.accumulation);
    match sheet.length() {
        TrainingLength::Steps(steps) => {
            page.put("epochs", 1);
            page.put("max_steps_per_epoch", steps);
            sheet.say(
                "training.steps: an epoch ends with the data, though; set epochs where the data are shorter.",
            );
        }
        TrainingLength::Epochs(epochs) => {
            page.put("epochs", epochs.ceil() as u64);
            page.put("max_steps_per_epoch", Value::Null);
            if epochs.fract() != 0.0 {
                sheet.note(
                    "training.epochs",
                    "recipes take whole epochs; set max_steps_per_epoch for a part of one.",
                );
            }
        }
    }
    let clip = sheet.clipping();
    page.put("clip_grad_norm", if clip > 0.0 { whole(clip) } else { Value::Null });
    let loss = match sheet.loss_chunk() {
        Some(tokens) => {
            let all = sheet.settings().batch_size.saturating_mul(sheet.settings().sequence_length);
            json!({
                "_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
                "num_output_chunks": all.div_ceil(tokens.max(1)),
            })
        }
        None => json!({ "_component_": "torch.nn.CrossEntropyLoss", "ignore_index": -100 }),
    };
    page.put("loss", loss);
    page.put("compile", false);
    page.put("device", "cuda");
    let logger = json!({
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    });
    page.put("metric_logger", logger);
    page.put("log_every_n_steps", sheet.config().output.logging_steps());
    page.put("log_peak_memory_stats", true);
}

fn put_memory(sheet: &mut Sheet<'_>, page: &mut Page) {
    let precision = sheet.precision();
    page.put("dtype", if precision == MixedPrecision::F32 { "fp32" } else { "bf16" });
    if matches!(precision, MixedPrecision::Fp16 | MixedPrecision::Fp8) {
        sheet.note("training.mixed_precision", "the file says bf16: recipes train in fp32 and bf16.");
    }
    sheet.carry(&["training.master_weights", "training.gradient_dtype"]);
    let masters = sheet.training().master_weights().set() == Some(MasterWeights::F32);
    if masters && sheet.adapters().is_none() {
        sheet.note("training.master_weights", "recipes with dtype bf16 have no f32 weights: 4 bytes a parameter less, and small updates are lost.");
    }
    let checkpointing = sheet.full_checkpointing();
    page.put("enable_activation_checkpointing", checkpointing);
    let offload = sheet.settings().offload;
    page.put("enable_activation_offloading", offload.activations != Tier::Device);
    if offload.activations != Tier::Device {
        sheet.carry(&["memory.offload.activations"]);
        if !checkpointing {
            sheet.say("memory.offload.activations: recipes offload with activation checkpointing alone; set enable_activation_checkpointing.");
        }
    }
    let in_backward = sheet.training().optimizer_in_backward();
    if sheet.adapters().is_none() {
        page.put("optimizer_in_bwd", in_backward);
        sheet.carry(&["training.optimizer_in_backward"]);
    }
    let mesh = sheet.settings().ranks.mesh;
    if mesh.size() > 1 {
        let kept_below = [offload.parameters, offload.gradients, offload.optimizer]
            .iter()
            .any(|tier| *tier != Tier::Device);
        page.put("fsdp_cpu_offload", kept_below);
        page.put("fsdp_reshard_after_forward", sheet.stage() == ZeroStage::Weights);
        if kept_below {
            sheet.carry(&[
                "memory.offload.parameters",
                "memory.offload.gradients",
                "memory.offload.optimizer",
            ]);
            sheet.say("memory.offload: fsdp_cpu_offload takes weights, gradients and optimizer states to the host together.");
        }
        if mesh.tensor > 1 {
            page.put("tensor_parallel_dim", mesh.tensor);
            sheet.carry(&["parallel.tensor_parallel", "parallel.sequence_parallel"]);
        }
        if sheet.stage() < ZeroStage::Gradients {
            sheet.note(
                "parallel.zero_stage",
                "distributed recipes share out optimizer states and gradients, and the weights (FSDP).",
            );
        }
    }
    sheet.carry(&["parallel.data_parallel", "parallel.zero_stage", "parallel.sharding_strategy"]);
}
