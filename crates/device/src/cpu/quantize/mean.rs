//! The mean of f32 numbers with PyTorch's order of additions, which decides its last bit.
//!
//! bitsandbytes takes the offset of doubly quantised magnitudes from `torch.mean`. On CPUs, PyTorch adds a contiguous row
//! in eight lanes (AVX2; it has no wider kernel for sums), each in four interleaved sums, each of these in a cascade of
//! four levels (`aten/src/ATen/native/cpu/SumKernel.cpp`). Rows of more than 32768 numbers it gives to several threads, and
//! GPUs add in other orders: means may differ in their last bit there.

const LANES: usize = 8;
const INTERLEAVED: usize = 4;
const LEVELS: usize = 4;

/// The mean; 0 of nothing.
pub(super) fn mean(values: &[f32]) -> f32 {
    let sum = if values.len() < LANES {
        let rows: Vec<[f32; 1]> = values.iter().map(|x| [*x]).collect();
        lane_sums(&rows)[0]
    } else {
        let (rows, rest) = values.as_chunks::<LANES>();
        let lanes = lane_sums(rows);
        rest.iter().chain(&lanes).fold(0.0f32, |sum, x| sum + x)
    };
    sum / values.len().max(1) as f32
}

/// The sum of each lane over all rows.
fn lane_sums<const N: usize>(rows: &[[f32; N]]) -> [f32; N] {
    let (groups, rest) = rows.as_chunks::<INTERLEAVED>();
    let [mut sum, others @ ..] = cascade(groups);
    for row in rest.iter().chain(&others) {
        add(&mut sum, row);
    }
    sum
}

/// The interleaved sums over all groups: each level takes up what the one below it gathered in `step` additions.
fn cascade<const N: usize>(groups: &[[[f32; N]; INTERLEAVED]]) -> [[f32; N]; INTERLEAVED] {
    let log2 = groups.len().next_power_of_two().ilog2() as usize;
    let power = (log2 / LEVELS).max(4);
    let step = 1usize << power;
    let mut levels = [[[0.0f32; N]; INTERLEAVED]; LEVELS];
    let steps = groups.chunks_exact(step);
    let rest = steps.remainder();
    for (i, groups) in steps.enumerate() {
        groups.iter().for_each(|group| add_group(&mut levels[0], group));
        let mut done = i + 1;
        for level in 1..LEVELS {
            let below = std::mem::replace(&mut levels[level - 1], [[0.0; N]; INTERLEAVED]);
            add_group(&mut levels[level], &below);
            if !done.is_multiple_of(step) {
                break;
            }
            done /= step;
        }
    }
    rest.iter().for_each(|group| add_group(&mut levels[0], group));
    let [mut sum, upper @ ..] = levels;
    upper.iter().for_each(|level| add_group(&mut sum, level));
    sum
}

fn add_group<const N: usize>(sums: &mut [[f32; N]; INTERLEAVED], group: &[[f32; N]; INTERLEAVED]) {
    sums.iter_mut().zip(group).for_each(|(sum, row)| add(sum, row));
}

fn add<const N: usize>(sum: &mut [f32; N], row: &[f32; N]) {
    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
}

#[cfg(test)]
mod tests {
    use super::mean;

    /// Numbers that any language makes alike: multiples of 2^-24 between 0.1 and 0.4.
    fn numbers(count: u32) -> Vec<f32> {
        (0..count)
            .map(|i| {
                let mixed = i.wrapping_mul(2_654_435_761).wrapping_add(12_345);
                (1_677_722 + (mixed >> 8) * 3 / 10) as f32 / 16_777_216.0
            })
            .collect()
    }

    /// What `torch.tensor(numbers).mean()` gives (PyTorch on x86-64), as bits.
    #[test]
    fn its_last_bit_is_pytorchs() {
        for (count, bits) in [
            (1, 0x3dcc_cd40),
            (5, 0x3e6c_5c68),
            (7, 0x3e69_1fb5),
            (8, 0x3e65_4f9e),
            (12, 0x3e7a_a18f),
            (24, 0x3e7a_9761),
            (27, 0x3e79_83c5),
            (100, 0x3e7d_c0bd),
            (256, 0x3e7f_8e5a),
            (1000, 0x3e7f_fe5d),
            (1728, 0x3e7f_ca5e),
            (5184, 0x3e7f_f4a9),
            (13824, 0x3e7f_fbc9),
            (32768, 0x3e7f_fe70),
        ] {
            assert_eq!(mean(&numbers(count)).to_bits(), bits, "{count} numbers");
        }
        assert_eq!(mean(&[]), 0.0);
    }
}
