//! Random configurations for the property tests.

use std::path::PathBuf;

use plimsoll_device::DType;
use plimsoll_memory::{ByteSize, splitmix64};
use plimsoll_model::adapter::{AdapterStart, TargetModules};

use super::lora::LoraInit;
use super::place::Origins;
use super::{
    Auto, DataConfig, MemoryConfig, ModelConfig, Names, OutputConfig, ParallelConfig, ParameterGroup,
    ParameterGroups, Paths, Patterns, PlanningConfig, Quantization, RawConfig, Targets, TokenizerSource,
    TrainingConfig,
};

/// Random words (SplitMix64), and a text to take strings from.
pub(super) struct Source<'a> {
    seed: u64,
    drawn: u64,
    texts: &'a [String],
}

impl<'a> Source<'a> {
    pub fn new(seed: u64, texts: &'a [String]) -> Source<'a> {
        Source { seed, drawn: 0, texts }
    }

    fn next(&mut self) -> u64 {
        self.drawn += 1;
        splitmix64(self.seed, self.drawn - 1)
    }

    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        let index = self.next() % choices.len() as u64;
        choices[index as usize].clone()
    }
}

pub(super) trait Sample {
    fn sample(source: &mut Source<'_>) -> Self;
}

impl<T: Sample> Sample for Option<T> {
    fn sample(source: &mut Source<'_>) -> Self {
        (!source.next().is_multiple_of(3)).then(|| T::sample(source))
    }
}

impl<T: Sample> Sample for Auto<T> {
    fn sample(source: &mut Source<'_>) -> Self {
        if source.next().is_multiple_of(3) { Auto::Auto } else { Auto::Set(T::sample(source)) }
    }
}

impl Sample for u64 {
    fn sample(source: &mut Source<'_>) -> Self {
        let shift = source.next() % 64;
        source.next() >> shift
    }
}

impl Sample for f64 {
    fn sample(source: &mut Source<'_>) -> Self {
        let value = f64::from_bits(source.next());
        if value.is_finite() { value } else { 5e-5 }
    }
}

impl Sample for bool {
    fn sample(source: &mut Source<'_>) -> Self {
        source.next().is_multiple_of(2)
    }
}

impl Sample for ByteSize {
    fn sample(source: &mut Source<'_>) -> Self {
        ByteSize(u64::sample(source))
    }
}

impl Sample for String {
    fn sample(source: &mut Source<'_>) -> Self {
        source.pick(source.texts)
    }
}

impl Sample for PathBuf {
    fn sample(source: &mut Source<'_>) -> Self {
        PathBuf::from(String::sample(source))
    }
}

impl Sample for Paths {
    fn sample(source: &mut Source<'_>) -> Self {
        let count = 1 + source.next() % 3;
        Paths::several((0..count).map(|_| String::sample(source)).collect()).unwrap()
    }
}

impl Sample for TokenizerSource {
    fn sample(source: &mut Source<'_>) -> Self {
        if source.next().is_multiple_of(4) {
            return TokenizerSource::Train { vocab_size: 257 + source.next() % 100_000 };
        }
        match PathBuf::sample(source) {
            path if path.as_os_str() == "byte-level" => TokenizerSource::ByteLevel,
            path => TokenizerSource::Path(path),
        }
    }
}

impl Sample for LoraInit {
    fn sample(source: &mut Source<'_>) -> Self {
        let power_iterations = [None, Some(0), Some(16)];
        LoraInit(match source.next() % 5 {
            0 => AdapterStart::Kaiming,
            1 => AdapterStart::Gaussian,
            n => AdapterStart::Pissa { power_iterations: power_iterations[n as usize - 2] },
        })
    }
}

impl Sample for ParameterGroups {
    fn sample(source: &mut Source<'_>) -> Self {
        let patterns = ["*.mlp.*", "model.layers.?.self_attn.q_proj.weight", "[a-c]*"];
        let count = source.next() % 3;
        let group = |_| {
            let rate = (source.next().is_multiple_of(2)).then_some(1e-4);
            ParameterGroup {
                pattern: source.pick(&patterns).to_owned(),
                learning_rate: rate,
                learning_rate_scale: if rate.is_none() { Some(0.1) } else { None },
                weight_decay: source.next().is_multiple_of(2).then_some(0.0),
            }
        };
        ParameterGroups::new((0..count).map(group).collect())
    }
}

impl Sample for Names {
    fn sample(source: &mut Source<'_>) -> Self {
        Names(vec!["embed_tokens".to_owned(); 1 + (source.next() % 2) as usize])
    }
}

impl Sample for Targets {
    fn sample(source: &mut Source<'_>) -> Self {
        let names = TargetModules::Names(vec!["q_proj".to_owned(), "self_attn.v_proj".to_owned()]);
        let pattern = TargetModules::Pattern(r".*\.(q|k)_proj".to_owned());
        Targets(source.pick(&[TargetModules::AllLinear, names, pattern]))
    }
}

impl Sample for Patterns<u64> {
    fn sample(source: &mut Source<'_>) -> Self {
        Patterns([("q_proj".to_owned(), 1 + source.next() % 64)].into())
    }
}

impl Sample for Patterns<f64> {
    fn sample(source: &mut Source<'_>) -> Self {
        Patterns([("layers.[0-3].mlp.up_proj".to_owned(), (1 + source.next() % 64) as f64)].into())
    }
}

impl Sample for Quantization {
    fn sample(source: &mut Source<'_>) -> Self {
        source.pick(&[Quantization::None, Quantization::Stored, Quantization::As(DType::Nf4)])
    }
}

impl Sample for RawConfig {
    fn sample(source: &mut Source<'_>) -> Self {
        RawConfig {
            rank: 0,
            started: None,
            model: ModelConfig::sample(source),
            data: DataConfig::sample(source),
            training: TrainingConfig::sample(source),
            memory: MemoryConfig::sample(source),
            planning: PlanningConfig::sample(source),
            parallel: ParallelConfig::sample(source),
            output: OutputConfig::sample(source),
            origins: Origins::default(),
        }
    }
}
