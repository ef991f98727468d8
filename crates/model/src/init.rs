//! First values of a model that is trained from scratch: the usual initialisations, from counter-based random numbers
//! that depend on the seed, the parameter's name and the element's index, and on nothing else.

use std::ops::Range;

use plimsoll_device::DType;
use plimsoll_device::cpu::at_once;
use plimsoll_memory::{splitmix64, usable_cores};

use crate::convert::{ConversionError, encode};
use crate::parameters::{Initialisation, Parameter};
use crate::spec::ModelSpec;

/// Values made at a time.
const CHUNK: usize = 256;
/// Values of a part at least: so many take longer than to begin a thread, by far, and are few enough that 4 MiB occupy sixteen cores.
const PART: usize = 32 << 10;

/// Writes the first values of some rows of a parameter as `dtype` (f32, bf16 or f16) into `out`, which has their size.
pub fn fill(
    parameter: &Parameter,
    rows: Range<u64>,
    spec: &ModelSpec,
    seed: u64,
    dtype: DType,
    out: &mut [u8],
) -> Result<(), ConversionError> {
    let values = Values { key: key(&parameter.name, seed), kind: parameter.initialisation(spec), dtype };
    let (first, bytes) = (rows.start * parameter.columns(), dtype.block_bytes() as usize);
    let part = (out.len() / bytes).div_ceil(usable_cores()).next_multiple_of(CHUNK).max(PART);
    let parts = out.chunks_mut(part * bytes).enumerate();
    let write = |(number, out): (usize, &mut [u8])| values.write(first + (number * part) as u64, out);
    at_once(parts, usable_cores(), write).into_iter().collect()
}

/// First values of one parameter.
struct Values {
    key: u64,
    kind: Initialisation,
    dtype: DType,
}

impl Values {
    /// Those from element `first` on.
    fn write(&self, first: u64, out: &mut [u8]) -> Result<(), ConversionError> {
        let (mut values, bytes) = ([0.0f32; CHUNK], self.dtype.block_bytes() as usize);
        for (number, out) in out.chunks_mut(CHUNK * bytes).enumerate() {
            let values = &mut values[..out.len() / bytes];
            match self.kind {
                Initialisation::Ones => values.fill(1.0),
                Initialisation::Zeros => values.fill(0.0),
                Initialisation::Normal(deviation) => {
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = (deviation * normal(self.key, first + (number * CHUNK + i) as u64)) as f32;
                    }
                }
            }
            encode(values, self.dtype, out)?;
        }
        Ok(())
    }
}

/// Normal random numbers of mean 0 for a parameter.
pub(crate) fn normal_values(name: &str, seed: u64, count: usize, deviation: f64) -> Vec<f32> {
    let key = key(name, seed);
    (0..count as u64).map(|i| (deviation * normal(key, i)) as f32).collect()
}

/// Random numbers between `-bound` and `bound` for a parameter.
pub(crate) fn uniform_values(name: &str, seed: u64, count: usize, bound: f64) -> Vec<f32> {
    let key = key(name, seed);
    let unit = |i| (mix(key ^ mix(i)) >> 11) as f64 / (1u64 << 53) as f64;
    (0..count as u64).map(|i| ((2.0 * unit(i) - 1.0) * bound) as f32).collect()
}

fn key(name: &str, seed: u64) -> u64 {
    name.bytes().fold(mix(seed), |key, byte| mix(key ^ u64::from(byte)))
}

/// The `index`-th number of a standard normal distribution (Box and Muller 1958).
fn normal(key: u64, index: u64) -> f64 {
    let bits = mix(key ^ mix(index));
    // Two independent numbers in (0, 1] and [0, 1).
    let radius = ((bits >> 32) + 1) as f64 / 4_294_967_296.0;
    let turn = (bits & 0xffff_ffff) as f64 / 4_294_967_296.0;
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * turn).cos()
}

/// A number that has nothing in common with those of other values.
fn mix(value: u64) -> u64 {
    splitmix64(value, 0)
}

#[cfg(test)]
mod tests {
    use super::normal;

    #[test]
    fn numbers_are_standard_normal() {
        let n = 100_000u64;
        let moments = (0..n)
            .map(|i| normal(7, i))
            .fold([0.0; 4], |[a, b, c, d], x| [a + x, b + x * x, c + x.powi(3), d + x.powi(4)]);
        for (moment, expected) in moments.iter().zip([0.0, 1.0, 0.0, 3.0]) {
            assert!((moment / n as f64 - expected).abs() < 0.08, "{moments:?}");
        }
    }
}
