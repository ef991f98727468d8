//! Five steps of every optimizer beside values computed by others: `docs/bench/optimizer_fixtures.py` makes them.

use plimsoll_device::{Cpu, CpuOptions, DType, Device, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, Parameter, RopeSpec};
use serde_json::Value;

use super::*;

/// The fixtures' parameters, in their order.
const NAMES: [&str; 6] = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
];

const LR: f64 = 1e-2;

fn spec() -> ModelSpec {
    ModelSpec {
        name: "tiny".into(),
        architecture: "llama".into(),
        vocab_size: 80,
        hidden_size: 64,
        num_layers: 1,
        attention: AttentionSpec::plain(4, 2, 16, RopeSpec::plain(16, 10_000.0)),
        mlp: MlpSpec { intermediate_size: 96, activation: Activation::Silu, gated: true, bias: false },
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 64,
        initializer_range: 0.2,
        bos_token: None,
        eos_tokens: vec![],
    }
}

fn hash(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The fixtures' weights (step 0) and gradients.
fn noise(parameter: u32, step: u32, n: u64) -> Vec<f32> {
    let seed = (1000 * step + parameter).wrapping_mul(0x9e37_79b9);
    let value = |i: u32| {
        let share = (hash(i.wrapping_add(seed)) >> 8) as f32 / 16_777_216.0 - 0.5;
        share * (0.02 * (1 + i % 7) as f32)
    };
    (0..n as u32).map(value).collect()
}

fn write(device: &Cpu, tensor: &Tensor, values: &[f32]) {
    device.write(tensor, &mut |bytes| bytes.copy_from_slice(&to_bytes(values))).unwrap();
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

fn settings(kind: OptimizerKind) -> OptimizerSettings {
    OptimizerSettings { kind, weight_decay: 0.1, ..OptimizerSettings::default() }
}

fn optimizer<'a>(
    device: &'a Cpu,
    spec: &ModelSpec,
    settings: &OptimizerSettings,
) -> Result<Optimizer<'a, Cpu>, StepError> {
    let storage = StateStorage {
        tiers: &Arc::new(LowerTiers::none()),
        tier: Tier::Device,
        cut: Pieces::new(spec, &settings.kind),
        head_dim: spec.attention.head_dim,
        stays: &|_| false,
        needs_master: &|_| false,
        seed: 3,
    };
    Optimizer::allocate(device, &spec.parameters(), settings, storage)
}

fn bytes(device: &Cpu, tensor: &Tensor) -> Vec<u8> {
    let mut copy = Vec::new();
    device.read(tensor, &mut |bytes| copy = bytes.to_vec()).unwrap();
    copy
}

/// Every parameter after five steps, with its state, in the order of [`NAMES`].
fn five_steps(device: &Cpu, settings: &OptimizerSettings) -> Vec<(Parameter, Vec<f32>, OptimizerState)> {
    let spec = spec();
    let mut optimizer = optimizer(device, &spec, settings).unwrap();
    let tensor = |p: &Parameter| device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
    let parameters = spec.parameters();
    let named = NAMES.map(|name| parameters.iter().find(|p| p.name == name).unwrap().clone());
    (0..)
        .zip(named)
        .map(|(number, p)| {
            let (weight, grad) = (tensor(&p), tensor(&p));
            write(device, &weight, &noise(number, 0, p.elements()));
            for step in 1..=5 {
                write(device, &grad, &noise(number, step, p.elements()));
                let update = Update { lr: LR, grad_scale: 1.0, step: u64::from(step) };
                optimizer.update(device, &Part::whole(&p), (&weight, &grad), update).unwrap();
            }
            let state = optimizer.state(p.block, p.role).unwrap().clone();
            (p, device.read_f32(&weight).unwrap(), state)
        })
        .collect()
}

fn device(threads: usize) -> Cpu {
    Cpu::new(16 << 20, CpuOptions { threads: Some(threads), isa: None }).unwrap()
}

/// FNV-1a.
fn fnv(bytes: &[u8]) -> String {
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// Compares with the fixture of that name; `tolerance` is of the largest change of a weight.
fn check(fixture: &str, kind: OptimizerKind, tolerance: f32) {
    let text = include_str!("../../tests/fixtures/optimizers.json");
    let all: Value = serde_json::from_str(text).unwrap();
    let device = device(2);
    let mut compared = 0;
    for (number, (p, weights, state)) in (0..).zip(five_steps(&device, &settings(kind))) {
        let Some(expected) = all[fixture].get(&p.name) else { continue };
        let before = noise(number, 0, p.elements());
        let values = expected["values"].as_array().unwrap();
        let change = weights
            .iter()
            .zip(&before)
            .fold(0.0f32, |most, (after, before)| most.max((after - before).abs()));
        for (i, want) in values.iter().enumerate() {
            let (got, want) = (weights[97 * i], want.as_f64().unwrap() as f32);
            let near = (got - want).abs() <= tolerance * change;
            assert!(near, "{fixture}, {}, element {}: {got:e}, not {want:e}", p.name, 97 * i);
        }
        if let Some(hashes) = expected.get("hashes").and_then(Value::as_array) {
            let got = state.tensors().iter().map(|(_, tensor)| fnv(&bytes(&device, tensor)));
            let want: Vec<&str> = hashes.iter().map(|h| h.as_str().unwrap()).collect();
            assert_eq!(got.collect::<Vec<_>>(), want, "{fixture}, {}: codes and absmax", p.name);
        }
        compared += 1;
    }
    assert!(compared >= 4, "{fixture}");
}

const ADAM: AdamSettings = AdamSettings { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const LION: LionSettings = LionSettings { beta1: 0.9, beta2: 0.99 };
const BITS: EightBit = EightBit { embeddings: true };
const ADAFACTOR: AdafactorSettings = AdafactorSettings {
    epsilon: 1e-30,
    scale_by_parameter: Some(1e-3),
    clip_threshold: 1.0,
    decay_rate: -0.8,
    beta1: None,
};

fn low_rank(rank: u64, update_proj_gap: u64, scale: f64) -> LowRankSettings {
    LowRankSettings { rank, update_proj_gap, scale, adam: AdamSettings { epsilon: 1e-6, ..ADAM } }
}

fn sgd(momentum: f64, nesterov: bool) -> OptimizerKind {
    OptimizerKind::Sgd(SgdSettings { momentum, dampening: 0.0, nesterov })
}

#[test]
fn adamw_and_sgd_are_pytorchs() {
    check("adamw", OptimizerKind::AdamW(ADAM), 1e-5);
    check("sgd", sgd(0.0, false), 1e-4);
    check("sgd_momentum", sgd(0.9, false), 1e-4);
    check("sgd_nesterov", sgd(0.9, true), 1e-4);
}

/// Each step rounds each state by half of 2^-8 on average.
#[test]
fn bf16_states_stay_near() {
    check("adamw", OptimizerKind::AdamWBf16(ADAM), 0.02);
}

#[test]
fn eight_bit_codes_are_those_of_the_definition() {
    check("adamw_8bit", OptimizerKind::AdamW8bit(ADAM, BITS), 1e-5);
    check("lion_8bit", OptimizerKind::Lion8bit(LION, BITS), 1e-5);
}

#[test]
fn adam_mini_and_lion_are_their_packages() {
    check("adam_mini", OptimizerKind::AdamMini(ADAM), 1e-5);
    check("lion", OptimizerKind::Lion(LION), 1e-5);
}

#[test]
fn factored_moments_are_transformers() {
    check("adafactor", OptimizerKind::Adafactor(ADAFACTOR), 1e-4);
    let momentum = AdafactorSettings { beta1: Some(0.9), ..ADAFACTOR };
    check("adafactor_momentum", OptimizerKind::Adafactor(momentum), 1e-4);
    check("adalomo", OptimizerKind::AdaLomo(ADAFACTOR), 1e-4);
}

#[test]
fn low_rank_updates_are_their_packages() {
    check("galore", OptimizerKind::GaLore(low_rank(48, 200, 0.25)), 5e-3);
    check("apollo", OptimizerKind::Apollo(low_rank(16, 3, 1.0), ApolloChannels::Channel), 1e-3);
    check("apollo_mini", OptimizerKind::Apollo(low_rank(1, 3, 128.0), ApolloChannels::Tensor), 1e-3);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for kind in [
        OptimizerKind::AdamWBf16(ADAM),
        OptimizerKind::AdamW8bit(ADAM, BITS),
        OptimizerKind::AdamMini(ADAM),
        OptimizerKind::Adafactor(ADAFACTOR),
        OptimizerKind::GaLore(low_rank(8, 2, 0.25)),
        OptimizerKind::Apollo(low_rank(8, 2, 1.0), ApolloChannels::Channel),
    ] {
        let run = |threads| {
            let device = device(threads);
            let all = five_steps(&device, &settings(kind));
            all.into_iter()
                .map(|(_, weights, state)| {
                    let states = state.tensors().iter().map(|(_, t)| bytes(&device, t));
                    (weights.into_iter().map(f32::to_bits).collect(), states.collect())
                })
                .collect::<Vec<(Vec<u32>, Vec<Vec<u8>>)>>()
        };
        assert!(run(1) == run(2), "{kind:?}");
    }
}

/// Of a gradient of low rank and a little noise, GaLore's projection keeps what the best one would.
#[test]
fn a_truncated_subspace_holds_the_gradient() {
    let (rank, device) = (6, device(2));
    let settings = settings(OptimizerKind::GaLore(low_rank(rank, 200, 0.25)));
    let spec = spec();
    let mut optimizer = optimizer(&device, &spec, &settings).unwrap();
    for p in spec.parameters().iter().filter(|p| p.name.contains("mlp.") && p.shape.len() == 2) {
        let (rows, columns) = (p.shape[0] as usize, p.shape[1] as usize);
        let (a, b) = (noise(1, 1, p.shape[0] * rank), noise(2, 1, p.shape[1] * rank));
        let small = noise(3, 1, p.elements());
        let at = |i: usize, j: usize| {
            let sum: f32 = (0..6).map(|k| a[i * 6 + k] * b[j * 6 + k]).sum();
            sum + 1e-4 * small[i * columns + j]
        };
        let values: Vec<f32> = (0..rows * columns).map(|x| at(x / columns, x % columns)).collect();
        let tensor = || device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
        let (weight, grad) = (tensor(), tensor());
        write(&device, &weight, &values);
        write(&device, &grad, &values);
        let update = Update { lr: LR, grad_scale: 1.0, step: 1 };
        optimizer.update(&device, &Part::whole(p), (&weight, &grad), update).unwrap();
        let projection = optimizer.state(p.block, p.role).unwrap().find(StateKind::Projection).unwrap();
        let projection = device.read_f32(projection).unwrap();
        // Rows of the projection, whichever way it lies.
        let (narrow, tall) = (rows.min(columns), rows >= columns);
        let vector =
            |k: usize, i: usize| if tall { projection[k * narrow + i] } else { projection[i * 6 + k] };
        let energy = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let mut kept = 0.0;
        for k in 0..6 {
            for l in 0..=k {
                let product: f32 = (0..narrow).map(|i| vector(k, i) * vector(l, i)).sum();
                let want = if k == l { 1.0 } else { 0.0 };
                assert!((product - want).abs() < 1e-4, "{}: {k} {l} {product}", p.name);
            }
            let wide = rows.max(columns);
            let image: Vec<f32> = (0..wide)
                .map(|j| {
                    let of = |i: usize| if tall { values[j * columns + i] } else { values[i * columns + j] };
                    (0..narrow).map(|i| of(i) * vector(k, i)).sum()
                })
                .collect();
            kept += energy(&image);
        }
        assert!(kept > 0.9999 * energy(&values), "{}: {kept} of {}", p.name, energy(&values));
    }
}

#[test]
fn groups_have_numbers_of_their_own() {
    let pattern = |text: &str| glob::Pattern::new(text).unwrap();
    let group =
        |text, lr_scale, weight_decay| ParameterGroup { pattern: pattern(text), lr_scale, weight_decay };
    let groups =
        vec![group("*.mlp.*", 0.0, None), group("*norm*", 1.0, Some(0.5)), group("*", 2.0, Some(0.0))];
    let settings = OptimizerSettings { groups, ..settings(OptimizerKind::AdamW(ADAM)) };
    let spec = spec();
    for p in spec.parameters() {
        let want = match &p.name {
            name if name.contains(".mlp.") => (0.0, 0.1),
            name if name.contains("norm") => (1.0, 0.5),
            _ => (2.0, 0.0),
        };
        assert_eq!(settings.numbers_of(&p), want, "{}", p.name);
    }
    let empty = OptimizerSettings { groups: vec![group("*.experts.*", 1.0, None)], ..settings };
    let error = optimizer(&device(1), &spec, &empty).err().unwrap().to_string();
    assert!(error.contains("no parameter of the model has a name like '*.experts.*'"), "{error}");
}
