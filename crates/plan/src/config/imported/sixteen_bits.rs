//! What the files of one run say of 16 bits, and the words where two of them do not say the same. Whoever reads several files asks here.

use super::leaves::Leaf;
use crate::config::ConfigError;

/// The key that switches of 16 bits decide.
pub const PRECISION: &str = "training.mixed_precision";

/// Words for a value that is not said.
const UNSAID: [&str; 4] = ["", "~", "null", "none"];

/// What a file says of the type that is computed in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SixteenBits {
    /// `bf16`, `fp16` or another, with `-amp` where it is autocast's; `f32` where switches are off and nothing else says it.
    pub precision: String,
    /// The kinds whose switches are off, where they alone say `f32`: of the other kind they say nothing.
    pub off: Vec<&'static str>,
}

impl SixteenBits {
    /// The switches of DeepSpeed, transformers and those who take transformers' arguments: each kind, and its names.
    pub const SWITCHES: [(&'static str, &'static [&'static str]); 2] =
        [("bf16", &["bf16", "bf16.enabled"]), ("fp16", &["fp16", "fp16.enabled"])];

    /// The kinds that a file switches off; none where one is on, or is left to something else.
    pub fn switched_off(keys: &[Leaf]) -> Vec<(&'static str, &Leaf)> {
        let mut off = Vec::new();
        for key in keys {
            let name = key.key.strip_prefix("deepspeed.").unwrap_or(&key.key);
            let value = key.value.to_ascii_lowercase();
            let Some((kind, _)) = Self::SWITCHES.iter().find(|(_, names)| names.contains(&name)) else {
                continue;
            };
            match value.as_str() {
                "false" | "no" | "0" => off.push((*kind, key)),
                _ if UNSAID.contains(&value.as_str()) => {}
                _ => return Vec::new(),
            }
        }
        off
    }

    /// Takes what another file of the run says. Answers whether that counts, or `None` where the two contradict each other. A file
    /// `goes_over` that of its launcher where it turns 16 bits on. DeepSpeed's engine has no autocast: its `bf16` is the trainer's.
    pub fn join(&mut self, other: &SixteenBits, goes_over: bool) -> Option<bool> {
        let [own, theirs] = [&*self, other].map(|one| one.precision.trim_end_matches("-amp"));
        let says_nothing_of = |one: &SixteenBits, kind: &str| !one.off.is_empty() && !one.off.contains(&kind);
        let is_same = own == theirs;
        let is_taken = match () {
            () if is_same => !goes_over && self.precision.len() < other.precision.len(),
            () if says_nothing_of(other, own) => false,
            () if says_nothing_of(self, theirs) || goes_over && !self.off.is_empty() => true,
            () if goes_over => false,
            () => return None,
        };
        match is_same {
            // f32 that something else than switches says is f32 for both kinds.
            true if self.off.is_empty() || other.off.is_empty() => self.off.clear(),
            true => self.off.extend(&other.off),
            false if is_taken => self.off.clone_from(&other.off),
            false => {}
        }
        if is_taken {
            self.precision.clone_from(&other.precision);
        }
        Some(is_taken)
    }
}

impl ConfigError {
    /// That two files of one run do not say the same of a key: what each says, with its place.
    pub fn of_two_files(key: &str, one: &str, other: &str) -> ConfigError {
        ConfigError::Conflict {
            keys: Vec::new(),
            reason: format!("{one} does not go with {other}: both are {key}"),
            remedy: "make the two agree, set one to auto, or let a flag decide".to_owned(),
        }
    }
}
