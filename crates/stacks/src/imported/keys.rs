//! Keys of other programs, and what each says of a request.

use std::collections::BTreeMap;

use plimsoll_plan::config::{DEEPSPEED, ForeignKey};
use serde_json::{Map, Value, json};

/// A request that is being put together.
pub struct Draft {
    keys: Map<String, Value>,
    /// Which key of the file each was said by, where one says it.
    said: BTreeMap<String, ForeignKey>,
    /// The key that is taken.
    at: Option<ForeignKey>,
    lora: Map<String, Value>,
    /// What torchtune adapts beside what it lists of attention.
    adapted: Vec<&'static str>,
    /// Whether FSDP is on, with or without a strategy.
    has_fsdp: bool,
    /// Whether the trainer evaluates; the size of its batches alone says nothing.
    evaluates: bool,
    /// How parameters are trained, where a key says it: `lora`, `full`.
    method: Option<String>,
    /// 16 bits for everything, which goes over autocast.
    pure_half: Option<&'static str>,
    /// FSDP's switch of checkpointing. Each of the two switches turns it on, and neither turns the other one off.
    fsdp_checkpoints: bool,
    /// Sequences of a step on all devices together.
    train_batch: Option<(u64, ForeignKey)>,
    /// What the last key should have been, where it is no number.
    expected: Option<&'static str>,
    program: &'static str,
}

/// What the keys of a file come to.
#[derive(Default)]
pub struct Settled {
    pub keys: Map<String, Value>,
    /// Which key of the file each was said by; what the program does by itself has none.
    pub said: BTreeMap<String, ForeignKey>,
    /// The kinds of 16 bits that are switched off, where nothing else says the precision.
    pub off: Vec<&'static str>,
    /// DeepSpeed's `train_batch_size`, and the key.
    pub train_batch: Option<(u64, ForeignKey)>,
}

/// What a key does to a draft; `None` where its value says nothing.
pub type Takes = fn(&mut Draft, &str) -> Option<()>;

pub fn is_true(value: &str) -> bool {
    ["true", "yes", "1"].contains(&value.to_ascii_lowercase().as_str())
}

fn is_false(value: &str) -> bool {
    ["false", "no", "0"].contains(&value.to_ascii_lowercase().as_str())
}

/// Words for a number that is not said; a variable of a shell is not known here.
fn is_unsaid(value: &str) -> bool {
    value.starts_with('$') || ["", "~", "auto", "null", "none"].contains(&value.to_ascii_lowercase().as_str())
}

/// A whole number; JSON and YAML may write it as `5e8`.
fn whole_number(value: &str) -> Option<u64> {
    let digits = value.replace('_', "");
    let of_float = || {
        let number: f64 = digits.parse().ok()?;
        ((0.0..1e15).contains(&number) && number.fract() == 0.0).then_some(number as u64)
    };
    digits.parse().ok().or_else(of_float)
}

impl Draft {
    pub fn new(program: &'static str, has_fsdp: bool) -> Draft {
        Draft {
            keys: Map::new(),
            said: BTreeMap::new(),
            at: None,
            lora: Map::new(),
            adapted: Vec::new(),
            has_fsdp,
            evaluates: false,
            method: None,
            pure_half: None,
            fsdp_checkpoints: false,
            train_batch: None,
            expected: None,
            program,
        }
    }

    /// The key that is taken from now on.
    pub fn at(&mut self, key: &ForeignKey) {
        self.at = Some(key.clone());
    }

    /// What the key that was taken last should have been, where its value is no number.
    pub fn expected(&mut self) -> Option<&'static str> {
        self.expected.take()
    }

    /// A key that the program wants and does not have: axolotl has no rank of its own.
    pub fn lacks(&self) -> Option<&'static str> {
        let adapts = matches!(self.method.as_deref(), Some("lora" | "qlora"));
        (self.program == "axolotl" && adapts && !self.lora.contains_key("rank")).then_some("lora_r")
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) -> Option<()> {
        self.keys.insert(key.to_owned(), value.into());
        self.say(key)
    }

    fn say(&mut self, key: &str) -> Option<()> {
        self.said.extend(self.at.clone().map(|at| (key.to_owned(), at)));
        Some(())
    }

    fn set_lora(&mut self, key: &str, value: impl Into<Value>) -> Option<()> {
        self.say("lora");
        self.lora.insert(key.to_owned(), value.into());
        Some(())
    }

    fn number(&mut self, key: &str, value: &str) -> Option<()> {
        let value = self.whole(value)?;
        self.set(key, value)
    }

    fn whole(&mut self, value: &str) -> Option<u64> {
        self.known(value, whole_number(value), "a whole number")
    }

    fn decimal(&mut self, value: &str) -> Option<f64> {
        let number = value.parse().ok().filter(|number: &f64| number.is_finite());
        self.known(value, number, "a number")
    }

    /// The number that a value is; what is none is an error, and no default.
    fn known<T>(&mut self, value: &str, number: Option<T>, expected: &'static str) -> Option<T> {
        if number.is_none() && !is_unsaid(value) {
            self.expected = Some(expected);
        }
        number
    }

    fn trained_as(&mut self, method: &str) -> Option<()> {
        self.method = Some(method.to_owned());
        Some(())
    }

    fn batch_of_all(&mut self, value: &str) -> Option<()> {
        self.train_batch = self.whole(value).zip(self.at.clone());
        self.train_batch.as_ref().map(|_| ())
    }

    /// Sets a key where a switch is on; a switch that is off says nothing else.
    fn when(&mut self, on: &str, key: &str, value: &str) -> Option<()> {
        if is_true(on) { self.set(key, value) } else { Some(()) }
    }

    /// 16 bits: autocast in a trainer, the type of everything in DeepSpeed's engine.
    fn half(&mut self, on: &str, kind: &'static str) -> Option<()> {
        match self.program {
            // axolotl's word for no autocast.
            _ if on == "full" => self.purely("true", kind),
            _ if on != "auto" && !is_true(on) && !is_false(on) => None,
            DEEPSPEED => self.when(on, "precision", kind),
            _ => self.when(on, "precision", &format!("{kind}-amp")),
        }
    }

    fn purely(&mut self, on: &str, kind: &'static str) -> Option<()> {
        if is_true(on) {
            self.pure_half = Some(kind);
            self.say("precision");
        }
        Some(())
    }

    fn adapt(&mut self, on: &str, part: &'static str) -> Option<()> {
        self.adapted.extend(is_true(on).then_some(part));
        Some(())
    }

    fn offload(&mut self, device: &str, what: &str) -> Option<()> {
        if device.eq_ignore_ascii_case("none") {
            return Some(());
        }
        let both = self.keys.get("offload").is_some_and(|known| known != what);
        self.set("offload", if both { "all" } else { what })
    }

    fn set_if_absent(&mut self, key: &str, value: impl Into<Value>) {
        if !self.keys.contains_key(key) {
            self.set(key, value);
        }
    }

    /// Whether there are adapters: those whose method is not LoRA have no rank. LLaMA-Factory makes adapters of rank 8 in all linear
    /// layers where nothing is said.
    fn has_lora(&mut self) -> bool {
        if self.program == "LLaMA-Factory" {
            if self.method.as_deref() == Some("full") {
                return false;
            }
            self.lora.entry("rank").or_insert(json!(8));
            self.lora.entry("target_modules").or_insert(json!(["all-linear"]));
        }
        self.lora.contains_key("rank")
    }

    /// The precision where switches alone say it: all that there are are off. Answers which kinds are.
    fn settle_precision(&mut self, off: Vec<(&'static str, &ForeignKey)>) -> Vec<&'static str> {
        if let Some(kind) = self.pure_half {
            self.set("precision", kind);
        }
        let Some((_, first)) = off.first().filter(|_| !self.keys.contains_key("precision")) else {
            return Vec::new();
        };
        self.set("precision", "f32");
        self.said.insert("precision".to_owned(), (*first).clone());
        off.into_iter().map(|(kind, _)| kind).collect()
    }

    /// The keys, with what the program does by itself; `off` are the switches of 16 bits, where all of them are off.
    pub fn finish(mut self, off: Vec<(&'static str, &ForeignKey)>) -> Settled {
        self.at = None;
        let has_lora = self.has_lora();
        let off = self.settle_precision(off);
        if self.fsdp_checkpoints {
            self.set("gradient_checkpointing", true);
        }
        if let Some(Value::Array(targets)) = self.lora.get_mut("target_modules") {
            targets.extend(self.adapted.iter().map(|part| json!(part)));
        }
        if has_lora {
            let lora = Value::Object(std::mem::take(&mut self.lora));
            self.set("lora", lora);
        }
        let precision = self.keys.get("precision").and_then(Value::as_str);
        let half = precision.and_then(|precision| precision.strip_suffix("-amp")).map(str::to_owned);
        let quantised = self.keys.contains_key("quantization");
        if self.program == "LLaMA-Factory" {
            self.set_if_absent("gradient_checkpointing", true);
        }
        // torchao's NF4 and LLaMA-Factory's configuration quantise scales too.
        if ["LLaMA-Factory", "torchtune"].contains(&self.program) && quantised {
            self.set_if_absent("double_quantization", true);
        }
        // Both load in the type of computation; in full fine-tuning LLaMA-Factory makes what is trained f32.
        if let Some(half) = half
            && (self.program == "axolotl" || self.program == "LLaMA-Factory" && has_lora)
        {
            self.set_if_absent("dtype", half);
        }
        if self.has_fsdp && !self.keys.contains_key("zero_stage") {
            self.set_if_absent("fsdp", "full_shard");
        }
        // TrainingArguments have 8.
        match self.evaluates {
            true => self.set_if_absent("eval_batch_size", 8),
            false => drop(self.keys.remove("eval_batch_size")),
        }
        let stack = match self.program {
            "torchtune" => "torchtune",
            DEEPSPEED => "deepspeed",
            _ => "hf",
        };
        self.set_if_absent("stack", stack);
        Settled { keys: self.keys, said: self.said, off, train_batch: self.train_batch }
    }
}

/// A list in brackets, or names with commas between them.
fn names(value: &str) -> Value {
    if let Ok(list @ Value::Array(_)) = serde_json::from_str(value) {
        return list;
    }
    let names = value.trim_matches(['[', ']']).split(',').map(|name| name.trim().trim_matches(['"', '\'']));
    names.filter(|name| !name.is_empty()).map(Value::from).collect()
}

/// A model of torchtune by its builder: `torchtune.models.llama3_1.qlora_llama3_1_8b` is llama-3.1-8b.
fn builder(draft: &mut Draft, value: &str) -> Option<()> {
    let name = value.rsplit('.').next()?;
    let plain = match name.strip_prefix("qlora_") {
        Some(plain) => {
            draft.set("quantization", "nf4");
            plain
        }
        None => name.strip_prefix("lora_").unwrap_or(name),
    };
    let mut words = plain.split('_');
    let mut name = words.next()?.to_owned();
    for word in words {
        // A word of one digit belongs to the version before it.
        let is_minor = word.len() == 1 && word.bytes().all(|byte| byte.is_ascii_digit());
        name = format!("{name}{}{word}", if is_minor { '.' } else { '-' });
    }
    if name.starts_with("llama")
        && let Some(at) = name.find(|c: char| c.is_ascii_digit())
    {
        name.insert(at, '-');
    }
    draft.set("model", name)
}

fn rank(draft: &mut Draft, value: &str) -> Option<()> {
    let rank = draft.whole(value)?;
    draft.set_lora("rank", rank)
}

fn targets(draft: &mut Draft, value: &str) -> Option<()> {
    match value {
        "all" | "all-linear" => draft.set_lora("target_modules", json!(["all-linear"])),
        other => draft.set_lora("target_modules", names(other)),
    }
}

fn dropout(draft: &mut Draft, value: &str) -> Option<()> {
    let share = draft.decimal(value)?;
    draft.set_lora("dropout", share)
}

fn dora(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) { draft.set_lora("use_dora", true) } else { Some(()) }
}

fn whole(draft: &mut Draft, value: &str) -> Option<()> {
    draft.set_lora("modules_to_save", names(value))
}

/// Quantisation in 4 or 8 bits; which kind of 4 bits may be said elsewhere.
fn bits(draft: &mut Draft, value: &str) -> Option<()> {
    match value {
        "4" => {
            draft.set_if_absent("quantization", "nf4");
            Some(())
        }
        "8" => draft.set("quantization", "int8"),
        other => draft.whole(other).and(None),
    }
}

fn four_bit(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) { bits(draft, "4") } else { Some(()) }
}

fn eight_bit(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) { bits(draft, "8") } else { Some(()) }
}

fn four_bit_type(draft: &mut Draft, value: &str) -> Option<()> {
    if matches!(value, "nf4" | "fp4") { draft.set("quantization", value) } else { None }
}

fn double(draft: &mut Draft, value: &str) -> Option<()> {
    draft.set("double_quantization", is_true(value))
}

fn attention(draft: &mut Draft, value: &str) -> Option<()> {
    match value {
        "fa2" | "fa3" | "flash_attention_2" => draft.set("attention", "flash_attention_2"),
        "sdpa" => draft.set("attention", "sdpa"),
        "disabled" | "eager" => draft.set("attention", "eager"),
        _ => None,
    }
}

fn mixed(draft: &mut Draft, value: &str) -> Option<()> {
    match value {
        "bf16" | "fp16" => draft.set("precision", format!("{value}-amp")),
        "no" => draft.set("precision", "f32"),
        _ => None,
    }
}

fn clips(draft: &mut Draft, value: &str) -> Option<()> {
    let norm = draft.decimal(value)?;
    draft.set("clip", norm > 0.0)
}

fn strategy(draft: &mut Draft, value: &str) -> Option<()> {
    let name = match value.to_ascii_lowercase().as_str() {
        "1" | "full_shard" | "true" => "full_shard",
        "2" | "shard_grad_op" | "false" => "shard_grad_op",
        "3" | "no_shard" => "no_shard",
        "4" | "hybrid_shard" => "hybrid_shard",
        _ => return None,
    };
    draft.set("fsdp", name)
}

/// A strategy and more in a line or a list: `full_shard auto_wrap offload`.
fn words_of_fsdp(draft: &mut Draft, value: &str) -> Option<()> {
    let words = value.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    for word in words {
        match word {
            "offload" => drop(draft.set("offload", "all")),
            // A switch says no strategy.
            "true" | "True" | "false" | "False" => {}
            other => drop(strategy(draft, other)),
        }
    }
    Some(())
}

fn checkpointing(draft: &mut Draft, value: &str) -> Option<()> {
    // axolotl's `offload`: what checkpointing keeps goes to the host.
    if value == "offload" {
        draft.set("activation_offloading", true)?;
    }
    draft.set("gradient_checkpointing", is_true(value) || ["unsloth", "offload"].contains(&value))
}

fn offloads_activations(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) { draft.set("activation_offloading", true) } else { Some(()) }
}

fn liger(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) {
        draft.set("liger", true)?;
        draft.set("loss", "liger")?;
    }
    Some(())
}

fn compiles(draft: &mut Draft, value: &str) -> Option<()> {
    if is_true(value) { draft.set("compile", true) } else { Some(()) }
}

fn evaluates(draft: &mut Draft, value: &str) -> Option<()> {
    draft.evaluates |= value != "no" && !value.eq_ignore_ascii_case("false");
    Some(())
}

/// A folder of a checkpoint, or that the last one is meant.
fn resumes(draft: &mut Draft, value: &str) -> Option<()> {
    if value.eq_ignore_ascii_case("false") { Some(()) } else { draft.set("resume", true) }
}

/// The trainer's and torchtune's names of optimizers are those of requests.
fn optimizer(draft: &mut Draft, value: &str) -> Option<()> {
    draft.set("optimizer", value)
}

const BATCH: Takes = |draft, value| draft.number("batch_size", value);
const LENGTH: Takes = |draft, value| draft.number("sequence_length", value);
const ACCUMULATION: Takes = |draft, value| draft.number("gradient_accumulation_steps", value);
const DEVICES: Takes = |draft, value| match value.parse::<f64>() {
    // Launchers count them by themselves where a word says of what kind, or -1.
    Ok(number) if number != -1.0 => draft.number("devices", value),
    _ => None,
};
const STAGE: Takes = |draft, value| draft.number("zero_stage", value);
const MODEL: Takes = |draft, value| draft.set("model", value);
const BF16: Takes = |draft, value| draft.half(value, "bf16");
const FP16: Takes = |draft, value| draft.half(value, "fp16");
const OFFLOAD_OPTIMIZER: Takes = |draft, value| draft.offload(value, "optimizer");
const OFFLOAD_PARAMETERS: Takes = |draft, value| draft.offload(value, "parameters");
const OFFLOAD_ALL: Takes = |draft, value| draft.when(value, "offload", "all");

/// Every key, with nested ones joined by dots; those of FSDP begin with `fsdp_`.
pub const KEYS: &[(&str, Takes)] = &[
    ("model_name_or_path", MODEL),
    ("base_model", MODEL),
    ("base_model_name_or_path", MODEL),
    ("model._component_", builder),
    ("per_device_train_batch_size", BATCH),
    ("micro_batch_size", BATCH),
    ("train_micro_batch_size_per_gpu", BATCH),
    ("batch_size", BATCH),
    // Of all devices in DeepSpeed's words; in scripts of others it is one's own.
    ("train_batch_size", |draft, value| match draft.program {
        DEEPSPEED => draft.batch_of_all(value),
        _ => None,
    }),
    ("deepspeed.train_batch_size", |draft, value| draft.batch_of_all(value)),
    ("per_device_eval_batch_size", |draft, value| draft.number("eval_batch_size", value)),
    // axolotl's.
    ("eval_batch_size", |draft, value| draft.number("eval_batch_size", value)),
    ("val_set_size", |draft, value| {
        draft.evaluates |= draft.decimal(value)? > 0.0;
        Some(())
    }),
    ("eval_strategy", evaluates),
    ("evaluation_strategy", evaluates),
    ("do_eval", evaluates),
    ("resume_from_checkpoint", resumes),
    ("dataloader_num_workers", |draft, value| draft.number("data_workers", value)),
    ("gradient_accumulation_steps", ACCUMULATION),
    ("deepspeed_config.gradient_accumulation_steps", ACCUMULATION),
    ("max_length", LENGTH),
    ("max_seq_length", LENGTH),
    ("sequence_len", LENGTH),
    ("cutoff_len", LENGTH),
    ("tokenizer.max_seq_len", LENGTH),
    ("model_max_length", LENGTH),
    ("bf16", BF16),
    ("fp16", FP16),
    ("bf16.enabled", BF16),
    ("fp16.enabled", FP16),
    ("pure_bf16", |draft, value| draft.purely(value, "bf16")),
    // axolotl's, without autocast.
    ("bfloat16", |draft, value| draft.purely(value, "bf16")),
    ("float16", |draft, value| draft.purely(value, "fp16")),
    ("dtype", |draft, value| match draft.program {
        "torchtune" => draft.set("precision", value),
        _ => draft.set("dtype", value),
    }),
    ("torch_dtype", |draft, value| draft.set("dtype", value)),
    ("mixed_precision", mixed),
    ("optim", optimizer),
    ("optimizer", optimizer),
    ("optimizer._component_", optimizer),
    // DeepSpeed makes its FusedAdam of either.
    ("optimizer.type", |draft, value| match value.to_ascii_lowercase().as_str() {
        "adamw" | "adam" => draft.set("optimizer", "fused_adam"),
        _ => draft.set("optimizer", value),
    }),
    ("optimizer_in_bwd", |draft, value| draft.set("optimizer_in_backward", is_true(value))),
    ("gradient_checkpointing", checkpointing),
    ("activation_checkpointing", checkpointing),
    ("enable_activation_checkpointing", checkpointing),
    ("fsdp_activation_checkpointing", |draft, value| {
        draft.fsdp_checkpoints |= is_true(value);
        Some(())
    }),
    ("enable_activation_offloading", offloads_activations),
    ("activation_offloading", offloads_activations),
    ("disable_gradient_checkpointing", |draft, value| draft.set("gradient_checkpointing", !is_true(value))),
    ("gradient_checkpointing_kwargs.use_reentrant", |draft, value| {
        draft.set("use_reentrant", is_true(value))
    }),
    ("max_grad_norm", clips),
    ("clip_grad_norm", clips),
    ("gradient_clipping", clips),
    ("deepspeed_config.gradient_clipping", clips),
    ("attn_implementation", attention),
    ("flash_attn", attention),
    ("flash_attention", |draft, value| draft.when(value, "attention", "flash_attention_2")),
    ("sdp_attention", |draft, value| draft.when(value, "attention", "sdpa")),
    ("eager_attention", |draft, value| draft.when(value, "attention", "eager")),
    ("adapter", |draft, value| match value {
        "lora" | "qlora" => draft.trained_as(value),
        _ => None,
    }),
    ("finetuning_type", |draft, value| match value {
        "lora" | "full" => draft.trained_as(value),
        _ => None,
    }),
    ("peft_type", |_, value| value.eq_ignore_ascii_case("lora").then_some(())),
    ("r", rank),
    ("lora_r", rank),
    ("lora_rank", rank),
    ("model.lora_rank", rank),
    ("target_modules", targets),
    ("lora_target_modules", targets),
    ("lora_target", targets),
    ("model.lora_attn_modules", targets),
    ("model.apply_lora_to_mlp", |draft, value| draft.adapt(value, "mlp")),
    ("model.apply_lora_to_output", |draft, value| draft.adapt(value, "output")),
    ("lora_target_linear", |draft, value| if is_true(value) { targets(draft, "all") } else { Some(()) }),
    ("lora_dropout", dropout),
    ("model.lora_dropout", dropout),
    ("use_dora", dora),
    ("peft_use_dora", dora),
    ("model.use_dora", dora),
    ("modules_to_save", whole),
    ("lora_modules_to_save", whole),
    ("additional_target", whole),
    ("load_in_4bit", four_bit),
    ("load_in_8bit", eight_bit),
    ("quantization_bit", bits),
    ("quantization_type", four_bit_type),
    ("model.quantize_base", four_bit),
    ("bnb_4bit_quant_type", four_bit_type),
    ("bnb_config_kwargs.bnb_4bit_quant_type", four_bit_type),
    ("bnb_4bit_use_double_quant", double),
    ("bnb_config_kwargs.bnb_4bit_use_double_quant", double),
    ("double_quantization", double),
    ("bnb_4bit_compute_dtype", |draft, value| draft.set("compute_dtype", value)),
    ("num_processes", DEVICES),
    ("nproc_per_node", DEVICES),
    ("num_gpus", DEVICES),
    // DeepSpeed's launcher: `localhost:0,1,2,3`.
    ("include", |draft, value| match value.contains('@') {
        true => None,
        false => draft.set("devices", value.split_once(':')?.1.split(',').count()),
    }),
    ("zero_optimization.stage", STAGE),
    ("deepspeed_config.zero_stage", STAGE),
    ("zero_stage", STAGE),
    ("zero_optimization.offload_optimizer.device", OFFLOAD_OPTIMIZER),
    ("deepspeed_config.offload_optimizer_device", OFFLOAD_OPTIMIZER),
    ("zero_optimization.offload_param.device", OFFLOAD_PARAMETERS),
    ("deepspeed_config.offload_param_device", OFFLOAD_PARAMETERS),
    ("distributed_type", |_, value| matches!(value, "NO" | "MULTI_GPU" | "FSDP" | "DEEPSPEED").then_some(())),
    ("fsdp", words_of_fsdp),
    ("dp_shard_size", |draft, value| draft.number("shard_size", value)),
    (
        "dp_replicate_size",
        |draft, value| {
            if draft.whole(value)? > 1 { draft.set("fsdp", "hybrid_shard") } else { Some(()) }
        },
    ),
    ("zero_optimization.reduce_bucket_size", |draft, value| draft.number("reduce_bucket_size", value)),
    ("zero_optimization.overlap_comm", |draft, value| draft.set("overlap_comm", is_true(value))),
    ("fsdp_version", |draft, value| draft.number("fsdp_version", value)),
    ("fsdp_sharding_strategy", strategy),
    ("fsdp_reshard_after_forward", strategy),
    ("fsdp_offload_params", OFFLOAD_ALL),
    ("fsdp_cpu_offload", OFFLOAD_ALL),
    ("torch_compile", compiles),
    ("compile", compiles),
    ("use_liger_kernel", liger),
    ("enable_liger_kernel", liger),
    // axolotl's.
    ("chunked_cross_entropy", |draft, value| draft.when(value, "loss", "chunked")),
    ("cut_cross_entropy", |draft, value| draft.when(value, "loss", "cce")),
    ("liger_fused_linear_cross_entropy", |draft, value| draft.when(value, "loss", "liger")),
    ("loss.num_output_chunks", |draft, value| draft.number("loss_chunks", value)),
    // LLaMA-Factory's: optimizers that a request refuses by name, where they are not known.
    ("use_galore", |draft, value| draft.when(value, "optimizer", "galore_adamw")),
    ("use_apollo", |draft, value| draft.when(value, "optimizer", "apollo_adamw")),
    ("use_badam", |draft, value| draft.when(value, "optimizer", "badam")),
    ("use_adam_mini", |draft, value| draft.when(value, "optimizer", "adam_mini")),
    ("use_unsloth", |draft, value| draft.when(value, "stack", "unsloth")),
    ("loss._component_", |draft, value| match value.rsplit('.').next() {
        Some("CrossEntropyLoss") => draft.set("loss", "full"),
        Some("LinearCrossEntropyLoss" | "CEWithChunkedOutputLoss") => draft.set("loss", "default"),
        _ => None,
    }),
];
