//! Steps against plain versions, the draw, and settings that are refused.

use proptest::prelude::*;

use super::candidates::Candidates;
use super::history::History;
use super::*;

const GREEDY: SamplerSettings = SamplerSettings {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    typical_p: 1.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    penalty_last_n: None,
    logit_bias: Vec::new(),
    seed: 0,
};

fn sampler(temperature: f64, seed: u64) -> Sampler {
    Sampler::new(&SamplerSettings { temperature, seed, ..GREEDY }).unwrap()
}

/// What a step leaves of logits, by token; `past` are the tokens that were there.
fn left(step: SamplerStep, logits: &[f32], past: &[u32]) -> Vec<(u32, f64)> {
    step.check().unwrap();
    let mut history = History::new(Some(None));
    history.extend(past);
    let mut candidates = Candidates::new(logits);
    step.apply(&mut candidates, &history);
    let mut left: Vec<(u32, f64)> = candidates.as_slice().iter().map(|c| (c.token, c.logit)).collect();
    left.sort_unstable_by_key(|(token, _)| *token);
    left
}

fn tokens(step: SamplerStep, logits: &[f32]) -> Vec<u32> {
    left(step, logits, &[]).into_iter().map(|(token, _)| token).collect()
}

/// Logits of these probabilities.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    logits.iter().map(|l| f64::from(*l).exp() / total).collect()
}

#[test]
fn the_default_is_greedy_and_has_no_other_step() {
    assert_eq!(SamplerSettings::default(), GREEDY);
    assert_eq!(GREEDY.steps(), [SamplerStep::Temperature(0.0)]);
    assert_eq!(SamplerSettings { temperature: 1.0, ..GREEDY }.steps(), []);
}

#[test]
fn temperature_zero_takes_the_first_of_the_likeliest() {
    assert_eq!(sampler(0.0, 1).sample(&[0.0, 3.0, 3.0, -1.0]), Some(1));
    assert_eq!(sampler(0.0, 1).sample(&[]), None);
    assert_eq!(sampler(1.0, 1).sample(&[]), None);
    assert_eq!(sampler(0.0, 1).sample(&[f32::NAN, -5.0, f32::NEG_INFINITY]), Some(1));
    assert_eq!(sampler(0.0, 1).sample(&[f32::NAN; 2]), Some(0));
    assert_eq!(sampler(0.0, 1).sample(&[-1.0, -0.0, 0.0]), Some(1));
    assert_eq!(sampler(0.7, 1).sample(&[0.0, f32::INFINITY, 1.0]), Some(1));
}

/// Many logits, odd ones among them: the shortcut takes what the steps take.
#[test]
fn the_likeliest_is_found_without_steps_as_with_them() {
    let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, 3.5, 3.5, f32::INFINITY];
    for most in 0..=odd.len() {
        for length in [0, 1, 15, 16, 17, 100] {
            for shift in 0..7 {
                let logits: Vec<f32> = (0..length)
                    .map(|i| odd.get((i * 5 + shift) % 11).filter(|_| (i + shift) % 7 < most))
                    .map(|odd| odd.copied().unwrap_or(-1.0))
                    .collect();
                let steps = vec![SamplerStep::TopK(1), SamplerStep::Temperature(0.0)];
                let wanted = Sampler::of_steps(steps, 1).unwrap().sample(&logits);
                assert_eq!(sampler(0.0, 1).sample(&logits), wanted, "{logits:?}");
            }
        }
    }
}

#[test]
fn draws_follow_the_distribution_and_the_seed() {
    let logits = [0.0, (3.0f32).ln(), f32::NEG_INFINITY];
    let draw = |seed| {
        let mut sampler = sampler(1.0, seed);
        (0..4000).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    let tokens = draw(7);
    assert_eq!(tokens, draw(7));
    assert_ne!(tokens, draw(8));
    let ones = tokens.iter().filter(|t| **t == 1).count();
    assert!((2850..3150).contains(&ones), "{ones}");
    assert!(!tokens.contains(&2));
}

#[test]
fn a_low_temperature_sharpens() {
    let mut sampler = sampler(0.05, 3);
    assert!((0..200).all(|_| sampler.sample(&[0.0, 1.0]) == Some(1)));
}

#[test]
fn top_k_keeps_the_likeliest_and_the_lower_of_equals() {
    assert_eq!(tokens(SamplerStep::TopK(2), &[1.0, 3.0, 2.0, 3.0]), [1, 3]);
    assert_eq!(tokens(SamplerStep::TopK(1), &[3.0, 3.0]), [0]);
    assert_eq!(tokens(SamplerStep::TopK(9), &[1.0, 2.0]), [0, 1]);
    assert_eq!(tokens(SamplerStep::TopK(0), &[1.0, 2.0]), [0, 1]);
}

#[test]
fn top_p_keeps_the_token_that_reaches_the_mass() {
    let logits = logits(&[0.1, 0.5, 0.15, 0.25]);
    assert_eq!(tokens(SamplerStep::TopP(0.4), &logits), [1]);
    assert_eq!(tokens(SamplerStep::TopP(0.6), &logits), [1, 3]);
    assert_eq!(tokens(SamplerStep::TopP(0.8), &logits), [1, 2, 3]);
    assert_eq!(tokens(SamplerStep::TopP(1.0), &logits), [0, 1, 2, 3]);
}

#[test]
fn min_p_is_a_share_of_the_best() {
    let logits = logits(&[0.1, 0.5, 0.15, 0.25]);
    assert_eq!(tokens(SamplerStep::MinP(0.25), &logits), [1, 2, 3]);
    assert_eq!(tokens(SamplerStep::MinP(1.0), &logits), [1]);
    assert_eq!(tokens(SamplerStep::MinP(0.0), &[0.0, f32::NEG_INFINITY]), [0, 1]);
}

/// Meister et al.: of one likely and many unlikely tokens, the unlikely ones carry about as much as is to be
/// expected.
#[test]
fn typical_keeps_what_is_nearest_to_the_entropy() {
    let logits = logits(&[0.4, 0.2, 0.2, 0.19, 0.01]);
    assert_eq!(tokens(SamplerStep::Typical(0.3), &logits), [1, 2]);
    assert_eq!(tokens(SamplerStep::Typical(0.5), &logits), [1, 2, 3]);
    assert_eq!(tokens(SamplerStep::Typical(0.9), &logits), [0, 1, 2, 3]);
    assert_eq!(tokens(SamplerStep::Typical(1.0), &logits), [0, 1, 2, 3, 4]);
}

#[test]
fn penalties_count_what_was_there() {
    let penalties = |repetition, presence, frequency, last_n| SamplerStep::Penalties {
        repetition,
        presence,
        frequency,
        last_n,
    };
    let values = |step, past: &[u32]| {
        left(step, &[2.0, -2.0, 1.0], past).into_iter().map(|(_, logit)| logit).collect::<Vec<_>>()
    };
    assert_eq!(values(penalties(2.0, 0.0, 0.0, None), &[0, 1]), [1.0, -4.0, 1.0]);
    assert_eq!(values(penalties(1.0, 0.5, 0.0, None), &[0, 0]), [1.5, -2.0, 1.0]);
    assert_eq!(values(penalties(1.0, 0.0, 0.5, None), &[0, 0, 2]), [1.0, -2.0, 0.5]);
    assert_eq!(values(penalties(2.0, 1.0, 1.0, Some(2)), &[0, 2, 2]), [2.0, -2.0, -2.5]);
    assert_eq!(values(penalties(2.0, 0.0, 0.0, None), &[9]), [2.0, -2.0, 1.0]);
}

#[test]
fn a_sampler_remembers_as_long_as_its_steps_ask() {
    let settings = SamplerSettings { repetition_penalty: 10.0, penalty_last_n: Some(2), ..GREEDY };
    let mut sampler = Sampler::new(&settings).unwrap();
    let logits = [3.0, 2.0, 1.0];
    assert_eq!(sampler.sample(&logits), Some(0));
    sampler.observe(&[0]);
    assert_eq!(sampler.sample(&logits), Some(1));
    sampler.observe(&[1]);
    assert_eq!(sampler.sample(&logits), Some(2));
    sampler.observe(&[2]);
    assert_eq!(sampler.sample(&logits), Some(0));
}

#[test]
fn bias_moves_and_forbids() {
    let bias = |bias: &[(u32, f32)]| {
        Sampler::new(&SamplerSettings { logit_bias: bias.to_vec(), ..GREEDY })
            .unwrap()
            .sample(&[1.0, 2.0, 3.0])
    };
    assert_eq!(bias(&[(0, 5.0)]), Some(0));
    assert_eq!(bias(&[(2, f32::NEG_INFINITY)]), Some(1));
    assert_eq!(bias(&[(0, 1.5), (0, 1.0)]), Some(0));
    assert_eq!(bias(&[(77, 9.0)]), Some(2));
}

#[test]
fn steps_have_the_usual_order_or_ones_own() {
    let settings = SamplerSettings {
        temperature: 0.5,
        top_k: 4,
        top_p: 0.9,
        min_p: 0.1,
        typical_p: 0.8,
        presence_penalty: 1.0,
        logit_bias: vec![(1, 1.0)],
        ..GREEDY
    };
    use SamplerStep::*;
    let steps = settings.steps();
    assert!(
        matches!(
            steps.as_slice(),
            [LogitBias(_), Penalties { .. }, TopK(4), Typical(_), TopP(_), MinP(_), Temperature(_)]
        ),
        "{steps:?}"
    );
    // A temperature before top-p changes what top-p keeps.
    let logits = logits(&[0.5, 0.3, 0.2]);
    let drawn = |steps: [SamplerStep; 2]| {
        let mut sampler = Sampler::of_steps(steps.to_vec(), 5).unwrap();
        let mut drawn: Vec<u32> = (0..300).map(|_| sampler.sample(&logits).unwrap()).collect();
        drawn.sort_unstable();
        drawn.dedup();
        drawn
    };
    assert_eq!(drawn([TopP(0.6), Temperature(0.1)]), [0, 1]);
    assert_eq!(drawn([Temperature(0.1), TopP(0.6)]), [0]);
}

#[test]
fn settings_outside_of_their_range_are_refused() {
    let check = |settings: SamplerSettings, message: &str| {
        assert_eq!(Sampler::new(&settings).unwrap_err().to_string(), message);
    };
    check(SamplerSettings { temperature: -1.0, ..GREEDY }, "temperature is -1; it must be 0 or more");
    check(SamplerSettings { temperature: f64::NAN, ..GREEDY }, "temperature is NaN; it must be 0 or more");
    check(SamplerSettings { top_p: 0.0, ..GREEDY }, "top_p is 0; it must be above 0 and at most 1");
    check(SamplerSettings { typical_p: 1.5, ..GREEDY }, "typical_p is 1.5; it must be above 0 and at most 1");
    check(SamplerSettings { min_p: -0.1, ..GREEDY }, "min_p is -0.1; it must be from 0 to 1");
    check(
        SamplerSettings { repetition_penalty: 0.0, ..GREEDY },
        "repetition_penalty is 0; it must be above 0",
    );
    check(
        SamplerSettings { presence_penalty: f64::INFINITY, ..GREEDY },
        "presence_penalty is inf; it must be a finite number",
    );
    check(
        SamplerSettings { logit_bias: vec![(0, f32::NAN)], ..GREEDY },
        "logit_bias is NaN; it must be a number",
    );
}

/// Tokens by falling probability, the lower one first where equal.
fn by_probability(probabilities: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
    order
}

/// The first tokens of an order whose probabilities reach the mass, in ascending order.
fn reaching(order: &[usize], probabilities: &[f64], mass: f64) -> Vec<u32> {
    let mut kept = Vec::new();
    let mut sum = 0.0;
    for token in order {
        kept.push(*token as u32);
        sum += probabilities[*token];
        if sum >= mass {
            break;
        }
    }
    kept.sort_unstable();
    kept
}

proptest! {
    #[test]
    fn steps_are_the_plain_versions(
        logits in prop::collection::vec((-40i32..40).prop_map(|n| n as f32 / 4.0), 1..30), k in 1usize..35, mass in 0.01f64..0.99,
    ) {
        let p = softmax(&logits);
        let order = by_probability(&p);
        prop_assert_eq!(tokens(SamplerStep::TopK(k), &logits), reaching(&order[..k.min(p.len())], &p, 2.0));
        // A sum that is as good as the mass may be taken either way.
        let sums = order.iter().scan(0.0, |sum, token| { *sum += p[*token]; Some(*sum) });
        prop_assume!(sums.into_iter().all(|sum| (sum - mass).abs() > 1e-9));
        prop_assert_eq!(tokens(SamplerStep::TopP(mass), &logits), reaching(&order, &p, mass));
        let best = p.iter().copied().fold(0.0, f64::max);
        let kept: Vec<u32> = (0..).zip(&p).filter(|(_, p)| **p >= mass * best).map(|(token, _)| token).collect();
        prop_assert_eq!(tokens(SamplerStep::MinP(mass), &logits), kept);
        let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
        // Equal distances to the last bit are no property of the step: distinct logits alone are compared.
        let mut distances: Vec<f64> = p.iter().map(|p| (-p.ln() - entropy).abs()).collect();
        let mut typical: Vec<usize> = (0..p.len()).collect();
        typical.sort_by(|a, b| distances[*a].total_cmp(&distances[*b]));
        let sums: Vec<f64> = typical.iter().scan(0.0, |sum, token| { *sum += p[*token]; Some(*sum) }).collect();
        distances.sort_by(f64::total_cmp);
        prop_assume!(distances.windows(2).all(|pair| pair[1] - pair[0] > 1e-9));
        prop_assume!(sums.iter().all(|sum| (sum - mass).abs() > 1e-9));
        prop_assert_eq!(tokens(SamplerStep::Typical(mass), &logits), reaching(&typical, &p, mass));
    }

    #[test]
    fn any_logits_give_a_token(
        logits in prop::collection::vec(prop_oneof![any::<f32>(), -5f32..5.0], 1..20), seed in any::<u64>(), past in prop::collection::vec(0u32..25, 0..9),
        temperature in 0.0f64..3.0, top_k in 0usize..25, top_p in 0.01f64..1.0, min_p in 0.0f64..1.0, typical_p in 0.01f64..1.0,
    ) {
        let settings = SamplerSettings {
            temperature, top_k, top_p, min_p, typical_p, seed, repetition_penalty: 1.3, presence_penalty: 0.2, frequency_penalty: -0.1,
            penalty_last_n: Some(5), logit_bias: vec![(3, f32::NEG_INFINITY), (30, 1.0)],
        };
        let mut sampler = Sampler::new(&settings).unwrap();
        sampler.observe(&past);
        for _ in 0..3 {
            let token = sampler.sample(&logits).unwrap();
            prop_assert!((token as usize) < logits.len());
            let can_come = logits.iter().enumerate().any(|(t, l)| t != 3 && *l > f32::NEG_INFINITY);
            prop_assert!(!(token == 3 && can_come));
        }
    }

    #[test]
    fn greedy_is_the_first_maximum(logits in prop::collection::vec((-8i32..8).prop_map(|n| n as f32), 1..40)) {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = logits.iter().position(|l| *l == best).map(|token| token as u32);
        prop_assert_eq!(sampler(0.0, 0).sample(&logits), first);
        prop_assert_eq!(Sampler::new(&SamplerSettings { top_k: 1, temperature: 2.0, ..GREEDY }).unwrap().sample(&logits), first);
    }
}
