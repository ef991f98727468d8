//! Five steps of every optimizer beside values computed by others: `docs/bench/optimizer_fixtures.py` makes them.

use plimsoll_device::{Cpu, CpuOptions, DType, Device, Tensor};
use plimsoll_memory::{Region, Tag};
use plimsoll_model::{Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, Parameter, RopeSpec};
use serde_json::Value;

use super::*;

impl Part {
    /// All of a parameter.
    pub fn whole(parameter: &Parameter) -> Part {
        Part {
            parameter: parameter.clone(),
            piece: 0,
            rows: parameter.all_rows(),
            norm_row: 0,
            owner: None,
            standing: Default::default(),
        }
    }
}

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
) -> Result<Optimizer<'a>, StepError> {
    let storage = StateStorage {
        tiers: &Arc::default(),
        tier: Tier::Device,
        buffers: Optimizer::BUFFERS,
        cut: Pieces::new(spec, &settings.kind),
        head_dim: spec.attention.head_dim,
        stays: &|_| false,
        needs_master: &|_| false,
        seed: 3,
        shares: None,
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
                let update = Update { lr: LR, step: u64::from(step) };
                optimizer
                    .update(device, &Part::whole(&p), (&weight, &grad), update, Control::default())
                    .unwrap();
            }
            let state = optimizer.states(p.block, p.role)[0].1.clone();
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
        let update = Update { lr: LR, step: 1 };
        optimizer.update(&device, &Part::whole(p), (&weight, &grad), update, Control::default()).unwrap();
        let projection = optimizer.states(p.block, p.role)[0].1.find(StateKind::Projection).unwrap();
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

/// The rate of a group is a factor on the step's.
#[test]
fn a_group_moves_by_its_own_rate() {
    let group =
        ParameterGroup { pattern: glob::Pattern::new("*norm*").unwrap(), lr_scale: 4.0, weight_decay: None };
    let settings = OptimizerSettings { groups: vec![group], weight_decay: 0.0, ..settings(sgd(0.0, false)) };
    let (spec, device) = (spec(), device(1));
    let mut optimizer = optimizer(&device, &spec, &settings).unwrap();
    for (name, expected) in [("norm", 1.0 - 0.125 * 4.0 * 0.5), ("down_proj", 1.0 - 0.125 * 0.5)] {
        let p = spec.parameters().into_iter().find(|p| p.name.contains(name)).unwrap();
        let [weight, grad] = [1.0, 0.5].map(|value| {
            let tensor = device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
            write(&device, &tensor, &vec![value; p.elements() as usize]);
            tensor
        });
        let update = Update { lr: 0.125, step: 1 };
        optimizer.update(&device, &Part::whole(&p), (&weight, &grad), update, Control::default()).unwrap();
        assert!(device.read_f32(&weight).unwrap().iter().all(|x| *x == expected), "{name}");
    }
}

/// Weights that are rounded at random are rounded alike whether a table is updated as a whole or a piece at a time.
#[test]
fn pieces_of_a_table_are_updated_as_the_whole_is() {
    let (spec, device) = (spec(), device(2));
    let p = spec.parameters().into_iter().find(|p| p.name == NAMES[0]).unwrap();
    for kind in
        [OptimizerKind::AdamW(ADAM), OptimizerKind::AdamMini(ADAM), OptimizerKind::AdamW8bit(ADAM, BITS)]
    {
        let run = |cuts: &[Range<u64>]| {
            let mut optimizer = optimizer(&device, &spec, &settings(kind)).unwrap();
            let alloc = |dtype| device.alloc(dtype, &p.shape, Tag::Weights, "test").unwrap();
            let (weight, grad) = (alloc(DType::Bf16), alloc(DType::F32));
            device.write(&weight, &mut |bytes| bytes.fill(0x3f)).unwrap();
            for step in 1..=2 {
                write(&device, &grad, &noise(0, step, p.elements()));
                for (piece, rows) in (0..).zip(cuts) {
                    let part = Part {
                        parameter: p.clone(),
                        piece,
                        rows: rows.clone(),
                        norm_row: 0,
                        owner: None,
                        standing: Default::default(),
                    };
                    let [weight, grad] = [&weight, &grad].map(|x| x.slice_rows(rows.clone()).unwrap());
                    let update = Update { lr: LR, step: u64::from(step) };
                    optimizer.update(&device, &part, (&weight, &grad), update, Control::default()).unwrap();
                }
            }
            bytes(&device, &weight)
        };
        let all = 0..p.rows();
        assert!(run(&[0..32, 32..p.rows()]) == run(std::slice::from_ref(&all)), "{kind:?}");
    }
}

/// One step of what has f32 states beside narrower ones of others: the weight decays after the step, and epsilon is added
/// before the bias correction in GaLore, after it in 8-bit AdamW.
#[test]
fn plain_parameters_decay_after_their_step() {
    const RATE: f64 = 0.125;
    const DECAY: f64 = 2.0;
    const EPSILON: f64 = 0.01;
    let adam = AdamSettings { epsilon: EPSILON, ..ADAM };
    let galore = LowRankSettings { adam, ..low_rank(8, 200, 0.25) };
    let (spec, device) = (spec(), device(1));
    let p = spec.parameters().into_iter().find(|p| p.name == NAMES[1]).unwrap();
    let root_of_correction2 = (1.0 - ADAM.beta2).sqrt();
    for (kind, epsilon) in [
        (OptimizerKind::GaLore(galore), EPSILON / root_of_correction2),
        (OptimizerKind::AdamW8bit(adam, BITS), EPSILON),
    ] {
        let pattern = glob::Pattern::new("*").unwrap();
        let group = ParameterGroup { pattern, lr_scale: 1.0, weight_decay: Some(DECAY) };
        let settings = OptimizerSettings { groups: vec![group], ..settings(kind) };
        let mut optimizer = optimizer(&device, &spec, &settings).unwrap();
        let tensor = || device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
        let (weight, grad, gradients) = (tensor(), tensor(), noise(1, 1, p.elements()));
        write(&device, &weight, &vec![1.0; p.elements() as usize]);
        write(&device, &grad, &gradients);
        let update = Update { lr: RATE, step: 1 };
        optimizer.update(&device, &Part::whole(&p), (&weight, &grad), update, Control::default()).unwrap();
        for (found, g) in device.read_f32(&weight).unwrap().into_iter().zip(gradients) {
            let g = f64::from(g);
            let expected = (1.0 - RATE * g / (g.abs() + epsilon)) * (1.0 - RATE * DECAY);
            assert!((f64::from(found) - expected).abs() < 1e-6, "{kind:?}: {found} {expected} {g}");
        }
    }
}

/// A gradient is projected where that makes it smaller, and scaled after that.
#[test]
fn gradients_are_projected_where_that_makes_them_smaller() {
    let (spec, device) = (spec(), device(1));
    // k_proj is [32, 64].
    let p = spec.parameters().into_iter().find(|p| p.name == NAMES[3]).unwrap();
    let first_moment = |rank, grad_scale| {
        let mut optimizer =
            optimizer(&device, &spec, &settings(OptimizerKind::GaLore(low_rank(rank, 200, 0.25)))).unwrap();
        let tensor = || device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
        let (weight, grad) = (tensor(), tensor());
        write(&device, &weight, &noise(3, 0, p.elements()));
        write(&device, &grad, &noise(3, 1, p.elements()));
        let factor = device.alloc(DType::F32, &[1], Tag::Workspace, "factor").unwrap();
        write(&device, &factor, &[grad_scale]);
        let (update, control) = (Update { lr: LR, step: 1 }, Control { factor: Some(&factor), flag: None });
        optimizer.update(&device, &Part::whole(&p), (&weight, &grad), update, control).unwrap();
        let state = &optimizer.states(p.block, p.role)[0].1;
        let moment = state.find(StateKind::FirstMoment).unwrap();
        let projection = state.find(StateKind::Projection).map(|x| x.shape().dims().to_vec());
        (moment.shape().dims().to_vec(), projection, device.read_f32(moment).unwrap())
    };
    let (shape, projection, whole) = first_moment(31, 1.0);
    assert_eq!((shape, projection), (vec![31, 64], Some(vec![32, 31])));
    let (.., half) = first_moment(31, 0.5);
    assert!(whole.iter().zip(&half).all(|(whole, half)| *half == 0.5 * whole) && whole[0] != 0.0);
    let (shape, projection, _) = first_moment(32, 1.0);
    assert_eq!((shape, projection), (vec![32, 64], None));
}

/// An optimizer of a single matrix of some shape.
fn of_one(device: &dyn Device, kind: OptimizerKind, shape: [u64; 2]) -> (Parameter, Optimizer<'_>) {
    let base = spec().parameters().into_iter().find(|p| p.name == NAMES[2]).unwrap();
    let p = Parameter { shape: shape.to_vec(), ..base };
    let storage = StateStorage {
        tiers: &Arc::default(),
        tier: Tier::Device,
        buffers: Optimizer::BUFFERS,
        cut: Pieces::new(&spec(), &kind),
        head_dim: 16,
        stays: &|_| false,
        needs_master: &|_| false,
        seed: 3,
        shares: None,
    };
    let optimizer = Optimizer::allocate(device, std::slice::from_ref(&p), &settings(kind), storage).unwrap();
    (p, optimizer)
}

/// Updates of more than 4 MiB are made some rows at a time, in so much memory and no more. What is taken off each row is the
/// direction, from the moments and the projection, in f64.
#[test]
fn large_updates_of_galore_come_in_chunks() {
    const RATE: f64 = 0.5;
    const RANK: usize = 4;
    let adam = AdamSettings { epsilon: 1e-6, ..ADAM };
    let galore = OptimizerKind::GaLore(low_rank(RANK as u64, 200, 0.25));
    for shape in [[1100, 1024], [700, 2048]] {
        let device = Cpu::new(48 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap();
        let [rows, columns] = shape.map(|size| size as usize);
        let (p, mut optimizer) = of_one(&device, galore, shape);
        let tensor = || device.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
        let (weight, grad) = (tensor(), tensor());
        let before = noise(3, 0, p.elements());
        write(&device, &weight, &before);
        write(&device, &grad, &noise(3, 1, p.elements()));
        let update = Update { lr: RATE, step: 1 };
        optimizer.update(&device, &Part::whole(&p), (&weight, &grad), update, Control::default()).unwrap();
        let tall = rows >= columns;
        let low = RANK * if tall { rows } else { columns };
        assert_eq!(device.arena().ledger().most(Tag::Workspace), (4 << 20) + 4 * low as u64, "{shape:?}");
        let state = &optimizer.states(p.block, p.role)[0].1;
        let read = |kind| -> Vec<f64> {
            device.read_f32(state.find(kind).unwrap()).unwrap().into_iter().map(f64::from).collect()
        };
        let (m, v) = (read(StateKind::FirstMoment), read(StateKind::SecondMoment));
        let projection = read(StateKind::Projection);
        let direction: Vec<f64> = m.iter().zip(&v).map(|(m, v)| m / (v.sqrt() + adam.epsilon)).collect();
        let corrections = (1.0 - adam.beta2).sqrt() / (1.0 - adam.beta1);
        let after = device.read_f32(&weight).unwrap();
        for row in 0..rows {
            for column in (row % 7..columns).step_by(7) {
                let back: f64 = (0..RANK)
                    .map(|k| match tall {
                        true => direction[row * RANK + k] * projection[k * columns + column],
                        false => projection[row * RANK + k] * direction[k * columns + column],
                    })
                    .sum();
                let place = row * columns + column;
                let moved = f64::from(before[place]) - 0.25 * RATE * corrections * back;
                let expected = moved * (1.0 - RATE * 0.1);
                let found = f64::from(after[place]);
                assert!((found - expected).abs() < 1e-5, "{shape:?} {row} {column}: {found} {expected}");
            }
        }
    }
}

#[test]
fn masters_are_told_from_other_states() {
    let (spec, device) = (spec(), Cpu::new(16 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap());
    let settings = settings(OptimizerKind::AdamW(ADAM));
    let storage = StateStorage {
        tiers: &Arc::default(),
        tier: Tier::Device,
        buffers: Optimizer::BUFFERS,
        cut: Pieces::new(&spec, &settings.kind),
        head_dim: 16,
        stays: &|_| false,
        needs_master: &|p| p.shape.len() == 2,
        seed: 3,
        shares: None,
    };
    let _optimizer = Optimizer::allocate(&device, &spec.parameters(), &settings, storage).unwrap();
    // Sizes are whole lines of 64 bytes.
    let bytes = |matrices: bool| -> u64 {
        spec.parameters().iter().filter(|p| !matrices || p.shape.len() == 2).map(|p| 4 * p.elements()).sum()
    };
    let live = device.arena().ledger().live();
    assert_eq!(live.get(Tag::MasterWeights), bytes(true));
    assert_eq!(live.get(Tag::Optimizer), 2 * bytes(false));
}

/// A home may be where another one was.
#[test]
fn states_below_the_device_begin_with_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let spill = plimsoll_disk::SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let (spec, device) = (spec(), device(1));
    let settings = settings(OptimizerKind::AdamW(ADAM));
    for tier in [Tier::Host, Tier::Disk] {
        let tiers = Arc::new(LowerTiers::open(Region::new(1 << 20).unwrap(), 1 << 20, &spill).unwrap());
        let before = tiers.take(tier, 1 << 20, Tag::Optimizer, "before").unwrap();
        tiers.write_now(&before, 0, &vec![0xff; 1 << 20]).unwrap();
        drop(before);
        let storage = StateStorage {
            tiers: &tiers,
            tier,
            buffers: Optimizer::BUFFERS,
            cut: Pieces::new(&spec, &settings.kind),
            head_dim: 16,
            stays: &|_| false,
            needs_master: &|_| false,
            seed: 3,
            shares: None,
        };
        let optimizer = Optimizer::allocate(&device, &spec.parameters(), &settings, storage).unwrap();
        for p in spec.parameters().iter().filter(|p| is_matrix(p)) {
            for kind in [StateKind::FirstMoment, StateKind::SecondMoment] {
                let contents = optimizer.contents(p, kind).unwrap();
                assert!(matches!(contents, Contents::Homes(_)));
                let mut seen = 0;
                contents
                    .read(&device, &tiers, &mut |bytes| {
                        assert!(bytes.iter().all(|byte| *byte == 0), "{} {kind:?} on {tier:?}", p.name);
                        seen += bytes.len() as u64;
                    })
                    .unwrap();
                assert_eq!(seen, 4 * p.elements());
            }
        }
    }
}

/// The vectors that are kept and 16 more are looked for, of the shorter side; not more than there are.
#[test]
fn a_subspace_is_looked_for_with_a_few_vectors_more() {
    let rows_of = |rank, shape: [u64; 2]| {
        let (dry, galore) =
            (plimsoll_device::Dry::recording(), OptimizerKind::GaLore(low_rank(rank, 200, 0.25)));
        let (p, mut optimizer) = of_one(&dry, galore, shape);
        let tensor = || dry.alloc(DType::F32, &p.shape, Tag::Weights, "test").unwrap();
        let update = Update { lr: LR, step: 1 };
        optimizer.update(&dry, &Part::whole(&p), (&tensor(), &tensor()), update, Control::default()).unwrap();
        let ledger = dry.arena().ledger();
        let bytes = |name| ledger.events().iter().find(|event| event.name == name).unwrap().delta as u64 / 4;
        (bytes("subspace") / shape[0].min(shape[1]), bytes("subspace_image") / shape[0].max(shape[1]))
    };
    assert_eq!(rows_of(4, [128, 64]), (20, 20));
    assert_eq!(rows_of(4, [64, 128]), (20, 20));
    assert_eq!(rows_of(60, [128, 64]), (64, 64));
}
