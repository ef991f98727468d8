//! From a request to a run: every default decided by the rules of the stack in its versions. Each rule has a source.
//!
//! What the user wrote is a [`Request`]; what it means is a [`Run`]. Nothing behind this knows a word of the request.

mod adapter;
pub mod hardware;
mod model;
mod sharding;
mod versions;
mod words;

use plimsoll_model::ModelSpec;
use plimsoll_plan::Target;
use serde::Serialize;

use crate::allocator::Settings;
use crate::lengths::micro_batches;
use crate::request::{Request, RequestError};
use crate::run::{
    Adapter, Attention, Autocast, Checkpointing, Loss, Optimizer, Outputs, Phase, Quantization, Run,
    Sharding, Stack, TorchType, Versions,
};
pub(crate) use adapter::is_first_qwen;
use words::{Named, word};

/// Devices of a machine where none is named.
const MACHINE: u64 = 8;

/// A run, the machine that it is on, and what was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// With every default decided.
    pub run: Run,
    /// The machine.
    pub target: Target,
    /// What the request left open.
    pub decided: Vec<Decision>,
}

/// A default that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// The key that was left open.
    pub key: &'static str,
    /// What was taken.
    pub value: String,
    /// The rule, with its source.
    pub rule: &'static str,
}

/// What a stack is, and how its ranks share.
const STACKS: [(&str, Stack); 10] = [
    ("hf", Stack::Transformers),
    ("peft", Stack::Plain),
    ("torchtune", Stack::Torchtune),
    ("litgpt", Stack::Litgpt),
    ("deepspeed", Stack::Transformers),
    ("fsdp", Stack::Transformers),
    ("unsloth", Stack::Unsloth),
    ("plain", Stack::Plain),
    ("transformers", Stack::Transformers),
    ("trl", Stack::Transformers),
];

impl Request {
    /// Decides everything that the request leaves open.
    ///
    /// # Errors
    /// A word that is none, keys that contradict each other, a model or a card that is not known.
    pub fn resolve(&self) -> Result<Resolved, RequestError> {
        let mut resolver = Resolver { request: self, decided: Vec::new() };
        let (run, target) = resolver.run()?;
        Ok(Resolved { run, target, decided: resolver.decided })
    }
}

/// Sequences, or tokens of one, at most; and elements of a tensor, so that no sum of bytes overflows.
const MOST_TOKENS: u64 = 1 << 24;
const MOST_ELEMENTS: u128 = 1 << 50;

/// Processes of a data loader at most.
const MOST_WORKERS: u64 = 1024;

struct Resolver<'a> {
    request: &'a Request,
    decided: Vec<Decision>,
}

impl Resolver<'_> {
    fn run(&mut self) -> Result<(Run, Target), RequestError> {
        let request = self.request;
        let stack = word("stack", &request.stack, &STACKS)?;
        let versions = versions::versions(&request.versions)?;
        let model = model::model(&request.model)?;
        let target = self.target()?;
        let card = hardware::card(&target.device);
        let phase = self.phase()?;
        let (precise, autocast) = word("precision", &request.precision, &words::PRECISIONS)?;
        let weights = match &request.dtype {
            Some(dtype) => word("dtype", dtype, &words::TYPES)?,
            None => precise,
        };
        let quantization = self.quantization(stack, precise, autocast)?;
        let sharding = sharding::sharding(request, stack)?;
        let adapter = match &request.lora {
            None => None,
            Some(lora) => {
                let quantised = quantization.is_some();
                let context =
                    adapter::Context { stack, model: &model, peft: versions.peft, weights, quantised };
                let adapter = context.adapter(lora)?;
                // FSDP flattens what it wraps, and a flat parameter has one type (`_flat_param.py`).
                Some(match sharding {
                    Sharding::FsdpWhole | Sharding::Fsdp1 { .. } | Sharding::Fsdp2 { .. } => {
                        Adapter { dtype: weights, ..adapter }
                    }
                    Sharding::None | Sharding::Zero { .. } => adapter,
                })
            }
        };
        let train = phase == Phase::Train;
        if train && quantization.is_some() && adapter.is_none() {
            return Err(contradiction(
                "quantization: quantised weights are not trained; add lora, or take quantization away",
            ));
        }
        let attention = self.attention(stack, &versions, card.capability, (weights, autocast))?;
        let checkpointing = self.checkpointing(stack, &versions);
        let [batch, sequence] = self.shape(phase, &model)?;
        let devices = self.devices(&target)?;
        let shard_devices = self.shard_devices(&target, devices)?;
        let run = Run {
            stack,
            phase,
            batch,
            sequence,
            padded: request.padded || !request.lengths.is_empty() && batch > 1,
            lengths: micro_batches(&request.lengths, batch, sequence),
            eval_batch: self.eval_batch()?,
            resume: request.resume && train,
            merge: self.merge(train, sharding)?,
            data_workers: self.data_workers()?,
            accumulation: positive("gradient_accumulation_steps", request.gradient_accumulation_steps)?
                .unwrap_or(1),
            weights,
            autocast,
            attention,
            checkpointing,
            use_cache: self.use_cache(stack, &versions, checkpointing),
            adapter,
            quantization,
            optimizer: self.optimizer(stack, &versions)?,
            optimizer_in_backward: request.optimizer_in_backward,
            clip: self.clip(stack),
            loss: self.loss(stack, &versions, &model)?,
            outputs: self.outputs(stack)?,
            liger_layers: request.liger,
            devices,
            shard_devices,
            reduce_bucket: positive("reduce_bucket_size", request.reduce_bucket_size)?,
            reduce_buckets: match (sharding, request.overlap_comm) {
                // One is filled while the other is sent (`stage_1_and_2.py`).
                (Sharding::Zero { stage: 1 | 2, .. }, Some(true)) => 2,
                _ => 1,
            },
            sharding,
            versions,
            card,
            allocator: self.allocator()?,
            model,
        };
        if train && request.compile && checkpointing == Checkpointing::Off {
            return Err(contradiction(
                "compile: what a compiled step keeps is chosen by its partitioner and is not known here; \
                 ask without it, for an upper bound",
            ));
        }
        Ok((run, target))
    }

    fn decide<T>(&mut self, key: &'static str, value: impl Into<String>, rule: &'static str, taken: T) -> T {
        self.decided.push(Decision { key, value: value.into(), rule });
        taken
    }

    fn target(&mut self) -> Result<Target, RequestError> {
        match self.request.hardware.as_deref().filter(|name| !name.trim().is_empty()) {
            Some(name) => hardware::target(name),
            None => {
                let target = hardware::target(hardware::USUAL)?;
                let title = target.title.clone();
                let rule = "no card was named; the kernels of attention depend on it";
                Ok(self.decide("hardware", title, rule, target))
            }
        }
    }

    fn phase(&mut self) -> Result<Phase, RequestError> {
        let Some(phase) = &self.request.phase else { return Ok(Phase::Train) };
        match word("phase", phase, &words::PHASES)? {
            Phase::Infer { .. } => match self.request.generated_tokens.unwrap_or(1) {
                generated @ 0..=MOST_TOKENS => Ok(Phase::Infer { generated: generated.max(1) }),
                more => Err(RequestError::Value {
                    key: "generated_tokens",
                    value: more.to_string(),
                    expected: format!("at most {MOST_TOKENS}"),
                }),
            },
            other => Ok(other),
        }
    }

    /// Sequences and tokens; loading needs none.
    fn shape(&self, phase: Phase, model: &ModelSpec) -> Result<[u64; 2], RequestError> {
        let Request { batch_size, mut sequence_length, .. } = *self.request;
        // A sample without tokens counts as one of one token, but not all can be such.
        if let Some(longest) = positive("lengths", self.request.lengths.iter().max().copied())? {
            sequence_length = sequence_length.min(longest);
        }
        let least = u64::from(phase != Phase::Load);
        for (key, value) in [("batch_size", batch_size), ("sequence_length", sequence_length)] {
            if !(least..=MOST_TOKENS).contains(&value) {
                let expected = format!("{least} to {MOST_TOKENS}");
                return Err(RequestError::Value { key, value: value.to_string(), expected });
            }
        }
        // The largest tensors that a step may have: scores of all heads, and what stands between wide layers.
        let widest = [model.vocab_size, model.hidden_size, model.mlp.intermediate_size, model.q_size()];
        let widest = u128::from(widest.into_iter().max().unwrap_or(1));
        let tokens = u128::from(batch_size) * u128::from(sequence_length);
        let scores = tokens * u128::from(sequence_length) * u128::from(model.attention.heads);
        if (tokens * widest).max(scores) > MOST_ELEMENTS {
            return Err(contradiction(
                "batch_size and sequence_length make tensors beyond any device; take smaller ones",
            ));
        }
        Ok([batch_size.max(1), sequence_length.max(1)])
    }

    fn eval_batch(&self) -> Result<Option<u64>, RequestError> {
        match self.request.eval_batch_size {
            Some(batch) if !(1..=MOST_TOKENS).contains(&batch) => Err(RequestError::Value {
                key: "eval_batch_size",
                value: batch.to_string(),
                expected: format!("1 to {MOST_TOKENS}"),
            }),
            batch => Ok(batch),
        }
    }

    /// Adapters are merged where one process has them and all weights.
    fn merge(&self, train: bool, sharding: Sharding) -> Result<bool, RequestError> {
        match (self.request.merge && train, sharding, &self.request.lora) {
            (false, ..) => Ok(false),
            (_, _, None) => Err(contradiction("merge: without lora there is nothing to merge")),
            (_, Sharding::None, _) => Ok(true),
            _ => Err(contradiction(
                "merge: ranks that share the weights save adapters; one process merges them afterwards, so ask for it without \
                 zero_stage and fsdp",
            )),
        }
    }

    fn data_workers(&self) -> Result<u64, RequestError> {
        match self.request.data_workers {
            workers @ 0..=MOST_WORKERS => Ok(workers),
            more => Err(RequestError::Value {
                key: "data_workers",
                value: more.to_string(),
                expected: format!("at most {MOST_WORKERS}"),
            }),
        }
    }

    fn allocator(&self) -> Result<Settings, RequestError> {
        let text = self.request.allocator.as_deref().unwrap_or_default();
        Settings::parse(text).map_err(|error| RequestError::Contradiction(format!("allocator: {error}")))
    }

    fn devices(&self, target: &Target) -> Result<u64, RequestError> {
        let of_hardware = target.devices();
        match self.request.devices {
            Some(0) => Err(contradiction("devices: 0; a run has at least one")),
            Some(devices) if of_hardware > 1 && devices != of_hardware => Err(contradiction(&format!(
                "devices: {devices}, but hardware names {of_hardware}; say one of the two"
            ))),
            Some(devices) if devices <= 1 << 16 => Ok(devices),
            Some(devices) => Err(contradiction(&format!("devices: {devices} is beyond any run"))),
            None => Ok(of_hardware),
        }
    }

    /// Devices that share out among them: in a hybrid of FSDP those of a machine.
    fn shard_devices(&mut self, target: &Target, devices: u64) -> Result<u64, RequestError> {
        let is_hybrid = self.request.fsdp.as_deref().is_some_and(|name| name.contains("hybrid"));
        let of_machine = match target.devices() {
            // The card alone is named.
            0 | 1 => MACHINE,
            _ => target.devices_of_machine,
        };
        match self.request.shard_size {
            Some(size) if size == 0 || !devices.is_multiple_of(size) => {
                Err(contradiction(&format!("shard_size: {size} does not divide {devices} devices")))
            }
            Some(size) => Ok(size),
            None if is_hybrid && devices > of_machine && devices.is_multiple_of(of_machine) => {
                let rule = "a hybrid shares out within a machine: of the hardware, or of eight devices";
                Ok(self.decide("shard_size", of_machine.to_string(), rule, of_machine))
            }
            None => Ok(devices),
        }
    }

    /// bitsandbytes computes in `bnb_4bit_compute_dtype`; people set it to the precision that they train in.
    fn quantization(
        &mut self,
        stack: Stack,
        precise: TorchType,
        autocast: Option<Autocast>,
    ) -> Result<Option<Quantization>, RequestError> {
        let double = self.request.double_quantization;
        // torchao's `NF4Tensor` has quantised scales always.
        let always = stack == Stack::Torchtune;
        let Some(name) = &self.request.quantization else {
            if double {
                return Err(contradiction("double_quantization is of quantization nf4 or fp4; name one"));
            }
            return Ok(None);
        };
        let compute = match &self.request.compute_dtype {
            Some(dtype) => word("compute_dtype", dtype, &words::TYPES)?,
            None => autocast.map_or(precise, |autocast| autocast.to),
        };
        let four_bit = Quantization::FourBit { double: double || always, compute };
        let table = [("nf4", four_bit), ("fp4", four_bit), ("int8", Quantization::Int8)];
        word("quantization", name, &table).map(Some)
    }

    /// transformers takes sdpa from 4.36 on, with PyTorch 2.1.1 or newer (`PreTrainedModel._autoset_attn_implementation`); before, each
    /// model's own products and softmax. torchtune and litgpt call `scaled_dot_product_attention`.
    fn attention(
        &mut self,
        stack: Stack,
        versions: &Versions,
        capability: (u32, u32),
        (weights, autocast): (TorchType, Option<Autocast>),
    ) -> Result<Attention, RequestError> {
        let Some(name) = &self.request.attention else {
            let own = matches!(stack, Stack::Torchtune | Stack::Litgpt);
            let rule =
                "transformers takes sdpa from 4.36 on, with torch 2.1 or newer; torchtune and litgpt always";
            return Ok(if own || versions.transformers >= (4, 36) && versions.torch >= (2, 1) {
                self.decide("attention", "sdpa", rule, Attention::Sdpa)
            } else {
                self.decide("attention", "eager", rule, Attention::Eager)
            });
        };
        let attention = word("attention", name, &words::ATTENTIONS)?;
        if attention == Attention::Flash2 {
            let (major, minor) = capability;
            if major < 8 {
                return Err(contradiction(&format!(
                    "attention: flash-attn 2 needs compute capability 8.0, and this card has {major}.{minor}; take sdpa or eager"
                )));
            }
            if weights == TorchType::F32 && autocast.is_none() {
                return Err(contradiction(
                    "attention: flash-attn 2 takes bf16 and fp16 alone; take sdpa, or another precision",
                ));
            }
        }
        Ok(attention)
    }

    /// `torch.utils.checkpoint` and transformers 4 took the reentrant form by default; transformers 5 takes the other (PR 43203). torchtune
    /// and litgpt wrap modules with the form that is not. Unsloth keeps layer inputs on the host.
    fn checkpointing(&mut self, stack: Stack, versions: &Versions) -> Checkpointing {
        if !self.request.gradient_checkpointing {
            return Checkpointing::Off;
        }
        match (self.request.use_reentrant, stack) {
            (_, Stack::Unsloth) => Checkpointing::Offloaded,
            _ if self.request.activation_offloading => Checkpointing::Offloaded,
            (Some(true), _) => Checkpointing::Reentrant,
            (Some(false), _) | (None, Stack::Torchtune | Stack::Litgpt) => Checkpointing::NonReentrant,
            (None, Stack::Plain | Stack::Transformers) => {
                let rule = "use_reentrant was true by default up to transformers 4, and is false from 5.0 on";
                match versions.transformers < (5, 0) {
                    true => self.decide("use_reentrant", "true", rule, Checkpointing::Reentrant),
                    false => self.decide("use_reentrant", "false", rule, Checkpointing::NonReentrant),
                }
            }
        }
    }

    /// A model's configuration says true. Checkpointing turns it off (`GradientCheckpointingLayer`), and so does the trainer from transformers 5
    /// on (PR 41585).
    fn use_cache(&mut self, stack: Stack, versions: &Versions, checkpointing: Checkpointing) -> bool {
        let of_transformers = matches!(stack, Stack::Plain | Stack::Transformers);
        if !of_transformers || checkpointing != Checkpointing::Off {
            return false;
        }
        let rule = "config.use_cache is true unless the trainer of transformers 5 turns it off";
        let usual = stack == Stack::Plain || versions.transformers < (5, 0);
        match self.request.use_cache {
            Some(use_cache) => use_cache,
            None => self.decide("use_cache", usual.to_string(), rule, usual),
        }
    }

    /// `TrainingArguments.optim`: fused from torch 2.8 on (transformers 4.56 and newer). A bare `torch.optim.AdamW` or `SGD` takes the
    /// form over lists on CUDA from torch 2.0 on (`_default_to_fused_or_foreach`).
    fn optimizer(&mut self, stack: Stack, versions: &Versions) -> Result<Optimizer, RequestError> {
        let of_torch = match versions.torch >= (2, 0) {
            true => Optimizer::AdamWForeach,
            false => Optimizer::AdamWForLoop,
        };
        let Some(name) = &self.request.optimizer else {
            let rule = "the trainer takes adamw_torch_fused from torch 2.8 and transformers 4.56 on, adamw_torch before; DeepSpeed its \
                        FusedAdam; torchtune's recipes fused=True; others torch.optim.AdamW";
            let fused = match stack {
                Stack::Torchtune => true,
                Stack::Transformers => {
                    self.request.zero_stage.is_some()
                        || versions.torch >= (2, 8) && versions.transformers >= (4, 56)
                }
                Stack::Plain | Stack::Litgpt | Stack::Unsloth => false,
            };
            let taken = if fused { Optimizer::AdamWFused } else { of_torch };
            return Ok(match self.request.phase.as_deref() {
                None | Some("train") => self.decide("optimizer", format!("{taken:?}"), rule, taken),
                _ => taken,
            });
        };
        Ok(match word("optimizer", name, &words::OPTIMIZERS)? {
            Named::TorchAdamW => of_torch,
            Named::TorchSgd => Optimizer::Sgd { momentum: false },
            Named::Exactly(optimizer) => optimizer,
        })
    }

    /// `TrainingArguments.max_grad_norm` is 1; recipes and loops of one's own clip where they say so.
    fn clip(&mut self, stack: Stack) -> bool {
        let usual = matches!(stack, Stack::Transformers | Stack::Unsloth);
        self.request.clip.unwrap_or(usual)
    }

    /// A trainer's or a recipe's function returns the loss alone; a loop keeps `outputs` or `logits` until the next forward pass has
    /// ended, litgpt's among them (`finetune/lora.py`).
    fn outputs(&self, stack: Stack) -> Result<Outputs, RequestError> {
        let usual = match stack {
            Stack::Plain | Stack::Litgpt => Outputs::UntilNextForward,
            Stack::Transformers | Stack::Torchtune | Stack::Unsloth => Outputs::Dropped,
        };
        match &self.request.outputs {
            Some(name) => word("outputs", name, &words::OUTPUTS),
            None => Ok(usual),
        }
    }

    /// Version boundaries: transformers' PR 35646 (labels are shifted instead of logits) and the move of the loss out of the models (4.45).
    fn loss(&mut self, stack: Stack, versions: &Versions, model: &ModelSpec) -> Result<Loss, RequestError> {
        // torchtune compiles its loss too (`training.compile_loss`).
        let chunks = positive("loss_chunks", self.request.loss_chunks)?.unwrap_or(8);
        let chunks_of_torchtune = Loss::Chunked { chunks, compiled: self.request.compile };
        let chunks_of_litgpt = match self.request.lora {
            Some(_) => Loss::ChunkedKept { tokens: 128 },
            None => Loss::WholeKept { rows: 128 },
        };
        let whole = match versions.transformers {
            // The model's own code, which came with its weights: it does not follow transformers.
            _ if is_first_qwen(model) => Loss::Shifted,
            // torchtune shifts the labels, too (`full_finetune_single_device.py`).
            _ if stack == Stack::Torchtune => Loss::Upcast,
            version if version <= (4, 44) => Loss::UpcastShiftedEarly,
            version if version <= (4, 48) => Loss::UpcastShifted,
            _ => Loss::Upcast,
        };
        let (own, chunked) = match stack {
            Stack::Torchtune => (chunks_of_torchtune, chunks_of_torchtune),
            Stack::Litgpt => (chunks_of_litgpt, chunks_of_litgpt),
            // Its fused loss makes the gradients of a chunk within the forward pass, as Liger's does.
            Stack::Unsloth => (Loss::Liger, Loss::Liger),
            Stack::Plain | Stack::Transformers => (whole, chunks_of_torchtune),
        };
        let Some(name) = &self.request.loss else { return Ok(own) };
        let table = [
            ("default", own),
            ("liger", Loss::Liger),
            ("cce", Loss::Cce),
            ("chunked", chunked),
            // torchtune's older loss takes all logits at once, too.
            ("full", whole),
        ];
        word("loss", name, &table)
    }
}

/// A number that is not 0, where there is one.
fn positive(key: &'static str, value: Option<u64>) -> Result<Option<u64>, RequestError> {
    match value {
        Some(0) => Err(RequestError::Value { key, value: "0".to_owned(), expected: "1 or more".to_owned() }),
        value => Ok(value),
    }
}

fn contradiction(what: &str) -> RequestError {
    RequestError::Contradiction(what.to_owned())
}

#[cfg(test)]
mod tests;
