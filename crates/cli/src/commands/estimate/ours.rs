//! What Plimsoll would need for the same training on the same card.

use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{ModelOrigin, TrainingPlan};
use plimsoll_stacks::{Answer, Checkpointing, Optimizer, Phase, Quantization, Run, TorchType};
use serde::Serialize;

/// A plan of the same.
#[derive(Serialize)]
pub struct Ours {
    /// Arena and what is outside of it.
    pub device_used_bytes: u64,
    /// Whether that fits.
    pub fits: bool,
    /// Assignments that make the plan.
    pub set: Vec<String>,
}

/// The plan; `None` where there is none of the same: inference, several devices, what is not trained here.
pub fn plan(answer: &Answer) -> Option<Ours> {
    let (run, target) = (&answer.resolved.run, &answer.resolved.target);
    if run.phase != Phase::Train || run.devices > 1 {
        return None;
    }
    let mut set = settings(run)?;
    set.push(format!("memory.device_budget={}B", target.device.memory.0));
    let config = RawConfig::from_overrides(set.iter().map(String::as_str)).ok()?;
    let origin = ModelOrigin::Catalogue(Box::new(run.model.clone()));
    let machine = target.machine(plimsoll_train::host_bytes_per_token(&config));
    let plan = TrainingPlan::in_brief(&config, &origin, &machine).ok()?;
    Some(Ours {
        device_used_bytes: plan.peak_bytes().saturating_add(plan.overhead_bytes),
        fits: plan.fits(),
        set,
    })
}

/// The same training in our keys. Where tensors live is left to the planner.
fn settings(run: &Run) -> Option<Vec<String>> {
    let optimizer = match run.optimizer {
        Optimizer::AdamWForLoop
        | Optimizer::AdamWForeach
        | Optimizer::AdamWFused
        | Optimizer::PagedAdamW32bit => "adamw",
        Optimizer::AdamW8bit { .. } | Optimizer::TorchaoAdamW8bit => "adamw_8bit",
        Optimizer::Sgd { .. } => "sgd",
        Optimizer::Lion { eight_bit: false, .. } => "lion",
        Optimizer::Lion { eight_bit: true, .. } => "lion_8bit",
        Optimizer::Adafactor => "adafactor",
    };
    let half = run.autocast.map_or(run.weights, |autocast| autocast.to);
    let precision = match half {
        TorchType::F32 => "f32",
        TorchType::F16 => "fp16",
        _ => "bf16",
    };
    let mut set = vec![
        format!("training.batch_size={}", run.batch),
        format!("training.gradient_accumulation_steps={}", run.accumulation),
        format!("data.sequence_length={}", run.sequence),
        format!("training.optimizer={optimizer}"),
        format!("training.mixed_precision={precision}"),
    ];
    let is_kept = run.checkpointing == Checkpointing::Off;
    set.push(format!("training.gradient_checkpointing={}", if is_kept { "none" } else { "full" }));
    // Weights of two bytes, and nothing of four behind them.
    if run.adapter.is_none() && run.weights == TorchType::Bf16 {
        set.push("training.master_weights=none".to_owned());
    }
    match (&run.adapter, run.quantization) {
        (None, _) => set.push("training.method=full".to_owned()),
        (Some(adapter), quantization) => {
            let quantised = match quantization {
                None => None,
                Some(Quantization::FourBit { .. }) => Some("nf4"),
                Some(Quantization::Int8) => Some("int8"),
            };
            set.push(format!("training.method={}", if quantised.is_some() { "qlora" } else { "lora" }));
            set.extend(quantised.map(|quantised| format!("training.quantization={quantised}")));
            set.push(format!("training.lora.rank={}", adapter.rank));
            set.push(format!("training.lora.target_modules=[{}]", adapter.targets.join(", ")));
        }
    }
    Some(set)
}
