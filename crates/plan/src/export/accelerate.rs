//! What `accelerate config` writes: ranks, FSDP (version 2), precision. The batch and the optimizer belong to the training script.

use plimsoll_memory::Tier;
use plimsoll_step::ZeroStage;
use serde_json::json;

use super::sheet::{Page, Sheet};
use crate::config::MixedPrecision;

pub(super) fn document(sheet: &mut Sheet<'_>) -> Page {
    sheet.head("Start with: accelerate launch --config_file FILE train.py. The batch, the optimizer and the schedule are the script's: `plimsoll export transformers` has them.");
    let mesh = sheet.settings().ranks.mesh;
    let offload = sheet.settings().offload;
    let shares = sheet.ranks() > 1 && (sheet.stage() > ZeroStage::Nothing || mesh.size() > mesh.data);
    let is_offloaded =
        [offload.parameters, offload.gradients, offload.optimizer].iter().any(|tier| *tier != Tier::Device);
    let is_fsdp = shares || is_offloaded;
    let mut page = Page::default();
    page.put("compute_environment", "LOCAL_MACHINE");
    page.put("debug", false);
    page.put(
        "distributed_type",
        match sheet.ranks() {
            _ if is_fsdp => "FSDP",
            1 => "NO",
            _ => "MULTI_GPU",
        },
    );
    let precision = sheet.precision();
    page.put(
        "mixed_precision",
        match precision {
            MixedPrecision::F32 => "no",
            MixedPrecision::Bf16 => "bf16",
            MixedPrecision::Fp16 => "fp16",
            MixedPrecision::Fp8 => "fp8",
        },
    );
    if precision == MixedPrecision::Fp8 {
        page.put("fp8_config", json!({ "backend": "AO" }));
    }
    page.put("num_processes", sheet.ranks());
    page.put("num_machines", sheet.machines);
    page.put("machine_rank", 0);
    page.put("main_training_function", "main");
    page.put("rdzv_backend", "static");
    page.put("same_network", true);
    page.put("use_cpu", false);
    if sheet.machines > 1 {
        sheet.say("machine_rank, main_process_ip and main_process_port are each machine's own: give them on its command line.");
    }
    if is_fsdp {
        let fsdp = fsdp(sheet, is_offloaded);
        page.put("fsdp_config", fsdp);
        put_mesh(sheet, &mut page);
    }
    if !is_fsdp && sheet.full_checkpointing() {
        sheet.say("training.gradient_checkpointing: set gradient_checkpointing in TrainingArguments.");
    }
    sheet.carry(&["parallel.data_parallel", "parallel.zero_stage", "parallel.sharding_strategy"]);
    sheet.carry(&["parallel.pipeline_schedule", "training.gradient_checkpointing"]);
    if mesh.pipeline > 1 {
        sheet.note(
            "parallel.pipeline_parallel",
            "accelerate has no stages with FSDP; the file starts a process for each rank all the same.",
        );
    }
    if sheet.adapters().is_some_and(|adapters| !adapters.weight_types.is_empty()) && is_fsdp {
        sheet.say("Quantised weights are shared out only where bnb_4bit_quant_storage is the type of the others, as `plimsoll export bitsandbytes` writes it for ZeRO 3.");
    }
    sheet.leave(&["parallel.", "training.mixed_precision"]);
    page
}

fn fsdp(sheet: &mut Sheet<'_>, is_offloaded: bool) -> Page {
    let stage = sheet.stage();
    match stage {
        ZeroStage::Nothing => sheet.say("parallel.zero_stage (0): FSDP shares out optimizer states and gradients all the same, and each rank then holds less."),
        ZeroStage::States => sheet.note("parallel.zero_stage", "FSDP shares out gradients with the optimizer states (ZeRO 2)."),
        ZeroStage::Gradients | ZeroStage::Weights => {}
    }
    let mut page = Page::default();
    page.put("fsdp_version", 2);
    page.put("fsdp_reshard_after_forward", stage == ZeroStage::Weights);
    page.put("fsdp_offload_params", is_offloaded);
    page.put("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP");
    page.put("fsdp_state_dict_type", "SHARDED_STATE_DICT");
    page.put("fsdp_cpu_ram_efficient_loading", true);
    let checkpointing = sheet.full_checkpointing();
    page.put("fsdp_activation_checkpointing", checkpointing);
    if checkpointing {
        sheet.say("training.gradient_checkpointing is FSDP's here: leave gradient_checkpointing of TrainingArguments at false.");
    }
    if is_offloaded {
        let offload = sheet.settings().offload;
        let kinds = [
            ("memory.offload.parameters", offload.parameters),
            ("memory.offload.gradients", offload.gradients),
            ("memory.offload.optimizer", offload.optimizer),
        ];
        for (key, tier) in kinds {
            match tier {
                Tier::Host => sheet.carry(&[key]),
                Tier::Disk => {
                    sheet.note(key, "FSDP offloads to the host alone, and the host has to have room for it.")
                }
                Tier::Device => {
                    sheet.note(key, "FSDP offloads weights, gradients and optimizer states together.")
                }
            }
        }
    }
    page
}

/// The ways in which ranks divide the work.
fn put_mesh(sheet: &mut Sheet<'_>, page: &mut Page) {
    let mesh = sheet.settings().ranks.mesh;
    let sharers = sheet.settings().sharding.among.unwrap_or(mesh.data).min(mesh.data).max(1);
    sheet.carry(&["parallel.shard_size", "parallel.tensor_parallel", "parallel.context_parallel"]);
    if mesh.tensor == 1 && mesh.context == 1 && sharers == mesh.data {
        return;
    }
    let mut ways = Page::default();
    ways.put("parallelism_config_dp_replicate_size", mesh.data / sharers);
    ways.put("parallelism_config_dp_shard_size", sharers);
    ways.put("parallelism_config_tp_size", mesh.tensor);
    ways.put("parallelism_config_cp_size", mesh.context);
    page.put("parallelism_config", ways);
}
