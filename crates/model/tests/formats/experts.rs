//! Mixtures of experts as transformers saves them, in both layouts, and what becomes of them in files. The models were made by
//! `docs/bench/tiny_models.py`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use plimsoll_model::convert::convert;
use plimsoll_model::gguf::GgufFile;
use plimsoll_model::{
    ExpertGroups, ModelFiles, ModelSpec, NewTensor, Parameter, QkNorm, Role, SafetensorsFile, SaveError,
    SaveWriter, Scoring, SharedExpert, Target, Transcoder, Upcycled, hf_config, write_tensors,
};
use serde_json::{Value, json};

const FAMILIES: [&str; 10] = [
    "mixtral",
    "qwen2-moe",
    "qwen2-moe-normalised",
    "qwen3-moe",
    "qwen3-moe-stacked",
    "olmoe",
    "glm4-moe",
    "glm4-moe-biased",
    "gpt-oss",
    "gpt-oss-clamped",
];

pub fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/experts").join(family)
}

pub fn open(family: &str) -> ModelFiles {
    ModelFiles::open(&folder(family)).unwrap()
}

fn tensors(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let file = SafetensorsFile::open(&path).unwrap();
            let bytes = |name: &str| file.bytes(name).unwrap().to_vec();
            all.extend(file.tensors().iter().map(|t| (t.name.clone(), bytes(&t.name))));
        }
    }
    all
}

fn bytes(files: &ModelFiles, parameter: &Parameter, dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; dtype.bytes_for(parameter.elements()).unwrap() as usize];
    files.weights().read_into(parameter, dtype, &mut bytes).unwrap();
    bytes
}

fn save(files: &ModelFiles, spec: &ModelSpec, folder: &Path, shard_bytes: u64) {
    let writer = SaveWriter::new(spec, DType::F32).shard_bytes(shard_bytes);
    writer.write(folder, |parameter, out| out.write_all(&bytes(files, parameter, DType::F32))).unwrap();
}

#[test]
fn configurations_say_what_the_families_are() {
    let experts = |family: &str| open(family).spec().experts.clone().unwrap();
    let mixtral = experts("mixtral");
    assert_eq!((mixtral.count, mixtral.per_token, mixtral.intermediate_size), (4, 2, 20));
    assert!(mixtral.router.normalise && mixtral.router.balance_loss == 0.02 && mixtral.shared.is_none());
    let qwen2 = experts("qwen2-moe");
    assert_eq!(qwen2.layers, [true, false, true]);
    assert_eq!(qwen2.shared, Some(SharedExpert { intermediate_size: 20, gated: true }));
    assert!(!qwen2.router.normalise && open("qwen2-moe").spec().attention.qkv_bias);
    let normalised = experts("qwen2-moe-normalised");
    assert_eq!(normalised.layers, [false, true, false]);
    assert!(normalised.router.normalise && normalised.router.balance_loss == 0.0);
    let glm = experts("glm4-moe");
    assert_eq!(glm.layers, [false, true, true]);
    assert_eq!(glm.shared, Some(SharedExpert { intermediate_size: 24, gated: false }));
    assert_eq!(glm.router.groups, Some(ExpertGroups { count: 4, chosen: 2, by_two: true }));
    assert_eq!((glm.router.scoring, glm.router.scale), (Scoring::Sigmoid, 1.5));
    assert!(glm.router.correction && glm.router.normalise);
    assert_eq!(open("glm4-moe").spec().attention.rope.as_ref().unwrap().dims, 4);
    let biased = open("glm4-moe-biased").spec().clone();
    assert!(biased.attention.qkv_bias && !biased.attention.output_bias && biased.attention.qk_norm.is_some());
    assert!(experts("qwen3-moe-stacked").stacked_files && !experts("qwen3-moe").stacked_files);
}

/// The same tensors under the same names, byte by byte, in one file and in several.
#[test]
fn saving_gives_back_the_same_tensors() {
    let place = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let files = open(family);
        for (name, shard_bytes) in [("one", u64::MAX), ("several", 20_000)] {
            let saved = place.path().join(format!("{family}-{name}"));
            save(&files, files.spec(), &saved, shard_bytes);
            assert_eq!(tensors(&saved), tensors(&folder(family)), "{family}");
            let again = ModelFiles::open(&saved).unwrap();
            let renamed = ModelSpec { name: files.spec().name.clone(), ..again.spec().clone() };
            assert_eq!(&renamed, files.spec(), "{family}");
            assert_eq!(saved.join("model.safetensors.index.json").exists(), name == "several");
        }
    }
}

/// A tensor for each expert or one for all of them: the same parameters, in every type.
#[test]
fn both_layouts_hold_the_same_parameters() {
    let place = tempfile::tempdir().unwrap();
    for family in ["qwen3-moe", "qwen3-moe-stacked", "qwen2-moe", "glm4-moe"] {
        let files = open(family);
        let mut spec = files.spec().clone();
        let experts = spec.experts.as_mut().unwrap();
        experts.stacked_files = !experts.stacked_files;
        let saved = place.path().join(family);
        save(&files, &spec, &saved, u64::MAX);
        let other = ModelFiles::open(&saved).unwrap();
        assert_eq!(other.spec().experts, spec.experts);
        assert_ne!(tensors(&saved).len(), tensors(&folder(family)).len());
        for parameter in spec.parameters() {
            for dtype in [DType::F32, DType::Bf16, DType::Nf4] {
                if dtype == DType::Nf4 && parameter.shape.len() < 2 {
                    continue;
                }
                let same = bytes(&files, &parameter, dtype) == bytes(&other, &parameter, dtype);
                assert!(same, "{family} {} {dtype}", parameter.name);
            }
        }
    }
}

/// The rows of one expert are its matrix.
#[test]
fn an_expert_is_read_by_itself() {
    for family in FAMILIES {
        let files = open(family);
        let stored = tensors(&folder(family));
        for parameter in files.spec().parameters().into_iter().filter(Parameter::is_of_experts) {
            let count = files.spec().experts.as_ref().unwrap().count;
            let (each, columns) = (parameter.rows() / count, parameter.columns());
            let whole = bytes(&files, &parameter, DType::F32);
            let places = files.spec().hf_tensors(&parameter);
            assert_eq!(places.first().unwrap().0, files.spec().hf_tensor_name(&parameter));
            for expert in 0..count {
                let rows = expert * each..(expert + 1) * each;
                let mut own = vec![0; (each * columns * 4) as usize];
                files.weights().read_rows_into(&parameter, rows.clone(), DType::F32, &mut own).unwrap();
                let start = (rows.start * columns * 4) as usize;
                assert_eq!(own, whole[start..start + own.len()], "{family} {}", parameter.name);
                let stored_alone = files.weights().stored_rows_as(&parameter, rows.clone(), DType::F32);
                let Some(weight) = stored_alone else {
                    // Columns, and elements by turns.
                    assert!(family.starts_with("gpt-oss"), "{family} {}", parameter.name);
                    continue;
                };
                let file = std::fs::read(&weight.path).unwrap();
                assert_eq!(file[weight.bytes.start as usize..weight.bytes.end as usize], own);
                let (name, _) = places.iter().find(|(_, own)| *own == rows).unwrap_or(&places[0]);
                assert!(stored[name].windows(own.len()).any(|bytes| bytes == own), "{name}");
            }
        }
    }
}

/// A folder of the test's own with the family's model, keys of its configuration changed.
fn changed(family: &str, keys: &Value, place: &Path) -> PathBuf {
    let to = place.join(family);
    std::fs::create_dir_all(&to).unwrap();
    let text = std::fs::read(folder(family).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(folder(family).join("model.safetensors"), to.join("model.safetensors")).unwrap();
    to
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let place = tempfile::tempdir().unwrap();
    for (family, keys, words) in [
        ("mixtral", json!({ "num_local_experts": 0 }), "num_experts: must be at least 1"),
        ("mixtral", json!({ "num_local_experts": 1u64 << 40 }), "beyond any model"),
        ("mixtral", json!({ "num_experts_per_tok": 5 }), "5 of 4 experts cannot be chosen"),
        ("mixtral", json!({ "num_local_experts": 6 }), "makes it [6, 24]"),
        ("mixtral", json!({ "num_local_experts": 3 }), "makes it [3, 24]"),
        ("mixtral", json!({ "intermediate_size": 24 }), "makes it [24, 24]"),
        ("qwen2-moe", json!({ "mlp_only_layers": "1" }), "mlp_only_layers"),
        ("qwen2-moe", json!({ "mlp_only_layers": [] }), "model.layers.1.mlp.gate.weight"),
        ("qwen3-moe-stacked", json!({ "num_local_experts": 4 }), "mlp.gate.weight"),
        ("qwen3-moe-stacked", json!({ "moe_intermediate_size": 10 }), "gate_up_proj"),
        ("glm4-moe", json!({ "n_group": 3 }), "n_group: 3 does not divide the 8 experts"),
        ("glm4-moe", json!({ "topk_group": 5 }), "topk_group"),
        ("glm4-moe", json!({ "n_shared_experts": 3 }), "shared_experts"),
        ("olmoe", json!({ "clip_qkv": 8.0 }), "clip_qkv"),
        ("olmoe", json!({ "router_aux_loss_coef": -1.0 }), "router_aux_loss_coef"),
        ("olmoe", json!({ "model_type": "gpt_oss" }), "self_attn.q_proj.weight"),
        ("gpt-oss", json!({ "num_local_experts": 5 }), "router"),
        ("gpt-oss", json!({ "swiglu_limit": 0.0 }), "swiglu_limit"),
        ("gpt-oss", json!({ "quantization_config": { "quant_method": "fp9" } }), "quantised by"),
        ("olmoe", json!({ "model_type": "deepseek_v32" }), "by an indexer"),
        ("deepseek-v3", json!({ "attention_bias": true }), "attention_bias: is true, which is not supported"),
        ("deepseek-v3", json!({ "rope_interleave": false }), "rope_interleave: is false"),
        ("deepseek-v3", json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor"),
        ("deepseek-v3", json!({ "qk_rope_head_dim": 5 }), "qk_rope_head_dim: 5"),
        ("deepseek-v3", json!({ "qk_nope_head_dim": 600 }), "qk_nope_head_dim: 604"),
        ("deepseek-v3", json!({ "qk_nope_head_dim": 0, "v_head_dim": 4 }), "qk_rope_head_dim: 4 of the 4"),
        ("deepseek-v3", json!({ "v_head_dim": 11 }), "v_head_dim: values of 11 are wider than keys of 10"),
        ("deepseek-v3", json!({ "kv_lora_rank": 0 }), "kv_lora_rank: 0"),
        ("deepseek-v3", json!({ "q_lora_rank": 1u64 << 40 }), "q_lora_rank"),
        ("deepseek-v3", json!({ "moe_layer_freq": 2 }), "moe_layer_freq"),
        ("deepseek-v3", json!({ "topk_method": "greedy" }), "topk_method"),
        (
            "glm-4.7-flash",
            json!({ "mlp_layer_types": ["dense", "sparse"] }),
            "mlp_layer_types: has 2 words for 3 layers",
        ),
        (
            "glm-4.7-flash",
            json!({ "mlp_layer_types": ["dense", "sparse", "thick"] }),
            "mlp_layer_types: \"thick\" is",
        ),
        ("deepseek-v2", json!({ "norm_topk_prob": true }), "norm_topk_prob"),
        ("deepseek-v2", json!({ "scoring_func": "sigmoid" }), "scoring_func"),
    ] {
        let folder = changed(family, &keys, place.path());
        let error = ModelFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains(words), "{family} {keys}: {error}");
    }
}

/// Layers that predict further tokens stand behind the last one, and are left alone.
#[test]
fn layers_behind_the_last_are_left_alone() {
    let place = tempfile::tempdir().unwrap();
    let folder = changed("glm4-moe", &json!({ "num_hidden_layers": 2 }), place.path());
    let files = ModelFiles::open(&folder).unwrap();
    assert_eq!(files.spec().num_layers, 2);
    assert_eq!(files.spec().experts.as_ref().unwrap().layers, [false, true]);
}

/// DeepSeek's first mixture, whose names and keys are those of its own code.
#[test]
fn deepseek_is_read() {
    let place = tempfile::tempdir().unwrap();
    let keys = json!({
        "model_type": "deepseek", "scoring_func": "softmax", "n_group": null, "moe_layer_freq": 1,
        "norm_topk_prob": false, "partial_rotary_factor": 1.0, "rope_parameters": null,
    });
    let folder = changed("glm4-moe", &keys, place.path());
    let error = ModelFiles::open(&folder).unwrap_err().to_string();
    assert!(error.contains("e_score_correction_bias"), "{error}");
    let spec = hf_config::read_config_file(&folder.join("config.json"), "d".into()).unwrap();
    let experts = spec.experts.clone().unwrap();
    assert_eq!((experts.router.scoring, experts.router.correction), (Scoring::Softmax, false));
    let names: Vec<String> = spec.parameters().iter().map(|p| spec.hf_tensor_name(p)).collect();
    for name in
        ["model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.2.mlp.shared_experts.up_proj.weight"]
    {
        assert!(names.iter().any(|own| own == name), "{name}");
    }
    let text = hf_config::config_json(&spec, DType::Bf16).unwrap();
    assert_eq!(hf_config::parse_config("x".as_ref(), &text, "d".into()).unwrap().experts, spec.experts);
}

#[test]
fn active_parameters_are_those_of_the_experts_of_a_token() {
    let spec = open("mixtral").spec().clone();
    let of_experts: u64 =
        spec.parameters().iter().filter(|p| p.is_of_experts()).map(Parameter::elements).sum();
    assert_eq!(spec.active_parameter_count(), spec.parameter_count() - of_experts / 2);
    assert!(spec.parameters().iter().any(|p| p.role == Role::Router));
}

fn write_gguf(files: &ModelFiles, path: &Path, dtype: DType) -> Result<u64, SaveError> {
    Transcoder::new(files.spec(), files.weights(), &mut |_, _| {}).write_gguf(path, dtype, None)
}

/// Through a GGUF file and back: the same tensors.
#[test]
fn gguf_files_keep_everything() {
    let place = tempfile::tempdir().unwrap();
    for (family, names) in [
        ("mixtral", ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_inp.weight"]),
        ("qwen3-moe", ["blk.0.ffn_down_exps.weight", "blk.0.attn_q_norm.weight"]),
        ("olmoe", ["blk.2.ffn_up_exps.weight", "blk.0.attn_k_norm.weight"]),
        ("glm4-moe", ["blk.1.exp_probs_b.bias", "blk.0.post_attention_norm.weight"]),
        ("glm4-moe-biased", ["blk.0.attn_q.bias", "blk.1.ffn_gate_shexp.weight"]),
        ("gpt-oss", ["blk.0.attn_sinks.weight", "blk.0.ffn_gate_exps.bias"]),
    ] {
        let (original, folder) = (folder(family), place.path().join(family));
        let files = open(family);
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("model.gguf");
        write_gguf(&files, &path, DType::F32).unwrap();
        let through = ModelFiles::open(&path).unwrap();
        let file = GgufFile::open(&path).unwrap();
        for name in names {
            assert!(file.tensor(name).is_some(), "{family} {name}");
        }
        let mut experts = files.spec().experts.clone().unwrap();
        experts.router.balance_loss = 0.0;
        assert_eq!(through.spec().experts, Some(experts), "{family}");
        let back = folder.join("back");
        Transcoder::new(through.spec(), through.weights(), &mut |_, _| {})
            .write_folder(&back, Target::HuggingFace(DType::F32))
            .unwrap();
        assert_eq!(tensors(&back), tensors(&original), "{family}");
    }
}

/// A shared expert with a weight of its own, in a model whose layers all have experts.
#[test]
fn gguf_files_keep_shared_experts() {
    let place = tempfile::tempdir().unwrap();
    let files = open("qwen2-moe");
    let mut spec = files.spec().of_layers(&[0]);
    spec.eos_tokens.clear();
    let path = place.path().join("model.gguf");
    Transcoder::new(&spec, files.weights(), &mut |_, _| {}).write_gguf(&path, DType::F32, None).unwrap();
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.tensor("blk.0.ffn_gate_inp_shexp.weight").unwrap().shape, [24]);
    let through = ModelFiles::open(&path).unwrap();
    assert_eq!(through.spec().experts.as_ref().unwrap().shared, spec.experts.as_ref().unwrap().shared);
    for parameter in spec.parameters() {
        assert_eq!(bytes(&through, &parameter, DType::F32), bytes(&files, &parameter, DType::F32));
    }
}

#[test]
fn what_gguf_has_no_words_for_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for (family, keys, words) in [
        ("qwen2-moe", json!({}), "layers without experts"),
        ("qwen3-moe-stacked", json!({}), "weighs experts in another way"),
        ("olmoe", json!({ "norm_topk_prob": true }), "weighs experts in another way"),
    ] {
        let files = ModelFiles::open(&changed(family, &keys, place.path())).unwrap();
        let path = place.path().join("x.gguf");
        let error = write_gguf(&files, &path, DType::F32).unwrap_err().to_string();
        assert!(error.contains(words) && !path.exists(), "{family}: {error}");
    }
}

/// A mixture whose matrices are whole blocks of every type: experts of 64 x 256.
fn wide() -> ModelSpec {
    let mut spec = super::support::tiny_spec();
    spec.architecture = "qwen3_moe".to_owned();
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    let mut experts = open("qwen3-moe").spec().experts.clone().unwrap();
    (experts.count, experts.intermediate_size, experts.layers) = (3, 256, vec![true, true]);
    experts.router.balance_loss = 0.0;
    spec.experts = Some(experts);
    spec
}

/// Experts in blocks, one by one and all together, from a GGUF file and from checkpoints that bitsandbytes packs.
#[test]
fn quantised_experts_are_read_as_they_are() {
    let place = tempfile::tempdir().unwrap();
    let spec = wide();
    let original = place.path().join("original");
    super::support::save_tiny(&original, &spec, DType::F32);
    let files = ModelFiles::open(&original).unwrap();
    let gguf = |dtype: DType| {
        let path = place.path().join(format!("{dtype}.gguf"));
        write_gguf(&files, &path, dtype).unwrap();
        (ModelFiles::open(&path).unwrap(), dtype)
    };
    let packed = |name: &str, target: Target, dtype: DType| {
        let path = place.path().join(name);
        Transcoder::new(&spec, files.weights(), &mut |_, _| {}).write_folder(&path, target).unwrap();
        let file = SafetensorsFile::open(&path.join("model.safetensors")).unwrap();
        assert!(file.tensor("model.layers.1.mlp.experts.2.down_proj.weight").is_some(), "{name}");
        (ModelFiles::open(&path).unwrap(), dtype)
    };
    let four_bit = |doubly| Target::FourBit { kind: FourBit::Nf4, doubly };
    for (quantised, dtype) in [
        gguf(DType::Q8_0),
        gguf(DType::Q4_0),
        packed("nf4", four_bit(true), DType::Nf4),
        packed("nf4-f32", four_bit(false), DType::Nf4F32),
        packed("int8", Target::EightBit, DType::Int8),
    ] {
        for parameter in spec.parameters().iter().filter(|p| p.is_of_experts()) {
            let weights = quantised.weights();
            assert_eq!(weights.inference_dtype(parameter, DType::Bf16), dtype, "{}", parameter.name);
            let whole = bytes(&quantised, parameter, dtype);
            let each = parameter.rows() / 3;
            let own_bytes = whole.len() / 3;
            for expert in 0..3 {
                let rows = expert * each..(expert + 1) * each;
                let mut own = vec![0; own_bytes];
                weights.read_rows_into(parameter, rows.clone(), dtype, &mut own).unwrap();
                assert_eq!(own, whole[expert as usize * own_bytes..][..own_bytes], "{dtype} {expert}");
                // What the blocks mean is what is read in f32, and near what was quantised.
                let mut values = vec![0.0; (each * parameter.columns()) as usize];
                weights.read_rows(parameter, rows.clone(), &mut values).unwrap();
                let mut meant = vec![0.0; values.len()];
                convert(dtype, &own, DType::F32, bytemuck::cast_slice_mut(&mut meant)).unwrap();
                assert_eq!(values, meant, "{dtype}");
                files.weights().read_rows(parameter, rows, &mut meant).unwrap();
                let far = values.iter().zip(&meant).any(|(a, b)| (a - b).abs() > 0.02);
                assert!(!far, "{dtype} {}", parameter.name);
            }
        }
        let router = spec.parameters().into_iter().find(|p| p.role == Role::Router).unwrap();
        assert_eq!(quantised.weights().inference_dtype(&router, DType::Bf16), DType::Bf16);
    }
}

/// Copies of feed-forward parts, and routers that are no copies of each other; what is no expert's stays.
#[test]
fn dense_models_become_mixtures() {
    let place = tempfile::tempdir().unwrap();
    let (dense, mixed) = (place.path().join("dense"), place.path().join("mixed"));
    let spec = super::support::tiny_spec();
    super::support::save_tiny(&dense, &spec, DType::F32);
    let files = ModelFiles::open(&dense).unwrap();
    let upcycled = Upcycled::new(files.spec(), files.weights(), 3, 7).unwrap();
    Transcoder::new(upcycled.spec(), &upcycled, &mut |_, _| {})
        .write_folder(&mixed, Target::HuggingFace(DType::F32))
        .unwrap();
    let (before, after) = (tensors(&dense), tensors(&mixed));
    for (name, bytes) in &before {
        let experts = |expert: u64| {
            let part = [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")];
            let (own, theirs) = part.into_iter().find(|(own, _)| name.contains(&format!("mlp.{own}")))?;
            let to = format!("block_sparse_moe.experts.{expert}.{theirs}");
            Some(name.replace(&format!("mlp.{own}"), &to))
        };
        match experts(0) {
            None => assert_eq!(&after[name], bytes, "{name}"),
            Some(_) => {
                (0..3).for_each(|expert| assert_eq!(&after[&experts(expert).unwrap()], bytes, "{name}"))
            }
        }
    }
    let router = |layer: u32| &after[&format!("model.layers.{layer}.block_sparse_moe.gate.weight")];
    assert_eq!(router(0).len(), 3 * 64 * 4);
    assert!(router(0) != router(1) && router(0).iter().any(|byte| *byte != 0));
    let mixture = ModelFiles::open(&mixed).unwrap();
    assert_eq!(mixture.spec().experts.as_ref().unwrap().per_token, 2);
    for (spec, experts, words) in [
        (mixture.spec(), 2, "mixtral"),
        (files.spec(), 0, "num_experts: must be at least 1"),
        (files.spec(), 5000, "beyond any model"),
    ] {
        let error = Upcycled::new(spec, files.weights(), experts, 7).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Stacks in MXFP4 that are not whole are refused by name.
#[test]
fn damaged_blocks_of_mxfp4_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/mxfp4/gpt-oss");
    std::fs::copy(from.join("config.json"), place.path().join("config.json")).unwrap();
    let file = SafetensorsFile::open(&from.join("model.safetensors")).unwrap();
    let stack = "model.layers.1.mlp.experts.down_proj";
    let write = |change: &dyn Fn(&mut NewTensor) -> bool| {
        let all = file.tensors().iter().map(|t| NewTensor {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
        });
        let mut tensors: Vec<NewTensor> = all.collect();
        tensors.retain_mut(|tensor| change(tensor));
        write_tensors(&place.path().join("model.safetensors"), &[], &tensors, |tensor, out| {
            let size = tensor.dtype.bytes_for(&tensor.shape).unwrap() as usize;
            let bytes = file.bytes(&tensor.name).unwrap_or_default();
            out.write_all(&[bytes, &vec![0; size]].concat()[..size])
        })
        .unwrap();
        ModelFiles::open(place.path())
    };
    assert!(write(&|_| true).is_ok());
    let (blocks, scales) = (format!("{stack}_blocks"), format!("{stack}_scales"));
    let reshaped = |name: &str, shape: &[u64]| {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        move |tensor: &mut NewTensor| {
            if tensor.name == name {
                tensor.shape.clone_from(&shape);
            }
            true
        }
    };
    for (change, words) in [
        (
            &(|t: &mut NewTensor| t.name != scales) as &dyn Fn(&mut NewTensor) -> bool,
            "is not in the checkpoint",
        ),
        (&|t: &mut NewTensor| t.name != blocks, "down_proj"),
        (&reshaped(&scales, &[6, 32, 3]), "needs 384 elements in U8"),
        (&reshaped(&blocks, &[6, 32, 2, 8]), "blocks of MXFP4 are"),
        (&reshaped(&blocks, &[6, 32, 0, 16]), "blocks of MXFP4 are"),
        (&reshaped(&blocks, &[6, 64, 1, 16]), "has shape [6, 32, 64]"),
    ] {
        let error = write(change).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}
