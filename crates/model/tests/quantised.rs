//! Checkpoints that bitsandbytes wrote, and GPTQ's and AWQ's format, against the values that their libraries give
//! (`docs/bench/quantised_models.py` makes the files).

use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_model::{ModelError, ModelFiles, Parameter};
use proptest::prelude::*;
use serde_json::Value;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantised")
}

fn fnv(values: &[f32]) -> String {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

fn read(files: &ModelFiles, parameter: &Parameter, dtype: DType) -> Result<Vec<f32>, ModelError> {
    let mut bytes = vec![0; dtype.bytes_for(parameter.elements()).unwrap() as usize];
    files.weights().read_into(parameter, dtype, &mut bytes)?;
    if dtype == DType::F32 {
        return Ok(floats(&bytes));
    }
    let mut values = vec![0.0; parameter.elements() as usize];
    dequantize(Isa::detect(), dtype, &bytes, &mut values).unwrap();
    Ok(values)
}

fn check(expected: &Value, values: &[f32], what: &str) {
    if let Some(hash) = expected["hash"].as_str() {
        assert_eq!(fnv(values), hash, "{what}");
    } else {
        let expected = expected["values"].as_array().unwrap();
        for (i, (expected, value)) in expected.iter().zip(values).enumerate() {
            let expected = expected.as_f64().unwrap() as f32;
            assert!((value - expected).abs() <= 1e-6 * expected.abs(), "{what} {i}: {value}, not {expected}");
        }
    }
}

#[test]
fn every_scheme_is_dequantised_as_its_library_does() {
    for (scheme, kept) in [
        ("nf4", DType::Nf4F32),
        ("nf4_double", DType::Nf4),
        ("nf4_128", DType::Nf4F32),
        ("fp4_double", DType::Fp4),
        ("int8", DType::F32),
        ("gptq", DType::F32),
        ("gptq_8_v2", DType::F32),
        ("awq", DType::F32),
    ] {
        let folder = data().join(scheme);
        let files = ModelFiles::open(&folder).unwrap();
        let expected: Value =
            serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let mut seen = 0;
        for parameter in files.spec().parameters() {
            let Some(expected) = expected.get(&parameter.name) else {
                assert_eq!(files.weights().stored_dtype(&parameter).unwrap(), DType::F32);
                continue;
            };
            seen += 1;
            let what = format!("{scheme} {}", parameter.name);
            let stored = files.weights().stored_dtype(&parameter).unwrap();
            assert_eq!(stored, kept, "{what}");
            check(expected, &read(&files, &parameter, DType::F32).unwrap(), &what);
            check(expected, &read(&files, &parameter, stored).unwrap(), &what);
            let mut row = vec![0.0; parameter.shape[1] as usize];
            let whole = read(&files, &parameter, DType::F32).unwrap();
            files.weights().read_rows(&parameter, 3..4, &mut row).unwrap();
            assert_eq!(row, whole[3 * row.len()..][..row.len()]);
            assert!(files.weights().view(&parameter).is_err());
        }
        assert_eq!(seen, 7);
    }
}

/// What is quantised on reading is what bitsandbytes quantises it to.
#[test]
fn quantising_on_reading_gives_the_same_bits() {
    let base = ModelFiles::open(&data().join("base")).unwrap();
    for (scheme, dtype) in [("nf4", DType::Nf4F32), ("nf4_double", DType::Nf4), ("fp4_double", DType::Fp4)] {
        let quantised = ModelFiles::open(&data().join(scheme)).unwrap();
        for parameter in base.spec().parameters().iter().filter(|p| p.role.is_block_matrix()) {
            let of = |files: &ModelFiles| {
                let mut bytes = vec![0; dtype.bytes_for(parameter.elements()).unwrap() as usize];
                files.weights().read_into(parameter, dtype, &mut bytes).unwrap();
                bytes
            };
            let (own, theirs) = (of(&base), of(&quantised));
            if dtype != DType::Fp4 {
                assert!(own == theirs, "{scheme} {}", parameter.name);
            }
            // FP4 has two zeros, of which the library takes one or the other on different machines.
            let values = |bytes: &[u8]| {
                let mut values = vec![0.0; parameter.elements() as usize];
                dequantize(Isa::detect(), dtype, bytes, &mut values).unwrap();
                values
            };
            assert_eq!(values(&own), values(&theirs), "{scheme} {}", parameter.name);
        }
    }
}

/// A copy of a scheme's folder with its weights changed.
fn broken(scheme: &str, change: impl FnOnce(&mut Vec<u8>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(data().join(scheme).join("config.json"), folder.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(data().join(scheme).join("model.safetensors")).unwrap();
    change(&mut bytes);
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

fn replace(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

#[test]
fn what_does_not_belong_together_is_named() {
    for (scheme, from, to, told) in [
        ("nf4", "v_proj.weight.absmax", "v_proj.weight.abcmax", "v_proj.weight.absmax"),
        ("nf4", "\"shape\": [32, 32]", "\"shape\": [32, 99]", "99"),
        ("nf4", "\"blocksize\": 64", "\"blocksize\": 65", "blocksize 65"),
        ("nf4_double", "\"nested_offset\"", "\"nested_offsaa\"", "nested_offset"),
        ("gptq", "v_proj.scales", "v_proj.scalez", "v_proj.scales"),
        ("awq", "v_proj.qzeros", "v_proj.qzeroz", "v_proj.qzeros"),
        ("int8", "v_proj.SCB", "v_proj.SCC", "v_proj"),
    ] {
        let folder = broken(scheme, |bytes| replace(bytes, from, to));
        let error = ModelFiles::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(told), "{scheme} {from}: {error}");
    }
    let folder = broken("nf4", |bytes| bytes.truncate(bytes.len() - 100));
    assert!(ModelFiles::open(folder.path()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever the bytes are, opening and reading end with an answer.
    #[test]
    fn mutations_do_not_bring_it_down(
        scheme in prop::sample::select(vec!["nf4_double", "int8", "gptq", "awq"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
    ) {
        let folder = broken(scheme, |bytes| {
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
            for (at, value, in_header) in changes {
                let limit = if in_header { header } else { bytes.len() };
                let at = at.index(limit);
                bytes[at] = value;
            }
        });
        if let Ok(files) = ModelFiles::open(folder.path()) {
            for parameter in files.spec().parameters() {
                let stored = files.weights().stored_dtype(&parameter).unwrap();
                let _ = read(&files, &parameter, DType::F32);
                let _ = read(&files, &parameter, stored);
            }
        }
    }
}
