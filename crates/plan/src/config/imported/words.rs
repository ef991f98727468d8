//! What values of other programs are called here.

/// A value as it is written in YAML, or that it has no meaning here.
pub type Meaning = fn(&str) -> Option<String>;

/// Their key, ours, and what a value becomes.
pub type Entry = (&'static str, &'static str, Meaning);

/// How their keys begin, and why they have no meaning here.
pub type Answer = (&'static str, &'static str);

pub fn same(value: &str) -> Option<String> {
    Some(value.to_owned())
}

/// One of some words.
pub fn among(value: &str, words: &[(&str, &str)]) -> Option<String> {
    let wanted = value.to_ascii_lowercase();
    words.iter().find(|(theirs, _)| *theirs == wanted).map(|(_, ours)| (*ours).to_owned())
}

/// The one of some words that stands in a list or a line of them.
pub fn word_of(value: &str, words: &[&str]) -> Option<String> {
    let wanted = value.to_ascii_lowercase();
    let mut written = wanted.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    written.find(|one| words.contains(one)).map(str::to_owned)
}

pub fn place(value: &str) -> Option<String> {
    among(value, &[("none", "device"), ("cpu", "host"), ("nvme", "disk")])
}

pub fn optimizer(value: &str) -> Option<String> {
    let words = [
        ("adamw", "adamw"),
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_hf", "adamw"),
        ("adamw_8bit", "adamw_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("paged_adamw_8bit", "adamw_8bit"),
        ("paged_adamw_32bit", "adamw"),
        ("adafactor", "adafactor"),
        ("lion", "lion"),
        ("lion_32bit", "lion"),
        ("lion_8bit", "lion_8bit"),
        ("paged_lion_32bit", "lion"),
        ("paged_lion_8bit", "lion_8bit"),
        ("sgd", "sgd"),
        ("adalomo", "adalomo"),
        ("galore_adamw", "galore"),
        ("apollo_adamw", "apollo"),
    ];
    among(value, &words)
}

pub fn schedule(value: &str) -> Option<String> {
    let words = [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("cosine_with_min_lr", "cosine"),
        ("constant", "constant"),
        ("constant_with_warmup", "constant"),
        ("inverse_sqrt", "inverse_sqrt"),
        ("warmup_stable_decay", "wsd"),
        ("warmuplr", "constant"),
        ("warmupdecaylr", "linear"),
        ("warmupcosinelr", "cosine"),
    ];
    among(value, &words)
}

pub fn when_true(value: &str, ours: &str) -> Option<String> {
    (value.eq_ignore_ascii_case("true")).then(|| ours.to_owned())
}

pub fn checkpointing(value: &str) -> Option<String> {
    among(value, &[("true", "full"), ("false", "none"), ("offload", "full"), ("unsloth", "full")])
}

/// Steps of a warm-up; transformers 5 takes a number below 1 for a share.
pub fn warmup_steps(value: &str) -> Option<String> {
    value
        .parse::<f64>()
        .ok()
        .filter(|steps| *steps == 0.0 || *steps >= 1.0)
        .map(|steps| format!("{steps:.0}"))
}

pub fn warmup_share(value: &str) -> Option<String> {
    value.parse::<f64>().ok().filter(|share| *share > 0.0 && *share < 1.0).map(|share| share.to_string())
}

/// Steps, where they are not left to the epochs.
pub fn steps(value: &str) -> Option<String> {
    value.parse::<i64>().ok().filter(|steps| *steps > 0).map(|steps| steps.to_string())
}
