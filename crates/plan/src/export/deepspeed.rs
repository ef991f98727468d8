//! DeepSpeed's configuration: ZeRO with its offload and buckets, precision, optimizer, scheduler, clipping, batch.

use plimsoll_memory::Tier;
use plimsoll_step::{LossScaling, OptimizerKind, ZeroStage};

use serde_json::json;

use super::sheet::{Page, Sheet, Warmup, whole};
use crate::config::{GradientDtype, LrSchedule, MasterWeights, MixedPrecision};

pub(super) fn document(sheet: &mut Sheet<'_>) -> Page {
    sheet.head("Give the file to deepspeed.initialize(config=...), or to transformers.TrainingArguments(deepspeed=...) with the arguments of `plimsoll export transformers`.");
    let mut page = Page::default();
    put_batch(sheet, &mut page);
    put_precision(sheet, &mut page);
    page.put("gradient_clipping", sheet.clipping());
    page.put("zero_optimization", zero(sheet));
    let offload = sheet.settings().offload;
    if [offload.parameters, offload.optimizer].contains(&Tier::Disk) {
        // DeepSpeed's own defaults, written out because they are what one tunes for a disk.
        let mut aio = Page::default();
        aio.put("block_size", 1_048_576);
        aio.put("queue_depth", 8);
        aio.put("single_submit", false);
        aio.put("overlap_events", true);
        page.put("aio", aio);
    }
    put_optimizer(sheet, &mut page);
    put_scheduler(sheet, &mut page);
    if sheet.full_checkpointing() {
        sheet.say("training.gradient_checkpointing is the model's, not DeepSpeed's: call model.gradient_checkpointing_enable(), or set gradient_checkpointing in TrainingArguments.");
    }
    if sheet.adapters().is_some() {
        sheet.say("training.method and training.lora are not DeepSpeed's: `plimsoll export peft` has the adapters, `plimsoll export bitsandbytes` the storage of frozen weights.");
        sheet.carry(&["training.method", "training.lora.", "training.quantization"]);
    }
    sheet.carry(&["training.steps", "training.epochs", "training.seed"]);
    sheet.whole_logits("A fused loss (Liger's) avoids them.");
    leave_mesh(sheet);
    sheet.leave(&["training.", "parallel."]);
    page
}

/// What `Trainer` fills in from its own arguments is `auto`.
pub(super) fn for_trainer(sheet: &mut Sheet<'_>) -> Page {
    let mut page = Page::default();
    for key in [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ] {
        page.put(key, "auto");
    }
    page.put("bf16", json!({ "enabled": "auto" }));
    page.put("fp16", json!({ "enabled": "auto" }));
    put_gradient_type(sheet, &mut page);
    page.put("zero_optimization", zero(sheet));
    // `Trainer` makes the optimizer, which may be any.
    page.put("zero_allow_untested_optimizer", true);
    if sheet.settings().offload.optimizer != Tier::Device {
        page.put("zero_force_ds_cpu_optimizer", false);
    }
    page
}

/// Ways of the mesh that DeepSpeed's file knows nothing of.
fn leave_mesh(sheet: &mut Sheet<'_>) {
    let mesh = sheet.settings().ranks.mesh;
    sheet.carry(&["parallel.data_parallel", "parallel.zero_stage", "parallel.sharding_strategy"]);
    sheet.carry(&["parallel.sequence_parallel", "parallel.pipeline_schedule"]);
    if mesh.tensor > 1 {
        sheet.note("parallel.tensor_parallel", "DeepSpeed cuts matrices by its AutoTP (tensor_parallel.autotp_size) or with Megatron; the file is for the ranks that hold the same weights.");
    }
    if mesh.expert > 1 {
        sheet.note(
            "parallel.expert_parallel",
            "experts are divided in the program (deepspeed.moe, ep_size); here each rank has all of them.",
        );
    }
    if mesh.pipeline > 1 {
        sheet.note(
            "parallel.pipeline_parallel",
            "stages are made in the program (deepspeed.pipe.PipelineModule), and ZeRO 2 and 3 go with none.",
        );
    }
    if mesh.context > 1 {
        sheet.note(
            "parallel.context_parallel",
            "DeepSpeed shares sequences by heads (Ulysses), in the program.",
        );
    }
    if sheet.settings().sharding.among.is_some() {
        sheet.note("parallel.shard_size", "the file shares out over all ranks; groups of ranks are MiCS (deepspeed.zero.MiCS_Init) or zero_hpz_partition_size.");
    }
}

/// The batch of a step, of which DeepSpeed checks the product.
fn put_batch(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.batch_size", "training.gradient_accumulation_steps"]);
    let (micro, accumulation) = (sheet.settings().batch_size, sheet.plan.choice.accumulation);
    let ranks = u64::from(sheet.data_ranks());
    page.put("train_batch_size", micro.saturating_mul(accumulation).saturating_mul(ranks));
    page.put("train_micro_batch_size_per_gpu", micro);
    page.put("gradient_accumulation_steps", accumulation);
}

fn put_precision(sheet: &mut Sheet<'_>, page: &mut Page) {
    let precision = sheet.precision();
    let masters = sheet.training().master_weights().set();
    let mut own = Page::default();
    own.put("enabled", precision != MixedPrecision::F32);
    match precision {
        MixedPrecision::F32 => page.put("bf16", own),
        MixedPrecision::Fp16 => {
            let scaling = sheet.settings().loss_scaling.unwrap_or_default();
            let LossScaling { initial, growth_interval, .. } = scaling;
            own.put("loss_scale", 0);
            own.put("initial_scale_power", initial.log2().round() as i64);
            own.put("loss_scale_window", growth_interval);
            own.put("hysteresis", 1);
            page.put("fp16", own);
        }
        MixedPrecision::Bf16 | MixedPrecision::Fp8 => {
            if precision == MixedPrecision::Fp8 {
                sheet.note(
                    "training.mixed_precision",
                    "the file says bf16; 8-bit floats are made by the program (Transformer Engine, torchao).",
                );
            }
            if masters == Some(MasterWeights::None) && sheet.adapters().is_none() {
                own.put("bf16_master_weights_and_grads", true);
                sheet.note("training.master_weights", "the file says bf16_master_weights_and_grads (DeepSpeed 0.18 or later), which rounds updates to the nearest and not stochastically.");
            }
            page.put("bf16", own);
        }
    }
    sheet.carry(&["training.master_weights"]);
    put_gradient_type(sheet, page);
}

/// The type that micro-batches are summed in, beside masters. The engine's own is that of the weights.
fn put_gradient_type(sheet: &mut Sheet<'_>, page: &mut Page) {
    sheet.carry(&["training.gradient_dtype"]);
    let masters = sheet.training().master_weights().set();
    let gradients = sheet.training().gradient_dtype().set();
    if sheet.precision() != MixedPrecision::F32 && masters != Some(MasterWeights::None) {
        let mut types = Page::default();
        types.put("grad_accum_dtype", if gradients == Some(GradientDtype::Bf16) { "bf16" } else { "fp32" });
        page.put("data_types", types);
    }
}

/// `zero_optimization`. DeepSpeed offloads the optimizer from stage 1 on, and weights, and anything to a disk, under stage 3 alone.
pub(super) fn zero(sheet: &mut Sheet<'_>) -> Page {
    sheet.carry(&["memory.offload.optimizer", "memory.offload.parameters"]);
    let offload = sheet.settings().offload;
    let said = sheet.stage() as u64;
    let on_disk = [offload.optimizer, offload.parameters, offload.gradients].contains(&Tier::Disk);
    let needed = match (offload.parameters, offload.gradients, offload.optimizer) {
        (Tier::Device, Tier::Device, Tier::Device) => 0,
        _ if on_disk || offload.parameters != Tier::Device => 3,
        (_, Tier::Host, _) => 2,
        _ => 1,
    };
    let stage = said.max(needed);
    if stage > said {
        let what = if needed == 3 {
            "weights, and anything to a disk, under stage 3 alone"
        } else {
            "optimizer states under ZeRO alone"
        };
        sheet.say(format!(
            "zero_optimization.stage is {stage}, and parallel.zero_stage {said}: DeepSpeed offloads {what}."
        ));
    }
    let hidden = sheet.plan.spec.hidden_size;
    let bucket = hidden.saturating_mul(hidden);
    let mut page = Page::default();
    page.put("stage", stage);
    if stage == 0 {
        return page;
    }
    let asked = sheet.config().parallel.overlap_communication().set();
    page.put("overlap_comm", asked.unwrap_or(true) && sheet.data_ranks() > 1);
    sheet.carry(&["parallel.overlap_communication"]);
    page.put("contiguous_gradients", true);
    page.put("reduce_bucket_size", bucket);
    if stage < 3 {
        page.put("allgather_bucket_size", bucket);
    } else {
        // As transformers fills them in: shares of the square of the hidden size.
        page.put("stage3_prefetch_bucket_size", (bucket as f64 * 0.9) as u64);
        page.put("stage3_param_persistence_threshold", hidden.saturating_mul(10));
        page.put("stage3_gather_16bit_weights_on_model_save", true);
    }
    if let Some(device) = device(offload.optimizer) {
        page.put("offload_optimizer", offloaded(sheet, offload.optimizer, device, &[("buffer_count", 4)]));
    }
    if offload.gradients != Tier::Device && offload.gradients == offload.optimizer {
        // They go where the optimizer is.
        sheet.carry(&["memory.offload.gradients"]);
    } else if offload.gradients != Tier::Device || offload.optimizer != Tier::Device {
        sheet.note("memory.offload.gradients", "gradients go with the optimizer in DeepSpeed.");
    }
    if let Some(device) = device(offload.parameters) {
        // A buffer takes the largest tensor.
        let elements = sheet.plan.spec.parameters().iter().map(|p| p.elements()).max().unwrap_or(0);
        let buffers = [("buffer_count", 5), ("buffer_size", elements.max(100_000_000))];
        page.put("offload_param", offloaded(sheet, offload.parameters, device, &buffers));
    }
    if offload.activations != Tier::Device {
        sheet.note("memory.offload.activations", "activations are sent to the host by activation_checkpointing.cpu_checkpointing, for models that checkpoint by deepspeed.checkpointing.");
    }
    page
}

fn device(tier: Tier) -> Option<&'static str> {
    match tier {
        Tier::Device => None,
        Tier::Host => Some("cpu"),
        Tier::Disk => Some("nvme"),
    }
}

fn offloaded(sheet: &Sheet<'_>, tier: Tier, device: &str, buffers: &[(&str, u64)]) -> Page {
    let mut page = Page::default();
    page.put("device", device);
    page.put("pin_memory", true);
    if tier == Tier::Disk {
        page.put("nvme_path", sheet.config().disk_path());
        buffers.iter().for_each(|(key, number)| page.put(key, number));
    }
    page
}

/// Optimizers that DeepSpeed has or takes from torch.optim; for others the program passes its own.
fn put_optimizer(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.optimizer";
    sheet.carry(&[key, "training.optimizer_options.", "training.adam_beta1", "training.adam_beta2"]);
    sheet.carry(&["training.adam_epsilon", "training.weight_decay"]);
    let mut params = Page::default();
    params.put("lr", sheet.learning_rate());
    let settings = &sheet.settings().optimizer;
    let kind = match &settings.kind {
        OptimizerKind::AdamW(adam) | OptimizerKind::AdamWBf16(adam) => {
            if matches!(settings.kind, OptimizerKind::AdamWBf16(_)) {
                sheet.note(key, "the file says AdamW, with f32 states: 8 bytes a parameter and not 4.");
            }
            params.put("betas", [adam.beta1, adam.beta2]);
            params.put("eps", adam.epsilon);
            Some("AdamW")
        }
        OptimizerKind::Lion(lion) => {
            params.put("betas", [lion.beta1, lion.beta2]);
            Some("Lion")
        }
        OptimizerKind::Sgd(sgd) => {
            params.put("momentum", sgd.momentum);
            params.put("dampening", sgd.dampening);
            params.put("nesterov", sgd.nesterov);
            Some("SGD")
        }
        OptimizerKind::AdamW8bit(..) => other(sheet, "bitsandbytes.optim.AdamW8bit"),
        OptimizerKind::Lion8bit(..) => other(sheet, "bitsandbytes.optim.Lion8bit"),
        OptimizerKind::AdamMini(_) => other(sheet, "adam_mini.Adam_mini"),
        OptimizerKind::Adafactor(_) => other(sheet, "transformers.Adafactor"),
        OptimizerKind::AdaLomo(_) => other(sheet, "lomo_optim.AdaLomo"),
        OptimizerKind::GaLore(_) => other(sheet, "galore_torch.GaLoreAdamW"),
        OptimizerKind::Apollo(..) => other(sheet, "apollo_torch.APOLLOAdamW"),
    };
    params.put("weight_decay", settings.weight_decay);
    let is_own = matches!(kind, Some("AdamW" | "Lion"));
    if let Some(kind) = kind {
        let mut optimizer = Page::default();
        optimizer.put("type", kind);
        optimizer.put("params", params);
        page.put("optimizer", optimizer);
    }
    if !is_own {
        page.put("zero_allow_untested_optimizer", true);
        if sheet.settings().offload.optimizer != Tier::Device {
            page.put("zero_force_ds_cpu_optimizer", false);
        }
    }
    if !settings.decay_norms_and_biases && settings.weight_decay > 0.0 && kind.is_some() {
        sheet.say("training.weight_decay: DeepSpeed decays norms and biases too, unless the program gives it groups of parameters.");
    }
    sheet.carry(&["training.decay_norms_and_biases"]);
}

fn other(sheet: &mut Sheet<'_>, class: &str) -> Option<&'static str> {
    let sharded = if sheet.stage() >= ZeroStage::States {
        " ZeRO cuts its states as flat runs of elements."
    } else {
        ""
    };
    sheet.note("training.optimizer", &format!("DeepSpeed has none of that name; the file says no optimizer, so that the program passes its own: {class}.{sharded}"));
    None
}

fn put_scheduler(sheet: &mut Sheet<'_>, page: &mut Page) {
    let key = "training.lr_schedule";
    sheet.carry(&[key, "training.min_lr_ratio", "training.decay_ratio"]);
    let (steps, warmup, peak) = (sheet.steps(), sheet.warmup(), sheet.learning_rate());
    let (form, least) = (sheet.training().lr_schedule(), sheet.training().min_lr_ratio());
    let Warmup::Steps(rise) = warmup else {
        return sheet.note("training.warmup_ratio", "the file has no scheduler, as training.epochs does not say the number of steps. Set training.steps.");
    };
    let mut params = Page::default();
    let put_rise = |params: &mut Page| {
        params.put("warmup_min_lr", 0);
        params.put("warmup_max_lr", peak);
    };
    let kind = match (form, steps) {
        (LrSchedule::Constant, _) if rise == 0 => return,
        (LrSchedule::Constant, _) => {
            put_rise(&mut params);
            "WarmupLR"
        }
        (LrSchedule::Linear, Some(steps)) => {
            if least > 0.0 {
                sheet.note("training.min_lr_ratio", "DeepSpeed's linear decay ends at 0.");
            }
            params.put("total_num_steps", steps);
            put_rise(&mut params);
            "WarmupDecayLR"
        }
        (LrSchedule::Cosine, Some(steps)) => {
            params.put("total_num_steps", steps);
            params.put("warmup_min_ratio", 0);
            params.put("cos_min_ratio", whole(least));
            "WarmupCosineLR"
        }
        (LrSchedule::Linear | LrSchedule::Cosine, None) => {
            return sheet.note(key, "the file has no scheduler, as training.epochs does not say the number of steps: set training.steps, or leave the schedule to the program.");
        }
        (LrSchedule::InverseSqrt | LrSchedule::Wsd, _) => {
            return sheet.note(key, "DeepSpeed has none of that form; the file has no scheduler, so that the program passes its own.");
        }
    };
    // DeepSpeed takes no warm-up of 0 steps; its first step is at the peak after one.
    params.put("warmup_num_steps", rise.max(1));
    params.put("warmup_type", "linear");
    let mut scheduler = Page::default();
    scheduler.put("type", kind);
    scheduler.put("params", params);
    page.put("scheduler", scheduler);
}
