//! LLaMA-Factory's configuration: arguments of its own beside those of `Trainer`.

use plimsoll_memory::Tier;
use plimsoll_model::adapter::{AdapterBias, AdapterStart, TargetModules};
use plimsoll_step::{ApolloChannels, AttentionKind, OptimizerKind, ZeroStage};

use super::bitsandbytes::{Storage, storage};
use super::sheet::{Page, Sheet, whole};
use super::{ExportError, ExportFormat, deepspeed, transformers};
use crate::config::{DataFormat, MasterWeights, MixedPrecision, TrainOn};

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    sheet.head("Start with: llamafactory-cli train FILE.");
    sheet.say_ranks();
    let mut page = Page::default();
    page.put(
        "model_name_or_path",
        sheet.model_path("LLaMA-Factory begins with a model that is there; set model.path")?,
    );
    let is_text = sheet.config().data.format() == DataFormat::Text;
    page.put("stage", if is_text { "pt" } else { "sft" });
    page.put("do_train", true);
    put_method(sheet, &mut page)?;
    put_data(sheet, &mut page, is_text);
    page.0.extend(transformers::arguments(sheet).0);
    put_optimizer(sheet, &mut page);
    put_memory(sheet, &mut page);
    sheet.whole_logits("enable_liger_kernel: true avoids them.");
    sheet.carry(&["parallel.data_parallel", "parallel.zero_stage", "parallel.sharding_strategy"]);
    sheet.leave(&["training.", "parallel.", "data."]);
    Ok(page)
}

/// What its own parser ends with an error (`hparams/parser.py`, `model/adapter.py`).
fn check(sheet: &Sheet<'_>, start: AdapterStart, storage: Option<&Storage>) -> Result<(), ExportError> {
    let pissa = matches!(start, AdapterStart::Pissa { .. });
    let shares_weights = sheet.stage() == ZeroStage::Weights && sheet.ranks() > 1;
    let low_rank =
        matches!(sheet.settings().optimizer.kind, OptimizerKind::GaLore(_) | OptimizerKind::Apollo(..));
    let refused: [(bool, &'static str, &'static str); 4] = [
        (
            low_rank,
            "LoRA with GaLore or APOLLO",
            "set training.optimizer to adamw, or training.method to full",
        ),
        (
            shares_weights && matches!(storage, Some(Storage::EightBit)),
            "weights in 8 bits with ZeRO 3",
            "set training.quantization to nf4, or parallel.zero_stage to 2",
        ),
        (
            pissa && shares_weights,
            "pissa_init with ZeRO 3",
            "set parallel.zero_stage to 2, or make the adapter by its scripts/pissa_init.py",
        ),
        (
            pissa && storage.is_some(),
            "pissa_init with quantised weights",
            "make the adapter by its scripts/pissa_init.py, or set training.method to lora",
        ),
    ];
    match refused.into_iter().find(|(is_so, ..)| *is_so) {
        Some((_, what, remedy)) => {
            Err(ExportError::Refused { format: ExportFormat::LlamaFactory, what, remedy })
        }
        None => Ok(()),
    }
}

fn put_method(sheet: &mut Sheet<'_>, page: &mut Page) -> Result<(), ExportError> {
    let storage = storage(sheet)?;
    sheet.carry(&["training.method", "training.quantization", "training.lora."]);
    let Ok(lora) = sheet.adapter_config() else {
        page.put("finetuning_type", "full");
        return Ok(());
    };
    check(sheet, lora.start, storage.as_ref())?;
    page.put("finetuning_type", "lora");
    page.put("lora_rank", lora.rank);
    page.put("lora_alpha", lora.alpha.round() as i64);
    page.put("lora_dropout", lora.dropout);
    match &lora.target_modules {
        TargetModules::AllLinear => page.put("lora_target", "all"),
        TargetModules::Names(names) => page.put("lora_target", names.join(",")),
        TargetModules::Pattern(pattern) => {
            page.put("lora_target", "all");
            sheet.note(
                "training.lora.target_modules",
                &format!("LLaMA-Factory takes names and no expression; the file says all and not {pattern}."),
            );
        }
    }
    if !lora.modules_to_save.is_empty() {
        page.put("additional_target", lora.modules_to_save.join(","));
    }
    page.put("use_rslora", lora.use_rslora);
    page.put("use_dora", lora.use_dora);
    match lora.start {
        AdapterStart::Kaiming => {}
        AdapterStart::Gaussian => {
            sheet.note("training.lora.init_lora_weights", "adapters begin as PEFT's do.")
        }
        AdapterStart::Pissa { power_iterations } => {
            page.put("pissa_init", true);
            page.put("pissa_iter", power_iterations.map_or(-1, i64::from));
        }
    }
    let ratio = sheet.training().lora.loraplus_lr_ratio();
    if ratio != 1.0 {
        page.put("loraplus_lr_ratio", ratio);
    }
    let left = [
        ("training.lora.rank_pattern", !lora.rank_pattern.is_empty()),
        ("training.lora.alpha_pattern", !lora.alpha_pattern.is_empty()),
        ("training.lora.bias", lora.bias != AdapterBias::None),
    ];
    for (key, _) in left.into_iter().filter(|(_, is_set)| *is_set) {
        sheet.note(key, "LLaMA-Factory has none.");
    }
    match storage {
        Some(Storage::FourBit { kind, double }) => {
            page.put("quantization_method", "bnb");
            page.put("quantization_bit", 4);
            page.put("quantization_type", kind);
            page.put("double_quantization", double);
        }
        Some(Storage::EightBit) => {
            page.put("quantization_method", "bnb");
            page.put("quantization_bit", 8);
        }
        None => {}
    }
    Ok(())
}

fn put_data(sheet: &mut Sheet<'_>, page: &mut Page, is_text: bool) {
    let data = &sheet.config().data;
    sheet.carry(&["data.sequence_length", "data.packing", "data.train_on", "data.format", "data.shuffle"]);
    page.put("cutoff_len", sheet.settings().sequence_length);
    page.put("packing", data.packing());
    page.put("disable_shuffling", !data.shuffle());
    if !is_text {
        // Samples that share a sequence do not see each other.
        page.put("neat_packing", data.packing());
        page.put("train_on_prompt", data.train_on() == TrainOn::All);
        sheet.say("template: LLaMA-Factory has templates by name (llama3, qwen, gemma ...); set the model's, as samples are written by it.");
    }
    for (key, name, paths) in
        [("data.train", "dataset", &data.train), ("data.validation", "eval_dataset", &data.validation)]
    {
        if let Some(paths) = paths {
            let stems: Vec<&str> = paths.patterns().iter().map(|path| stem(path)).collect();
            page.put(name, stems.join(","));
            sheet.note(key, &format!("LLaMA-Factory knows data by names in data/dataset_info.json; add {} there, each with its file_name.", stems.join(", ")));
        }
    }
    if data.train.is_none() {
        sheet.say("data.train is not set: add dataset, a name in data/dataset_info.json.");
    }
}

/// A file's name without folder and ending.
fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split_once('.').map_or(name, |(stem, _)| stem)
}

/// Optimizers that LLaMA-Factory has beside those of `Trainer`.
fn put_optimizer(sheet: &mut Sheet<'_>, page: &mut Page) {
    let low_rank = match &sheet.settings().optimizer.kind {
        OptimizerKind::AdamMini(_) => {
            page.put("use_adam_mini", true);
            sheet.drop_notes("training.optimizer");
            return;
        }
        OptimizerKind::GaLore(settings) => ("galore", settings, None),
        OptimizerKind::Apollo(settings, channels) => ("apollo", settings, Some(channels)),
        _ => return,
    };
    let (name, settings, channels) = low_rank;
    ["optim_args", "optim_target_modules"].iter().for_each(|key| {
        page.0.shift_remove(*key);
    });
    page.put("optim", "adamw_torch");
    page.put(&format!("use_{name}"), true);
    page.put(&format!("{name}_target"), "all");
    page.put(&format!("{name}_rank"), settings.rank);
    page.put(&format!("{name}_update_interval"), settings.update_proj_gap);
    page.put(&format!("{name}_scale"), settings.scale);
    page.put_some(
        "apollo_scale_type",
        channels.map(|channels| match channels {
            ApolloChannels::Channel => "channel",
            ApolloChannels::Tensor => "tensor",
        }),
    );
}

fn put_memory(sheet: &mut Sheet<'_>, page: &mut Page) {
    // LLaMA-Factory turns checkpointing on unless it is told not to.
    let checkpointing = page.0.shift_remove("gradient_checkpointing") == Some(true.into());
    page.0.shift_remove("gradient_checkpointing_kwargs");
    page.put("disable_gradient_checkpointing", !checkpointing);
    sheet.carry(&["training.attention"]);
    match sheet.settings().attention {
        AttentionKind::Flash => page.put("flash_attn", "fa2"),
        AttentionKind::Standard => page.put("flash_attn", "disabled"),
        AttentionKind::SlidingWindow(_) | AttentionKind::BlockSparse(_) => {
            page.put("flash_attn", "fa2");
            sheet.note(
                "training.attention",
                "the pattern is not carried over; the model's own attention takes more time.",
            );
        }
    }
    let offload = sheet.settings().offload;
    let tiers = [offload.parameters, offload.gradients, offload.optimizer];
    if sheet.stage() > ZeroStage::Nothing && sheet.ranks() > 1
        || tiers.iter().any(|tier| *tier != Tier::Device)
    {
        page.put("deepspeed", deepspeed::for_trainer(sheet));
    }
    put_masters(sheet, page);
    let alpha = sheet.adapter_config().map(|lora| lora.alpha).unwrap_or(0.0);
    if alpha.fract() != 0.0 {
        sheet.note(
            "training.lora.alpha",
            &format!("LLaMA-Factory takes whole numbers; the file says {}.", whole(alpha.round())),
        );
    }
}

/// LLaMA-Factory makes trained weights f32 by itself, unless it is told to leave them in bfloat16.
fn put_masters(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.master_weights";
    sheet.drop_notes(key);
    let bf16 = sheet.training().mixed_precision().set() == Some(MixedPrecision::Bf16);
    let no_masters = sheet.training().master_weights().set() == Some(MasterWeights::None);
    if !bf16 || !no_masters || sheet.adapters().is_some() {
        return;
    }
    let stage = page.0.get("deepspeed").and_then(|own| own.pointer("/zero_optimization/stage"));
    if stage == Some(&3.into()) {
        sheet.note(
            key,
            "LLaMA-Factory refuses pure_bf16 with ZeRO 3; the file leaves it off, and weights are f32.",
        );
    } else {
        page.put("pure_bf16", true);
        sheet.note(key, "updates are rounded to the nearest and not stochastically.");
    }
}
