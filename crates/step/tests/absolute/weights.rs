//! Weights after each of ten steps, beside rules of optimizers that are written out in f64 for reading.

use plimsoll_device::DType;
use plimsoll_model::{ParameterKind, Role};
use plimsoll_step::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, GradientClipping, LionSettings, LossScaling,
    LowRankSettings, Precision, SgdSettings, StepSettings,
};

use super::rules::{Adafactor, Adam, Lion, Rule, Sgd};
use super::*;

const DECAY: f64 = 0.1;
const ADAM: AdamSettings = AdamSettings { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };
const LION: LionSettings = LionSettings { beta1: 0.9, beta2: 0.97 };
const BITS: EightBit = EightBit { embeddings: true };
const ADAFACTOR: AdafactorSettings = AdafactorSettings {
    decay_rate: -0.8,
    beta1: None,
    epsilon: 1e-30,
    scale_by_parameter: Some(1e-3),
    clip_threshold: 1.0,
};

/// Runs of elements that share a second moment of Adam-mini.
fn runs(p: &Parameter, spec: &ModelSpec) -> u64 {
    match p.role {
        Role::QProj => spec.attention.heads,
        Role::KProj => spec.attention.kv_heads,
        _ if p.role.kind() == ParameterKind::Bias => p.elements(),
        _ if p.shape.len() == 2 => p.shape[0],
        _ => 1,
    }
}

/// Takes ten steps and compares each, from where it began, with the rule's; `tolerance` is of the largest change.
fn check(
    label: &str,
    settings: &StepSettings,
    lr: f64,
    tolerance: f64,
    rule: impl Fn(&Parameter, &ModelSpec) -> Box<dyn Rule>,
) {
    let spec = ModelSpec { num_layers: 2, ..biased() };
    let device = roomy(2);
    let mut trainer = trainer(&device, &spec, settings);
    let mut rules: Vec<_> = trainer.trained().iter().map(|p| rule(p, &spec)).collect();
    for step in 1..=10i32 {
        let (tokens, targets) = tokens(u64::from(step.unsigned_abs()), 2, 9);
        let batch = [MicroBatch::new(&tokens, &targets)];
        let before = weights(&trainer);
        let all = gradients(&device, &mut trainer, &batch);
        let scale = trainer.progress().loss_scale.map_or(1.0, |loss_scale| loss_scale.scale);
        let norm = all.iter().map(|(_, g)| squares(g)).sum::<f64>().sqrt() / scale;
        let clip = match settings.clipping {
            GradientClipping::GlobalNorm(most) => (most / norm).min(1.0),
            GradientClipping::None => 1.0,
        };
        let outcome = trainer.step(&batch, lr).unwrap();
        assert!((outcome.grad_norm / norm - 1.0).abs() < 1e-5, "{label}: {} {norm}", outcome.grad_norm);
        let after = weights(&trainer);
        for (i, (p, gradient)) in all.iter().enumerate() {
            let gradient: Vec<f64> = gradient.iter().map(|g| g * clip / scale).collect();
            let decays = matches!(p.role.kind(), ParameterKind::Matrix | ParameterKind::Embedding);
            let decay = if decays { DECAY } else { 0.0 };
            let wanted = rules[i].step(&before[i], &gradient, lr, decay, step);
            let change = wanted.iter().zip(&before[i]).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
            for (at, (got, want)) in after[i].iter().zip(&wanted).enumerate() {
                let off = (got - want).abs();
                // A weight is rounded to f32.
                let near = off <= tolerance * change + 1.5e-7 * want.abs();
                assert!(near, "{label}, step {step}, {}[{at}]: {got}, not {want}", p.name);
            }
        }
    }
}

fn with(kind: OptimizerKind) -> StepSettings {
    StepSettings {
        optimizer: optimizer(kind, DECAY),
        clipping: GradientClipping::GlobalNorm(0.7),
        ..settings(2, 9)
    }
}

fn adam(p: &Parameter) -> Box<dyn Rule> {
    Box::new(Adam::new(ADAM, p.elements(), p.elements()))
}

#[test]
fn adamw_corrects_its_biases_and_decays_apart_from_the_step() {
    check("adamw", &with(OptimizerKind::AdamW(ADAM)), 1e-2, 1e-4, |p, _| adam(p));
    // Masters are what is updated.
    let settings = StepSettings { precision: BF16_WITH_MASTERS, ..with(OptimizerKind::AdamW(ADAM)) };
    check("adamw, masters", &settings, 1e-2, 1e-4, |p, _| adam(p));
    // Moments of 8 bits of mantissa.
    check("adamw_bf16", &with(OptimizerKind::AdamWBf16(ADAM)), 1e-2, 0.05, |p, _| adam(p));
}

#[test]
fn adam_mini_shares_second_moments() {
    check("adam_mini", &with(OptimizerKind::AdamMini(ADAM)), 1e-2, 1e-4, |p, spec| {
        Box::new(Adam::new(ADAM, p.elements(), runs(p, spec)))
    });
}

#[test]
fn small_parameters_of_8_bit_adamw_are_exact() {
    // bitsandbytes lets weights decay after the step.
    let after = |p: &Parameter, _: &ModelSpec| -> Box<dyn Rule> {
        Box::new(Adam { decay_after: true, ..Adam::new(ADAM, p.elements(), p.elements()) })
    };
    check("adamw_8bit", &with(OptimizerKind::AdamW8bit(ADAM, BITS)), 1e-2, 1e-4, after);
}

#[test]
fn lion_takes_signs() {
    check("lion", &with(OptimizerKind::Lion(LION)), 1e-3, 1e-4, |p, _| {
        Box::new(Lion { numbers: LION, m: vec![0.0; p.elements() as usize] })
    });
}

#[test]
fn sgd_decays_through_the_gradient() {
    for (momentum, dampening, nesterov) in [(0.0, 0.0, false), (0.9, 0.3, false), (0.9, 0.0, true)] {
        let numbers = SgdSettings { momentum, dampening, nesterov };
        check("sgd", &with(OptimizerKind::Sgd(numbers)), 0.3, 1e-4, |_, _| {
            Box::new(Sgd { numbers, m: Vec::new() })
        });
    }
}

#[test]
fn adafactor_factors_and_clips() {
    for beta1 in [None, Some(0.9)] {
        for scale_by_parameter in [None, Some(1e-3)] {
            let numbers = AdafactorSettings { beta1, scale_by_parameter, ..ADAFACTOR };
            let lr = if scale_by_parameter.is_some() { 0.1 } else { 0.01 };
            let rule = |p: &Parameter, _: &ModelSpec| -> Box<dyn Rule> {
                Box::new(Adafactor::new(numbers, &p.shape))
            };
            check("adafactor", &with(OptimizerKind::Adafactor(numbers)), lr, 1e-3, rule);
            if beta1.is_none() {
                check("adalomo", &with(OptimizerKind::AdaLomo(numbers)), lr, 1e-3, rule);
            }
        }
    }
}

/// The loss is scaled, the update is not.
#[test]
fn a_scaled_loss_gives_the_same_update() {
    for initial in [1.0, 256.0, 4096.0] {
        let scaling = LossScaling { initial, growth_interval: 4, ..LossScaling::default() };
        let settings = StepSettings {
            precision: Precision::F16,
            loss_scaling: Some(scaling),
            ..with(OptimizerKind::AdamW(ADAM))
        };
        check("fp16", &settings, 1e-2, 1e-4, |p, _| adam(p));
    }
}

/// Under a gradient that stays the same each rule of Adam's kind makes the same step again and again, from the first
/// one on: bias corrections are what sees to that.
#[test]
fn bias_corrections_make_the_first_step_as_large_as_the_tenth() {
    let low_rank = LowRankSettings { rank: 4, update_proj_gap: 200, scale: 1.0, adam: ADAM };
    let mini = LowRankSettings { rank: 1, ..low_rank };
    let kinds = [
        (OptimizerKind::AdamW(ADAM), 1e-3),
        (OptimizerKind::AdamMini(ADAM), 1e-3),
        (OptimizerKind::AdamWBf16(ADAM), 0.05),
        (OptimizerKind::AdamW8bit(ADAM, BITS), 0.05),
        (OptimizerKind::GaLore(low_rank), 2e-3),
        (OptimizerKind::Apollo(low_rank, ApolloChannels::Channel), 2e-3),
        (OptimizerKind::Apollo(mini, ApolloChannels::Tensor), 2e-3),
    ];
    // Large enough for 8-bit states.
    let base = biased();
    let mlp = plimsoll_model::MlpSpec { intermediate_size: 180, ..base.mlp };
    let spec = ModelSpec { mlp, num_layers: 2, vocab_size: 180, ..base };
    let (tokens, targets) = tokens(7, 2, 9);
    let batch = [MicroBatch::new(&tokens, &targets)];
    for (kind, tolerance) in kinds {
        let settings = StepSettings {
            optimizer: optimizer(kind, 0.0),
            clipping: GradientClipping::None,
            ..settings(2, 9)
        };
        let device = roomy(2);
        let mut trainer = trainer(&device, &spec, &settings);
        let lr = 1e-5;
        let mut first: Vec<f64> = Vec::new();
        for step in 1..=10 {
            let before = weights(&trainer);
            let all = gradients(&device, &mut trainer, &batch);
            trainer.step(&batch, lr).unwrap();
            let change = |(after, before): (&Vec<f64>, &Vec<f64>)| {
                let change: Vec<f64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
                squares(&change).sqrt()
            };
            let changes: Vec<f64> = weights(&trainer).iter().zip(&before).map(change).collect();
            for (i, (p, gradient)) in all.iter().enumerate() {
                // Tokens that never came have no gradient; where it is all but nothing, epsilon counts.
                let touched = gradient.iter().filter(|g| **g != 0.0).count() as f64;
                if gradient.iter().any(|g| *g != 0.0 && g.abs() < 1e3 * ADAM.epsilon) {
                    continue;
                }
                if step == 1 {
                    // A step of the rate for every element that has a gradient, or of the rank's share of them.
                    let adam = matches!(kind, OptimizerKind::AdamW(_) | OptimizerKind::AdamWBf16(_));
                    let wanted = lr * touched.sqrt();
                    assert!(!adam || (changes[i] / wanted - 1.0).abs() < 0.01, "{kind:?} {}", p.name);
                    if let (OptimizerKind::GaLore(numbers), true) = (kind, p.role.is_block_matrix()) {
                        let wide = p.shape[0].max(p.shape[1]);
                        let wanted = lr * ((numbers.rank * wide) as f64).sqrt();
                        assert!((changes[i] / wanted - 1.0).abs() < 0.05, "{} {wanted}", changes[i]);
                    }
                } else {
                    let near = (changes[i] / first[i] - 1.0).abs() < tolerance + 0.01;
                    assert!(near, "{kind:?}, step {step}, {}: {} {}", p.name, changes[i], first[i]);
                }
            }
            if step == 1 {
                first = changes;
            }
        }
        assert!(spec.parameters().iter().all(|p| trainer.weight(p).unwrap().dtype() == DType::F32));
    }
}
