//! The keys that shape a step: which values are next to one, and how the planner takes one where that is left open.

use plimsoll_memory::ByteSize;

use super::{ConfigError, Entry, RawConfig};

/// The values that are next to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Around {
    /// All words that the key may have.
    Words,
    /// All of these.
    These(&'static [&'static str]),
    /// Half of a number, and twice as much.
    Halves,
    /// What the value itself lets expect: halves of numbers, sizes and shares, the other words of a key of words.
    Like,
}

/// How the planner takes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// The fastest with which the step fits.
    Fastest,
    /// By a rule, however fast others are.
    ByRule(&'static str),
    /// Not at all: it is the user's, or the default.
    Never,
}

/// A key that shapes a step, or may.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shaping<'k> {
    /// The dotted path.
    pub key: &'k str,
    around: Around,
    pub takes: Takes,
    /// Keys that another value unsets, since the two go together.
    unsets: &'static [&'static str],
    /// Whether the sequences of an optimizer step stay as many.
    keeps_batch: bool,
}

const fn shaping(key: &str, around: Around, takes: Takes) -> Shaping<'_> {
    Shaping { key, around, takes, unsets: &[], keeps_batch: false }
}

impl Shaping<'_> {
    const fn unsetting(self, unsets: &'static [&'static str]) -> Self {
        Shaping { unsets, ..self }
    }

    const fn keeping_batch(self) -> Self {
        Shaping { keeps_batch: true, ..self }
    }
}

const AT_HOME: Takes = Takes::ByRule(
    "tensors leave the device only where nothing fits without: optimizer states first, then gradients, activations and weights",
);
const SWITCH: Around = Around::These(&["false", "true"]);
/// Of one way of dividing the ranks, another number leaves another number to data parallelism.
const WAY: &[&str] = &["parallel.data_parallel"];

use Around::{Halves, These, Words};
use Takes::{ByRule, Fastest, Never};

const ALL: &[Shaping<'static>] = &[
    shaping("training.batch_size", Halves, Fastest)
        .unsetting(&["training.gradient_accumulation_steps"])
        .keeping_batch(),
    shaping("training.gradient_accumulation_steps", Halves, Fastest)
        .unsetting(&["training.batch_size"])
        .keeping_batch(),
    shaping("training.effective_batch_size", Halves, Never)
        .unsetting(&["training.batch_size", "training.gradient_accumulation_steps"]),
    shaping("data.sequence_length", Halves, Never),
    shaping("training.method", Words, Never),
    shaping("training.quantization", These(&["none", "nf4", "int8"]), Never),
    shaping(
        "training.mixed_precision",
        Words,
        ByRule(
            "f32 loses nothing; bf16 is taken where the device is made for it, f32 does not fit or frozen weights are quantised, and no other type is",
        ),
    ),
    shaping(
        "training.master_weights",
        Words,
        ByRule("without f32 master weights updates are rounded, which is for you to choose"),
    ),
    shaping("training.gradient_dtype", Words, ByRule("gradients are as wide as what the optimizer updates")),
    shaping("training.optimizer", Words, Never),
    shaping(
        "training.gradient_checkpointing",
        These(&[
            "none",
            "{selective: [swiglu, norms]}",
            "{selective: [swiglu, norms, attention]}",
            "{selective: [swiglu, norms, attention, qkv]}",
            "{selective: [swiglu, norms, attention, qkv, ffn]}",
            "full",
            "sqrt",
        ]),
        Fastest,
    ),
    shaping("training.activation_compression", These(&["none", "int8"]), Never),
    shaping(
        "training.attention",
        These(&["flash", "standard"]),
        ByRule("flash attention computes the same without writing the scores out"),
    ),
    shaping(
        "training.loss_chunk_tokens",
        Halves,
        ByRule("so many tokens have logits of about 32 MiB, on a card of up to 1 GiB where there is room"),
    ),
    shaping("training.mlp_chunk_tokens", Halves, Never),
    shaping("training.sequence_chunk_tokens", Halves, Never),
    shaping("training.micro_batches_per_pass", Halves, Fastest),
    shaping("training.optimizer_in_backward", SWITCH, Never),
    shaping("memory.offload.optimizer", Words, AT_HOME),
    shaping("memory.offload.gradients", Words, AT_HOME),
    shaping("memory.offload.activations", Words, AT_HOME),
    shaping("memory.offload.parameters", Words, AT_HOME),
    shaping("memory.kept_layers.optimizer", Halves, Fastest),
    shaping("memory.kept_layers.gradients", Halves, Fastest),
    shaping("memory.kept_layers.activations", Halves, Fastest),
    shaping("memory.kept_layers.parameters", Halves, Fastest),
    shaping("memory.expert_slots", Halves, Fastest),
    shaping(
        "memory.prefetch",
        SWITCH,
        ByRule("what is offloaded is prefetched, and waited for only where the buffers for that do not fit"),
    ),
    shaping("parallel.zero_stage", These(&["0", "1", "2", "3"]), Fastest)
        .unsetting(&["parallel.sharding_strategy"]),
    shaping("parallel.overlap_communication", SWITCH, Fastest),
    shaping("parallel.tensor_parallel", Halves, Fastest).unsetting(WAY),
    shaping("parallel.pipeline_parallel", Halves, Fastest).unsetting(WAY),
    shaping("parallel.context_parallel", Halves, Fastest).unsetting(WAY),
    shaping("parallel.data_parallel", Halves, Fastest),
];

/// A key as a configuration has it.
pub(crate) struct KeyState {
    /// What it is set to.
    pub value: Option<String>,
    /// What it is without, in words.
    pub default: String,
    /// The legal values, in words.
    values: String,
}

impl KeyState {
    /// Whether the planner decides it where it is `auto` or left out.
    pub fn may_be_auto(&self) -> bool {
        self.values.split(" | ").any(|word| word == "auto")
    }

    /// Whether the user has fixed it.
    pub fn is_fixed(&self) -> bool {
        self.value.as_ref().is_some_and(|value| value != "auto")
    }
}

impl<'k> Shaping<'k> {
    /// What is known of a key. Of one that is not known to shape a step, the values next to it show whether it does.
    pub fn of(key: &'k str) -> Shaping<'k> {
        ALL.iter().find(|one| one.key == key).copied().unwrap_or(shaping(key, Around::Like, Never))
    }

    /// Whether the key is known to shape a step.
    pub fn is_known(&self) -> bool {
        self.around != Around::Like
    }

    /// The values next to one, without that one.
    pub fn neighbours(&self, state: &KeyState, value: &str) -> Vec<String> {
        let all: Vec<String> = match self.around {
            Words => state.values.split(" | ").filter(|word| *word != "auto").map(str::to_owned).collect(),
            These(all) => all.iter().map(|one| (*one).to_owned()).collect(),
            Halves => match value.parse::<u64>() {
                Ok(number @ 1..) => {
                    let both = [number / 2, number.saturating_mul(2)].into_iter().filter(|one| *one > 0);
                    both.map(|one| one.to_string()).collect()
                }
                _ => Vec::new(),
            },
            Around::Like => like(&state.values, value),
        };
        all.into_iter().filter(|other| other != value).collect()
    }

    /// The configuration with another value, for steps of so many sequences.
    ///
    /// # Errors
    /// The value does not go with the others.
    pub fn with(&self, config: &RawConfig, value: &str, sequences: u64) -> Result<RawConfig, ConfigError> {
        let mut config = config.clone();
        // Where nothing is shared there are no groups that share.
        let groups = ("parallel.zero_stage", "0") == (self.key, value);
        let unset = self.unsets.iter().copied().chain(groups.then_some("parallel.shard_size"));
        let unset = unset.map(|key| format!("{key}=null"));
        let batch = self.keeps_batch.then(|| format!("training.effective_batch_size={sequences}"));
        let own = format!("{}={value}", self.key);
        for assignment in unset.chain(batch).chain([own]) {
            config.apply_set(&assignment)?;
        }
        // Ranks that were counted are divided anew.
        match config.started {
            Some(started) => config.on_ranks(started),
            None => config.validate().map(|()| config),
        }
    }
}

/// A size as somebody would write it, if that is exact.
fn size_text(bytes: u64) -> String {
    let shown = ByteSize(bytes).to_string();
    if shown.parse() == Ok(ByteSize(bytes)) { shown } else { bytes.to_string() }
}

/// Values like one, of those that a key may have.
fn like(values: &str, value: &str) -> Vec<String> {
    if let Ok(number) = value.parse::<u64>() {
        let both = [number / 2, number.saturating_mul(2)].into_iter().filter(|one| *one > 0);
        return both.map(|one| one.to_string()).collect();
    }
    if let Ok(number) = value.parse::<f64>() {
        let both = [number / 2.0, number * 2.0].into_iter().filter(|one| one.is_finite() && *one != number);
        return both.map(|one| one.to_string()).collect();
    }
    if let Ok(ByteSize(bytes)) = value.parse::<ByteSize>() {
        let both = [bytes / 2, bytes.saturating_mul(2)].into_iter().filter(|one| *one > 0);
        return both.map(size_text).collect();
    }
    let words: Vec<&str> = values.split(" | ").filter(|word| *word != "auto").collect();
    match words.contains(&value) {
        true => words.into_iter().map(str::to_owned).collect(),
        false => Vec::new(),
    }
}

impl RawConfig {
    /// Whether there is a key of this name; `argument` is what names it: `--explain KEY`.
    ///
    /// # Errors
    /// There is none: [`ConfigError::UnknownKey`] with what was probably meant.
    pub fn check_key(&self, key: &str, argument: &str) -> Result<(), ConfigError> {
        self.key_state(key, argument).map(drop)
    }

    /// A key as it is here.
    ///
    /// # Errors
    /// There is no such key; `argument` is what named it.
    pub(crate) fn key_state(&self, key: &str, argument: &str) -> Result<KeyState, ConfigError> {
        let mut found = None;
        self.visit(&mut |entry: Entry| {
            if entry.path == key {
                let (value, default, values) = (entry.value, (entry.default)(), (entry.values)());
                found = Some(KeyState { value: value.map(|shown| shown.text), default, values });
            }
        });
        match found {
            Some(found) => Ok(found),
            None => Err(super::load::unknown_key(key, argument)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_shapes_a_step_exists_and_its_values_can_be_set() {
        for one in ALL {
            let config = RawConfig::default();
            let state = config.key_state(one.key, "test").unwrap();
            for key in one.unsets {
                config.key_state(key, "test").unwrap();
            }
            for value in one.neighbours(&state, "8") {
                let mut config = config.clone();
                config.apply_set(&format!("{}={value}", one.key)).unwrap();
                assert_eq!(config.key_state(one.key, "test").unwrap().value, Some(value));
            }
        }
        assert!(RawConfig::default().key_state("training.batchsize", "test").is_err());
    }

    #[test]
    fn numbers_have_halves_and_words_have_each_other() {
        let around = |key: &str, value: &str| {
            let state = RawConfig::default().key_state(key, "test").unwrap();
            Shaping::of(key).neighbours(&state, value)
        };
        assert_eq!(around("training.batch_size", "4"), ["2", "8"]);
        assert_eq!(around("training.batch_size", "1"), ["2"]);
        assert_eq!(around("parallel.zero_stage", "1"), ["0", "2", "3"]);
        assert_eq!(around("memory.offload.optimizer", "device"), ["host", "disk"]);
        assert_eq!(around("training.mixed_precision", "bf16"), ["f32", "fp16", "fp8"]);
        assert_eq!(around("training.mlp_chunk_tokens", "all tokens at once"), [""; 0]);
        assert!(!Shaping::of("training.learning_rate").is_known());
        assert_eq!(around("training.learning_rate", "0.5"), ["0.25", "1"]);
        assert_eq!(around("memory.host_budget", "1KiB"), ["512 B", "2.00 KiB"]);
        assert_eq!(around("memory.host_budget", "12345678B"), ["6172839", "24691356"]);
        assert_eq!(around("training.dynamic_batching.enabled", "false"), ["true"]);
        assert_eq!(around("output.dir", "out"), [""; 0]);
    }
}
