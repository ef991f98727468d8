//! A real file of mixed types, every tensor dequantised.

use std::collections::BTreeSet;
use std::path::Path;

use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_model::gguf::GgufFile;

/// Qwen2.5-Coder-0.5B-Instruct as `q4_k_m`: the weights of a trained model are small, centred numbers.
#[test]
#[ignore = "needs models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf (491 MB)"]
fn every_tensor_of_a_real_file_is_sane() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("../../models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf");
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return;
    }
    let file = GgufFile::open(&path).unwrap();
    let mut types = BTreeSet::new();
    for tensor in file.tensors() {
        let name = &tensor.name;
        let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        dequantize(Isa::detect(), tensor.dtype, file.bytes(tensor), &mut values).unwrap();
        file.release();
        types.insert(tensor.dtype.name());
        let n = values.len() as f64;
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let rms = (values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n).sqrt();
        let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(values.iter().all(|x| x.is_finite()), "{name} is not finite");
        if tensor.shape.len() == 2 {
            assert!((0.003..0.2).contains(&rms), "{name} {}: rms {rms}", tensor.dtype);
            assert!(mean.abs() < rms / 10.0, "{name} {}: mean {mean}, rms {rms}", tensor.dtype);
            assert!(f64::from(largest) < 1000.0 * rms, "{name} {}: {largest}, rms {rms}", tensor.dtype);
        }
    }
    eprintln!("{} tensors of the types {types:?}", file.tensors().len());
    assert!(types.contains("q4_k") && types.contains("q6_k"), "{types:?}");
}
