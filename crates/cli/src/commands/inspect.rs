//! `plimsoll inspect`: what a model's files hold.

use std::collections::BTreeMap;

use plimsoll_memory::ByteSize;
use plimsoll_model::{BlockId, ModelFiles};
use serde_json::json;

use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::row;
use crate::table;

pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let files = ModelFiles::open(&args.path)?;
    let spec = files.spec();
    let parameters = spec.parameters();
    let mut dtypes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut groups: BTreeMap<&'static str, u64> = BTreeMap::new();
    for p in &parameters {
        *dtypes.entry(files.weights().stored_dtype(p)?.name()).or_default() += p.elements();
        let group = match p.block {
            BlockId::Embedding => "embedding",
            BlockId::Layer(_) => "layers",
            BlockId::Head => "head",
        };
        *groups.entry(group).or_default() += p.elements();
    }
    let format = format!("{:?}", files.format()).to_lowercase();
    let stored = files.weights().stored_bytes();
    let attention = &spec.attention;
    if args.json {
        let document = json!({
            "path": args.path,
            "format": format,
            "architecture": spec.architecture,
            "parameters": spec.parameter_count(),
            "parameters_by_group": groups,
            "parameters_by_dtype": dtypes,
            "stored_bytes": stored,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.mlp.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "rope_theta": attention.rope.as_ref().map(|rope| rope.theta),
            "max_position_embeddings": spec.max_position_embeddings,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "eos_tokens": spec.eos_tokens,
            "tensors": parameters.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(),
        });
        outln!("{}", serde_json::to_string_pretty(&document)?)?;
        return Ok(());
    }
    let mut rows = vec![
        row!["name", spec.name],
        row!["format", format],
        row!["architecture", spec.architecture],
        row!["parameters", spec.parameter_count()],
        row!["stored", ByteSize(stored)],
        row!["layers", spec.num_layers],
        row!["hidden size", spec.hidden_size],
        row!["inner size", spec.mlp.intermediate_size],
        row![
            "heads",
            format!(
                "{} of {}, {} for keys and values",
                attention.heads, attention.head_dim, attention.kv_heads
            )
        ],
        row!["vocabulary", spec.vocab_size],
        row!["context", spec.max_position_embeddings],
        row!["head", if spec.tie_word_embeddings { "tied to the embedding" } else { "its own" }],
    ];
    for (group, n) in groups {
        rows.push(row![format!("  in {group}"), n]);
    }
    for (dtype, n) in dtypes {
        rows.push(row![format!("  as {dtype}"), n]);
    }
    out!("{}", table::render(&rows))?;
    Ok(())
}
