//! Checkpoints that bitsandbytes and compressed-tensors wrote, and the formats of GPTQ, AWQ, 8-bit floats and Model Optimizer, against the
//! values that their libraries give (`docs/bench/quantised_models.py` makes the files).

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
    } else if let Some(hash) = expected["rounded"].as_str() {
        // Its library computes in bf16.
        let rounded: Vec<f32> = values.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
        assert_eq!(fnv(&rounded), hash, "{what}");
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
        ("fp8", DType::F32),
        ("fp8_tensor", DType::F32),
        ("fbgemm_fp8", DType::F32),
        ("ct_fp8_rows", DType::F32),
        ("ct_fp8_blocks", DType::F32),
        ("ct_int8_rows", DType::F32),
        ("ct_int8", DType::F32),
        ("ct_int4", DType::F32),
        ("ct_ordered", DType::F32),
        ("ct_words8", DType::F32),
        ("ct_nvfp4", DType::F32),
        ("ct_mxfp4", DType::F32),
        ("modelopt_nvfp4", DType::F32),
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
        ("fp8", "\"F8_E4M3\"", "\"F8_E3M3\"", "F8_E3M3"),
        ("fp8", "v_proj.weight_scale_inv", "v_proj.weight_scale_inw", "v_proj"),
        ("ct_int4", "v_proj.weight_shape", "v_proj.weight_shapf", "v_proj.weight_shape"),
        ("ct_int4", "v_proj.weight_packed", "v_proj.weight_packee", "v_proj.weight"),
        ("ct_nvfp4", "v_proj.weight_global_scale", "v_proj.weight_global_scalf", "needs weight_global_scale"),
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
        scheme in prop::sample::select(vec![
            "nf4_double", "int8", "gptq", "awq", "fp8", "ct_int8_rows", "ct_int8", "ct_int4", "ct_nvfp4", "modelopt_nvfp4",
        ]),
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

/// Signed bytes with a factor for each matrix or row are held as they are where blocks of 64 fill the rows.
#[test]
fn signed_bytes_stay_signed_bytes() {
    let bytes = std::fs::read(data().join("ct_int8/model.safetensors")).unwrap();
    let tensors = safetensors_of(&bytes);
    let config = std::fs::read_to_string(data().join("ct_int8/config.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // A matrix of 128 inputs: all others are as narrow as before.
    let config = config.replace("\"intermediate_size\": 48", "\"intermediate_size\": 128");
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let mut all = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let wide = |size: u64| if size == 48 { 128 } else { size };
        let shape: Vec<u64> = shape.into_iter().map(wide).collect();
        let elements = shape.iter().product::<u64>() as usize;
        let size = if dtype == "F32" { 4 } else { 1 };
        let bytes: Vec<u8> = bytes.into_iter().cycle().take(elements * size).collect();
        all.push((name, dtype, shape, bytes));
    }
    std::fs::write(folder.path().join("model.safetensors"), written(&all)).unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    let down = files.spec().parameters().into_iter().find(|p| p.name.contains("down_proj")).unwrap();
    assert_eq!(files.weights().stored_dtype(&down).unwrap(), DType::Int8);
    assert_eq!(read(&files, &down, DType::Int8).unwrap(), read(&files, &down, DType::F32).unwrap());
}

type Stored = (String, String, Vec<u64>, Vec<u8>);

/// The tensors of a file.
fn safetensors_of(bytes: &[u8]) -> Vec<Stored> {
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let number = |value: &Value| value.as_u64().unwrap();
    let all = tensors.map(|(name, tensor)| {
        let at = tensor["data_offsets"].as_array().unwrap();
        let own = data[number(&at[0]) as usize..number(&at[1]) as usize].to_vec();
        let shape = tensor["shape"].as_array().unwrap().iter().map(number).collect();
        (name, tensor["dtype"].as_str().unwrap().to_owned(), shape, own)
    });
    all.collect()
}

/// A file of tensors.
fn written(tensors: &[Stored]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), entry);
        data.extend(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], &header, &data].concat()
}

/// DeepSeek-V3's files: every matrix of every expert in 8-bit floats with factors of blocks, the last of which are smaller.
#[test]
fn experts_in_8_bit_floats_are_read_one_by_one() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/experts/deepseek-v3");
    let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] =
        serde_json::json!({ "quant_method": "fp8", "weight_block_size": [8, 16] });
    let code = |seed: u64, i: u64| ((seed * 31 + i * 7) % 0x7f) as u8;
    let factor = |seed: u64, block: u64| (seed + block + 1) as f32 / 64.0;
    let (mut all, mut seeds) = (Vec::new(), std::collections::HashMap::new());
    // Published models have a layer behind the last, which is not read.
    let mut tensors = safetensors_of(&bytes);
    let last = tensors.iter().filter(|tensor| tensor.0.contains(".layers.2.")).cloned();
    let behind: Vec<Stored> =
        last.map(|(name, d, s, b)| (name.replace(".layers.2.", ".layers.3."), d, s, b)).collect();
    tensors.extend(behind);
    for (name, dtype, shape, bytes) in tensors {
        if !name.contains("proj") {
            all.push((name, dtype, shape, bytes));
            continue;
        }
        let seed = seeds.len() as u64;
        seeds.insert(name.clone(), seed);
        let blocks = [shape[0].div_ceil(8), shape[1].div_ceil(16)];
        let codes = (0..shape[0] * shape[1]).map(|i| code(seed, i)).collect();
        let factors = (0..blocks[0] * blocks[1]).flat_map(|i| factor(seed, i).to_le_bytes()).collect();
        all.push((format!("{name}_scale_inv"), "F32".to_owned(), blocks.to_vec(), factors));
        all.push((name, "F8_E4M3".to_owned(), shape, codes));
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), written(&all)).unwrap();

    let files = ModelFiles::open(folder.path()).unwrap();
    // Floats of 4 bits of exponent and 3 of mantissa are f16's, scaled.
    let value = |code: u8| half::f16::from_bits(u16::from(code) << 7).to_f32() * 256.0;
    let mut experts = 0;
    for parameter in files.spec().parameters().iter().filter(|p| p.name.contains("proj")) {
        let columns = *parameter.shape.last().unwrap();
        let rows = parameter.shape[parameter.shape.len() - 2];
        let values = read(&files, parameter, DType::F32).unwrap();
        for (expert, own) in values.chunks((rows * columns) as usize).enumerate() {
            let single = parameter.name.replace(".experts.", &format!(".experts.{expert}."));
            let single = single.replace(".shared_expert.", ".shared_experts.");
            let seed = seeds[&single];
            for (i, value_read) in (0..).zip(own) {
                let block = i / columns / 8 * columns.div_ceil(16) + i % columns / 16;
                assert_eq!(*value_read, value(code(seed, i)) * factor(seed, block), "{single} {i}");
            }
            experts += usize::from(parameter.shape.len() == 3);
        }
    }
    assert_eq!(experts, 2 * 3 * 8);
}

/// Groups that there are not, and factors without the one that they are to be multiplied by.
#[test]
fn factors_that_are_not_whole_are_refused() {
    let refused = |scheme: &str, change: &dyn Fn(&mut Vec<Stored>)| {
        let folder = broken(scheme, |bytes| {
            let mut tensors = safetensors_of(bytes);
            change(&mut tensors);
            *bytes = written(&tensors);
        });
        ModelFiles::open(folder.path()).map(|_| ()).map_err(|error| error.to_string())
    };
    let index = |value: u32| {
        move |tensors: &mut Vec<Stored>| {
            let all = tensors.iter_mut().filter(|tensor| tensor.0.ends_with("weight_g_idx"));
            all.for_each(|tensor| {
                tensor.3.chunks_mut(4).for_each(|own| own.copy_from_slice(&value.to_le_bytes()))
            });
        }
    };
    let error = refused("ct_ordered", &index(3)).unwrap_err();
    assert!(error.contains("names group 3 of"), "{error}");
    // Nothing was put in order.
    refused("ct_ordered", &index(u32::MAX)).unwrap();
    for (scheme, global) in [("ct_nvfp4", "global_scale"), ("modelopt_nvfp4", "weight_scale_2")] {
        let error =
            refused(scheme, &|tensors| tensors.retain(|tensor| !tensor.0.ends_with(global))).unwrap_err();
        assert!(error.contains("needs weight_global_scale or weight_scale_2"), "{error}");
    }
    let uneven = |tensors: &mut Vec<Stored>| {
        let own = tensors.iter_mut().find(|tensor| tensor.0.ends_with("down_proj.weight_scale")).unwrap();
        (own.2[1], own.3) = (2, own.3[..own.3.len() / 3 * 2].to_vec());
    };
    let error = refused("ct_int4", &uneven).unwrap_err();
    assert!(error.contains("for each group of a row of 16"), "{error}");
}
