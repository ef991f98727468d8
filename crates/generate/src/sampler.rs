//! From logits to a token.

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerSettings {
    /// 0 takes the likeliest token; 1 draws from the model's own distribution; more flattens it.
    pub temperature: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// Draws tokens. The same seed and the same logits give the same tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    settings: SamplerSettings,
    draws: u64,
}

impl Sampler {
    /// A sampler at the beginning of its random numbers.
    pub fn new(settings: SamplerSettings) -> Sampler {
        Sampler { settings, draws: 0 }
    }

    /// The next token for these logits; the first of the likeliest ones where several are equal. `None` for none.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        if self.settings.temperature <= 0.0 {
            return argmax(logits);
        }
        let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let weights: Vec<f64> =
            logits.iter().map(|l| ((f64::from(*l) - best) / self.settings.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        if !total.is_finite() {
            return argmax(logits);
        }
        let mut left = self.uniform() * total;
        for (token, weight) in (0..).zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return Some(token);
            }
        }
        argmax(logits)
    }

    /// A number in [0, 1): SplitMix64 over seed and number of the draw.
    fn uniform(&mut self) -> f64 {
        self.draws += 1;
        let mut z = self.settings.seed.wrapping_add(self.draws.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (token, logit) in (0..).zip(logits) {
        if best.is_none_or(|(_, highest)| *logit > highest) {
            best = Some((token, *logit));
        }
    }
    best.map(|(token, _)| token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f64, seed: u64) -> Sampler {
        Sampler::new(SamplerSettings { temperature, seed })
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_likeliest() {
        assert_eq!(sampler(0.0, 1).sample(&[0.0, 3.0, 3.0, -1.0]), Some(1));
        assert_eq!(sampler(0.0, 1).sample(&[]), None);
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
}
