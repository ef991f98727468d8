//! NF4 with double quantisation of every linear of a real model: codes, scales, factors and offsets are bitsandbytes' to
//! the bit, and what they take is counted. The model is fetched by `examples/get-smollm2`; without it this says so and
//! checks nothing. `docs/bench/nf4_of_smollm2.py` makes the reference.

use std::path::PathBuf;

use plimsoll_device::DType;
use plimsoll_model::{ModelFiles, Target, Transcoder};
use serde_json::Value;

/// The model and the hashes, or a reason on standard error.
fn model() -> Option<(ModelFiles, Value)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        eprintln!("skipped: {} is not there; examples/get-smollm2 fetches it", path.display());
        return None;
    }
    let reference = std::fs::read(root.join("tests/data/quantised/smollm2_nf4.json")).unwrap();
    Some((ModelFiles::open(&path).unwrap(), serde_json::from_slice(&reference).unwrap()))
}

/// FNV-1a, 64 bits.
fn fnv<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> String {
    let hash = bytes.into_iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// What a matrix of [`DType::Nf4`] consists of, each as bitsandbytes stores it: codes, codes of scales, factors, offset.
fn parts(matrix: &[u8]) -> [Vec<u8>; 4] {
    let mut parts = [const { Vec::new() }; 4];
    let [codes, scales, factors, offset] = &mut parts;
    for run in matrix.chunks(8 + 256 * 33) {
        factors.extend(&run[..4]);
        *offset = run[4..8].to_vec();
        for block in run[8..].chunks_exact(33) {
            scales.push(block[0]);
            // Kernels have the two halves of a block in the two halves of a byte.
            let code = |i: usize| block[1 + i % 32] >> (i / 32 * 4) & 15;
            codes.extend((0..32).map(|i| code(2 * i) << 4 | code(2 * i + 1)));
        }
    }
    parts
}

#[test]
fn all_linears_are_bitsandbytes_to_the_bit() {
    let Some((files, reference)) = model() else { return };
    let (mut matrices, mut elements, mut bytes) = (0, 0, 0);
    for parameter in files.spec().parameters().iter().filter(|p| p.role.is_block_matrix()) {
        let mut matrix = vec![0; DType::Nf4.bytes_for(parameter.elements()).unwrap() as usize];
        files.weights().read_into(parameter, DType::Nf4, &mut matrix).unwrap();
        let expected = reference[&parameter.name].as_array().unwrap();
        for ((part, expected), what) in
            parts(&matrix).iter().zip(expected).zip(["codes", "scales", "factors", "offset"])
        {
            assert_eq!(fnv(part), expected.as_str().unwrap(), "{what} of {}", parameter.name);
        }
        matrices += 1;
        elements += parameter.elements();
        bytes += matrix.len();
    }
    assert_eq!(matrices, 210);
    let bits = bytes as f64 * 8.0 / elements as f64;
    assert!(bits <= 4.13, "{bits} bits a parameter in memory");
}

/// In the file, bitsandbytes' tables come with every matrix.
#[test]
fn a_checkpoint_takes_what_its_format_asks_for() {
    let Some((files, _)) = model() else { return };
    let folder = tempfile::tempdir().unwrap();
    let target =
        Target::FourBit { kind: plimsoll_device::cpu::quantize::four_bit::FourBit::Nf4, doubly: true };
    Transcoder::new(files.spec(), files.weights(), &mut |_, _| {})
        .write_folder(folder.path(), target)
        .unwrap();
    let written = ModelFiles::open(folder.path()).unwrap();
    let file = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let header: Value =
        serde_json::from_slice(&file[8..8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize])
            .unwrap();
    let bytes = |ending: &str| -> u64 {
        let tensors = header.as_object().unwrap().iter().filter(|(name, _)| name.contains("_proj.weight"));
        let place = |tensor: &Value, i: usize| tensor["data_offsets"][i].as_u64().unwrap();
        tensors.filter(|(name, _)| name.ends_with(ending)).map(|(_, t)| place(t, 1) - place(t, 0)).sum()
    };
    let linears = written.spec().parameters().into_iter().filter(|p| p.role.is_block_matrix());
    let elements: u64 = linears.map(|p| p.elements()).sum();
    let stored = bytes("_proj.weight") + bytes(".absmax") + bytes(".nested_absmax");
    let bits = stored as f64 * 8.0 / elements as f64;
    assert!(bits <= 4.13, "{bits} bits a parameter in the file");
    // What was written is what is quantised on reading.
    for parameter in files.spec().parameters().iter().filter(|p| p.role.is_block_matrix()).take(14) {
        let of = |files: &ModelFiles| {
            let mut bytes = vec![0; DType::Nf4.bytes_for(parameter.elements()).unwrap() as usize];
            files.weights().read_into(parameter, DType::Nf4, &mut bytes).unwrap();
            bytes
        };
        assert!(of(&files) == of(&written), "{}", parameter.name);
    }
}
