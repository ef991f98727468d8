//! `transformers.TrainingArguments`: its keyword arguments. Argument names are those of versions 4 and 5.

use serde_json::json;

use super::sheet::{PLACES, Page, Sheet, whole};
use super::trainer::{optimizer, put_warmup, schedule};
use crate::config::{MasterWeights, MixedPrecision, TrainingLength};

pub(super) fn document(sheet: &mut Sheet<'_>) -> Page {
    sheet.head("Keyword arguments: TrainingArguments(**json.load(open(FILE))).");
    let page = arguments(sheet);
    if sheet.adapters().is_some() {
        sheet.carry(&["training.method", "training.lora.", "training.quantization"]);
        sheet.say("training.method: `plimsoll export peft` has the adapters, `plimsoll export bitsandbytes` the storage of frozen weights.");
        if sheet.training().lora.loraplus_lr_ratio() != 1.0 {
            sheet.note(
                "training.lora.loraplus_lr_ratio",
                "pass an optimizer of peft.optimizers.create_loraplus_optimizer to Trainer(optimizers=...).",
            );
        }
    }
    if sheet.ranks() > 1 || !sheet.settings().offload.is_none() {
        sheet.say("parallel and memory.offload are the launcher's: start with the file of `plimsoll export accelerate`, or set deepspeed to that of `plimsoll export deepspeed`.");
        sheet.carry(&["parallel."]);
        sheet.carry(&PLACES);
    }
    sheet.note_sequence(
        "a property of the data: cut the samples to it, or set max_length in trl's SFTConfig.",
    );
    sheet.note_attention("attn_implementation in from_pretrained");
    sheet.whole_logits("use_liger_kernel=True avoids them.");
    note_data(sheet);
    sheet.leave(&["training.", "parallel.", "data."]);
    page
}

/// Data are handed to `Trainer`, and no argument names them.
fn note_data(sheet: &mut Sheet<'_>) {
    sheet.carry(&["data.sequence_length"]);
    let data = &sheet.config().data;
    if data.train.is_some() {
        sheet.note("data.train", "hand it to Trainer(train_dataset=...).");
    }
    if data.validation.is_some() {
        sheet.note("data.validation", "hand it to Trainer(eval_dataset=...).");
    }
    if !data.shuffle() {
        sheet.note("data.shuffle", "Trainer draws in a random order; have it take a sequential sampler.");
    }
}

/// What `Trainer` is told, for every program that is built on it.
pub(super) fn arguments(sheet: &mut Sheet<'_>) -> Page {
    let mut page = Page::default();
    put_run(sheet, &mut page);
    put_precision(sheet, &mut page);
    let checkpointing = sheet.full_checkpointing();
    page.put("gradient_checkpointing", checkpointing);
    if checkpointing {
        page.put("gradient_checkpointing_kwargs", json!({ "use_reentrant": false }));
    }
    put_optimizer(sheet, &mut page);
    put_output(sheet, &mut page);
    put_workers(sheet, &mut page);
    let data = &sheet.config().data;
    sheet.carry(&["data.persistent_workers"]);
    if data.workers() > 0 {
        page.put("dataloader_persistent_workers", data.persistent_workers());
    }
    page
}

/// Workers that make batches ahead. Batches ahead without workers are refused there.
pub(super) fn put_workers(sheet: &mut Sheet<'_>, page: &mut Page) {
    let data = &sheet.config().data;
    sheet.carry(&["data.num_workers", "data.prefetch_factor"]);
    page.put("dataloader_num_workers", data.workers());
    if data.workers() > 0 {
        page.put("dataloader_prefetch_factor", data.prefetch_factor());
    }
}

fn put_run(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.batch_size", "training.gradient_accumulation_steps", "training.seed"]);
    page.put("output_dir", sheet.config().output.dir());
    page.put("per_device_train_batch_size", sheet.settings().batch_size);
    page.put("gradient_accumulation_steps", sheet.plan.choice.accumulation);
    match sheet.length() {
        TrainingLength::Steps(steps) => page.put("max_steps", steps),
        TrainingLength::Epochs(epochs) => page.put("num_train_epochs", epochs),
    }
    page.put("seed", sheet.training().seed());
    sheet.carry(&["data.seed"]);
    page.put_some("data_seed", sheet.config().data.seed);
}

fn put_precision(sheet: &mut Sheet<'_>, page: &mut Page) {
    let precision = sheet.precision();
    page.put("bf16", matches!(precision, MixedPrecision::Bf16 | MixedPrecision::Fp8));
    page.put("fp16", precision == MixedPrecision::Fp16);
    if precision == MixedPrecision::Fp8 {
        sheet.note(
            "training.mixed_precision",
            "the arguments say bf16; start with mixed_precision: fp8 of `plimsoll export accelerate`.",
        );
    }
    sheet.carry(&["training.master_weights"]);
    let is_bf16 = precision == MixedPrecision::Bf16 && sheet.adapters().is_none();
    match sheet.training().master_weights().set() {
        Some(MasterWeights::None) if is_bf16 => sheet.note("training.master_weights", "load the model in bfloat16, so that there are no f32 weights; updates are then rounded to the nearest and not stochastically."),
        _ if is_bf16 => sheet.say("training.master_weights: load the model in float32; with bf16=True its products are in bfloat16. Loaded in bfloat16 it would have no f32 weights."),
        _ => {}
    }
    if precision != MixedPrecision::F32 {
        sheet.carry(&["training.gradient_dtype"]);
    }
}

fn put_optimizer(sheet: &mut Sheet<'_>, page: &mut Page) {
    let own = optimizer(sheet);
    page.put("optim", own.name);
    page.put_some("optim_args", own.joined_args());
    page.put_some("optim_target_modules", own.targets);
    page.put("learning_rate", sheet.learning_rate());
    sheet.carry(&["training.weight_decay", "training.decay_norms_and_biases"]);
    page.put("weight_decay", sheet.settings().optimizer.weight_decay);
    if sheet.training().decay_norms_and_biases() {
        sheet.note("training.decay_norms_and_biases", "Trainer never decays norms and biases.");
    }
    if let Some([first, second]) = own.betas {
        page.put("adam_beta1", first);
        page.put("adam_beta2", second);
    }
    page.put_some("adam_epsilon", own.epsilon);
    page.put("max_grad_norm", whole(sheet.clipping()));
    let (kind, further) = schedule(sheet);
    page.put("lr_scheduler_type", kind);
    if !further.0.is_empty() {
        page.put("lr_scheduler_kwargs", further);
    }
    put_warmup(sheet, page);
}

fn put_output(sheet: &mut Sheet<'_>, page: &mut Page) {
    let output = &sheet.config().output;
    page.put("logging_steps", output.logging_steps());
    if output.tensorboard() {
        page.put("report_to", "tensorboard");
    }
    match output.save_steps() {
        0 => page.put("save_strategy", "no"),
        steps => {
            page.put("save_strategy", "steps");
            page.put("save_steps", steps);
            page.put("save_total_limit", output.save_total_limit());
        }
    }
    let batch = sheet.evaluated();
    if batch.is_some() && output.eval_steps() > 0 {
        page.put("eval_strategy", "steps");
        page.put("eval_steps", output.eval_steps());
    }
    page.put_some("per_device_eval_batch_size", batch);
}
