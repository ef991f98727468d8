//! Values that are a word, or a word with an argument: `full`, `{every: 4}`, `{selective: [norms, swiglu]}`.

use plimsoll_memory::ByteSize;
use plimsoll_step::{Checkpointing, Compression, Group, Groups};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::document::{Input, Node, Yaml};
use super::value::{ConfigValue, Mismatch, because, mismatch};

/// What the backward pass computes again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GradientCheckpointing {
    /// The step's own form.
    Form(Checkpointing),
    /// The fastest form with which the step's arena is no larger than this.
    Within(ByteSize),
}

impl ConfigValue for GradientCheckpointing {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let form = match tagged::<Self>(input)? {
            ("none", None) => Checkpointing::None,
            ("full", None) => Checkpointing::Full,
            ("sqrt", None) => Checkpointing::Sqrt,
            ("every", Some(n)) => match u64::read(n)? {
                n @ 1..=65_536 => Checkpointing::Every(n as u32),
                n => return Err(because::<Self>(input, format!("every {n} blocks"))),
            },
            ("ratio", Some(share)) => match f64::read(share)? {
                share if (0.0..=1.0).contains(&share) => Checkpointing::Ratio(share),
                share => return Err(because::<Self>(input, format!("a share of {share}, not 0 to 1"))),
            },
            ("selective", Some(groups)) => Checkpointing::Selective(read_groups(groups)?),
            ("mixed", Some(parts)) => read_mixed(parts)?,
            ("auto", Some(size)) => return Ok(GradientCheckpointing::Within(ByteSize::read(size)?)),
            _ => return Err(mismatch::<Self>(input)),
        };
        Ok(GradientCheckpointing::Form(form))
    }

    fn describe() -> String {
        let groups: Vec<&str> = Group::ALL.map(group_name).to_vec();
        format!(
            "none | full | sqrt | {{every: BLOCKS}} | {{ratio: SHARE}} | {{selective: [{}]}} | {{mixed: {{layers: BLOCKS, first: none or full or GROUPS, others: the same}}}} | {{auto: SIZE}}",
            groups.join(", ")
        )
    }

    fn text(&self) -> String {
        match self {
            GradientCheckpointing::Form(Checkpointing::None) => "none".to_owned(),
            GradientCheckpointing::Form(Checkpointing::Full) => "full".to_owned(),
            GradientCheckpointing::Form(Checkpointing::Sqrt) => "sqrt".to_owned(),
            GradientCheckpointing::Form(Checkpointing::Every(n)) => format!("{{every: {n}}}"),
            GradientCheckpointing::Form(Checkpointing::Ratio(share)) => format!("{{ratio: {share}}}"),
            GradientCheckpointing::Form(Checkpointing::Selective(groups)) => {
                format!("{{selective: [{}]}}", names(*groups).join(", "))
            }
            GradientCheckpointing::Form(Checkpointing::Mixed { layers, first, others }) => {
                let [first, others] = [first, others].map(|groups| Recomputed(*groups).text());
                format!("{{mixed: {{layers: {layers}, first: {first}, others: {others}}}}}")
            }
            GradientCheckpointing::Within(size) => format!("{{auto: {size}}}"),
        }
    }
}

/// What some blocks recompute: `none`, `full`, or groups.
struct Recomputed(Groups);

impl Recomputed {
    fn read(input: Input<'_>) -> Result<Groups, Mismatch> {
        match input.word() {
            Some("none") => Ok(Groups::NONE),
            Some("full") => Ok(Groups::BLOCK),
            _ => read_groups(input),
        }
    }

    fn text(&self) -> String {
        match self.0 {
            Groups::NONE => "none".to_owned(),
            Groups::BLOCK => "full".to_owned(),
            groups => format!("[{}]", names(groups).join(", ")),
        }
    }
}

impl Serialize for Recomputed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Groups::NONE | Groups::BLOCK => serializer.serialize_str(&self.text()),
            groups => names(groups).serialize(serializer),
        }
    }
}

/// `{layers: 8, first: full, others: [norms, swiglu]}`, all three of them.
fn read_mixed(input: Input<'_>) -> Result<Checkpointing, Mismatch> {
    let Yaml::Map(entries) = &input.node.value else {
        return Err(because::<GradientCheckpointing>(input, input.describe()));
    };
    let part = |name: &str| {
        let found = entries.iter().find(|(key, _)| key.value == name);
        let missing = || because::<GradientCheckpointing>(input, format!("a mix without {name}"));
        found.map(|(_, node)| Input { node, ..input }).ok_or_else(missing)
    };
    if let Some((key, node)) =
        entries.iter().find(|(key, _)| !["layers", "first", "others"].contains(&key.value.as_str()))
    {
        let got = format!("the key '{}'", super::document::shortened(&key.value));
        return Err(because::<GradientCheckpointing>(Input { node, ..input }, got));
    }
    let layers = match u64::read(part("layers")?)? {
        layers @ 1..=65_536 => layers as u32,
        layers => return Err(because::<GradientCheckpointing>(input, format!("{layers} blocks"))),
    };
    let (first, others) = (Recomputed::read(part("first")?)?, Recomputed::read(part("others")?)?);
    Ok(Checkpointing::Mixed { layers, first, others })
}

impl std::fmt::Display for GradientCheckpointing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.text())
    }
}

impl Serialize for GradientCheckpointing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let form = match self {
            GradientCheckpointing::Within(size) => return one_entry(serializer, "auto", size),
            GradientCheckpointing::Form(form) => form,
        };
        match form {
            Checkpointing::Every(n) => one_entry(serializer, "every", n),
            Checkpointing::Ratio(share) => one_entry(serializer, "ratio", share),
            Checkpointing::Selective(groups) => one_entry(serializer, "selective", &names(*groups)),
            Checkpointing::Mixed { layers, first, others } => {
                #[derive(Serialize)]
                struct Mixed {
                    layers: u32,
                    first: Recomputed,
                    others: Recomputed,
                }
                let (layers, first, others) = (*layers, Recomputed(*first), Recomputed(*others));
                one_entry(serializer, "mixed", &Mixed { layers, first, others })
            }
            Checkpointing::None | Checkpointing::Full | Checkpointing::Sqrt => {
                serializer.serialize_str(&self.text())
            }
        }
    }
}

/// How saved activations are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationCompression(pub Compression);

/// Elements that share a scale where none are given.
const DEFAULT_RUN: u64 = 256;

impl ConfigValue for ActivationCompression {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let block = match tagged::<Self>(input)? {
            ("none", None) => return Ok(ActivationCompression(Compression::None)),
            ("int8", None) => DEFAULT_RUN,
            ("int8", Some(Input { node: Node { value: Yaml::Text(word), .. }, .. })) if word == "tensor" => {
                u64::MAX
            }
            ("int8", Some(block)) => match u64::read(block)? {
                0 => return Err(because::<Self>(input, "runs of no elements".to_owned())),
                block => block,
            },
            _ => return Err(mismatch::<Self>(input)),
        };
        Ok(ActivationCompression(Compression::Int8 { block }))
    }

    fn describe() -> String {
        "none | int8 | {int8: ELEMENTS} | {int8: tensor}".to_owned()
    }

    fn text(&self) -> String {
        match self.0 {
            Compression::None => "none".to_owned(),
            Compression::Int8 { block: DEFAULT_RUN } => "int8".to_owned(),
            Compression::Int8 { block: u64::MAX } => "{int8: tensor}".to_owned(),
            Compression::Int8 { block } => format!("{{int8: {block}}}"),
        }
    }
}

impl std::fmt::Display for ActivationCompression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.text())
    }
}

impl Serialize for ActivationCompression {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Compression::Int8 { block: u64::MAX } => one_entry(serializer, "int8", "tensor"),
            Compression::Int8 { block } if block != DEFAULT_RUN => one_entry(serializer, "int8", &block),
            Compression::Int8 { .. } | Compression::None => serializer.serialize_str(&self.text()),
        }
    }
}

/// The word, and its argument if it has one.
pub(super) fn tagged<T: ConfigValue>(input: Input<'_>) -> Result<(&str, Option<Input<'_>>), Mismatch> {
    match &input.node.value {
        Yaml::Text(word) => Ok((word, None)),
        Yaml::Map(entries) => match entries.as_slice() {
            [(key, node)] => Ok((&key.value, Some(Input { node, ..input }))),
            _ => Err(because::<T>(input, format!("a mapping of {} entries", entries.len()))),
        },
        _ => Err(mismatch::<T>(input)),
    }
}

pub(super) fn one_entry<S: Serializer, T: Serialize + ?Sized>(
    serializer: S,
    key: &str,
    value: &T,
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(1))?;
    map.serialize_entry(key, value)?;
    map.end()
}

/// One group, or a list of them.
fn read_groups(input: Input<'_>) -> Result<Groups, Mismatch> {
    let group = |input: Input<'_>| {
        let word = input.word().unwrap_or_default();
        let found = Group::ALL.into_iter().find(|group| group_name(*group) == word);
        found.ok_or_else(|| because::<GradientCheckpointing>(input, input.describe()))
    };
    match &input.node.value {
        Yaml::List(items) if !items.is_empty() => {
            items.iter().map(|node| group(Input { node, ..input })).collect()
        }
        Yaml::List(_) => Err(because::<GradientCheckpointing>(input, "an empty list".to_owned())),
        _ => Ok([group(input)?].into_iter().collect()),
    }
}

fn names(groups: Groups) -> Vec<&'static str> {
    groups.iter().map(group_name).collect()
}

fn group_name(group: Group) -> &'static str {
    match group {
        Group::Norms => "norms",
        Group::Swiglu => "swiglu",
        Group::Ffn => "ffn",
        Group::Qkv => "qkv",
        Group::Attention => "attention",
        Group::Block => "block",
    }
}

#[cfg(test)]
impl super::sample::Sample for GradientCheckpointing {
    fn sample(source: &mut super::sample::Source<'_>) -> Self {
        let groups = Group::ALL.into_iter().take(1 + u64::sample(source) as usize % 6).collect();
        let forms = [
            Checkpointing::None,
            Checkpointing::Full,
            Checkpointing::Sqrt,
            Checkpointing::Every(1 + u64::sample(source) as u32 % 100),
            Checkpointing::Ratio(0.375),
            Checkpointing::Selective(groups),
            Checkpointing::Mixed { layers: 7, first: groups, others: Groups::NONE },
            Checkpointing::Mixed { layers: 1, first: Groups::BLOCK, others: groups },
        ];
        match bool::sample(source) {
            true => GradientCheckpointing::Form(source.pick(&forms)),
            false => GradientCheckpointing::Within(ByteSize::sample(source)),
        }
    }
}

#[cfg(test)]
impl super::sample::Sample for ActivationCompression {
    fn sample(source: &mut super::sample::Source<'_>) -> Self {
        let int8 = |block| Compression::Int8 { block };
        let all = [Compression::None, int8(DEFAULT_RUN), int8(64), int8(u64::MAX)];
        ActivationCompression(source.pick(&all))
    }
}
