//! The report for people.

use plimsoll_memory::ByteSize;
use serde_json::Value;

use super::report::{Kind, Latent, Report, Token};
use crate::needs;
use crate::row;
use crate::table;
use crate::units::count;

/// Lines of a chat template that are shown unless all are asked for.
const TEMPLATE_LINES: usize = 6;
/// Characters of a metadata value that are shown.
const VALUE_CHARACTERS: usize = 72;
/// Special tokens that are shown.
const SPECIAL_TOKENS: usize = 12;

pub fn render(report: &Report, whole_template: bool) -> String {
    let mut out = format!("{}: {}\n", report.path, what(report));
    let mut section = |title: &str, body: String| {
        if !body.is_empty() {
            out.push_str(&format!("\n{title}\n{body}"));
        }
    };
    section("shape", shape(report));
    section("experts", experts(report));
    section("parameters", groups(report));
    section("storage", storage(report));
    section("adapter", adapter(report));
    section("checkpoint", checkpoint(report));
    section("run", run(report));
    section("tokenizer", tokenizer(report));
    for template in &report.chat_templates {
        section(&format!("chat template {}", clean(&template.name)), lines(&template.source, whole_template));
    }
    section("metadata", metadata(report));
    section(needs::TITLE, needs::table(&report.needs));
    section("tensors", tensors(report));
    section("notes", report.notes.iter().map(|note| format!("  {note}\n")).collect());
    out
}

fn what(report: &Report) -> String {
    let kind = match report.kind {
        Kind::Model => "a model",
        Kind::Checkpoint => "a checkpoint of a training run",
        Kind::Run => "the output of a training run",
        Kind::Adapter => "an adapter",
        Kind::Tensors => "tensors",
        Kind::Vocabulary => "a vocabulary without weights",
        Kind::Tokenizer => "a tokenizer",
        Kind::Catalogue => "a model of the catalogue",
    };
    report.format.map_or(kind.to_owned(), |format| format!("{kind} in {format}"))
}

fn shape(report: &Report) -> String {
    let Some(model) = &report.model else { return String::new() };
    let heads = match &model.latent_attention {
        None => format!(
            "{} of {}, {} for keys and values",
            model.num_attention_heads, model.head_dim, model.num_key_value_heads
        ),
        Some(Latent { q_lora_rank, kv_lora_rank, qk_rope_head_dim, v_head_dim }) => {
            let queries = q_lora_rank.map_or_else(String::new, |rank| format!(", queries from {rank}"));
            format!(
                "{} of {}, {qk_rope_head_dim} of it rotated; keys and values (of {v_head_dim}) come from {kv_lora_rank}{queries}",
                model.num_attention_heads, model.head_dim
            )
        }
    };
    let positions = model.rope_theta.map_or("learned".to_owned(), |theta| format!("rotary, base {theta}"));
    pairs(&[
        ("name", clean(&model.name)),
        ("architecture", model.architecture.clone()),
        ("layers", model.num_hidden_layers.to_string()),
        ("hidden size", model.hidden_size.to_string()),
        ("inner size", model.intermediate_size.to_string()),
        ("heads", heads),
        ("vocabulary", model.vocab_size.to_string()),
        ("context", model.max_position_embeddings.to_string()),
        ("positions", positions),
        ("head", if model.tie_word_embeddings { "tied to the embedding" } else { "its own" }.to_owned()),
    ])
}

fn experts(report: &Report) -> String {
    let Some((model, experts)) =
        report.model.as_ref().and_then(|model| Some((model, model.experts.as_ref()?)))
    else {
        return String::new();
    };
    let mut router = vec![experts.scoring_func.to_owned()];
    if experts.norm_topk_prob {
        router.push("weights of a token add up to 1".to_owned());
    }
    if experts.routed_scaling_factor != 1.0 {
        router.push(format!("weights times {}", experts.routed_scaling_factor));
    }
    if let Some([count, chosen]) = experts.groups {
        router.push(format!("{chosen} of {count} groups"));
    }
    if experts.correction_bias {
        router.push("a bias corrects the choice".to_owned());
    }
    let mut number = experts.num_experts.to_string();
    if let Some([zero, copy, constant]) = experts.without_matrices {
        number = format!("{number} and {zero} zero, {copy} copy, {constant} constant ones");
    }
    let shared = experts.shared_expert_intermediate_size;
    let layers = format!("{} of {}", experts.layers_with_experts, model.num_hidden_layers);
    pairs(&[
        ("experts", format!("{number}, {} for each token", experts.num_experts_per_tok)),
        ("inner size", experts.moe_intermediate_size.to_string()),
        ("shared expert", shared.map_or("none".to_owned(), |width| format!("inner size {width}"))),
        ("layers", layers),
        ("router", router.join(", ")),
    ])
}

fn groups(report: &Report) -> String {
    let Some(model) = &report.model else { return String::new() };
    let all = model.parameters.max(1) as f64;
    let mut rows: Vec<Vec<String>> = model
        .parameters_by_group
        .iter()
        .map(|(group, n)| row![group.replace('_', " "), n, format!("{:.1} %", 100.0 * *n as f64 / all)])
        .collect();
    rows.push(row!["in all", model.parameters, count(model.parameters)]);
    if let Some(active) = model.active_parameters {
        rows.push(row!["active", active, count(active)]);
    }
    table::render(&rows)
}

fn storage(report: &Report) -> String {
    let Some(storage) = report.storage.as_ref().filter(|storage| !storage.dtypes.is_empty()) else {
        return String::new();
    };
    let mut rows = vec![row!["", "tensors", "parameters", "bytes", "bits/parameter"]];
    let (mut tensors, mut parameters) = (0, 0u64);
    for dtype in &storage.dtypes {
        tensors += dtype.tensors;
        parameters = parameters.saturating_add(dtype.parameters);
        let bits = format!("{:.2}", dtype.bits_per_parameter);
        rows.push(row![dtype.dtype, dtype.tensors, dtype.parameters, ByteSize(dtype.bytes), bits]);
    }
    let bits = format!("{:.2}", 8.0 * storage.stored_bytes as f64 / parameters.max(1) as f64);
    rows.push(row!["in all", tensors, parameters, ByteSize(storage.stored_bytes), bits]);
    let files = if storage.files == 1 { "1 file".to_owned() } else { format!("{} files", storage.files) };
    format!("{}  {files} of {}\n", table::render(&rows), ByteSize(storage.file_bytes))
}

fn adapter(report: &Report) -> String {
    let Some(adapter) = &report.adapter else { return String::new() };
    let unknown = || "not said".to_owned();
    pairs(&[
        ("base model", adapter.base_model.as_deref().map_or_else(unknown, clean)),
        ("kind", adapter.kind.as_deref().map_or_else(unknown, clean)),
        ("rank", adapter.rank.map_or_else(unknown, |rank| rank.to_string())),
        ("alpha", adapter.alpha.map_or_else(unknown, |alpha| alpha.to_string())),
        ("on", clean(&adapter.target_modules.join(", "))),
    ])
}

fn checkpoint(report: &Report) -> String {
    let Some(checkpoint) = &report.checkpoint else { return String::new() };
    let optimizer = checkpoint.optimizer_bytes.map_or("missing".to_owned(), |n| ByteSize(n).to_string());
    pairs(&[
        ("step", checkpoint.step.to_string()),
        ("tokens seen", checkpoint.tokens.to_string()),
        ("windows seen", checkpoint.windows.to_string()),
        ("optimizer state", optimizer),
    ])
}

fn run(report: &Report) -> String {
    let Some(run) = &report.run else { return String::new() };
    let unknown = || "not known".to_owned();
    let finished = match run.finished {
        Some(true) => "yes".to_owned(),
        Some(false) => "no; --resume goes on".to_owned(),
        None => unknown(),
    };
    let steps: Vec<String> = run.checkpoints.iter().map(u64::to_string).collect();
    let steps = if steps.is_empty() { "none".to_owned() } else { format!("at step {}", steps.join(", ")) };
    pairs(&[
        ("steps", run.steps.map_or_else(unknown, |steps| steps.to_string())),
        ("last loss", run.last_loss.map_or_else(unknown, |loss| format!("{loss:.4}"))),
        ("finished", finished),
        ("checkpoints", steps),
    ])
}

fn tokenizer(report: &Report) -> String {
    let Some(tokenizer) = &report.tokenizer else { return String::new() };
    let list = |tokens: &[Token]| {
        let shown: Vec<String> = tokens
            .iter()
            .take(SPECIAL_TOKENS)
            .map(|token| format!("{} ({})", clean(&token.text), token.id))
            .collect();
        let more = tokens.len().saturating_sub(SPECIAL_TOKENS);
        match (shown.is_empty(), more) {
            (true, _) => "none".to_owned(),
            (false, 0) => shown.join(", "),
            (false, more) => format!("{} and {more} more", shown.join(", ")),
        }
    };
    let kind = tokenizer.ggml.as_ref().map_or(String::new(), |ggml| format!(" ({})", clean(ggml)));
    pairs(&[
        ("kind", format!("{}{kind}", tokenizer.kind)),
        ("vocabulary", tokenizer.vocab_size.to_string()),
        ("beginning", list(tokenizer.bos.as_slice())),
        ("end", list(&tokenizer.eos)),
        ("padding", list(tokenizer.pad.as_slice())),
        ("special tokens", list(&tokenizer.special_tokens)),
    ])
}

fn metadata(report: &Report) -> String {
    let shown = |value: &Value| match value {
        Value::String(text) => clean(text),
        other => other.to_string(),
    };
    let all: Vec<(&str, String)> =
        report.metadata.iter().map(|(key, value)| (key.as_str(), shown(value))).collect();
    pairs(&all)
}

fn tensors(report: &Report) -> String {
    let Some(tensors) = &report.stored_tensors else { return String::new() };
    let rows: Vec<Vec<String>> = tensors
        .iter()
        .map(|t| row![clean(&t.name), t.dtype, format!("{:?}", t.shape), ByteSize(t.bytes), t.file])
        .collect();
    table::render(&rows)
}

/// A template's first lines, or all of them.
fn lines(source: &str, whole: bool) -> String {
    let all: Vec<&str> = source.lines().collect();
    let shown = if whole { all.len() } else { TEMPLATE_LINES.min(all.len()) };
    let mut out = String::new();
    for line in &all[..shown] {
        let line = if whole { (*line).to_owned() } else { clean(line) };
        out.push_str(&format!("  {}\n", line.replace(|c: char| c.is_control() && c != '\t', "")));
    }
    if shown < all.len() {
        out.push_str(&format!("  ... {} more lines; --template shows them\n", all.len() - shown));
    } else if !whole && all.iter().any(|line| line.chars().count() > VALUE_CHARACTERS) {
        out.push_str("  ... --template shows all of it\n");
    }
    out
}

/// Names and values, both to the left.
fn pairs(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(key, _)| key.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for (key, value) in rows {
        let pad = " ".repeat(width - key.chars().count());
        out.push_str(format!("  {key}{pad}  {value}").trim_end());
        out.push('\n');
    }
    out
}

/// A file's text as a terminal may show it: on one line, without control characters, not too long.
fn clean(text: &str) -> String {
    let mut out: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(VALUE_CHARACTERS).collect();
    if text.chars().count() > VALUE_CHARACTERS {
        out.push_str("...");
    }
    out
}
