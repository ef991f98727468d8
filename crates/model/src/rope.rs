//! The frequencies of rotary positions (Su et al. 2021), by the scaling rules of Hugging Face configurations.

use std::f64::consts::TAU;

use crate::spec::{RopeScaling, RopeSpec};

impl RopeSpec {
    /// Inverse frequencies of the pairs, and the factor on cos and sin. `length` is the longest sequence in use.
    pub fn frequencies(&self, length: u64) -> (Vec<f32>, f64) {
        let d = self.dims as f64;
        let pairs = self.dims / 2;
        let plain = |base: f64| (0..pairs).map(move |i| 1.0 / base.powf(2.0 * i as f64 / d));
        let as_f32 = |list: &mut dyn Iterator<Item = f64>| list.map(|f| f as f32).collect::<Vec<f32>>();
        match &self.scaling {
            RopeScaling::None => (as_f32(&mut plain(self.theta)), 1.0),
            RopeScaling::Linear { factor } => (as_f32(&mut plain(self.theta).map(|f| f / factor)), 1.0),
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                let length = (length as f64).max(*max_position_embeddings);
                let growth = factor * length / max_position_embeddings - (factor - 1.0);
                (as_f32(&mut plain(self.theta * growth.powf(d / (d - 2.0)))), 1.0)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let scaled = |f: f64| {
                    let wavelength = TAU / f;
                    if wavelength > original_max_position_embeddings / low_freq_factor {
                        f / factor
                    } else if wavelength < original_max_position_embeddings / high_freq_factor {
                        f
                    } else {
                        let smooth = (original_max_position_embeddings / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (as_f32(&mut plain(self.theta).map(scaled)), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                truncate,
            } => {
                // The dimension whose wavelength makes `rotations` turns within the original context.
                let dimension = |rotations: f64| {
                    d * (original_max_position_embeddings / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (low, high) = (dimension(*beta_fast), dimension(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(d - 1.0));
                let width = if high > low { high - low } else { 0.001 };
                let blended = |(i, f): (usize, f64)| {
                    let ramp = ((i as f64 - low) / width).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                };
                (as_f32(&mut plain(self.theta).enumerate().map(blended)), *attention_factor)
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                attention_factor,
                original_max_position_embeddings,
            } => {
                let factors = if length as f64 > *original_max_position_embeddings {
                    long_factor
                } else {
                    short_factor
                };
                let one_by_one = plain(self.theta).zip(factors).map(|(f, factor)| f / factor);
                (as_f32(&mut { one_by_one }), *attention_factor)
            }
            RopeScaling::PerFrequency { factors } => {
                let one_by_one = plain(self.theta).zip(factors).map(|(f, factor)| f / factor);
                (as_f32(&mut { one_by_one }), 1.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected inverse frequencies were computed by hand from the published rules.
    fn check(scaling: RopeScaling, length: u64, index: usize, expected: f64, magnitude: f64) {
        let rope = RopeSpec { dims: 8, theta: 10_000.0, scaling };
        let (frequencies, factor) = rope.frequencies(length);
        assert_eq!(frequencies.len(), 4);
        assert!(
            (f64::from(frequencies[index]) / expected - 1.0).abs() < 1e-6,
            "{} {expected}",
            frequencies[index]
        );
        assert_eq!(factor, magnitude);
    }

    #[test]
    fn every_rule_gives_its_published_frequencies() {
        check(RopeScaling::None, 64, 1, 0.1, 1.0);
        check(RopeScaling::None, 64, 3, 0.001, 1.0);
        check(RopeScaling::Linear { factor: 4.0 }, 64, 1, 0.025, 1.0);
        check(RopeScaling::PerFrequency { factors: vec![1.0, 2.0, 4.0, 8.0] }, 64, 2, 0.0025, 1.0);
        // Not longer than trained: the plain base. Twice as long with factor 2: base * 3^(8/6).
        let dynamic = RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 64.0 };
        check(dynamic.clone(), 64, 1, 0.1, 1.0);
        let base = 10_000.0 * 3f64.powf(8.0 / 6.0);
        check(dynamic, 128, 1, base.powf(-0.25), 1.0);
        // Wavelengths 6.28, 62.8, 628, 6283 against 8192/4 = 2048 and 8192/1 = 8192.
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        check(llama3.clone(), 64, 2, 0.01, 1.0);
        let smooth = (8192.0 / (TAU * 1000.0) - 1.0) / 3.0;
        check(llama3, 64, 3, (1.0 - smooth) * 0.001 / 8.0 + smooth * 0.001, 1.0);
        // beta_fast 32: dimension 8 ln(4096/(32 tau)) / (2 ln 1e4) = 1.31, floor 1; beta_slow 1: 2.81, ceil 3.
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.5,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 4096.0,
            truncate: true,
        };
        check(yarn.clone(), 64, 1, 0.1, 1.5);
        check(yarn.clone(), 64, 2, 0.01 * (0.5 / 4.0 + 0.5), 1.5);
        check(yarn, 64, 3, 0.001 / 4.0, 1.5);
        // gpt-oss: the ramp goes from the first of these dimensions to the second as they are.
        let exact = RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.5,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 4096.0,
            truncate: false,
        };
        let dimension = |turns: f64| 8.0 * (4096.0 / (turns * TAU)).ln() / (2.0 * 1e4f64.ln());
        let ramp = (2.0 - dimension(32.0)) / (dimension(1.0) - dimension(32.0));
        check(exact.clone(), 64, 1, 0.1, 1.5);
        check(exact.clone(), 64, 2, 0.01 * (ramp / 4.0 + 1.0 - ramp), 1.5);
        check(exact, 64, 3, 0.001 / 4.0, 1.5);
        let long = RopeScaling::LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![2.0; 4],
            attention_factor: 1.25,
            original_max_position_embeddings: 100.0,
        };
        check(long.clone(), 100, 1, 0.1, 1.25);
        check(long, 101, 1, 0.05, 1.25);
    }

    /// Wavelengths 6.28, 62.8, 628, 6283 against 8192/2 = 4096 and 8192/4 = 2048; and against 512/0.5 = 1024 and 512/4.
    #[test]
    fn low_frequencies_begin_where_the_original_length_over_their_factor_ends() {
        let llama3 = |low_freq_factor, original_max_position_embeddings| RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor: 4.0,
            original_max_position_embeddings,
        };
        check(llama3(2.0, 8192.0), 64, 2, 0.01, 1.0);
        check(llama3(2.0, 8192.0), 64, 3, 0.001 / 8.0, 1.0);
        let smooth = (512.0 / (TAU * 100.0) - 0.5) / 3.5;
        check(llama3(0.5, 512.0), 64, 2, (1.0 - smooth) * 0.01 / 8.0 + smooth * 0.01, 1.0);
        check(llama3(0.5, 512.0), 64, 3, 0.001 / 8.0, 1.0);
    }

    /// Where YaRN's ramp would end behind the last dimension, it ends there; where it has no width, it is a step.
    #[test]
    fn the_ramp_of_yarn_ends_within_the_dimensions() {
        let yarn = |beta_fast, original_max_position_embeddings| RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.0,
            beta_fast,
            beta_slow: 1.0,
            original_max_position_embeddings,
            truncate: true,
        };
        // With theta 10, 8 ln(4096/(300 tau)) / (2 ln 10) = 1.35, floor 1; 8 ln(4096/tau) / (2 ln 10) = 11.3, which is 7 at most.
        let rope = RopeSpec { dims: 8, theta: 10.0, scaling: yarn(300.0, 4096.0) };
        let (found, _) = rope.frequencies(64);
        for (index, ramp) in [(0, 0.0), (1, 0.0), (2, 1.0 / 6.0), (3, 2.0 / 6.0)] {
            let plain = 10f64.powf(-0.25 * index as f64);
            let expected = plain / 4.0 * ramp + plain * (1.0 - ramp);
            assert!((f64::from(found[index]) / expected - 1.0).abs() < 1e-6, "{index}: {found:?} {expected}");
        }
        // No wavelength makes a turn within 5 positions: the ramp begins and ends with the first pair.
        check(yarn(32.0, 5.0), 64, 0, 1.0, 1.0);
        check(yarn(32.0, 5.0), 64, 1, 0.1 / 4.0, 1.0);
    }
}
