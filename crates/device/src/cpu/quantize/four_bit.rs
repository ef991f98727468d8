//! NF4 and FP4 as bitsandbytes defines them, to the bit, and their arrangement for this engine's kernels.
//!
//! Blocks of 64 run over the flat, row-major matrix; the last one may be short. A value's code is the place of the
//! nearest table entry to `value * (1 / magnitude)`, the lower one in the middle. Magnitudes may be quantised in turn:
//! less their mean, in blocks of 256, with the signed dynamic map (QLoRA, Dettmers et al. 2023).

use super::tables::{FP4_ASCENDING, FP4_LIMITS, NF4_LIMITS, SIGNED_DYNAMIC_MAP};
use crate::DType;
use crate::cpu::at_once;

/// Values of a block.
pub const BLOCK: usize = 64;
/// Magnitudes of a block of the second quantisation.
pub const NESTED_BLOCK: usize = 256;

/// A table of sixteen values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FourBit {
    /// Quantiles of a normal distribution.
    Nf4,
    /// Floats of 4 bits.
    Fp4,
}

impl FourBit {
    /// The table of a storage type, if it is one of these.
    pub fn of(dtype: DType) -> Option<FourBit> {
        match dtype {
            DType::Nf4 | DType::Nf4F32 => Some(FourBit::Nf4),
            DType::Fp4 | DType::Fp4F32 => Some(FourBit::Fp4),
            _ => None,
        }
    }

    /// The values of the codes.
    pub fn values(self) -> &'static [f32; 16] {
        match self {
            FourBit::Nf4 => &super::NF4_VALUES,
            FourBit::Fp4 => &super::FP4_VALUES,
        }
    }

    /// The storage type, with magnitudes as codes or in f32.
    pub fn dtype(self, doubly: bool) -> DType {
        match (self, doubly) {
            (FourBit::Nf4, true) => DType::Nf4,
            (FourBit::Nf4, false) => DType::Nf4F32,
            (FourBit::Fp4, true) => DType::Fp4,
            (FourBit::Fp4, false) => DType::Fp4F32,
        }
    }

    /// The code of a value between -1 and 1. NaN, which a block of zeros gives, has code 0.
    fn code(self, x: f32) -> u8 {
        match self {
            FourBit::Nf4 => NF4_LIMITS.iter().map(|limit| u8::from(x > *limit)).sum(),
            FourBit::Fp4 => {
                let above = FP4_LIMITS.iter().filter(|limit| x.abs() > **limit).count();
                FP4_ASCENDING[above] | if x < 0.0 { 8 } else { 0 }
            }
        }
    }
}

/// The largest magnitudes of blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum Magnitudes {
    /// As they are.
    F32(Vec<f32>),
    /// Quantised: `map[code] * factor + offset`, a factor for each 256 of them.
    Coded {
        /// Places in the signed dynamic map.
        codes: Vec<u8>,
        /// The largest difference from the offset in each block of 256.
        factors: Vec<f32>,
        /// The mean.
        offset: f32,
    },
}

impl Magnitudes {
    /// `magnitudes`, quantised in turn where `doubly`.
    pub fn new(magnitudes: Vec<f32>, doubly: bool) -> Magnitudes {
        let offset = doubly.then(|| Magnitudes::offset(&magnitudes));
        Magnitudes::around(magnitudes, offset)
    }

    /// What a matrix's magnitudes are quantised around: their mean.
    pub fn offset(magnitudes: &[f32]) -> f32 {
        super::mean::mean(magnitudes)
    }

    /// `magnitudes`, quantised in turn around an offset where there is one: those of a whole matrix, or of runs of 256 of it.
    pub fn around(magnitudes: Vec<f32>, offset: Option<f32>) -> Magnitudes {
        let Some(offset) = offset else { return Magnitudes::F32(magnitudes) };
        let mut codes = Vec::with_capacity(magnitudes.len());
        let mut factors = Vec::with_capacity(magnitudes.len().div_ceil(NESTED_BLOCK));
        for block in magnitudes.chunks(NESTED_BLOCK) {
            let factor = block.iter().fold(0.0f32, |most, x| most.max((x - offset).abs()));
            let by = 1.0 / factor;
            codes.extend(block.iter().map(|x| nearest((x - offset) * by)));
            factors.push(factor);
        }
        Magnitudes::Coded { codes, factors, offset }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Magnitudes::F32(values) => values.len(),
            Magnitudes::Coded { codes, .. } => codes.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, as products compute with them.
    pub fn values(&self) -> Vec<f32> {
        match self {
            Magnitudes::F32(values) => values.clone(),
            Magnitudes::Coded { codes, factors, offset } => codes
                .chunks(NESTED_BLOCK)
                .zip(factors)
                .flat_map(|(codes, factor)| {
                    codes.iter().map(move |code| SIGNED_DYNAMIC_MAP[usize::from(*code)] * factor + offset)
                })
                .collect(),
        }
    }
}

/// The place in the signed dynamic map of a number between -1 and 1, as bitsandbytes' library for CPUs finds it: the number
/// is rounded to one of 65536 even steps, and has the nearest entry to that. Very small ones may so get a neighbour of the
/// nearest. The first place for NaN, which equal magnitudes give, and whose factor is 0.
fn nearest(x: f32) -> u8 {
    const STEPS: f32 = 65535.0;
    if x.is_nan() {
        return 0;
    }
    let step = ((x + 1.0) * 0.5 * STEPS + 0.5).floor().clamp(0.0, STEPS);
    let x = step / STEPS * 2.0 - 1.0;
    let above = SIGNED_DYNAMIC_MAP.partition_point(|entry| *entry < x).clamp(1, 255);
    let (low, high) = (SIGNED_DYNAMIC_MAP[above - 1], SIGNED_DYNAMIC_MAP[above]);
    // Differences of neighbours to a number between them.
    (if x - low <= high - x { above - 1 } else { above }) as u8
}

/// Codes `values`, which begin a block: two codes to a byte, the first in the upper half, and the largest magnitude of
/// each block. `None`, and nothing done, where the sizes do not fit.
pub fn code(
    kind: FourBit,
    values: &[f32],
    codes: &mut [u8],
    magnitudes: &mut [f32],
    threads: usize,
) -> Option<()> {
    if codes.len() != values.len().div_ceil(2) || magnitudes.len() != values.len().div_ceil(BLOCK) {
        return None;
    }
    let each = magnitudes.len().div_ceil(threads.max(1)).max(1);
    let parts = values.chunks(each * BLOCK).zip(codes.chunks_mut(each * BLOCK / 2));
    at_once(parts.zip(magnitudes.chunks_mut(each)), threads, |((values, codes), magnitudes)| {
        for ((values, codes), magnitude) in
            values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).zip(magnitudes)
        {
            *magnitude = code_block(kind, values, codes);
        }
    });
    Some(())
}

fn code_block(kind: FourBit, values: &[f32], codes: &mut [u8]) -> f32 {
    let magnitude = super::blocks::largest(values);
    let by = 1.0 / magnitude;
    for (pair, out) in values.chunks(2).zip(codes) {
        let code = |i: usize| pair.get(i).map_or(0, |x| kind.code(x * by));
        *out = code(0) << 4 | code(1);
    }
    magnitude
}

/// Arranges `elements` coded values as `dtype`: codes two to a byte as [`code`] and bitsandbytes have them. Bits are only
/// moved. `None`, and nothing done, where types or sizes do not fit.
pub fn arrange(
    dtype: DType,
    elements: usize,
    codes: &[u8],
    magnitudes: &Magnitudes,
    out: &mut [u8],
) -> Option<()> {
    FourBit::of(dtype)?;
    let blocks = elements.div_ceil(BLOCK);
    let fits = codes.len() == elements.div_ceil(2)
        && magnitudes.len() == blocks
        && dtype.bytes_for(elements as u64) == Some(out.len() as u64);
    match magnitudes {
        Magnitudes::F32(magnitudes) if fits && dtype.has_rows() => {
            let blocks = out.chunks_exact_mut(4 + BLOCK / 2).zip(codes.chunks(BLOCK / 2)).zip(magnitudes);
            for ((out, codes), magnitude) in blocks {
                let (head, out) = out.split_at_mut(4);
                head.copy_from_slice(&magnitude.to_le_bytes());
                halve(codes, out);
            }
        }
        Magnitudes::Coded { codes: coded, factors, offset }
            if fits && !dtype.has_rows() && factors.len() == blocks.div_ceil(NESTED_BLOCK) =>
        {
            let runs = out
                .chunks_mut(8 + NESTED_BLOCK * (1 + BLOCK / 2))
                .zip(codes.chunks(NESTED_BLOCK * BLOCK / 2))
                .zip(coded.chunks(NESTED_BLOCK).zip(factors));
            for ((out, codes), (coded, factor)) in runs {
                let (head, out) = out.split_at_mut(8);
                head[..4].copy_from_slice(&factor.to_le_bytes());
                head[4..].copy_from_slice(&offset.to_le_bytes());
                let blocks = out.chunks_exact_mut(1 + BLOCK / 2).zip(codes.chunks(BLOCK / 2)).zip(coded);
                for ((out, codes), coded) in blocks {
                    let (head, out) = out.split_at_mut(1);
                    head[0] = *coded;
                    halve(codes, out);
                }
            }
        }
        _ => return None,
    }
    Some(())
}

/// One block's codes, from pairs of neighbours, the first in the upper half, to pairs of the two halves of the block,
/// the first half in the lower one. Codes that are not there are 0.
fn halve(pairs: &[u8], out: &mut [u8]) {
    let pair = |i: usize| pairs.get(i).copied().unwrap_or(0);
    for (i, out) in out.chunks_exact_mut(2).enumerate() {
        let (first, second) = (pair(i), pair(BLOCK / 4 + i));
        out[0] = first >> 4 | second & 0xf0;
        out[1] = first & 15 | second << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::nearest;

    /// What bitsandbytes 0.50 gives on CPUs, where that is not the nearest entry.
    #[test]
    fn places_in_the_map_are_those_of_bitsandbytes() {
        for (x, place) in [
            (-1.0, 0),
            (-0.732_804, 18),
            (0.184_385_5, 196),
            (-8.869_6e-4, 112),
            (-6.642_7e-6, 123),
            (9.029_5e-6, 131),
            (5.525_5e-5, 132),
            (8.457_5e-5, 133),
            (1.0, 255),
            (1.000_000_1, 255),
            (f32::NAN, 0),
        ] {
            assert_eq!(nearest(x), place, "{x}");
        }
    }
}
