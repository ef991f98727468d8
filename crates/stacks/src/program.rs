//! A run as a program: the phases of a process, one after the other, on the simulated allocator.

mod afterwards;

use std::cell::RefCell;
use std::rc::Rc;

use crate::allocator::{CrossStreamReuse, OutOfMemory, Settings};
use crate::eager::{Event, Highest, Memory, SavedNote, Tensor, Torch};
use crate::estimate::{Estimate, Kind, Peak, PhasePeak, Uncertain};
use crate::model::{Cache, Decoder, Output, position_tables};
use crate::optimizer::{States, clip_gradients};
use crate::run::{Checkpointing, Outputs, Phase, Run, Sharding, Stack, TorchType};
use crate::sharded::{self, Shards};

/// Why a run has no estimate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EstimateError {
    /// It ends for want of memory.
    #[error("{phase}: {cause}")]
    OutOfMemory {
        /// Where.
        phase: String,
        /// What the allocator says.
        cause: OutOfMemory,
    },
    /// No program of such a step exists.
    #[error("{0}")]
    Unknown(String),
}

/// So many optimizer steps are run: states appear in the first, the second has them from its beginning, and the third is
/// like the second.
const STEPS: usize = 2;

/// Of a long answer's tokens so many are decoded; between them the cache grows at once.
const DECODE_PASSES: u64 = 32;

/// The most bytes that a tensor of a run may have: far beyond every card, and small enough that no sum overflows.
const LARGEST: u128 = 1 << 50;

/// Sizes of DistributedDataParallel's buckets: the first, and the others.
const FIRST_BUCKET: u64 = 1 << 20;
const BUCKET: u64 = 25 << 20;

/// Bytes that a CUDA context and the kernels that PyTorch loads take. Measured by others: 426 MiB (RTX 6000 Ada, torch
/// 2.10, unsloth-zoo pull request 1053) and 256 MiB (RTX 3090, torch 2.7, InvokeAI issue 9413); PyTorch's maintainers say
/// 300 to 400 MB (issues 107667 and 109888).
const CONTEXT: u64 = 350 << 20;
/// How far the published numbers are from it.
const CONTEXT_UNCERTAIN: u64 = 100 << 20;

/// Micro-batches of a step that are run: from the second on gradients are there, and the third is like the second.
const MICRO_BATCHES: u64 = 3;

/// Micro-batches of different lengths that a step has at most, so that there are several steps.
const MOST_OF_A_STEP: u64 = 16;

/// Bytes of a device that belong to nobody's tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outside {
    /// A context, kernels, and communicators.
    pub bytes: u64,
    /// Without the communicators, which may take next to nothing.
    pub least: u64,
}

/// Runs it dry.
///
/// # Errors
/// Where nothing is known of such a run. One that does not fit the card is answered as if the card were large enough.
pub fn estimate(run: &Run) -> Result<Estimate, EstimateError> {
    estimate_beside(run, Outside { bytes: CONTEXT, least: CONTEXT })
}

/// The same beside what else is on the device.
pub(crate) fn estimate_beside(run: &Run, outside: Outside) -> Result<Estimate, EstimateError> {
    known(run)?;
    // A full card makes the allocator give back what it only keeps, so that less is reserved than on a larger one.
    let mut cards = vec![run.card.memory.saturating_sub(outside.bytes)];
    if outside.least < outside.bytes {
        cards.push(run.card.memory.saturating_sub(outside.least));
    }
    let fitting = cards
        .into_iter()
        .map(|capacity| Process::run(run, capacity, false))
        .find(|process| process.torch.memory().refused().is_none());
    let process = fitting.unwrap_or_else(|| Process::run(run, u64::MAX / 2, false));
    let outside = outside.bytes;
    let highest = process.phases.iter().map(|(_, highest, _, _)| highest).max_by_key(|highest| highest.bytes);
    let highest = highest.cloned().unwrap_or_default();
    let phase = process.phases.iter().find(|(_, phase, _, _)| phase.bytes == highest.bytes);
    let phase = phase.map_or_else(String::new, |(name, ..)| (*name).to_owned());
    let phases: Vec<PhasePeak> = process
        .phases
        .iter()
        .map(|(name, highest, reserved, host)| PhasePeak {
            phase: (*name).to_owned(),
            allocated_bytes: highest.bytes,
            reserved_bytes: *reserved,
            host_bytes: *host,
        })
        .collect();
    let reserved = phases.iter().map(|phase| phase.reserved_bytes).max().unwrap_or(0);
    let what =
        "the CUDA context and loaded kernels: published measurements differ by card and driver".to_owned();
    Ok(Estimate {
        allocated_peak_bytes: highest.bytes,
        reserved_peak_bytes: reserved,
        device_used_bytes: reserved.saturating_add(outside),
        peak: Peak { phase, moment: highest.moment, at_peak: highest.by_kind },
        phases,
        uncertain: vec![Uncertain { what, bytes: CONTEXT_UNCERTAIN }],
    })
}

fn known(run: &Run) -> Result<(), EstimateError> {
    let unknown = |what: &str| Err(EstimateError::Unknown(format!("no program of {what} yet")));
    if run.batch == 0 || run.sequence == 0 || run.accumulation == 0 {
        return Err(EstimateError::Unknown("a step without tokens takes nothing".into()));
    }
    let generated = match run.phase {
        Phase::Infer { generated } => generated,
        Phase::Train | Phase::Load => 0,
    };
    let model = &run.model;
    // Of what a token goes through in all of its experts together.
    let of_experts = model.experts.as_ref().map_or(0, |experts| {
        let widest = (2 * experts.intermediate_size).max(model.hidden_size).max(2 * experts.count);
        experts.per_token.saturating_mul(widest)
    });
    let widest = [4 * model.mlp.intermediate_size, model.q_size(), model.hidden_size, of_experts]
        .into_iter()
        .fold(model.vocab_size, u64::max);
    let is_too_large = |batch: u64, length: u128| {
        let row = u128::from(widest).max(length.saturating_mul(u128::from(model.attention.heads)));
        u128::from(batch).saturating_mul(length).saturating_mul(row).saturating_mul(4) > LARGEST
    };
    let (batch, sequence) = (run.batch, run.sequence);
    let beyond =
        |what: String| Err(EstimateError::Unknown(format!("{what} are beyond any card; take fewer")));
    if is_too_large(batch, sequence.into()) {
        return beyond(format!("{batch} sequences of {sequence} tokens"));
    }
    if is_too_large(batch, u128::from(sequence) + u128::from(generated)) {
        return beyond(format!("{generated} generated tokens of each of {batch} sequences"));
    }
    let in_evaluation = run.eval_batch.unwrap_or(0);
    if is_too_large(in_evaluation, sequence.into()) {
        return beyond(format!("{in_evaluation} sequences of {sequence} tokens in evaluation"));
    }
    if run.sharding != Sharding::None && run.phase != Phase::Train {
        return unknown("inference with shared weights");
    }
    if model.experts.is_some() && matches!(run.stack, Stack::Torchtune | Stack::Unsloth) {
        return unknown("experts in torchtune or Unsloth");
    }
    let without = model.experts.as_ref().is_some_and(|experts| experts.zero_computation.is_some());
    if without
        || model.attention.latent.is_some()
        || matches!(model.architecture.as_str(), "gpt_oss" | "plimsoll_moe")
    {
        return unknown(&format!("{} models", model.architecture));
    }
    let dora = run.adapter.as_ref().is_some_and(|adapter| adapter.dora);
    if dora && !matches!(run.stack, Stack::Plain | Stack::Transformers) {
        return unknown("DoRA outside PEFT");
    }
    Ok(())
}

/// What a tracer of PyTorch's operations would have written down of a run's last step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Births and deaths of storages, in order, from the beginning of the process.
    pub events: Vec<Event>,
    /// Where in the list phases end.
    pub marks: Vec<(&'static str, usize)>,
    /// The tensors that nodes saved in the last forward pass.
    pub saved: Vec<SavedNote>,
}

/// Runs it dry on an endless card, and gives the log.
///
/// # Errors
/// Where nothing is known of such a run.
pub fn trace(run: &Run) -> Result<Trace, EstimateError> {
    known(run)?;
    let mut process = Process::run(run, u64::MAX / 2, true);
    process.torch.memory().take_log().drain(..).for_each(|event| process.events.push(event));
    Ok(Trace { events: process.events, marks: process.marks, saved: process.saved })
}

/// A process: what lives in it from its beginning to its end.
struct Process<'a> {
    run: &'a Run,
    torch: Torch,
    phases: Vec<(&'static str, Highest, u64, u64)>,
    logged: bool,
    events: Vec<Event>,
    marks: Vec<(&'static str, usize)>,
    saved: Vec<SavedNote>,
    /// Buffers of the model, which no wrapper shares.
    _buffers: Vec<Tensor>,
}

impl<'a> Process<'a> {
    fn run(run: &'a Run, capacity: u64, logged: bool) -> Process<'a> {
        // Ranks' blocks on other streams wait for the host; `sharded` says when.
        let settings = match run.sharding {
            Sharding::None => run.allocator.clone(),
            _ => Settings { cross_stream_reuse: CrossStreamReuse::Synchronisation, ..run.allocator.clone() },
        };
        let memory = Memory::new(settings, capacity, logged);
        let torch = Torch::new(memory, run.card.clone(), run.versions);
        if logged {
            torch.as_traced();
        }
        // Those of a sharded model come to the device with their layers.
        let tables = position_tables(run).filter(|_| run.sharding == Sharding::None);
        let of_layer = |_| tables.iter().flat_map(|tables| tables.make(&torch));
        let buffers = (0..run.model.num_layers).flat_map(of_layer).collect();
        let mut process = Process {
            run,
            _buffers: buffers,
            torch,
            phases: Vec::new(),
            logged,
            events: Vec::new(),
            marks: Vec::new(),
            saved: Vec::new(),
        };
        let host = Process::host_while_loading(run).min(i64::MAX as u64).cast_signed();
        process.torch.memory().host(host);
        let (model, shards) = match Shards::load(&process.torch, run) {
            Some((model, shards)) => (model, Some(shards)),
            None => (Decoder::load(&process.torch, run), None),
        };
        let model = Rc::new(model);
        process.end("load");
        process.torch.memory().host(-host);
        process.torch.memory().host(Process::batches_on_host(run));
        process.torch.memory().reset_peaks();
        match run.phase {
            Phase::Load => {}
            Phase::Train => process.train(&model, shards.as_deref()),
            Phase::Infer { generated } => process.generate(&model, generated),
        }
        process
    }

    /// The end of a phase. Phases of several steps with the same name become one, the highest.
    fn end(&mut self, name: &'static str) {
        let memory = self.torch.memory();
        let now = (name, memory.highest(), memory.statistics().reserved.peak, memory.host_peak());
        memory.reset_peaks();
        if self.logged {
            self.events.extend(memory.take_log());
            self.marks.push((name, self.events.len()));
        }
        match self.phases.iter_mut().find(|(known, ..)| *known == name) {
            None => self.phases.push(now),
            Some(before) => {
                before.2 = before.2.max(now.2);
                before.3 = before.3.max(now.3);
                if now.1.bytes > before.1.bytes {
                    before.1 = now.1;
                }
            }
        }
    }

    fn tokens(&self, rows: u64) -> Tensor {
        self.tokens_of(self.run.batch, rows)
    }

    fn tokens_of(&self, batch: u64, rows: u64) -> Tensor {
        self.torch.empty(&[batch, rows], TorchType::I64, "_to_copy")
    }

    /// The lengths of the micro-batches of each step that is run.
    fn steps(&self) -> Vec<Vec<u64>> {
        let Run { accumulation, sequence, lengths, .. } = self.run;
        if lengths.is_empty() {
            let micro_batches = usize::try_from((*accumulation).min(MICRO_BATCHES)).unwrap_or(1);
            return vec![vec![*sequence; micro_batches]; STEPS];
        }
        let size = usize::try_from((*accumulation).min(MOST_OF_A_STEP)).unwrap_or(1);
        lengths.chunks(size.max(1)).map(<[u64]>::to_vec).collect()
    }

    fn train(&mut self, model: &Rc<Decoder>, shards: Option<&Shards>) {
        let run = self.run;
        let inner = sharded::inner(run);
        let parameters = shards.map_or_else(|| model.trained(), Shards::parameters);
        let mut states = States::new(run.optimizer);
        let within = run.optimizer_in_backward && shards.is_none();
        if run.resume && !within {
            self.resume(&mut states, &parameters);
        }
        if within {
            for parameter in &parameters {
                let mut own = states.another();
                if run.resume {
                    self.resume(&mut own, std::slice::from_ref(parameter));
                }
                let states = RefCell::new(own);
                let step = move |torch: &Torch, grad: &Tensor| {
                    states.borrow_mut().step(torch, std::slice::from_ref(grad));
                };
                parameter.after_accumulation(Rc::new(step));
            }
        }
        let _buckets = self.buckets(&parameters);
        let mut outputs: Option<Output> = None;
        let steps = self.steps();
        for (step, lengths) in steps.iter().enumerate() {
            let last = step + 1 == steps.len();
            for (micro_batch, length) in lengths.iter().enumerate() {
                if self.torch.memory().refused().is_some() {
                    return;
                }
                if last && self.logged && micro_batch == 0 {
                    self.torch.list_saved();
                }
                let tokens = self.tokens(*length);
                let labels = self.tokens(*length);
                if let Some(shards) = shards {
                    shards.begin(&self.torch);
                }
                let out = self.forward(model, &inner, &tokens, &labels);
                if last && self.logged && micro_batch == 0 {
                    self.saved = self.torch.take_saved();
                }
                let loss = out.loss.clone();
                outputs = (run.outputs != Outputs::Dropped).then_some(out);
                self.end("forward");
                if let Some(shards) = shards {
                    shards.before_backward(&self.torch);
                }
                if let Some(loss) = &loss {
                    self.torch.backward(loss);
                }
                if let Some(shards) = shards {
                    shards.finish(&self.torch);
                }
                self.end("backward");
                drop(loss);
                if run.outputs == Outputs::UntilStep && micro_batch + 1 < lengths.len() {
                    outputs = None;
                }
            }
            let gradients: Vec<Tensor> = parameters.iter().filter_map(Tensor::grad).collect();
            if run.clip {
                clip_gradients(&self.torch, &gradients);
            }
            drop(gradients);
            let with_gradients: Vec<Tensor> =
                parameters.iter().filter(|parameter| parameter.grad().is_some()).cloned().collect();
            match shards {
                Some(shards) => shards.step(&self.torch, || states.step(&self.torch, &with_gradients)),
                None => states.step(&self.torch, &with_gradients),
            }
            self.end("optimizer");
            for parameter in &parameters {
                parameter.take_grad();
            }
            if let Some(shards) = shards {
                shards.zero_grad();
            }
            if run.outputs == Outputs::UntilStep {
                outputs = None;
            }
        }
        drop(outputs);
        self.evaluate(model, shards);
        self.save(model, shards);
        if run.merge {
            self.merge(model);
        }
    }

    /// DistributedDataParallel's flat copies of the gradients, whole parameters up to 25 MiB each, from the last one on
    /// (`torch/csrc/distributed/c10d/reducer.cpp`).
    fn buckets(&self, parameters: &[Tensor]) -> Vec<Tensor> {
        if self.run.devices < 2 || self.run.sharding != Sharding::None {
            return Vec::new();
        }
        let mut sizes = vec![0];
        for parameter in parameters.iter().rev() {
            let limit = if sizes.len() == 1 { FIRST_BUCKET } else { BUCKET };
            match sizes.last_mut() {
                Some(size) if *size < limit => *size += parameter.bytes(),
                _ => sizes.push(parameter.bytes()),
            }
        }
        let bucket = |bytes: u64| self.torch.empty(&[bytes], TorchType::U8, "bucket");
        self.torch.of_kind(Kind::Communication, || sizes.into_iter().map(bucket).collect())
    }

    fn forward(&self, model: &Decoder, run: &Run, tokens: &Tensor, labels: &Tensor) -> Output {
        let to = run.autocast.map(|autocast| autocast.to);
        let caches = run.use_cache && run.checkpointing == Checkpointing::Off;
        let cache = caches.then(|| Rc::new(Cache::default()));
        let mut out =
            self.torch.autocast(to, || model.forward(&self.torch, run, tokens, Some(labels), cache));
        if let (Stack::Transformers, Some(_)) = (run.stack, to) {
            // accelerate wraps the forward pass so that it returns f32 (`convert_outputs_to_fp32`).
            let upcast = |logits: &Tensor| self.torch.to(logits, TorchType::F32);
            out.logits = self.torch.of_kind(Kind::Logits, || out.logits.iter().map(upcast).collect());
        }
        out
    }

    fn generate(&mut self, model: &Rc<Decoder>, generated: u64) {
        let run = self.run;
        let cache = Rc::new(Cache::default());
        let mut rows = run.sequence;
        // The prompt's pass makes the first token.
        let decoded = generated.saturating_sub(1);
        let passes = decoded.min(DECODE_PASSES);
        for pass in 0..=passes {
            if pass > 0 {
                let skipped = decoded * pass / passes - decoded * (pass - 1) / passes - 1;
                cache.skip(&self.torch, skipped);
            }
            let tokens = self.tokens(rows);
            let to = run.autocast.map(|autocast| autocast.to);
            let out = self.torch.no_grad(|| {
                self.torch
                    .autocast(to, || model.forward(&self.torch, run, &tokens, None, Some(Rc::clone(&cache))))
            });
            drop(out);
            cache.end_pass();
            self.end(if pass == 0 { "prefill" } else { "decode" });
            rows = 1;
        }
    }
}
