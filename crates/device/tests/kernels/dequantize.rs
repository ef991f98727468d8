//! Any bytes as any stored type: every instruction set gives the same numbers, and what is no whole block is refused.

use plimsoll_device::DType;
use plimsoll_device::cpu::{Isa, dequantize};
use proptest::prelude::*;

/// Numbers beside the ones to write, which must stay.
const GUARD: usize = 64;
const UNTOUCHED: f32 = -12345.5;

fn any_dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

/// The same number, or none on both sides.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// The bytes begin anywhere, as they do in files.
    #[test]
    fn any_bytes_become_numbers_and_nothing_else(
        dtype in any_dtype(), blocks in 0usize..9, shift in 0usize..5, seed in any::<u64>(),
    ) {
        let elements = blocks * dtype.block_elements() as usize;
        // Not a size for each block: some have a factor for many.
        let size = dtype.bytes_for(elements as u64).unwrap() as usize;
        let mut state = seed;
        let bytes: Vec<u8> = (0..shift + size).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        }).collect();
        let stored = &bytes[shift..];
        // The same with more behind it, so that nothing is an end.
        let more = (elements + 1).next_multiple_of(256);
        let mut longer = stored.to_vec();
        longer.resize(dtype.bytes_for(more as u64).unwrap() as usize, 0);
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut out = vec![UNTOUCHED; GUARD + elements + GUARD];
            let done = dequantize(isa, dtype, stored, &mut out[GUARD..GUARD + elements]);
            prop_assert_eq!(done.is_some(), dtype.is_weight());
            let (before, rest) = out.split_at(GUARD);
            let (numbers, after) = rest.split_at(elements);
            prop_assert!(before.iter().chain(after).all(|x| *x == UNTOUCHED), "{} {}", dtype, isa);
            let first = first.get_or_insert_with(|| numbers.to_vec());
            let differ = first.iter().zip(numbers).position(|(a, b)| !same(*a, *b));
            prop_assert!(differ.is_none(), "{} {}: element {:?}", dtype, isa, differ);
            let mut whole = vec![UNTOUCHED; more];
            if dequantize(isa, dtype, &longer, &mut whole).is_some() {
                let differ = whole.iter().zip(numbers).position(|(a, b)| !same(*a, *b));
                prop_assert!(differ.is_none(), "{} {}: element {:?} at an end", dtype, isa, differ);
            }
        }
    }

    #[test]
    fn what_is_no_whole_block_is_refused(dtype in any_dtype(), size in 0usize..700, elements in 0usize..700) {
        let fits = dtype.bytes_for(elements as u64) == Some(size as u64);
        for isa in Isa::available() {
            let mut out = vec![UNTOUCHED; elements];
            let done = dequantize(isa, dtype, &vec![0xff; size], &mut out);
            prop_assert_eq!(done.is_some(), fits && dtype.is_weight());
            prop_assert!(done.is_some() || out.iter().all(|x| *x == UNTOUCHED));
        }
    }
}
