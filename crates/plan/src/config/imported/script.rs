//! The command line that starts a training script, by itself or in a shell script.

use super::Leaf;
use super::words::{Entry, among, same, when_true};
use crate::config::document::shortened;
use crate::config::place::shortened_origin;

/// Launchers and interpreters of training scripts.
const STARTERS: [&str; 8] =
    ["python", "python3", "torchrun", "accelerate", "deepspeed", "llamafactory-cli", "srun", "mpirun"];

/// Arguments of launchers and of TRL, beside those of the trainer.
pub const ENTRIES: [Entry; 13] = [
    ("nproc_per_node", "parallel.data_parallel", count),
    ("num_processes", "parallel.data_parallel", count),
    ("num_gpus", "parallel.data_parallel", count),
    // DeepSpeed's launcher: `localhost:0,1,2,3`.
    ("include", "parallel.data_parallel", |v| match v.contains('@') {
        true => None,
        false => Some(v.split_once(':')?.1.split(',').count().to_string()),
    }),
    ("model_max_length", "data.sequence_length", same),
    ("use_peft", "training.method", |v| when_true(v, "lora")),
    ("lora_r", "training.lora.rank", same),
    ("lora_target_modules", "training.lora.target_modules", |v| {
        Some(if v.starts_with('[') || v == "all-linear" { v.to_owned() } else { format!("[{v}]") })
    }),
    ("load_in_4bit", "training.quantization", |v| when_true(v, "nf4")),
    ("load_in_8bit", "training.quantization", |v| when_true(v, "int8")),
    ("attn_implementation", "training.attention", |v| {
        among(v, &[("flash_attention_2", "flash"), ("sdpa", "flash"), ("eager", "standard")])
    }),
    ("zero_stage", "parallel.zero_stage", same),
    ("mixed_precision", "training.mixed_precision", |v| {
        among(v, &[("no", "f32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")])
    }),
];

fn count(value: &str) -> Option<String> {
    value.parse::<u32>().ok().filter(|count| *count > 0).map(|count| count.to_string())
}

/// The arguments of the first command of a text that starts a training script; `None` where there is none. An error names the line whose
/// quotes are open.
pub fn leaves(text: &str, origin: &str) -> Option<Result<Vec<Leaf>, String>> {
    let origin = shortened_origin(origin);
    let mut lines = text.lines().zip(1_u64..);
    while let Some((first, number)) = lines.next() {
        let mut words = Vec::new();
        let (mut line, mut at) = (first, number);
        loop {
            let (own, goes_on) = match line.trim_end().strip_suffix('\\') {
                Some(own) => (own, true),
                None => (line, false),
            };
            match shell_words::split(uncommented(own)) {
                Ok(own) => words.extend(own.into_iter().map(|word| (word, at))),
                Err(_) if words.iter().any(|(word, _)| is_starter(word)) => {
                    return Some(Err(format!("{origin}:{at}: a quote is not closed")));
                }
                Err(_) => break,
            }
            let next = if goes_on { lines.next() } else { None };
            let Some(next) = next else { break };
            (line, at) = next;
        }
        if words.iter().any(|(word, _)| is_starter(word))
            && words.iter().any(|(word, _)| word.starts_with("--"))
        {
            return Some(Ok(arguments(&words, &origin)));
        }
    }
    None
}

/// A line without what stands behind a `#` at the beginning of a word.
fn uncommented(line: &str) -> &str {
    if line.trim_start().starts_with('#') {
        ""
    } else {
        line.split_once(" #").map_or(line, |(before, _)| before)
    }
}

fn is_starter(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    STARTERS.contains(&name)
}

/// `--key value`, `--key=value`, and `--flag`, which is true. Several values are a list.
fn arguments(words: &[(String, u64)], origin: &str) -> Vec<Leaf> {
    let mut all = Vec::new();
    let mut words = words.iter().peekable();
    while let Some((word, line)) = words.next() {
        let Some(named) = word.strip_prefix("--").filter(|name| !name.is_empty()) else { continue };
        let (key, value) = match named.split_once('=') {
            Some((key, value)) => (key, vec![value.to_owned()]),
            None => {
                let mut values = Vec::new();
                while let Some((value, _)) =
                    words.next_if(|(next, _)| !next.starts_with("--") && !next.ends_with(".py"))
                {
                    values.push(value.clone());
                }
                (named, values)
            }
        };
        let value = match &value[..] {
            [] => "true".to_owned(),
            [one] => one.clone(),
            many => {
                let quoted: Vec<String> =
                    many.iter().map(|one| serde_json::Value::from(one.as_str()).to_string()).collect();
                format!("[{}]", quoted.join(", "))
            }
        };
        let place = format!("{origin}:{line}");
        all.push(Leaf { key: shortened(&key.replace('-', "_")), value, place });
    }
    all
}
