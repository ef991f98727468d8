//! Finding out what files are and what is in them. What cannot be read of a part becomes a note; the rest is shown.

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::gguf::{GgufFile, Metadata, MetadataEntry, Value as GgufValue};
use plimsoll_model::safetensors::{INDEX_NAME, SINGLE_NAME, SafetensorsSet};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{
    ExpertsSpec, Format, ModelFiles, ModelSpec, Parameter, SafetensorsFile, Scoring, catalogue as known,
};
use plimsoll_plan::needs;
use plimsoll_train::{Checkpoint as TrainingCheckpoint, REPORT_FILE};
use serde_json::{Value, json};

use super::report::{
    Adapter, ChatTemplate, Checkpoint, DTypeBytes, Experts, Kind, Latent, Model, Report, Run, Storage,
    StoredTensor, Token, TokenizerReport,
};
use crate::failure::Failure;

const CONFIG: &str = "config.json";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
const TRAINER_STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const METRICS: &str = "metrics.jsonl";

/// JSON beside weights that is longer than this is not read.
const MAX_JSON: u64 = 4 << 20;

/// A model of the catalogue.
pub fn catalogue(name: &str) -> Result<Report, Failure> {
    let spec = known::find(name).map_err(|_| Failure::usage(format!("{name}: no such model")))?;
    let mut report = Report::new(name.to_owned(), Kind::Catalogue);
    shape(&mut report, &spec, &|_| DType::Bf16);
    report
        .notes
        .push("dimensions alone: there are no files; inference is reckoned with bf16 weights".to_owned());
    Ok(report)
}

/// A file or folder.
pub fn files(path: &Path) -> Result<Report, Failure> {
    let shown = path.display().to_string();
    if !path.is_dir() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        return match extension {
            "safetensors" => safetensors(shown, path, SafetensorsSet::single(path).map_err(model)?),
            "json" if name == TOKENIZER => tokenizer(shown, parent(path)),
            "json" if name == INDEX_NAME || name == CONFIG || name == ADAPTER_CONFIG => files(parent(path)),
            _ if extension == "gguf" || begins_with_magic(path) => gguf(shown, path),
            // Says what it could have been.
            _ => Err(ModelFiles::open(path).err().map_or_else(|| Failure::usage(shown), Failure::from)),
        };
    }
    let has = |name: &str| path.join(name).is_file();
    let weights = has(SINGLE_NAME) || has(INDEX_NAME);
    if has(ADAPTER_CONFIG) && !has(CONFIG) {
        return adapter(shown, path);
    }
    let run = run(path)?;
    if weights {
        let (file, single) =
            (path.join(if has(SINGLE_NAME) { SINGLE_NAME } else { INDEX_NAME }), has(SINGLE_NAME));
        let set = if single { SafetensorsSet::single(&file) } else { SafetensorsSet::indexed(&file) };
        let mut report = safetensors(shown, path, set.map_err(model)?)?;
        if has(TRAINER_STATE) {
            (report.kind, report.checkpoint) = (Kind::Checkpoint, checkpoint(path, &mut report.notes));
        } else if run.is_some() {
            (report.kind, report.run) = (Kind::Run, run);
        }
        return Ok(report);
    }
    if run.is_some() {
        let last = TrainingCheckpoint::list(path)?.pop();
        let mut report = match &last {
            Some(last) => files(&last.path)?,
            None => Report::new(shown.clone(), Kind::Run),
        };
        (report.path, report.kind, report.run) = (shown, Kind::Run, run);
        report.notes.push(match last {
            Some(last) => {
                format!("there is no final model; what is shown is that of {}", last.path.display())
            }
            None => "there is neither a final model nor a checkpoint yet".to_owned(),
        });
        return Ok(report);
    }
    if has(TOKENIZER) {
        return tokenizer(shown, path);
    }
    Err(ModelFiles::open(path).err().map_or_else(|| Failure::usage(shown), Failure::from))
}

fn model(error: impl Into<plimsoll_model::ModelError>) -> Failure {
    error.into().into()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn begins_with_magic(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"GGUF"
}

fn safetensors(shown: String, path: &Path, set: SafetensorsSet) -> Result<Report, Failure> {
    let mut report = Report::new(shown, Kind::Tensors);
    report.format = Some("safetensors");
    store_safetensors(&mut report, set.files());
    open_model(&mut report, path);
    let folder = if path.is_dir() { path } else { parent(path) };
    if folder.join(TOKENIZER).is_file() {
        add_tokenizer(&mut report, Tokenizer::from_hf_dir(folder).map_err(|e| e.to_string()));
    }
    Ok(report)
}

fn store_safetensors(report: &mut Report, files: &[SafetensorsFile]) {
    let mut tensors = Vec::new();
    for file in files {
        let name = file_name(file.path());
        tensors.extend(file.tensors().iter().map(|tensor| StoredTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.name().to_lowercase(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes.len() as u64,
            file: name.clone(),
        }));
        for (key, value) in file.metadata() {
            report.metadata.insert(key.clone(), value.as_str().into());
        }
    }
    store(report, tensors, files.iter().map(SafetensorsFile::path));
}

fn gguf(shown: String, path: &Path) -> Result<Report, Failure> {
    let file = GgufFile::open(path).map_err(model)?;
    let mut report =
        Report::new(shown, if file.tensors().is_empty() { Kind::Vocabulary } else { Kind::Tensors });
    report.format = Some("gguf");
    let metadata = file.metadata();
    report.metadata.insert("version".to_owned(), file.version().into());
    for entry in metadata.entries() {
        report.metadata.insert(entry.key.clone(), metadata_value(&metadata, entry));
    }
    let name = file_name(path);
    let tensors = file.tensors().iter().map(|tensor| StoredTensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name().to_owned(),
        shape: tensor.shape.clone(),
        bytes: tensor.bytes.len() as u64,
        file: name.clone(),
    });
    store(&mut report, tensors.collect(), [path].into_iter());
    if report.kind != Kind::Vocabulary {
        open_model(&mut report, path);
    }
    if metadata.get("tokenizer.ggml.model").is_some() {
        add_tokenizer(&mut report, Tokenizer::from_gguf_file(path).map_err(|e| e.to_string()));
        let text = |key| metadata.str(key).ok().flatten().unwrap_or("none");
        if let Some(tokenizer) = &mut report.tokenizer {
            let (kind, pre) = (text("tokenizer.ggml.model"), text("tokenizer.ggml.pre"));
            tokenizer.ggml = Some(format!("{kind}, pre-tokenizer {pre}"));
        }
    }
    file.release();
    Ok(report)
}

/// A value as JSON; of a list its length and the type of its elements.
fn metadata_value(metadata: &Metadata<'_>, entry: &MetadataEntry) -> Value {
    match &entry.value {
        GgufValue::Unsigned(n) => json!(n),
        GgufValue::Signed(n) => json!(n),
        GgufValue::Float(x) => json!(x),
        GgufValue::Bool(b) => json!(b),
        GgufValue::String => metadata.str(&entry.key).ok().flatten().map_or(Value::Null, Value::from),
        GgufValue::Array { element, count } => format!("[{count} x {element}]").into(),
    }
}

/// The shape of the model that the tensors are, if it can be run.
fn open_model(report: &mut Report, path: &Path) {
    match ModelFiles::open(path) {
        Ok(files) => {
            report.kind = Kind::Model;
            report.format = Some(match files.format() {
                Format::Safetensors => "safetensors",
                Format::Gguf => "gguf",
            });
            shape(report, files.spec(), &|p| files.weights().inference_dtype(p, DType::F32));
        }
        Err(error) => report.notes.push(format!("this cannot be run: {error}")),
    }
}

fn shape(report: &mut Report, spec: &ModelSpec, weight_types: &(dyn Fn(&Parameter) -> DType + Sync)) {
    let mut groups: BTreeMap<&'static str, u64> = BTreeMap::new();
    let parameters = spec.parameters();
    for parameter in &parameters {
        *groups.entry(parameter.group().name()).or_default() += parameter.elements();
    }
    report.tensors = parameters.into_iter().map(|parameter| parameter.name).collect();
    let attention = &spec.attention;
    report.model = Some(Model {
        name: spec.name.clone(),
        architecture: spec.architecture.clone(),
        parameters: spec.parameter_count(),
        active_parameters: spec.experts.is_some().then(|| spec.active_parameter_count()),
        experts: spec.experts.as_ref().map(experts),
        parameters_by_group: groups,
        vocab_size: spec.vocab_size,
        hidden_size: spec.hidden_size,
        intermediate_size: spec.mlp.intermediate_size,
        num_hidden_layers: spec.num_layers,
        num_attention_heads: attention.heads,
        num_key_value_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        latent_attention: attention.latent.map(|latent| Latent {
            q_lora_rank: latent.query_rank,
            kv_lora_rank: latent.kv_rank,
            qk_rope_head_dim: attention.rotated_dim(),
            v_head_dim: latent.value_dim,
        }),
        rope_theta: attention.rope.as_ref().map(|rope| rope.theta),
        max_position_embeddings: spec.max_position_embeddings,
        tie_word_embeddings: spec.tie_word_embeddings,
        eos_tokens: spec.eos_tokens.clone(),
    });
    match needs(spec, weight_types) {
        Ok(needs) => report.needs = needs,
        Err(error) => report.notes.push(format!("what it needs cannot be said: {error}")),
    }
}

fn experts(experts: &ExpertsSpec) -> Experts {
    let router = &experts.router;
    Experts {
        num_experts: experts.count,
        num_experts_per_tok: experts.per_token,
        moe_intermediate_size: experts.intermediate_size,
        shared_expert_intermediate_size: experts.shared.map(|shared| shared.intermediate_size),
        layers_with_experts: experts.layers.iter().filter(|sparse| **sparse).count(),
        scoring_func: match router.scoring {
            Scoring::Softmax => "softmax",
            Scoring::Sigmoid => "sigmoid",
        },
        norm_topk_prob: router.normalise,
        routed_scaling_factor: router.scale,
        groups: router.groups.map(|groups| [groups.count, groups.chosen]),
        correction_bias: router.correction,
        without_matrices: experts.zero_experts().map(|own| [own.zero, own.copy, own.constant]),
    }
}

fn store<'a>(report: &mut Report, tensors: Vec<StoredTensor>, files: impl Iterator<Item = &'a Path>) {
    let mut by_dtype: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for tensor in &tensors {
        let entry = by_dtype.entry(tensor.dtype.clone()).or_default();
        let elements = tensor.shape.iter().fold(1u64, |product, size| product.saturating_mul(*size));
        *entry = (entry.0 + 1, entry.1.saturating_add(elements), entry.2 + tensor.bytes);
    }
    let (mut count, mut file_bytes) = (0, 0);
    for file in files {
        count += 1;
        file_bytes += std::fs::metadata(file).map_or(0, |found| found.len());
    }
    report.storage = Some(Storage {
        files: count,
        file_bytes,
        stored_bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
        parameters_by_dtype: by_dtype.iter().map(|(dtype, entry)| (dtype.clone(), entry.1)).collect(),
        dtypes: by_dtype
            .into_iter()
            .map(|(dtype, (tensors, parameters, bytes))| DTypeBytes {
                dtype,
                tensors,
                parameters,
                bytes,
                bits_per_parameter: 8.0 * bytes as f64 / parameters.max(1) as f64,
            })
            .collect(),
    });
    report.tensors = tensors.iter().map(|tensor| tensor.name.clone()).collect();
    report.stored_tensors = Some(tensors);
}

fn tokenizer(shown: String, folder: &Path) -> Result<Report, Failure> {
    let mut report = Report::new(shown, Kind::Tokenizer);
    add_tokenizer(&mut report, Ok(Tokenizer::from_hf_dir(folder)?));
    Ok(report)
}

fn add_tokenizer(report: &mut Report, tokenizer: Result<Tokenizer, String>) {
    let tokenizer = match tokenizer {
        Ok(tokenizer) => tokenizer,
        Err(reason) => return report.notes.push(format!("its tokenizer cannot be used: {reason}")),
    };
    let token = |id: u32| Token { id, text: tokenizer.id_to_token(id).unwrap_or_default() };
    let vocab_size = tokenizer.vocab_size();
    if let Some(model) = report.model.as_ref().filter(|model| vocab_size as u64 > model.vocab_size) {
        let rows = model.vocab_size;
        let note = format!(
            "the tokenizer has {vocab_size} tokens, but the embedding has {rows} rows: it belongs to another model"
        );
        report.notes.push(note);
    }
    report.tokenizer = Some(TokenizerReport {
        kind: tokenizer.kind().to_string(),
        ggml: None,
        vocab_size,
        bos: tokenizer.bos_token().map(token),
        eos: tokenizer.eos_tokens().iter().copied().map(token).collect(),
        pad: tokenizer.pad_token().map(token),
        special_tokens: tokenizer
            .all_special_tokens()
            .into_iter()
            .map(|special| Token { id: special.id, text: special.text })
            .collect(),
    });
    report.chat_templates = tokenizer
        .chat_templates()
        .iter()
        .map(|template| ChatTemplate { name: template.name.clone(), source: template.source.clone() })
        .collect();
}

fn adapter(shown: String, folder: &Path) -> Result<Report, Failure> {
    let config = read_json(&folder.join(ADAPTER_CONFIG)).map_err(Failure::other)?;
    let text = |key: &str| config.get(key).and_then(Value::as_str).map(str::to_owned);
    let mut report = Report::new(shown, Kind::Adapter);
    report.adapter = Some(Adapter {
        base_model: text("base_model_name_or_path"),
        kind: text("peft_type"),
        rank: config.get("r").and_then(Value::as_u64),
        alpha: config.get("lora_alpha").and_then(Value::as_f64),
        target_modules: match config.get("target_modules") {
            Some(Value::String(pattern)) => vec![pattern.clone()],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            _ => Vec::new(),
        },
    });
    let weights = folder.join(ADAPTER_WEIGHTS);
    if weights.is_file() {
        report.format = Some("safetensors");
        store_safetensors(&mut report, &[SafetensorsFile::open(&weights).map_err(model)?]);
    } else {
        report.notes.push(format!("there is no {ADAPTER_WEIGHTS}"));
    }
    if folder.join(TOKENIZER).is_file() {
        add_tokenizer(&mut report, Tokenizer::from_hf_dir(folder).map_err(|e| e.to_string()));
    }
    Ok(report)
}

fn checkpoint(folder: &Path, notes: &mut Vec<String>) -> Option<Checkpoint> {
    let state = match (TrainingCheckpoint { path: folder.to_owned(), step: 0 }).state() {
        Ok(state) => state,
        Err(error) => {
            // `transformers` writes a file of that name too, with other things in it.
            notes.push(format!("no run can be resumed from it: {error}"));
            return None;
        }
    };
    Some(Checkpoint {
        step: state.step,
        tokens: state.tokens,
        windows: state.windows,
        optimizer_bytes: std::fs::metadata(folder.join(OPTIMIZER)).ok().map(|found| found.len()),
    })
}

/// What a folder says of a training run, if it is one's.
fn run(folder: &Path) -> Result<Option<Run>, Failure> {
    let checkpoints: Vec<u64> = TrainingCheckpoint::list(folder)?.into_iter().map(|c| c.step).collect();
    if checkpoints.is_empty() && !folder.join(METRICS).is_file() {
        return Ok(None);
    }
    let report = read_json(&folder.join(REPORT_FILE)).unwrap_or_default();
    Ok(Some(Run {
        steps: report.get("steps").and_then(Value::as_u64),
        last_loss: report.get("last_loss").and_then(Value::as_f64),
        finished: report.get("finished").and_then(Value::as_bool),
        checkpoints,
    }))
}

fn read_json(path: &Path) -> Result<Value, String> {
    let wrong = |reason: String| format!("{}: {reason}", path.display());
    let length = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
    if length > MAX_JSON {
        return Err(wrong(format!("{length} bytes are too many")));
    }
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
