//! Bytes as weights of every stored type: numbers come out of whole blocks, and nothing else does. The first byte chooses
//! the type, the second what it is converted to.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_device::DType;
use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_model::convert::convert;

fuzz_target!(|input: &[u8]| {
    let [kind, target, bytes @ ..] = input else { return };
    let from = DType::ALL[usize::from(*kind) % DType::ALL.len()];
    let to = [DType::F32, DType::Bf16, DType::F16][usize::from(*target) % 3];
    let (block, size) = (from.block_elements() as usize, from.block_bytes() as usize);
    // Blocks of some types share factors, which come after them.
    let room = |elements: usize| from.bytes_for(elements as u64).expect("whole blocks") as usize;
    let mut elements = bytes.len() / size * block;
    while room(elements) > bytes.len() {
        // A factor of the whole tensor is there without any element too.
        let Some(fewer) = elements.checked_sub(block) else { return };
        elements = fewer;
    }
    let whole = room(elements) == bytes.len();
    let mut out = vec![0; to.bytes_for(elements as u64).expect("a plain type") as usize];
    let converted = convert(from, bytes, to, &mut out);
    let weight = from.is_weight();
    assert_eq!(converted.is_ok(), whole && weight, "{from}: {converted:?}");

    let mut portable = vec![0.0; elements];
    let stored = &bytes[..room(elements)];
    assert_eq!(dequantize(Isa::Portable, from, stored, &mut portable).is_some(), weight);
    for isa in Isa::available().filter(|_| weight) {
        let mut numbers = vec![0.0; elements];
        dequantize(isa, from, stored, &mut numbers).expect("whole blocks");
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(portable.iter().zip(&numbers).all(same), "{from} by {isa}");
    }
});
