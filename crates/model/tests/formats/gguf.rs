//! The GGUF reader against damaged and lying files, and the meaning of a llama's metadata.

use plimsoll_model::gguf::GgufFile;
use plimsoll_model::{ModelFiles, RopeScaling};

use crate::support::{Gguf, Stored, tiny_gguf, tiny_spec, write_file};

/// Opens the bytes as a file; the error's text names the file.
fn open(bytes: &[u8]) -> Result<ModelFiles, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_file(&path, bytes);
    ModelFiles::open(&path).map_err(|error| {
        let text = error.to_string();
        assert!(text.contains("tiny.gguf"), "{text}");
        text
    })
}

fn refused(bytes: &[u8], expected: &str) {
    let error = open(bytes).expect_err(expected);
    assert!(error.contains(expected), "expected {expected:?} in {error:?}");
}

fn good() -> Gguf {
    tiny_gguf(&tiny_spec(), Stored::F32)
}

#[test]
fn the_shape_is_read_from_the_metadata() {
    assert_eq!(open(&good().bytes()).unwrap().spec(), &tiny_spec());
    let mut spec = tiny_spec();
    spec.tie_word_embeddings = false;
    spec.attention.qkv_bias = true;
    spec.attention.output_bias = true;
    spec.mlp.bias = true;
    assert_eq!(open(&tiny_gguf(&spec, Stored::F32).bytes()).unwrap().spec(), &spec);
}

#[test]
fn metadata_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    write_file(
        &path,
        &good()
            .text("a.text", "grüße")
            .raw("a.flag", 7, &[1])
            .raw("a.i16", 3, &(-7i16).to_le_bytes())
            .bytes(),
    );
    let file = GgufFile::open(&path).unwrap();
    let metadata = file.metadata();
    assert_eq!(file.version(), 3);
    assert_eq!(metadata.str("a.text").unwrap(), Some("grüße"));
    assert_eq!(metadata.bool("a.flag").unwrap(), Some(true));
    assert_eq!(metadata.f64("a.i16").unwrap(), Some(-7.0));
    assert_eq!(metadata.f64("llama.attention.layer_norm_rms_epsilon").unwrap(), Some(1e-5));
    assert_eq!(metadata.strings("general.languages").unwrap(), Some(vec!["en", "de"]));
    assert_eq!(metadata.u64("none").unwrap(), None);
    let wrong = |error: plimsoll_model::gguf::GgufError, expected: &str| {
        assert!(error.to_string().contains(expected), "{error}");
    };
    wrong(metadata.u64("a.i16").unwrap_err(), "a.i16 is -7 (i16) instead of an integer of at least 0");
    wrong(metadata.u64("a.text").unwrap_err(), "is a string instead of");
    wrong(metadata.str("a.flag").unwrap_err(), "is true instead of a string");
    wrong(metadata.integers("general.languages").unwrap_err(), "is a list of 2 string instead of");
}

#[test]
fn damaged_containers_are_refused() {
    let bytes = good().bytes();
    refused(b"", "magic");
    refused(b"GGML....", "is not a GGUF file");
    refused(&bytes[..30], "is cut short");
    refused(&bytes[..bytes.len() - 64], "cut short");
    let patched = |at: usize, with: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    refused(&patched(4, &1u32.to_le_bytes()), "version 1, which is obsolete");
    refused(&patched(4, &3u32.to_be_bytes()), "big-endian");
    refused(&patched(4, &9u32.to_le_bytes()), "version 9");
    refused(&patched(8, &u64::MAX.to_le_bytes()), "tensor list");
    refused(&patched(16, &u64::MAX.to_le_bytes()), "metadata needs");
    refused(&patched(24, &u64::MAX.to_le_bytes()), "metadata key number 0 needs");
    refused(&patched(24, &0u64.to_le_bytes()), "has 0 bytes");
}

#[test]
fn lying_metadata_are_refused() {
    let with = |kind, value: &[u8]| good().raw("z", kind, value).bytes();
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    refused(&with(77, &[]), "unknown type 77");
    refused(&with(7, &[2]), "no truth value: 2");
    refused(&with(8, &u64::MAX.to_le_bytes()), "\"z\" needs");
    refused(&with(9, &array(4, u64::MAX)), "\"z\" needs");
    refused(&with(9, &array(8, 1 << 60)), "\"z\" needs");
    refused(&with(9, &array(9, 1)), "array of arrays");
    // Counts that would be allocated if they were believed; what follows is far less.
    refused(&with(9, &[&array(0, 1 << 40)[..], &[0; 64]].concat()), "\"z\" needs");
    refused(&with(9, &[&array(8, 3)[..], &u64::MAX.to_le_bytes(), &[0; 16]].concat()), "\"z\" needs");
    refused(&with(9, &[&array(8, 2)[..], &(1u64 << 62).to_le_bytes(), &[0; 16]].concat()), "\"z\" needs");
    refused(&with(9, &array(13, 0)), "unknown type 13");
    refused(&good().u32("llama.block_count", 2).bytes(), "repeats \"llama.block_count\"");
    refused(&good().u32("general.alignment", 33).bytes(), "no power of two");
    refused(&good().u32("general.alignment", 0).bytes(), "no power of two");
    refused(&good().u32("general.alignment", 1 << 31).bytes(), "no power of two");
    refused(&good().text("general.alignment", "32").bytes(), "is a string instead of an integer");
}

#[test]
fn more_entries_than_any_model_has_are_refused() {
    let count = (1u64 << 20) + 1;
    let mut bytes = Gguf::default().bytes();
    bytes.resize(24 << 20 | 1 << 16, 0);
    bytes[16..24].copy_from_slice(&count.to_le_bytes());
    refused(&bytes, "1048577 entries, beyond any model");
    bytes[16..24].copy_from_slice(&0u64.to_le_bytes());
    bytes[8..16].copy_from_slice(&count.to_le_bytes());
    refused(&bytes, "1048577 entries, beyond any model");
}

#[test]
fn invalid_utf8_is_refused_with_its_place() {
    let spoilt = |file: Gguf, text: &[u8]| {
        let mut bytes = file.bytes();
        let at = bytes.windows(text.len()).position(|window| window == text).unwrap();
        bytes[at] = 0xff;
        (bytes, format!("byte {at}: "))
    };
    for (text, place) in [
        (&b"llama.block_count"[..], "metadata key number 1 is not valid UTF-8"),
        (b"blk.0.attn_norm.weight", "the name of tensor number 1 is not valid UTF-8"),
    ] {
        let (bytes, at) = spoilt(good(), text);
        refused(&bytes, &(at + place));
    }
    let (bytes, at) =
        spoilt(good().without("general.architecture").text("general.architecture", "llaMA"), b"llaMA");
    refused(&bytes, &(at + "the value of metadata key \"general.architecture\" is not valid UTF-8"));
}

#[test]
fn errors_stay_short_whatever_the_names() {
    let name = "n".repeat(1 << 20);
    for file in [
        good().tensor(&name, &[33], 8, vec![0; 68]),
        good().tensor(&name, &[16], 0, vec![0; 64]),
        good().without("general.architecture").text("general.architecture", &name),
        good().text(&name[..60_000], "").text(&name[..60_000], ""),
    ] {
        let error = open(&file.bytes()).unwrap_err();
        assert!(error.contains("nnn...") || error.contains("nnn\"..."), "{error}");
        assert!(error.len() < 1000, "{} bytes", error.len());
    }
}

#[test]
fn lying_tensors_are_refused() {
    let extra = |dims: &[u64], kind, data: usize| good().tensor("extra", dims, kind, vec![0; data]).bytes();
    refused(&extra(&[64; 5], 0, 0), "has 5 dimensions");
    refused(&extra(&[1 << 40, 1 << 40], 0, 0), "impossible shape");
    refused(&extra(&[1 << 62], 0, 0), "impossible shape");
    refused(&extra(&[0], 0, 0), "impossible shape");
    refused(&extra(&[1 << 30], 0, 32), "outside the data section");
    refused(&extra(&[33], 8, 68), "no whole number of q8_0 blocks");
    // 64 elements in all, but every row is half a block.
    refused(&extra(&[16, 4], 8, 68), "no whole number of q8_0 blocks");
    refused(&extra(&[u64::MAX, 32], 8, 68), "impossible shape");
    refused(&extra(&[1 << 63], 0, 0), "impossible shape");
    refused(&extra(&[256], 16, 66), "stored as IQ2_XXS, which is not supported");
    refused(&extra(&[256], 99, 144), "unknown type 99");
    refused(&good().tensor("output_norm.weight", &[64], 0, vec![0; 256]).bytes(), "is in the file twice");
    refused(&extra(&[16], 0, 64), "the weights have 1 tensor: extra");

    // The last tensor's offset is the 8 bytes before the padding of the header.
    let file = Gguf::default().tensor("a", &[8], 0, vec![0; 32]).tensor("b", &[8], 0, vec![0; 32]);
    let offset = 24 + (8 + 1 + 4 + 8 + 4 + 8) * 2 - 8;
    let moved = |to: u64| {
        let mut bytes = file.bytes();
        bytes[offset..offset + 8].copy_from_slice(&to.to_le_bytes());
        bytes
    };
    refused(&moved(0), "overlap those of \"a\"");
    refused(&moved(40), "not a multiple of the file's alignment 32");
    refused(&moved(1 << 40), "outside the data section");
    refused(&moved(u64::MAX - 31), "outside the data section");
}

#[test]
fn shapes_that_contradict_the_tensors_are_refused() {
    let with = |key: &str, value| good().without(key).u32(key, value).bytes();
    refused(&with("llama.embedding_length", 32), "\"token_embd.weight\" has shape [96, 64]");
    refused(&with("llama.feed_forward_length", 96), "ffn_gate.weight\" has shape [128, 64]");
    refused(&with("llama.block_count", 3), "lack 9 tensors: blk.2.");
    refused(&with("llama.block_count", 1), "have 9 tensors: blk.1.");
    refused(&with("llama.attention.head_count_kv", 3), "does not divide num_attention_heads");
    refused(&with("llama.attention.head_count", 0), "does not divide the embedding_length");
    refused(&with("llama.block_count", 4_000_000_000), "num_hidden_layers");
    refused(&with("tokenizer.ggml.eos_token_id", 96), "is 96, but the embedding has 96 rows");
    refused(&good().u32("llama.rope.dimension_count", 8).bytes(), "heads are 16 wide");
    refused(&good().u32("llama.expert_count", 8).bytes(), "no layer has a \"ffn_gate_inp.weight\"");
    let renamed = |name| good().without("general.architecture").text("general.architecture", name).bytes();
    refused(&renamed("deepseek2"), "deepseek2.embedding_length is missing");
    refused(&renamed("gpt-oss"), "gpt-oss.embedding_length is missing");
    refused(&good().without("llama.context_length").bytes(), "llama.context_length is missing");
    refused(&good().without_tensor("token_embd.weight").bytes(), "\"token_embd.weight\": is missing");
    refused(&good().without_tensor("blk.1.attn_k.weight").bytes(), "blk.1.attn_k.weight");
    refused(&good().without("general.architecture").bytes(), "general.architecture is missing");
    let other = good().without("general.architecture").text("general.architecture", "mamba").bytes();
    refused(&other, "\"mamba\", which is not supported");
}

/// The rows of q and k are put in order one by one, so a block must not hold parts of two.
#[test]
fn interleaved_rows_of_partial_blocks_are_refused() {
    let mut spec = tiny_spec();
    (spec.attention.qkv_bias, spec.attention.output_bias) = (true, true);
    let file = tiny_gguf(&spec, Stored::F32);
    assert!(open(&file.bytes()).is_ok());
    let bias =
        |name: &str, dims: &[u64]| file.clone().without_tensor(name).tensor(name, dims, 8, vec![0; 68]);
    refused(
        &bias("blk.1.attn_q.bias", &[64]).bytes(),
        "rows of 1 elements are no whole number of q8_0 blocks",
    );
    assert!(open(&bias("blk.1.attn_output.bias", &[64]).bytes()).is_ok());
}

#[test]
fn rotary_scaling_is_read_from_metadata_or_factors() {
    let scaling = |file: Gguf| open(&file.bytes()).unwrap().spec().attention.rope.clone().unwrap().scaling;
    let kind = |kind: &str, factor: f32| {
        good().text("llama.rope.scaling.type", kind).f32("llama.rope.scaling.factor", factor)
    };
    assert_eq!(scaling(kind("none", 2.0)), RopeScaling::None);
    assert_eq!(scaling(kind("linear", 2.0)), RopeScaling::Linear { factor: 2.0 });
    assert_eq!(scaling(good().f32("llama.rope.scale_linear", 4.0)), RopeScaling::Linear { factor: 4.0 });
    let yarn = kind("yarn", 4.0).u32("llama.rope.scaling.original_context_length", 64);
    let RopeScaling::Yarn { factor, attention_factor, .. } = scaling(yarn) else { panic!("no yarn") };
    assert_eq!(factor, 4.0);
    assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);

    let factors: Vec<f32> = (1..=8).map(|i| i as f32).collect();
    let bytes = bytemuck::cast_slice(&factors).to_vec();
    let with_factors = |file: Gguf| file.tensor("rope_freqs.weight", &[8], 0, bytes.clone());
    let expected = factors.iter().map(|factor| f64::from(*factor)).collect();
    assert_eq!(scaling(with_factors(good())), RopeScaling::PerFrequency { factors: expected });
    refused(&with_factors(kind("linear", 2.0)).bytes(), "only one is supported");
    refused(&good().tensor("rope_freqs.weight", &[4], 0, vec![0; 16]).bytes(), "rotary factors are [8]");
    refused(&good().tensor("rope_freqs.weight", &[8], 0, vec![0; 32]).bytes(), "is not a positive number");
    refused(&kind("spiral", 2.0).bytes(), "supported are none, linear, yarn and longrope");
}
