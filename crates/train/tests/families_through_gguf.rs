//! The tiny models of every family through a GGUF file: its loss is PyTorch's (`docs/bench/tiny_models.py`), the folder
//! that is made of it holds the very tensors, and what the format has no words for is refused.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, IGNORED_TARGET};
use plimsoll_memory::Tier;
use plimsoll_model::gguf::{GgufFile, GgufValue, MetadataEntry, NewGgufTensor, ValueType};
use plimsoll_model::hf_config::read_config;
use plimsoll_model::{
    ModelError, ModelFiles, Parameter, Role, RowSource, SafetensorsFile, SaveError, Target, Transcoder,
};
use plimsoll_parallel::Solo;
use plimsoll_plan::DryRun;
use plimsoll_step::{
    DecodeSettings, Decoder, MicroBatch, Precision, StepError, StepSettings, Trainer, WeightStorage,
};
use serde_json::{Value, json};

fn all_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// The folder of a family, with one feed-forward part or experts.
fn data(family: &str) -> PathBuf {
    let own = ["families", "experts"].map(|kind| all_data().join(kind).join(family));
    own.into_iter().find(|folder| folder.exists()).unwrap()
}

/// A folder of the test's own with the family's model, keys of its configuration changed.
fn changed(family: &str, keys: &Value, place: &Path) -> PathBuf {
    let (from, to) = (data(family), place.join(family));
    std::fs::create_dir(&to).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).unwrap();
    to
}

fn expected(family: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(family).join("expected.json")).unwrap()).unwrap()
}

fn loss(files: &ModelFiles, tokens: &[u32]) -> f64 {
    let mut targets = tokens[1..].to_vec();
    targets.push(IGNORED_TARGET);
    let settings = StepSettings::new(1, tokens.len() as u64);
    let dry = DryRun::training(files.spec(), &settings, 1).unwrap();
    let device = Cpu::new(dry.peak_bytes(), CpuOptions { threads: Some(2), isa: None }).unwrap();
    let mut trainer = Trainer::new(&device, Arc::default(), files.spec().clone(), settings, &Solo).unwrap();
    trainer
        .load(|parameter, rows, dtype, out| {
            files.weights().read_rows_into(parameter, rows, dtype, out).unwrap();
            Ok::<(), StepError>(())
        })
        .unwrap();
    trainer.accumulate(&[MicroBatch::new(tokens, &targets)]).unwrap().0
}

fn tensors(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = SafetensorsFile::open(&folder.join("model.safetensors")).unwrap();
    file.tensors().iter().map(|t| (t.name.clone(), file.bytes(&t.name).unwrap().to_vec())).collect()
}

fn write_gguf(files: &ModelFiles, path: &Path, dtype: DType) -> Result<u64, SaveError> {
    Transcoder::new(files.spec(), files.weights(), &mut |_, _| {}).write_gguf(path, dtype, None)
}

/// A rotation with these weights.
fn latent_yarn(mscale: f64, mscale_all_dim: f64) -> Value {
    json!({ "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 16, "rope_theta": 500.0,
    } })
}

#[test]
fn losses_are_kept_and_tensors_come_back() {
    let place = tempfile::tempdir().unwrap();
    let same = json!({});
    for (family, keys) in [
        ("llama", &same),
        ("llama-biases", &same),
        ("llama-linear", &same),
        ("llama-llama3", &same),
        ("llama-yarn", &same),
        ("mistral", &same),
        ("qwen2", &json!({ "use_sliding_window": false, "layer_types": null })),
        ("qwen3", &same),
        ("gemma", &same),
        // What scores are divided by is the width of heads, as in all models but those of 27B.
        ("gemma2", &json!({ "query_pre_attn_scalar": 8 })),
        ("gemma3", &json!({ "query_pre_attn_scalar": 8 })),
        ("gpt2", &same),
        ("phi3", &same),
        ("phi3-longrope", &same),
        ("olmo2", &same),
        ("gpt-oss", &same),
        ("deepseek-v2", &same),
        ("deepseek-v2-groups", &latent_yarn(0.7, 0.7)),
        ("deepseek-v3", &same),
        ("deepseek-v3-yarn", &latent_yarn(1.0, 1.0)),
        ("glm-4.7-flash", &same),
    ] {
        let folder = changed(family, keys, place.path());
        let (files, reference) = (ModelFiles::open(&folder).unwrap(), expected(family));
        let tokens: Vec<u32> = serde_json::from_value(reference["tokens"].clone()).unwrap();
        let wanted = if *keys == same { reference["loss"].as_f64().unwrap() } else { loss(&files, &tokens) };

        let path = folder.join("model.gguf");
        write_gguf(&files, &path, DType::F32).unwrap();
        let through = ModelFiles::open(&path).unwrap();
        let found = loss(&through, &tokens);
        assert!((found - wanted).abs() < 1e-5, "{family}: loss {found} instead of {wanted}");

        let back = folder.join("back");
        Transcoder::new(through.spec(), through.weights(), &mut |_, _| {})
            .write_folder(&back, Target::HuggingFace(DType::F32))
            .unwrap();
        let (first, last) = (tensors(&folder), tensors(&back));
        assert_eq!(first.keys().collect::<Vec<_>>(), last.keys().collect::<Vec<_>>(), "{family}");
        for (name, bytes) in &first {
            let close = bytes.chunks_exact(4).zip(last[name].chunks_exact(4)).all(|(a, b)| {
                let [a, b] = [a, b].map(|x| f32::from_le_bytes(x.try_into().unwrap()));
                // Norms of Gemma are stored with 1 added, which rounds.
                a == b || family.starts_with("gemma") && name.contains("norm") && (a - b).abs() < 2e-7
            });
            assert!(close && bytes.len() == last[name].len(), "{family} {name}");
        }
        let back = loss(&ModelFiles::open(&back).unwrap(), &tokens);
        assert!((back - wanted).abs() < 1e-5, "{family}: loss {back} of the folder instead of {wanted}");
    }
}

const GATE_UP: &str = "model.layers.1.mlp.experts.gate_up_proj";
const GATE_UP_BIAS: &str = "model.layers.1.mlp.experts.gate_up_proj_bias";
const KV_UP: &str = "model.layers.1.self_attn.kv_b_proj.weight";
const DOWN: &str = "model.layers.1.mlp.experts.down_proj";

/// Tensors have the names of llama.cpp's own converter, and its orders of rows.
#[test]
fn names_and_orders_are_those_of_llama_cpp() {
    let place = tempfile::tempdir().unwrap();
    // An element of a tensor of the file, another of one of the folder, and what is added to the latter.
    type Pair = ((&'static str, usize), (&'static str, usize), f32);
    let of_llama: &[Pair] = &[
        // Heads of 6 rows: rows 0 and 3 stand together, then 1 and 4. The second head's first row is the sixth.
        (("blk.1.attn_q.weight", 24), ("model.layers.1.self_attn.q_proj.weight", 3 * 24), 0.0),
        (("blk.1.attn_k.weight", 2 * 24 + 5), ("model.layers.1.self_attn.k_proj.weight", 24 + 5), 0.0),
        (("blk.1.attn_q.weight", 6 * 24 + 1), ("model.layers.1.self_attn.q_proj.weight", 6 * 24 + 1), 0.0),
        (("blk.1.attn_v.weight", 24), ("model.layers.1.self_attn.v_proj.weight", 24), 0.0),
    ];
    let of_gpt2: &[Pair] = &[
        (("blk.1.attn_qkv.weight", 1), ("transformer.h.1.attn.c_attn.weight", 72), 0.0),
        (("blk.1.ffn_down.weight", 1), ("transformer.h.1.mlp.c_proj.weight", 24), 0.0),
        (("blk.1.ffn_norm.bias", 3), ("transformer.h.1.ln_2.bias", 3), 0.0),
        (("position_embd.weight", 30), ("transformer.wpe.weight", 30), 0.0),
    ];
    let of_phi3: &[Pair] = &[
        (("blk.1.attn_qkv.weight", 70), ("model.layers.1.self_attn.qkv_proj.weight", 70), 0.0),
        (("blk.1.ffn_up.weight", 1000), ("model.layers.1.mlp.gate_up_proj.weight", 1000), 0.0),
    ];
    let of_gemma3: &[Pair] = &[
        (("blk.1.attn_q.weight", 24), ("model.layers.1.self_attn.q_proj.weight", 24), 0.0),
        (("blk.1.attn_q_norm.weight", 2), ("model.layers.1.self_attn.q_norm.weight", 2), 1.0),
        (("blk.1.attn_k_norm.weight", 2), ("model.layers.1.self_attn.k_norm.weight", 2), 1.0),
        (("blk.1.post_attention_norm.weight", 2), ("model.layers.1.post_attention_layernorm.weight", 2), 1.0),
        (("blk.1.ffn_norm.weight", 2), ("model.layers.1.pre_feedforward_layernorm.weight", 2), 1.0),
        (("blk.1.post_ffw_norm.weight", 2), ("model.layers.1.post_feedforward_layernorm.weight", 2), 1.0),
        (("output_norm.weight", 2), ("model.norm.weight", 2), 1.0),
    ];
    let of_olmo2: &[Pair] = &[
        (("blk.1.attn_k.weight", 24), ("model.layers.1.self_attn.k_proj.weight", 24), 0.0),
        (("blk.1.attn_q_norm.weight", 20), ("model.layers.1.self_attn.q_norm.weight", 20), 0.0),
        (("blk.1.post_attention_norm.weight", 2), ("model.layers.1.post_attention_layernorm.weight", 2), 0.0),
        (("blk.1.post_ffw_norm.weight", 2), ("model.layers.1.post_feedforward_layernorm.weight", 2), 0.0),
    ];
    // Six experts of 20, of 24 inputs: columns of gate and up by turns.
    let of_gpt_oss: &[Pair] = &[
        (("blk.1.ffn_gate_exps.weight", (2 * 20 + 3) * 24 + 5), (GATE_UP, (2 * 24 + 5) * 40 + 6), 0.0),
        (("blk.1.ffn_up_exps.weight", (2 * 20 + 3) * 24 + 5), (GATE_UP, (2 * 24 + 5) * 40 + 7), 0.0),
        (("blk.1.ffn_down_exps.weight", (24 + 4) * 20 + 7), (DOWN, (20 + 7) * 24 + 4), 0.0),
        (("blk.1.ffn_gate_exps.bias", 2 * 20 + 3), (GATE_UP_BIAS, 2 * 40 + 6), 0.0),
        (("blk.1.ffn_up_exps.bias", 2 * 20 + 3), (GATE_UP_BIAS, 2 * 40 + 7), 0.0),
        (("blk.1.ffn_down_exps.bias", 30), ("model.layers.1.mlp.experts.down_proj_bias", 30), 0.0),
        (("blk.1.ffn_gate_inp.weight", 30), ("model.layers.1.mlp.router.weight", 30), 0.0),
        (("blk.1.ffn_gate_inp.bias", 3), ("model.layers.1.mlp.router.bias", 3), 0.0),
        (("blk.1.attn_sinks.weight", 2), ("model.layers.1.self_attn.sinks", 2), 0.0),
        (("blk.1.attn_output.bias", 2), ("model.layers.1.self_attn.o_proj.bias", 2), 0.0),
        (("blk.1.post_attention_norm.weight", 2), ("model.layers.1.post_attention_layernorm.weight", 2), 0.0),
    ];
    // Four heads of 6 + 5 rows of 10: the half of keys is transposed.
    let of_deepseek: &[Pair] = &[
        (("blk.1.attn_k_b.weight", (2 * 10 + 3) * 6 + 4), (KV_UP, (2 * 11 + 4) * 10 + 3), 0.0),
        (("blk.1.attn_v_b.weight", (2 * 5 + 1) * 10 + 7), (KV_UP, (2 * 11 + 6 + 1) * 10 + 7), 0.0),
        (("blk.1.attn_kv_a_mqa.weight", 30), ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 30), 0.0),
        (("blk.1.attn_kv_a_norm.weight", 3), ("model.layers.1.self_attn.kv_a_layernorm.weight", 3), 0.0),
        (("blk.1.attn_q_a.weight", 30), ("model.layers.1.self_attn.q_a_proj.weight", 30), 0.0),
        (("blk.1.attn_q_a_norm.weight", 3), ("model.layers.1.self_attn.q_a_layernorm.weight", 3), 0.0),
        (("blk.1.attn_q_b.weight", 30), ("model.layers.1.self_attn.q_b_proj.weight", 30), 0.0),
        (("blk.1.exp_probs_b.bias", 1), ("model.layers.1.mlp.gate.e_score_correction_bias", 1), 0.0),
    ];
    let usual_scale = json!({ "query_pre_attn_scalar": 8 });
    for (family, keys, pairs) in [
        ("llama", &json!({}), of_llama),
        ("gpt2", &json!({}), of_gpt2),
        ("phi3", &json!({}), of_phi3),
        ("gemma3", &usual_scale, of_gemma3),
        ("olmo2", &json!({}), of_olmo2),
        ("gpt-oss", &json!({}), of_gpt_oss),
        ("deepseek-v3", &json!({}), of_deepseek),
    ] {
        let folder = changed(family, keys, place.path());
        let files = ModelFiles::open(&folder).unwrap();
        let path = folder.join("model.gguf");
        write_gguf(&files, &path, DType::F32).unwrap();
        let (file, stored) = (GgufFile::open(&path).unwrap(), tensors(&folder));
        let at = |bytes: &[u8], index: usize| f32::from_le_bytes(bytes[4 * index..][..4].try_into().unwrap());
        for ((ours, i), (theirs, j), more) in pairs {
            let tensor = file.tensor(ours).unwrap_or_else(|| panic!("{family} has no {ours}"));
            assert_eq!(at(file.bytes(tensor), *i), at(&stored[*theirs], *j) + more, "{family} {ours}");
        }
    }
}

/// Converters before April 2025 wrote the matrix of keys and values whole, and the widths of heads under other keys.
#[test]
fn older_files_with_latent_attention_are_the_same_model() {
    let place = tempfile::tempdir().unwrap();
    let folder = changed("deepseek-v2-groups", &latent_yarn(0.7, 0.7), place.path());
    let path = folder.join("model.gguf");
    write_gguf(&ModelFiles::open(&folder).unwrap(), &path, DType::F32).unwrap();
    let (file, stored) = (GgufFile::open(&path).unwrap(), tensors(&folder));
    let metadata = file.metadata();
    let older = |key: &str| match key.strip_prefix("deepseek2.attention.")? {
        "head_count_kv" => Some(4),
        "key_length" => Some(10),
        "value_length" => Some(5),
        _ => None,
    };
    let entries: Vec<(String, GgufValue)> = metadata
        .entries()
        .iter()
        .filter(|entry| !entry.key.ends_with("_mla"))
        .map(|MetadataEntry { key, kind, .. }| {
            let value = match kind {
                ValueType::String => GgufValue::String(metadata.str(key).unwrap().unwrap().to_owned()),
                ValueType::F32 => GgufValue::F32(metadata.f64(key).unwrap().unwrap() as f32),
                ValueType::Bool => GgufValue::Bool(metadata.bool(key).unwrap().unwrap()),
                _ => GgufValue::U32(older(key).unwrap_or(metadata.u64(key).unwrap().unwrap() as u32)),
            };
            (key.clone(), value)
        })
        .collect();
    let mut contents = Vec::new();
    for tensor in file.tensors() {
        contents.push((tensor.name.clone(), tensor.shape.clone(), file.bytes(tensor).to_vec()));
        let Some(layer) = tensor.name.strip_suffix(".attn_k_b.weight") else { continue };
        let of_folder = format!("model.layers.{}.self_attn.kv_b_proj.weight", &layer["blk.".len()..]);
        contents.push((format!("{layer}.attn_kv_b.weight"), vec![44, 10], stored[&of_folder].clone()));
    }
    let write_with = |name: &str, entries: &[(String, GgufValue)], halves: bool| {
        let is_half = |name: &str| name.ends_with("attn_k_b.weight") || name.ends_with("attn_v_b.weight");
        let own: Vec<_> = contents.iter().filter(|(name, ..)| halves || !is_half(name)).collect();
        let tensor = |(name, shape, _): &&(String, Vec<u64>, Vec<u8>)| NewGgufTensor {
            name: name.clone(),
            dtype: DType::F32,
            shape: shape.clone(),
        };
        let tensors: Vec<NewGgufTensor> = own.iter().map(tensor).collect();
        let path = folder.join(name);
        let content = |index: usize, out: &mut dyn std::io::Write| out.write_all(&own[index].2);
        plimsoll_model::gguf::write_gguf(&path, entries, &tensors, content).unwrap();
        path
    };
    let write = |name: &str, entries: &[(String, GgufValue)]| write_with(name, entries, false);
    let old = write("old.gguf", &entries);
    // Others keep the halves beside the matrix.
    let both = write_with("both.gguf", &entries, true);
    // Heads have places of their own: a number that nobody has takes no memory.
    let mut lying = entries.clone();
    let heads = lying.iter_mut().find(|(key, _)| key == "deepseek2.attention.head_count").unwrap();
    heads.1 = GgufValue::U32(1 << 27);
    let error = ModelFiles::open(&write("lying.gguf", &lying)).unwrap_err().to_string();
    assert!(error.contains("beyond any model"), "{error}");
    for (key, value, told) in [
        ("attention.temperature_scale", 0.1, "larger by position"),
        ("rope.scaling.attn_factor", 1.5, "only 1 is supported"),
        ("rope.scaling.yarn_log_multiplier", 0.0, "no weight of YaRN"),
    ] {
        let key = format!("deepseek2.{key}");
        let mut other: Vec<_> = entries.iter().filter(|(own, _)| *own != key).cloned().collect();
        other.push((key, GgufValue::F32(value)));
        let error = ModelFiles::open(&write("other.gguf", &other)).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    let [new, old, both] = [path, old, both].map(|path| ModelFiles::open(&path).unwrap());
    assert_eq!(old.spec().attention, new.spec().attention);
    assert_eq!(both.spec().attention, new.spec().attention);
    for parameter in new.spec().parameters() {
        let values = |files: &ModelFiles| {
            let mut values = vec![0.0f32; parameter.elements() as usize];
            files.weights().read_rows(&parameter, parameter.all_rows(), &mut values).unwrap();
            values
        };
        assert!(values(&old) == values(&new) && values(&both) == values(&new), "{}", parameter.name);
    }
}

/// The half of keys has blocks across the rows of its matrix: its values are taken, and kept in bf16.
#[test]
fn quantised_halves_of_latent_attention_give_their_values() {
    let place = tempfile::tempdir().unwrap();
    let sizes = json!({
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32,
        "q_lora_rank": null, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64,
    });
    let folder = changed("deepseek-v3", &sizes, place.path());
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let spec = read_config(&folder, "tiny".to_owned()).unwrap();
    let path = folder.join("model.gguf");
    Transcoder::new(&spec, &Waves, &mut |_, _| {}).write_gguf(&path, DType::Q8_0, None).unwrap();
    let files = ModelFiles::open(&path).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let halves = ["blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"];
    assert_eq!(halves.map(|name| file.tensor(name).unwrap().dtype), [DType::Q8_0; 2]);
    let mut seen = 0;
    for parameter in spec.parameters().iter().filter(|p| p.role == Role::KvUpProj) {
        let weights = files.weights();
        assert_eq!(weights.inference_dtype(parameter, DType::F32), DType::Bf16);
        let mut all = vec![0.0f32; parameter.elements() as usize];
        let mut wanted = all.clone();
        weights.read_rows(parameter, parameter.all_rows(), &mut all).unwrap();
        Waves.rows(parameter, parameter.all_rows(), &mut wanted).unwrap();
        // Half a step of 127, and the rounding of its factor to f16.
        assert!(all.iter().zip(&wanted).all(|(a, b)| (a - b).abs() <= 0.6 / 127.0), "{}", parameter.name);
        // Rows that begin and end within halves of heads.
        let (rows, columns) = (20..100u64, parameter.columns() as usize);
        let mut some = vec![0.0f32; 80 * columns];
        weights.read_rows(parameter, rows, &mut some).unwrap();
        assert!(some == all[20 * columns..100 * columns]);
        let mut bf16 = vec![0; 2 * all.len()];
        weights.read_into(parameter, DType::Bf16, &mut bf16).unwrap();
        let rounded = bf16.chunks_exact(2).map(|x| f32::from_le_bytes([0, 0, x[0], x[1]]));
        assert!(rounded.zip(&all).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0));
        seen += 1;
    }
    assert_eq!(seen, 3);
}

/// Weights that differ from element to element.
struct Waves;

impl RowSource for Waves {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        let start = rows.start * parameter.columns();
        (start..).zip(out).for_each(|(i, out)| *out = (i as f32 * 0.37).sin());
        Ok(())
    }
}

#[test]
fn what_gguf_has_no_words_for_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for (family, keys, told) in [
        ("llama-dynamic", json!({}), "dynamic"),
        ("qwen2", json!({}), "window of 6"),
        ("gemma2", json!({}), "factor on attention scores"),
        ("gemma3", json!({ "query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0 }), "soft caps"),
        ("llama", json!({ "hidden_act": "gelu" }), "activation"),
        ("gpt-oss", json!({ "swiglu_limit": 5.0 }), "activation"),
        ("deepseek-v3-yarn", latent_yarn(0.9, 0.7), "mscale of its YaRN"),
        ("deepseek-v2-groups", latent_yarn(1.0, 0.0), "YaRN without mscale_all_dim"),
    ] {
        let folder = changed(family, &keys, place.path());
        let files = ModelFiles::open(&folder).unwrap();
        let path = folder.join("model.gguf");
        let error = write_gguf(&files, &path, DType::F32).unwrap_err().to_string();
        assert!(error.contains(told), "{family}: {error}");
        assert!(!path.exists(), "{family}");
    }
}

/// Experts in MXFP4, as OpenAI's files have them: PyTorch's loss, and each block's bits in a GGUF file and in a folder that are made
/// of it.
#[test]
fn experts_in_mxfp4_keep_their_bits() {
    let folder = all_data().join("mxfp4/gpt-oss");
    let reference: Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(reference["tokens"].clone()).unwrap();
    let files = ModelFiles::open(&folder).unwrap();
    let check = |files: &ModelFiles, what: &str| {
        let (found, wanted) = (loss(files, &tokens), reference["loss"].as_f64().unwrap());
        assert!((found - wanted).abs() < 1e-5, "{what}: loss {found} instead of {wanted}");
    };
    check(&files, "the folder");
    let experts: Vec<_> = files.spec().parameters().into_iter().filter(is_expert_matrix).collect();
    assert_eq!(experts.len(), 9);
    let blocks = |files: &ModelFiles| -> Vec<Vec<u8>> {
        let of = |parameter: &Parameter| {
            assert_eq!(files.weights().stored_dtype(parameter).unwrap(), DType::Mxfp4);
            assert_eq!(files.weights().inference_dtype(parameter, DType::Bf16), DType::Mxfp4);
            let mut bytes = vec![0; DType::Mxfp4.bytes_for(parameter.elements()).unwrap() as usize];
            files.weights().read_into(parameter, DType::Mxfp4, &mut bytes).unwrap();
            bytes
        };
        experts.iter().map(of).collect()
    };
    let wanted = blocks(&files);
    let place = tempfile::tempdir().unwrap();
    let back = place.path().join("back");
    let write = |files: &ModelFiles, folder: &Path| {
        let mut ignore = |_: u64, _: u64| {};
        Transcoder::new(files.spec(), files.weights(), &mut ignore).write_folder(folder, Target::Mxfp4)
    };
    write(&files, &back).unwrap();
    assert_eq!(tensors(&back), tensors(&folder));
    check(&ModelFiles::open(&back).unwrap(), "the same folder again");

    let path = place.path().join("model.gguf");
    write_gguf(&files, &path, DType::Mxfp4).unwrap();
    let through = ModelFiles::open(&path).unwrap();
    assert!(blocks(&through) == wanted);
    // ggml's order: value i and value i + 16 of a block share a byte. The second expert's fourth row of gate is its seventh there.
    let file = SafetensorsFile::open(&folder.join("model.safetensors")).unwrap();
    let stored =
        |suffix: &str| file.bytes(&format!("model.layers.0.mlp.experts.gate_up_proj_{suffix}")).unwrap();
    let gguf = GgufFile::open(&path).unwrap();
    let ours = gguf.bytes(gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap());
    let (own, theirs) = (64 + 3, 128 + 6);
    assert_eq!(ours[own * 17], stored("scales")[theirs]);
    for i in 0..16 {
        let code = |place: usize| stored("blocks")[theirs * 16 + place / 2] >> (4 * (place % 2)) & 15;
        assert_eq!(ours[own * 17 + 1 + i], code(i) | code(i + 16) << 4, "{i}");
    }
    // From GGUF back to the folder, whose other matrices were quantised on the way.
    let again = place.path().join("again");
    write(&through, &again).unwrap();
    let (first, last) = (tensors(&folder), tensors(&again));
    for (name, bytes) in first.iter().filter(|(name, _)| name.contains("experts.")) {
        assert!(bytes == &last[name], "{name}");
    }

    // What is no gpt-oss has no such folder, and what is damaged is refused by name.
    let other = ModelFiles::open(&data("mixtral")).unwrap();
    let error = write(&other, &place.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("gpt-oss alone"), "{error}");
}

fn is_expert_matrix(parameter: &Parameter) -> bool {
    parameter.is_of_experts() && parameter.shape.len() == 3
}

/// Experts in MXFP4 are computed with as they are: greedy words are PyTorch's.
#[test]
fn experts_in_mxfp4_answer_as_pytorch_does() {
    let folder = all_data().join("mxfp4/gpt-oss");
    let reference: Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let [tokens, greedy]: [Vec<u32>; 2] =
        ["tokens", "greedy"].map(|key| serde_json::from_value(reference[key].clone()).unwrap());
    let prompt = reference["prompt_tokens"].as_u64().unwrap() as usize;
    let files = ModelFiles::open(&folder).unwrap();
    let settings = DecodeSettings {
        precision: Precision::F32,
        cache: DType::F32,
        cache_tier: Tier::Device,
        context: 32,
        prompt_chunk_tokens: 4,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    };
    let types = |p: &Parameter| files.weights().inference_dtype(p, DType::F32);
    let storage = || WeightStorage::new(&types);
    let dry = DryRun::generation(files.spec(), settings, storage(), 16).unwrap();
    let device = Cpu::new(dry.peak_bytes(), CpuOptions { threads: Some(2), isa: None }).unwrap();
    let mut decoder =
        Decoder::new(&device, &Arc::default(), files.spec().clone(), settings, storage()).unwrap();
    decoder
        .load(|parameter, rows, dtype, out| {
            files.weights().read_rows_into(parameter, rows, dtype, out).unwrap();
            Ok::<(), StepError>(())
        })
        .unwrap();
    let mut logits = decoder.append(&tokens[..prompt]).unwrap();
    for wanted in greedy {
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32;
        assert_eq!(best, wanted);
        logits = decoder.append(&[best]).unwrap();
    }
}
