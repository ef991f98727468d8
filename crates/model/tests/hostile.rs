//! Files from strangers: whatever their bytes, they are read or refused with the file's name, and never more.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::{
    Activation, AttentionSpec, MlpSpec, ModelFiles, ModelSpec, NormKind, NormSpec, RopeScaling, RopeSpec,
    SaveWriter, init,
};
use proptest::prelude::*;

fn spec() -> ModelSpec {
    ModelSpec {
        name: "tiny".into(),
        architecture: "llama".into(),
        vocab_size: 7,
        hidden_size: 8,
        num_layers: 1,
        attention: AttentionSpec {
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            qkv_bias: false,
            output_bias: false,
            rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        },
        mlp: MlpSpec { intermediate_size: 12, activation: Activation::Silu, gated: true, bias: false },
        norm: NormSpec { kind: NormKind::Rms, epsilon: 1e-5 },
        tie_word_embeddings: false,
        max_position_embeddings: 32,
        initializer_range: 0.02,
        bos_token: Some(0),
        eos_tokens: vec![1],
    }
}

fn save(folder: &Path, shard_bytes: u64) {
    let spec = spec();
    SaveWriter::new(&spec, DType::F32)
        .shard_bytes(shard_bytes)
        .write(folder, |p, out| {
            let mut bytes = vec![0; 4 * p.elements() as usize];
            init::fill(p, &spec, 1, DType::F32, &mut bytes).map_err(std::io::Error::other)?;
            out.write_all(&bytes)
        })
        .unwrap();
}

/// A GGUF of the same model, in F32.
fn gguf() -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    let spec = spec();
    let mut tensors: Vec<(String, Vec<u64>)> = vec![("token_embd.weight".into(), vec![8, 7])];
    for (name, dims) in [
        ("attn_norm", vec![8]),
        ("attn_q", vec![8, 8]),
        ("attn_k", vec![8, 4]),
        ("attn_v", vec![8, 4]),
        ("attn_output", vec![8, 8]),
        ("ffn_norm", vec![8]),
        ("ffn_gate", vec![8, 12]),
        ("ffn_up", vec![8, 12]),
        ("ffn_down", vec![12, 8]),
    ] {
        tensors.push((format!("blk.0.{name}.weight"), dims));
    }
    tensors.push(("output_norm.weight".into(), vec![8]));
    tensors.push(("output.weight".into(), vec![8, 7]));
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    };
    let numbers: [(&str, u32); 8] = [
        ("llama.block_count", 1),
        ("llama.context_length", 32),
        ("llama.embedding_length", 8),
        ("llama.feed_forward_length", 12),
        ("llama.attention.head_count", 2),
        ("llama.attention.head_count_kv", 1),
        ("llama.rope.dimension_count", 4),
        ("llama.vocab_size", 7),
    ];
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((numbers.len() as u64 + 2).to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    text(&mut out, &spec.architecture);
    text(&mut out, "llama.attention.layer_norm_rms_epsilon");
    out.extend(6u32.to_le_bytes());
    out.extend(1e-5f32.to_le_bytes());
    for (key, value) in numbers {
        text(&mut out, key);
        out.extend(4u32.to_le_bytes());
        out.extend(value.to_le_bytes());
    }
    let mut offset = 0u64;
    for (name, dims) in &tensors {
        text(&mut out, name);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(0u32.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += (4 * dims.iter().product::<u64>()).next_multiple_of(32);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    let start = out.len();
    out.resize(start + offset as usize, 0);
    out
}

/// Opens, reads every weight, and gives the error's text if there is one.
fn read(path: &Path) -> Result<(), String> {
    let files = ModelFiles::open(path).map_err(|e| e.to_string())?;
    for p in files.spec().parameters() {
        // A size that lies must be refused before anybody allocates for it.
        assert!(p.elements() < 1 << 20, "{}", p.name);
        let mut out = vec![0; 4 * p.elements() as usize];
        files.weights().read_into(&p, DType::F32, &mut out).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn change(bytes: &mut Vec<u8>, changes: &[(usize, u8)], keep: usize) {
    for (at, value) in changes {
        let at = at % bytes.len();
        bytes[at] = *value;
    }
    bytes.truncate(keep);
}

#[test]
fn whole_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let (single, sharded) = (folder.path().join("single"), folder.path().join("sharded"));
    save(&single, u64::MAX);
    save(&sharded, 600);
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, gguf()).unwrap();
    for path in [&single, &single.join("model.safetensors"), &sharded, &file] {
        read(path).unwrap();
    }
    assert_eq!(ModelFiles::open(&single).unwrap().spec().num_layers, 1);
}

#[test]
fn what_is_wrong_is_named() {
    let check = |spoil: fn(&Path), words: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        save(&path, 600);
        spoil(&path);
        let error = read(&path).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{error:?} has no {word:?}");
        }
    };
    check(|p| std::fs::remove_file(p.join("config.json")).unwrap(), &["config.json"]);
    check(|p| std::fs::write(p.join("config.json"), "{").unwrap(), &["config.json", "line 1"]);
    check(
        |p| {
            let shard = std::fs::read_dir(p)
                .unwrap()
                .map(|e| e.unwrap().path())
                .find(|f| f.to_str().unwrap().contains("model-00002"))
                .unwrap();
            std::fs::remove_file(shard).unwrap();
        },
        &["model-00002"],
    );
    check(wrong_width, &["mlp", "12", "16"]);
}

/// The type of one tensor of a file whose rows are 8 elements, changed: rows that are no whole blocks are refused with
/// the tensor's name, whatever the type.
#[test]
fn rows_of_part_of_a_block_are_named() {
    let name = b"blk.0.attn_q.weight";
    // Two sizes: the count and 8 bytes each come between name and type.
    let to_type = name.len() + 4 + 2 * 8;
    for type_id in [2u8, 3, 6, 7, 8, 10, 11, 12, 13, 14, 15, 20, 39] {
        let mut bytes = gguf();
        let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
        bytes[at + to_type] = type_id;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, bytes).unwrap();
        let error = read(&file).unwrap_err();
        for word in ["blk.0.attn_q.weight", "rows of 8 elements"] {
            assert!(error.contains(word), "{type_id}: {error:?} has no {word:?}");
        }
    }
}

fn wrong_width(path: &Path) {
    let file = path.join("config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let changed = text.replace("\"intermediate_size\": 12", "\"intermediate_size\": 16");
    assert_ne!(text, changed);
    std::fs::write(file, changed).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_spoilt_safetensors_file_is_read_or_refused(
        changes in prop::collection::vec((0usize..2000, any::<u8>()), 0..6), keep in 0usize..4000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        save(&path, u64::MAX);
        let file = path.join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes, &changes, keep);
        std::fs::write(&file, bytes).unwrap();
        if let Err(error) = read(&path) {
            prop_assert!(error.contains("model"), "{}", error);
        }
    }

    #[test]
    fn a_spoilt_gguf_is_read_or_refused(
        changes in prop::collection::vec((0usize..1500, any::<u8>()), 0..6), keep in 0usize..6000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        let mut bytes = gguf();
        change(&mut bytes, &changes, keep);
        std::fs::write(&file, bytes).unwrap();
        if let Err(error) = read(&file) {
            prop_assert!(error.contains("model.gguf"), "{}", error);
        }
    }

    #[test]
    fn any_bytes_are_refused_as_a_gguf(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.gguf");
        let bytes = [b"GGUF\x03\0\0\0".as_slice(), &bytes].concat();
        std::fs::write(&file, bytes).unwrap();
        prop_assert!(read(&file).is_err());
    }
}
