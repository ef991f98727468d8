//! A tiny model with every kind of shape that matters: grouped heads, odd widths, more layers than one.

#![allow(dead_code)]

pub mod meets;
pub mod watched;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::cpu::quantize;
use plimsoll_device::{
    Cpu, CpuOptions, DType, Device, DeviceError, Dry, Due, Elementwise, IGNORED_TARGET, Lent, Op, Tensor,
    Transferred, Workspace,
};
use plimsoll_memory::{Arena, Loan};
use plimsoll_model::{
    Activation, AttentionSpec, ExpertGroups, ExpertsSpec, LatentAttention, MlpSpec, ModelSpec, NormKind,
    NormPlacement, NormSpec, Parameter, ParameterKind, QkNorm, RopeSpec, RouterSpec, Scoring, SharedExpert,
    SlidingWindow, ZeroComputationSpec,
};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    AdafactorSettings, GradientClipping, Linears, MicroBatch, OptimizerKind, OptimizerSettings, Precision,
    StepError, StepSettings, Trainer,
};

pub const VOCAB: u32 = 61;

/// Llama's block.
pub fn llama() -> ModelSpec {
    ModelSpec {
        name: "tiny".into(),
        architecture: "llama".into(),
        vocab_size: u64::from(VOCAB),
        hidden_size: 24,
        num_layers: 3,
        attention: AttentionSpec::plain(4, 2, 6, RopeSpec::plain(6, 10_000.0)),
        mlp: MlpSpec { intermediate_size: 40, activation: Activation::Silu, gated: true, bias: false },
        experts: None,
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 64,
        initializer_range: 0.2,
        part: Default::default(),
        bos_token: None,
        eos_tokens: vec![],
    }
}

/// The block's other side: LayerNorm, biases everywhere, no gate, a head of its own.
pub fn biased() -> ModelSpec {
    let base = llama();
    ModelSpec {
        attention: AttentionSpec { qkv_bias: true, output_bias: true, ..base.attention },
        mlp: MlpSpec { activation: Activation::GeluTanh, gated: false, bias: true, ..base.mlp },
        norm: NormSpec { kind: NormKind::Layer, ..base.norm },
        tie_word_embeddings: false,
        ..base
    }
}

/// Gemma 3's block: norms around both parts, 1 + weight, heads normalised, alternating windows, two rotations, and
/// Gemma 2's caps.
pub fn gemma() -> ModelSpec {
    let base = llama();
    ModelSpec {
        attention: AttentionSpec {
            qk_norm: Some(QkNorm::PerHead),
            local_rope: Some(RopeSpec::plain(6, 100.0)),
            sliding_window: Some(SlidingWindow { size: 3, layers: vec![true, false, true] }),
            scale: Some(0.3),
            soft_cap: Some(2.0),
            ..base.attention
        },
        mlp: MlpSpec { activation: Activation::GeluTanh, ..base.mlp },
        norm: NormSpec { one_plus_weight: true, placement: NormPlacement::Around, ..base.norm },
        embedding_scale: Some(4.9),
        logit_soft_cap: Some(3.0),
        ..base
    }
}

/// OLMo 2's block: norms after both parts, heads normalised together; and heads rotated in part.
pub fn olmo() -> ModelSpec {
    let base = llama();
    ModelSpec {
        attention: AttentionSpec {
            qk_norm: Some(QkNorm::Whole),
            rope: Some(RopeSpec { dims: 4, ..RopeSpec::plain(6, 1000.0) }),
            ..base.attention
        },
        norm: NormSpec { placement: NormPlacement::After, ..base.norm },
        tie_word_embeddings: false,
        ..base
    }
}

/// GPT-2's: learned positions.
pub fn gpt2() -> ModelSpec {
    let base = biased();
    ModelSpec {
        attention: AttentionSpec { rope: None, kv_heads: 4, ..base.attention },
        tie_word_embeddings: true,
        ..base
    }
}

/// Qwen2-MoE's: a shared expert with a gate, and a layer without experts.
pub fn mixture() -> ModelSpec {
    let router = RouterSpec {
        scoring: Scoring::Softmax,
        normalise: false,
        scale: 1.0,
        groups: None,
        correction: false,
        bias: false,
        balance_loss: 0.02,
    };
    let experts = ExpertsSpec {
        count: 5,
        per_token: 2,
        intermediate_size: 20,
        shared: Some(SharedExpert { intermediate_size: 12, gated: true }),
        zero_computation: None,
        router,
        layers: vec![true, false, true],
        stacked_files: false,
    };
    ModelSpec { experts: Some(experts), ..llama() }
}

/// DeepSeek-V3's router, whose groups have sigmoids and a correction, between the norms of Gemma.
pub fn grouped_mixture() -> ModelSpec {
    let router = RouterSpec {
        scoring: Scoring::Sigmoid,
        normalise: true,
        scale: 1.5,
        groups: Some(ExpertGroups { count: 3, chosen: 2, by_two: true }),
        correction: true,
        bias: false,
        balance_loss: 0.0,
    };
    let experts = ExpertsSpec {
        count: 6,
        per_token: 3,
        intermediate_size: 16,
        shared: Some(SharedExpert { intermediate_size: 8, gated: false }),
        zero_computation: None,
        router,
        layers: vec![true; 3],
        stacked_files: false,
    };
    ModelSpec { experts: Some(experts), ..gemma() }
}

/// MoE++: experts without matrices beside others and a shared one, and routers that read each other across a layer without experts.
pub fn moe_plus_plus() -> ModelSpec {
    let router = RouterSpec {
        scoring: Scoring::Softmax,
        normalise: false,
        scale: 1.0,
        groups: None,
        bias: false,
        correction: false,
        balance_loss: 0.01,
    };
    let zero_computation =
        ZeroComputationSpec { zero: 1, copy: 1, constant: 2, gating_residuals: true, tau: 0.75 };
    let experts = ExpertsSpec {
        count: 4,
        per_token: 3,
        intermediate_size: 20,
        shared: Some(SharedExpert { intermediate_size: 12, gated: false }),
        zero_computation: Some(zero_computation),
        router,
        layers: vec![true, false, true],
        stacked_files: false,
    };
    ModelSpec { experts: Some(experts), ..llama() }
}

/// gpt-oss's: sinks in attention with windows by turns, biases everywhere, the router's and those of experts too, and the clamped SwiGLU.
pub fn biased_mixture() -> ModelSpec {
    let base = mixture();
    let experts = base.experts.clone().map(|experts| ExpertsSpec {
        shared: None,
        router: RouterSpec { normalise: true, bias: true, ..experts.router },
        layers: vec![true; 3],
        ..experts
    });
    ModelSpec {
        attention: AttentionSpec {
            qkv_bias: true,
            output_bias: true,
            sliding_window: Some(SlidingWindow { size: 3, layers: vec![true, false, true] }),
            sinks: true,
            ..base.attention
        },
        // Limits that values of tests reach.
        mlp: MlpSpec {
            activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 0.9 },
            bias: true,
            ..base.mlp
        },
        experts,
        tie_word_embeddings: false,
        ..base
    }
}

/// DeepSeek-V3's: latent attention whose values are narrower than keys, before its experts.
pub fn latent_mixture() -> ModelSpec {
    let rope = RopeSpec { dims: 4, ..RopeSpec::plain(10, 1000.0) };
    let latent = LatentAttention { query_rank: Some(14), kv_rank: 9, value_dim: 6 };
    ModelSpec {
        attention: AttentionSpec { latent: Some(latent), ..AttentionSpec::plain(4, 4, 10, rope) },
        experts: grouped_mixture().experts,
        tie_word_embeddings: false,
        ..llama()
    }
}

/// A block of every kind.
pub fn families() -> [ModelSpec; 10] {
    [
        llama(),
        biased(),
        gemma(),
        olmo(),
        gpt2(),
        mixture(),
        grouped_mixture(),
        moe_plus_plus(),
        biased_mixture(),
        latent_mixture(),
    ]
}

/// Those that can be divided into stages: no layer reads what another's router said.
pub fn divisible() -> Vec<ModelSpec> {
    let reads = |spec: &ModelSpec| spec.layers().any(|layer| spec.gating_residual_of(layer).is_some());
    families().into_iter().filter(|spec| !reads(spec)).collect()
}

/// A model of so many layers, in the pattern of its own.
pub fn deeper(spec: ModelSpec, num_layers: u32) -> ModelSpec {
    let mut spec = ModelSpec { num_layers, ..spec };
    let windows = spec.attention.sliding_window.as_mut().map(|window| &mut window.layers);
    for layers in windows.into_iter().chain(spec.experts.as_mut().map(|experts| &mut experts.layers)) {
        *layers = layers.iter().copied().cycle().take(num_layers as usize).collect();
    }
    spec
}

pub fn settings(batch_size: u64, sequence_length: u64) -> StepSettings {
    StepSettings {
        loss_chunk_tokens: 10,
        clipping: GradientClipping::GlobalNorm(1.0),
        seed: 3,
        ..StepSettings::new(batch_size, sequence_length)
    }
}

pub const BF16_WITH_MASTERS: Precision =
    Precision { weights: DType::Bf16, activations: DType::Bf16, master_weights: true, ..Precision::F32 };

pub const PURE_BF16: Precision =
    Precision { gradients: DType::Bf16, master_weights: false, ..BF16_WITH_MASTERS };

pub const PURE_FP8: Precision = Precision { linears: Linears::Fp8, ..PURE_BF16 };

/// Numbers that look random and depend on nothing but the seed.
pub fn noise(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    }
}

/// Writes rows of what [`values`] has.
pub fn fill(p: &Parameter, rows: Range<u64>, dtype: DType, out: &mut [u8]) -> Result<(), StepError> {
    let [first, last] = [rows.start, rows.end].map(|row| (row * p.columns()) as usize);
    write_values(&values(p)[first..last], dtype, out);
    Ok(())
}

/// The value of every weight.
pub fn values(parameter: &Parameter) -> Vec<f32> {
    let seed = parameter.name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    let mut noise = noise(seed);
    let norm = parameter.role.kind() == ParameterKind::Norm;
    (0..parameter.elements()).map(|_| if norm { 1.0 + 0.2 * noise() } else { 0.6 * noise() } as f32).collect()
}

pub fn write_values(values: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::Bf16 => {
            for (cell, v) in out.chunks_exact_mut(2).zip(values) {
                cell.copy_from_slice(&half::bf16::from_f32(*v).to_ne_bytes());
            }
        }
        DType::F16 => {
            for (cell, v) in out.chunks_exact_mut(2).zip(values) {
                cell.copy_from_slice(&half::f16::from_f32(*v).to_ne_bytes());
            }
        }
        quantised if quantised.is_block() => quantize::quantize(quantised, values, out, 1).unwrap(),
        _ => {
            for (cell, v) in out.chunks_exact_mut(4).zip(values) {
                cell.copy_from_slice(&v.to_ne_bytes());
            }
        }
    }
}

/// Tokens and the targets that follow from them: position i predicts token i + 1.
pub fn tokens(seed: u64, sequences: u64, length: u64) -> (Vec<u32>, Vec<u32>) {
    let mut noise = noise(seed);
    let tokens: Vec<u32> =
        (0..sequences * length).map(|_| ((noise() + 0.5) * f64::from(VOCAB)) as u32 % VOCAB).collect();
    let targets = (0..tokens.len())
        .map(|i| if (i + 1) % length as usize == 0 { IGNORED_TARGET } else { tokens[i + 1] })
        .collect();
    (tokens, targets)
}

pub fn planned_peak(spec: &ModelSpec, settings: &StepSettings, micro_batches: usize) -> u64 {
    planned(spec, settings, micro_batches).0
}

/// The arena's peak in a step, and the most that an operation needs beside it.
pub fn planned(spec: &ModelSpec, settings: &StepSettings, micro_batches: usize) -> (u64, Workspace) {
    let dry = Dry::new();
    let mut trainer = Trainer::new(&dry, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
    let n = (settings.batch_size * settings.sequence_length) as usize;
    let (tokens, targets) = (vec![0; n], vec![IGNORED_TARGET; n]);
    let weights = settings.target_weights.then(|| vec![0.0; n]);
    let batch = MicroBatch {
        weights: weights.as_deref(),
        document_starts: settings.document_starts.then_some(&tokens),
        ..MicroBatch::new(&tokens, &targets)
    };
    trainer.step(&vec![batch; micro_batches], 1e-3).unwrap();
    (dry.arena().high_water(), dry.workspace())
}

/// A device of just the planned size.
pub fn device(spec: &ModelSpec, settings: &StepSettings, threads: usize) -> Cpu {
    Cpu::new(planned_peak(spec, settings, 2), CpuOptions { threads: Some(threads), isa: None }).unwrap()
}

pub fn trainer<'a>(device: &'a Cpu, spec: &ModelSpec, settings: &StepSettings) -> Trainer<'a> {
    let mut trainer = Trainer::new(device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill).unwrap();
    trainer
}

/// Bytes of every tensor of the training state, and the losses of `steps` steps of two micro-batches each.
pub fn train(
    spec: &ModelSpec,
    settings: &StepSettings,
    threads: usize,
    steps: u64,
) -> (Vec<f64>, Vec<Vec<u8>>) {
    let device = device(spec, settings, threads);
    let mut trainer = trainer(&device, spec, settings);
    let losses = (0..steps).map(|step| one_step(&mut trainer, settings, step)).collect();
    (losses, state(&trainer))
}

pub fn one_step(trainer: &mut Trainer<'_>, settings: &StepSettings, step: u64) -> f64 {
    let (batch, length) = (settings.batch_size, settings.sequence_length);
    let halves: Vec<_> = (0..2).map(|half| tokens(100 + 2 * step + half, batch, length)).collect();
    let batches: Vec<MicroBatch<'_>> =
        halves.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
    trainer.step(&batches, 1e-2).unwrap().loss
}

pub fn state(trainer: &Trainer<'_>) -> Vec<Vec<u8>> {
    let bytes = |named: &plimsoll_step::NamedTensor| {
        let mut copy = Vec::new();
        trainer.read_state(named, &mut |bytes| copy.extend_from_slice(bytes)).unwrap();
        copy
    };
    trainer.state().unwrap().iter().map(bytes).collect()
}

/// A dry device that notes some of what it is asked for.
#[derive(Default)]
pub struct Noting {
    dry: Dry,
    log: RefCell<String>,
    reads: Cell<u64>,
    most_reads: Cell<u64>,
    scaled: Cell<u64>,
}

impl Noting {
    /// In order: `r` a read from a disk begins, `w` a write or a copy, `.` one of them is waited for, `o` an operation.
    pub fn log(&self) -> String {
        self.log.borrow().clone()
    }

    /// The most reads that were begun and not waited for at once.
    pub fn most_reads(&self) -> u64 {
        self.most_reads.get()
    }

    /// Tensors that were multiplied by a number.
    pub fn scaled(&self) -> u64 {
        self.scaled.get()
    }
}

impl Device for Noting {
    fn arena(&self) -> &Arena {
        self.dry.arena()
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        self.log.borrow_mut().push('o');
        let scales = matches!(op, Op::Elementwise(Elementwise::Scale { .. } | Elementwise::ScaleBy { .. }));
        self.scaled.set(self.scaled.get() + u64::from(scales));
        self.dry.execute(op, unless_zero)
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.dry.write(out, fill)
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.dry.read(x, look)
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        self.dry.lend(tensor)
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        self.dry.reclaim(memory)
    }

    fn transfer(&self, moved: Transferred, _: Due) -> Due {
        let is_read = moved.read > 0;
        self.log.borrow_mut().push(if is_read { 'r' } else { 'w' });
        self.reads.set(self.reads.get() + u64::from(is_read));
        self.most_reads.set(self.most_reads.get().max(self.reads.get()));
        Due::default()
    }

    fn wait(&self, _: Due) {
        self.log.borrow_mut().push('.');
        // What is written is waited for before anything is read.
        self.reads.set(self.reads.get().saturating_sub(1));
    }
}

/// AdaLomo's own numbers.
pub const ADALOMO: AdafactorSettings = AdafactorSettings {
    decay_rate: -0.8,
    beta1: None,
    epsilon: 1e-30,
    scale_by_parameter: Some(1e-3),
    clip_threshold: 1.0,
};

/// An optimizer with the usual numbers beside its rule's.
pub fn with_kind(kind: OptimizerKind) -> OptimizerSettings {
    OptimizerSettings { kind, ..Default::default() }
}
