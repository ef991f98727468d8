//! Where a model comes from and how its files hold it: names and sizes, a folder, a GGUF file of 8-bit blocks, and what
//! adapters train beside each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_model::{ModelFiles, ModelSpec, Parameter, Transcoder, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{ModelOrigin, OriginError, TrainingPlan, quantized_as};
use plimsoll_step::{Adapters, StepError};
use serde_json::{Map, json};

use crate::common::machine;

fn find(text: &str) -> Result<ModelOrigin, OriginError> {
    ModelOrigin::find(&RawConfig::from_str(text, "test").unwrap())
}

const SIZES: &str = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4";

#[test]
fn a_model_is_a_name_or_sizes_or_an_error_that_says_what_to_do() {
    let named = find("model: smollm2-135m").unwrap();
    assert_eq!(named.spec(), &catalogue::find("smollm2-135m").unwrap());
    assert!(named.weights().is_none() && named.path().is_none());
    let scratch = find(&format!("model: {{from_scratch: {{{SIZES}}}}}")).unwrap();
    assert!(matches!(&scratch, ModelOrigin::Scratch(spec, _) if spec.hidden_size == 32));
    assert!(scratch.weights().is_none() && scratch.path().is_none());
    // A byte is a token; the one after them ends a text. What is trained ends texts with its first.
    let ends = |spec: &ModelSpec| (spec.bos_token, spec.eos_tokens.clone());
    assert_eq!(ends(scratch.spec()), (Some(256), vec![256]));
    let trained = format!("model: {{from_scratch: {{{SIZES}, tokenizer: {{train: bpe, vocab_size: 500}}}}}}");
    let trained = find(&trained).unwrap();
    assert_eq!((ends(trained.spec()), trained.spec().vocab_size), ((Some(0), vec![0]), 500));

    assert!(matches!(find("training: {seed: 1}"), Err(OriginError::NoModel)));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged.gguf");
    std::fs::write(&file, "no model").unwrap();
    let tokenizer =
        |path: &Path| format!("model: {{from_scratch: {{{SIZES}, tokenizer: {}}}}}", path.display());
    let heads = |heads: u64| {
        format!(
            "model: {{from_scratch: {{hidden_size: 32, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: {heads}}}}}"
        )
    };
    for (text, said) in [
        (
            "model: smollm2-135",
            "smollm2-135 is neither a file or folder here nor a name of the catalogue; did you mean smollm2-135m",
        ),
        ("model: qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", "nor a name of the catalogue"),
        (&tokenizer(folder.path()), "tokenizer.json"),
        (&tokenizer(&file), "GGUF"),
        (&heads(3), "num_attention_heads: 3 does not divide hidden_size 32; set head_dim"),
        (&heads(0), "num_attention_heads: 0 does not divide hidden_size 32; set head_dim"),
    ] {
        let error = find(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
}

/// A folder with a model of two layers, all of whose rows are whole blocks of 32.
fn folder(place: &Path) -> PathBuf {
    let config = json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true,
    });
    std::fs::write(place.join("config.json"), config.to_string()).unwrap();
    let spec = plimsoll_model::hf_config::parse_config(
        Path::new("config.json"),
        &config.to_string(),
        "m".to_owned(),
    );
    let (mut header, mut end) = (Map::new(), 0);
    for p in spec.unwrap().parameters() {
        let begin = end;
        end += 4 * p.elements();
        header
            .insert(p.name.clone(), json!({"dtype": "F32", "shape": p.shape, "data_offsets": [begin, end]}));
    }
    let header = serde_json::to_string(&header).unwrap();
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.into_bytes());
    bytes.resize(bytes.len() + end as usize, 0);
    std::fs::write(place.join("model.safetensors"), bytes).unwrap();
    place.to_owned()
}

/// A model, what is said, the types of frozen weights, how many there are and how many are read from files.
type Kept<'a> = (&'a ModelOrigin, &'a [&'a str], &'a [&'a str], usize, usize);

struct Case {
    _place: tempfile::TempDir,
    floats: ModelOrigin,
    packed: ModelOrigin,
    gguf: PathBuf,
}

fn models() -> Case {
    let place = tempfile::tempdir().unwrap();
    let folder = folder(place.path());
    let gguf = place.path().join("model.gguf");
    let files = ModelFiles::open(&folder).unwrap();
    Transcoder::new(files.spec(), files.weights(), &mut |_, _| {})
        .write_gguf(&gguf, DType::Q8_0, None)
        .unwrap();
    let open = |path: &Path| ModelOrigin::from_path_or_name(path.to_str().unwrap()).unwrap();
    Case { floats: open(&folder), packed: open(&gguf), gguf, _place: place }
}

fn planned(origin: &ModelOrigin, set: &[&str]) -> Result<TrainingPlan, StepError> {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 16}", "test").unwrap();
    config.apply_set("memory.device_budget=1GiB").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    TrainingPlan::for_model(&config, origin, &machine())
}

fn adapters(origin: &ModelOrigin, set: &[&str]) -> Adapters {
    let plan = planned(origin, set).unwrap();
    plan.choice.settings.method.adapters().unwrap().clone()
}

/// The types that frozen weights are stored in, and the tensors that are read as a file has them.
fn stored(adapters: &Adapters) -> (BTreeSet<&'static str>, usize, usize) {
    let types = adapters.weight_types.values().map(|dtype| dtype.name()).collect();
    (types, adapters.weight_types.len(), adapters.in_files.len())
}

#[test]
fn frozen_weights_stay_as_their_file_has_them_unless_they_are_to_be_quantised() {
    let case = models();
    assert_eq!((case.packed.path(), case.packed.weights().is_some()), (Some(case.gguf.clone()), true));
    let (lora, qlora) = ("training.method=lora", "training.method=qlora");
    let quantization = |name: &str| format!("training.quantization={name}");
    let [none, stored_as_they_are, nf4] = ["none", "stored", "nf4"].map(quantization);
    let table = "training.lora.modules_to_save=[embed_tokens]";
    let (pissa, values) = ("training.lora.init_lora_weights=pissa", "training.lora.target_modules=[v_proj]");
    // Seven matrices and two norms in each of two layers, a norm and an embedding. The GGUF file has them all but the norms
    // in blocks, and the rows of queries and keys in another order.
    let (floats, packed) = (&case.floats, &case.packed);
    let cases: [Kept; 15] = [
        (floats, &[lora], &[], 0, 20),
        (floats, &[lora, &stored_as_they_are], &[], 0, 20),
        (floats, &[lora, &nf4], &["nf4"], 14, 6),
        (floats, &[qlora], &["nf4"], 14, 6),
        (floats, &[qlora, table], &["nf4"], 14, 5),
        // What is left beside the largest singular values is in no file.
        (floats, &[lora, pissa, values], &[], 0, 18),
        (packed, &[lora], &["q8_0"], 15, 16),
        (packed, &[qlora], &["q8_0"], 15, 16),
        (packed, &[lora, &stored_as_they_are], &["q8_0"], 15, 16),
        (packed, &[lora, &none], &[], 0, 5),
        (packed, &[lora, &nf4], &["nf4", "q8_0"], 15, 6),
        (packed, &[qlora, table], &["q8_0"], 14, 15),
        (packed, &[lora, pissa, values, &nf4], &["nf4", "q8_0"], 15, 6),
        (packed, &[lora, pissa, values, &none], &[], 0, 5),
        (packed, &[lora, pissa, values, &nf4, table], &["nf4"], 14, 5),
    ];
    for (origin, set, types, weights, in_files) in cases {
        let expected = (types.iter().copied().collect(), weights, in_files);
        assert_eq!(stored(&adapters(origin, set)), expected, "{set:?} of {:?}", origin.path());
    }
    let found = adapters(packed, &[lora]).in_files;
    assert!(found.values().all(|weight| weight.path == case.gguf && weight.bytes.end > weight.bytes.start));
    let error = planned(packed, &[lora, pissa, values]).unwrap_err().to_string();
    let said = "model.layers.0.self_attn.v_proj.weight is kept in the blocks that the file has it in";
    assert!(error.contains(said), "{error}");
}

#[test]
fn rows_that_are_no_whole_blocks_get_the_next_wider_type() {
    let spec =
        |hidden_size| ModelSpec { num_layers: 1, hidden_size, ..catalogue::find("smollm2-135m").unwrap() };
    let of = |columns: u64, dtype: DType| {
        let spec = spec(columns);
        let matrix = |p: &Parameter| p.role.is_block_matrix() && p.shape.last() == Some(&columns);
        quantized_as(spec.parameters().iter().find(|p| matrix(p)).unwrap(), dtype)
    };
    for (columns, asked, got) in [
        (512, DType::Q4K, Some(DType::Q4K)),
        (576, DType::Q4K, Some(DType::Q5_0)),
        (576, DType::Q6K, Some(DType::Q8_0)),
        (768, DType::Q6K, Some(DType::Q6K)),
        (576, DType::Nf4, Some(DType::Nf4)),
        (576, DType::Q8_0, Some(DType::Q8_0)),
        (592, DType::Q4K, None),
        (592, DType::Q8_0, None),
    ] {
        assert_eq!(of(columns, asked), got, "{columns} {asked}");
    }
    let spec = spec(512);
    let others = spec.parameters().into_iter().filter(|p| !p.role.is_block_matrix());
    let others: Vec<Option<DType>> = others.map(|p| quantized_as(&p, DType::Q8_0)).collect();
    assert!(others.len() > 2 && others.iter().all(Option::is_none));
}

/// Matrices of experts are read one by one, and 4-bit types with double quantisation only in whole runs of 16,384 elements.
#[test]
fn experts_of_no_whole_runs_have_factors_of_their_own() {
    let of = |inner: u64, dtype: DType| {
        let mut spec = ModelSpec { hidden_size: 64, ..catalogue::find("olmoe-1b-7b").unwrap() };
        spec.experts.as_mut().unwrap().intermediate_size = inner;
        let parameters = spec.parameters();
        quantized_as(parameters.iter().find(|p| p.is_of_experts()).unwrap(), dtype)
    };
    for (inner, asked, got) in [
        (256, DType::Nf4, Some(DType::Nf4)),
        (64, DType::Nf4, Some(DType::Nf4F32)),
        (64, DType::Fp4, Some(DType::Fp4F32)),
        (64, DType::Q4_0, Some(DType::Q4_0)),
    ] {
        assert_eq!(of(inner, asked), got, "{inner} {asked}");
    }
}
