//! `training.attention`: `flash`, `standard`, `{sliding_window: W}` or `{block_sparse: {...}}`.

use plimsoll_step::{AttentionKind, BlockSparse};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::document::{Input, Node, Yaml};
use super::policies::{one_entry, tagged};
use super::value::{ConfigValue, Mismatch, because, mismatch};

/// How tokens attend to each other in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention(pub AttentionKind);

impl ConfigValue for Attention {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        Ok(Attention(match tagged::<Self>(input)? {
            ("flash", None) => AttentionKind::Flash,
            ("standard", None) => AttentionKind::Standard,
            ("sliding_window", Some(window)) => {
                AttentionKind::SlidingWindow(at_least_one(window, "a window", u64::read(window)?)?)
            }
            ("block_sparse", Some(pattern)) => AttentionKind::BlockSparse(read_pattern(pattern)?),
            _ => return Err(mismatch::<Self>(input)),
        }))
    }

    fn describe() -> String {
        "flash | standard | {sliding_window: TOKENS} | {block_sparse: {block: TOKENS, local_blocks: BLOCKS, \
         global_blocks: BLOCKS}}"
            .to_owned()
    }

    fn text(&self) -> String {
        match self.0 {
            AttentionKind::Flash => "flash".to_owned(),
            AttentionKind::Standard => "standard".to_owned(),
            AttentionKind::SlidingWindow(window) => format!("{{sliding_window: {window}}}"),
            AttentionKind::BlockSparse(BlockSparse { block, local_blocks, global_blocks }) => format!(
                "{{block_sparse: {{block: {block}, local_blocks: {local_blocks}, global_blocks: {global_blocks}}}}}"
            ),
        }
    }
}

impl std::fmt::Display for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.text())
    }
}

impl Serialize for Attention {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            AttentionKind::Flash | AttentionKind::Standard => serializer.serialize_str(&self.text()),
            AttentionKind::SlidingWindow(window) => one_entry(serializer, "sliding_window", &window),
            AttentionKind::BlockSparse(pattern) => one_entry(serializer, "block_sparse", &Pattern(pattern)),
        }
    }
}

/// A pattern of blocks as it is written.
struct Pattern(BlockSparse);

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("block", &self.0.block)?;
        map.serialize_entry("local_blocks", &self.0.local_blocks)?;
        map.serialize_entry("global_blocks", &self.0.global_blocks)?;
        map.end()
    }
}

/// `block` and `local_blocks` must be there; without `global_blocks` there are none.
fn read_pattern(input: Input<'_>) -> Result<BlockSparse, Mismatch> {
    let Yaml::Map(entries) = &input.node.value else { return Err(mismatch::<Attention>(input)) };
    let known = ["block", "local_blocks", "global_blocks"];
    if let Some((key, _)) = entries.iter().find(|(key, _)| !known.contains(&key.value.as_str())) {
        return Err(because::<Attention>(input, format!("a pattern with '{}'", key.value)));
    }
    let number = |name: &str| -> Result<Option<u64>, Mismatch> {
        let entry = entries.iter().find(|(key, _)| key.value == name);
        entry.map(|(_, node): &(_, Node)| u64::read(Input { node, ..input })).transpose()
    };
    let needed = |name: &str| {
        let missing = || because::<Attention>(input, format!("a pattern without {name}"));
        at_least_one(input, name, number(name)?.ok_or_else(missing)?)
    };
    Ok(BlockSparse {
        block: needed("block")?,
        local_blocks: needed("local_blocks")?,
        global_blocks: number("global_blocks")?.unwrap_or(0),
    })
}

/// Every token sees itself.
fn at_least_one(input: Input<'_>, what: &str, number: u64) -> Result<u64, Mismatch> {
    if number > 0 {
        return Ok(number);
    }
    Err(because::<Attention>(input, format!("{what} of 0, where 1 is the least: a token sees itself")))
}

#[cfg(test)]
impl super::sample::Sample for Attention {
    fn sample(source: &mut super::sample::Source<'_>) -> Self {
        let pattern = BlockSparse { block: 64, local_blocks: 2, global_blocks: u64::sample(source) % 3 };
        let window = AttentionKind::SlidingWindow(1 + u64::sample(source) % 1000);
        let all =
            [AttentionKind::Flash, AttentionKind::Standard, window, AttentionKind::BlockSparse(pattern)];
        Attention(source.pick(&all))
    }
}
