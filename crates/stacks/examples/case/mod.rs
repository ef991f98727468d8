//! A case of the oracle as a run: `llama-bf16-full-sdpa-off`.

use std::path::Path;

use plimsoll_model::hf_config::parse_config;
use plimsoll_stacks::{
    Adapter, Attention, Autocast, Card, Checkpointing, Loss, Optimizer, Outputs, Phase, Quantization, Run,
    Sharding, Stack, TorchType, Versions,
};
use serde_json::Value;

/// The run that the oracle made for `case`, by what its fixture says of all of them.
pub fn run_of(fixture: &Value, case: &str) -> Result<Run, String> {
    let [family, precision, method, attention, checkpointing]: [&str; 5] =
        case.split('-').collect::<Vec<_>>().try_into().map_err(|_| format!("{case} has not five parts"))?;
    let config = fixture["configs"][family].to_string();
    let model = parse_config(Path::new(case), &config, family.into()).map_err(|error| error.to_string())?;
    let number = |key: &str| fixture[key].as_u64().ok_or_else(|| format!("{key} is no number"));
    let autocast = precision == "autocast";
    let quantised = method == "qlora";
    let weights = if precision == "f32" || autocast && !quantised { TorchType::F32 } else { TorchType::Bf16 };
    let targets: &[&str] = match family {
        "phi3" => &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "gpt2" => &["c_attn", "c_proj", "c_fc"],
        "mixtral" | "qwen2moe" | "qwen3moe" | "glm4moe" => &["q_proj", "k_proj", "v_proj", "o_proj"],
        _ => &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    };
    let adapter = (method != "full").then(|| -> Result<Adapter, String> {
        Ok(Adapter {
            rank: number("rank")?,
            targets: targets.iter().map(|target| (*target).to_owned()).collect(),
            dropout: false,
            dtype: TorchType::F32,
            dora: method == "dora",
            trained_whole: Vec::new(),
        })
    });
    Ok(Run {
        stack: Stack::Plain,
        phase: Phase::Train,
        model,
        batch: number("batch")?,
        sequence: number("sequence")?,
        lengths: Vec::new(),
        padded: false,
        eval_batch: None,
        resume: false,
        merge: false,
        data_workers: 0,
        accumulation: 1,
        weights,
        autocast: autocast.then_some(Autocast { to: TorchType::Bf16, scaler: false }),
        attention: if attention == "eager" { Attention::Eager } else { Attention::Sdpa },
        checkpointing: match checkpointing {
            "off" => Checkpointing::Off,
            "reentrant" => Checkpointing::Reentrant,
            _ => Checkpointing::NonReentrant,
        },
        use_cache: false,
        adapter: adapter.transpose()?,
        quantization: quantised.then_some(Quantization::FourBit { double: true, compute: TorchType::Bf16 }),
        optimizer: Optimizer::AdamWForeach,
        optimizer_in_backward: false,
        clip: false,
        loss: Loss::Upcast,
        outputs: Outputs::UntilNextForward,
        liger_layers: false,
        devices: 1,
        shard_devices: 1,
        reduce_bucket: None,
        reduce_buckets: 1,
        sharding: Sharding::None,
        versions: Versions {
            // The oracle sends grouped heads in f32 to the math kernel, as PyTorch does before 2.14.
            torch: (2, 13),
            transformers: (5, 23),
            peft: (0, 21),
            bitsandbytes: (0, 50),
            deepspeed: (0, 18),
        },
        card: Card { name: "rtx-4090".into(), memory: 24 << 30, capability: (8, 9), multiprocessors: 128 },
        allocator: Default::default(),
    })
}
