//! What the forward pass keeps for the backward pass, tensor group by tensor group.
//!
//! Every form of gradient checkpointing is a value of [`SavePolicy`]. Whatever is not kept is computed again by the
//! same functions, so checkpointing changes memory and time but not one bit of the result. Compression does change
//! bits, and is asked for by name.

use std::ops::Range;

/// The fate of a group of activations between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// It stays in memory.
    Keep,
    /// It stays in memory as 8-bit codes with a scale for each run of this many elements.
    Int8 {
        /// Elements of a run.
        block: u64,
    },
    /// It is dropped and computed again.
    Recompute,
}

/// The policy of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPolicy {
    /// The residual stream that enters the block. It cannot be recomputed within the block.
    pub input: Save,
    /// Outputs and statistics of the norms.
    pub norms: Save,
    /// Queries, keys and values.
    pub qkv: Save,
    /// The attention's output and log-sum-exp, and its probabilities where scores are written out.
    pub attention: Save,
    /// The residual stream between attention and feed-forward part.
    pub middle: Save,
    /// Outputs of the gate and up projections.
    pub gate_up: Save,
    /// The input of the down projection.
    pub activation: Save,
}

impl LayerPolicy {
    /// The same fate for every group but the input, which is kept.
    pub fn all(save: Save) -> LayerPolicy {
        LayerPolicy {
            input: Save::Keep,
            norms: save,
            qkv: save,
            attention: save,
            middle: save,
            gate_up: save,
            activation: save,
        }
    }

    /// Nothing is kept, not even the input, which stays as it is: for a block that runs for its output alone.
    pub fn nothing() -> LayerPolicy {
        LayerPolicy { input: Save::Recompute, ..LayerPolicy::all(Save::Recompute) }
    }

    /// Everything is kept but the groups named.
    pub fn without(groups: Groups) -> LayerPolicy {
        let mut policy = LayerPolicy::all(Save::Keep);
        let mut drop = |group, members: &[fn(&mut LayerPolicy) -> &mut Save]| {
            if groups.contains(group) {
                members.iter().for_each(|member| *member(&mut policy) = Save::Recompute);
            }
        };
        drop(Group::Norms, &[|p| &mut p.norms]);
        drop(Group::Swiglu, &[|p| &mut p.activation]);
        drop(Group::Ffn, &[|p| &mut p.gate_up, |p| &mut p.activation]);
        drop(Group::Qkv, &[|p| &mut p.qkv]);
        drop(Group::Attention, &[|p| &mut p.attention]);
        if groups.contains(Group::Block) { LayerPolicy::all(Save::Recompute) } else { policy }
    }

    /// Whatever is kept, kept as 8-bit codes.
    fn compressed(self, compression: Compression) -> LayerPolicy {
        let Compression::Int8 { block } = compression else { return self };
        let fate = |save| if save == Save::Keep { Save::Int8 { block } } else { save };
        LayerPolicy {
            input: fate(self.input),
            norms: fate(self.norms),
            qkv: fate(self.qkv),
            attention: fate(self.attention),
            middle: fate(self.middle),
            gate_up: fate(self.gate_up),
            activation: fate(self.activation),
        }
    }
}

/// A group of activations that can be computed again on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// The outputs of the norms: element-wise work.
    Norms,
    /// The activation function's output: element-wise work.
    Swiglu,
    /// Everything between the feed-forward part's norm and its down projection: the gate and up products.
    Ffn,
    /// Queries, keys and values: their three products.
    Qkv,
    /// The attention's output: attention itself.
    Attention,
    /// The whole block but its input.
    Block,
}

impl Group {
    /// Every group, cheapest work for a byte first.
    pub const ALL: [Group; 6] =
        [Group::Swiglu, Group::Norms, Group::Attention, Group::Qkv, Group::Ffn, Group::Block];
}

/// A set of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Groups(u8);

impl Groups {
    /// Whether a group is in the set.
    pub fn contains(self, group: Group) -> bool {
        self.0 & (1 << group as u8) != 0
    }

    /// The groups in the set, in the order of [`Group::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Group> {
        Group::ALL.into_iter().filter(move |group| self.contains(*group))
    }
}

impl Groups {
    /// No group: everything is kept.
    pub const NONE: Groups = Groups(0);
    /// The whole block.
    pub const BLOCK: Groups = Groups(1 << Group::Block as u8);
}

impl FromIterator<Group> for Groups {
    fn from_iter<I: IntoIterator<Item = Group>>(groups: I) -> Groups {
        Groups(groups.into_iter().fold(0, |set, group| set | 1 << group as u8))
    }
}

/// Gradient checkpointing as users name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Checkpointing {
    /// Everything is kept.
    None,
    /// Only the blocks' inputs are kept.
    Full,
    /// Only the input of every so-many-th block is kept (Chen et al. 2016). A segment's blocks run forward once more
    /// for their inputs, then each is treated as in [`Checkpointing::Full`].
    Every(u32),
    /// The same with segments of the square root of the number of blocks, rounded.
    Sqrt,
    /// This share of the blocks, the first ones, keep only their inputs, the others everything.
    Ratio(f64),
    /// Every block recomputes these groups.
    Selective(Groups),
    /// The first blocks recompute some groups, the others some more or some less. Of a rank that has some of the blocks, the first
    /// of its own.
    Mixed {
        /// How many the first ones are.
        layers: u32,
        /// What they recompute.
        first: Groups,
        /// What the others recompute.
        others: Groups,
    },
}

/// How what is kept is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// As 8-bit codes with a scale for each run of elements.
    Int8 {
        /// Elements of a run; one run for a whole tensor where this is larger.
        block: u64,
    },
}

/// The policies of all blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePolicy {
    layers: Vec<LayerPolicy>,
    /// The numbers of the blocks: runs of them, which no segment reaches beyond.
    runs: Vec<Range<u32>>,
    /// Blocks between two inputs that are kept through the forward pass.
    segment: u32,
}

impl SavePolicy {
    /// The policy that a form of checkpointing and of compression stand for.
    pub fn new(checkpointing: Checkpointing, compression: Compression, layers: u32) -> SavePolicy {
        let full = LayerPolicy::all(Save::Recompute);
        let mut before = full;
        let (each, segment, first) = match checkpointing {
            Checkpointing::None => (LayerPolicy::all(Save::Keep), 1, 0),
            Checkpointing::Full => (full, 1, 0),
            Checkpointing::Every(blocks) => (full, blocks.max(1), 0),
            Checkpointing::Sqrt => (full, (f64::from(layers).sqrt().round() as u32).max(1), 0),
            Checkpointing::Ratio(share) => {
                let first = (f64::from(layers) * share.clamp(0.0, 1.0)).round() as usize;
                (LayerPolicy::all(Save::Keep), 1, first)
            }
            Checkpointing::Selective(groups) => (LayerPolicy::without(groups), 1, 0),
            Checkpointing::Mixed { layers, first, others } => {
                before = LayerPolicy::without(first);
                (LayerPolicy::without(others), 1, layers as usize)
            }
        };
        let mut layers = vec![each.compressed(compression); layers as usize];
        layers.iter_mut().take(first).for_each(|layer| *layer = before.compressed(compression));
        let runs = std::iter::once(0..layers.len() as u32).collect();
        SavePolicy { layers, runs, segment }
    }

    /// The same for blocks of other numbers: of as many in all, in runs that follow each other.
    #[must_use]
    pub fn numbered(self, runs: Vec<Range<u32>>) -> SavePolicy {
        SavePolicy { runs, ..self }
    }

    /// The policy of one block; blocks beyond the last keep nothing.
    pub fn layer(&self, layer: u32) -> LayerPolicy {
        let place = self.runs.iter().cloned().flatten().position(|own| own == layer);
        let policy = place.and_then(|place| self.layers.get(place));
        policy.copied().unwrap_or(LayerPolicy::all(Save::Recompute))
    }

    /// The segments that the blocks fall into, in order.
    pub fn segments(&self) -> impl Iterator<Item = Range<u32>> {
        self.runs.iter().flat_map(|run| self.segments_of(run))
    }

    /// Those of a run of blocks.
    fn segments_of(&self, run: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let (segment, end) = (self.segment, run.end);
        run.clone().step_by(segment as usize).map(move |first| first..end.min(first + segment))
    }

    /// The places of the segments of each run among all of them.
    pub fn segments_by_run(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let of_run = |run: &Range<u32>| {
            let first = end;
            end += self.segments_of(run).count();
            first..end
        };
        self.runs.iter().map(of_run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_stand_for_policies() {
        let policy = |checkpointing| SavePolicy::new(checkpointing, Compression::None, 10);
        let segments = |checkpointing| policy(checkpointing).segments().collect::<Vec<_>>();
        assert_eq!(segments(Checkpointing::Every(4)), [0..4, 4..8, 8..10]);
        assert_eq!(segments(Checkpointing::Sqrt).len(), 4);
        assert_eq!(segments(Checkpointing::Full).len(), 10);
        let in_runs = policy(Checkpointing::Every(4)).numbered(vec![5..10, 20..25]);
        assert_eq!(in_runs.segments().collect::<Vec<_>>(), [5..9, 9..10, 20..24, 24..25]);
        assert_eq!(in_runs.segments_by_run(), [0..2, 2..4]);
        let half = policy(Checkpointing::Ratio(0.6)).numbered(vec![5..10, 20..25]);
        assert_eq!(
            [9, 20, 21, 22].map(|layer| half.layer(layer).qkv == Save::Keep),
            [false, false, true, true]
        );
        let kept = |checkpointing| {
            (0..10).filter(|l| policy(checkpointing).layer(*l).qkv == Save::Keep).collect::<Vec<_>>()
        };
        assert_eq!(kept(Checkpointing::Ratio(0.5)), [5, 6, 7, 8, 9]);
        assert_eq!(kept(Checkpointing::Ratio(0.0)), (0..10).collect::<Vec<_>>());
        assert!(kept(Checkpointing::Full).is_empty());
        let cheap = Checkpointing::Selective([Group::Norms, Group::Swiglu].into_iter().collect());
        let LayerPolicy { norms, activation, gate_up, .. } = policy(cheap).layer(3);
        assert_eq!([norms, activation, gate_up], [Save::Recompute, Save::Recompute, Save::Keep]);
        let block = Checkpointing::Selective([Group::Block, Group::Norms].into_iter().collect());
        assert_eq!(policy(block), policy(Checkpointing::Full));
        let mixed = |layers, first, others| policy(Checkpointing::Mixed { layers, first, others });
        assert_eq!(mixed(5, Groups::BLOCK, Groups::NONE), policy(Checkpointing::Ratio(0.5)));
        assert_eq!(mixed(99, Groups::BLOCK, Groups::NONE), policy(Checkpointing::Full));
        let norms: Groups = [Group::Norms].into_iter().collect();
        let two = mixed(2, norms, Groups::BLOCK).numbered(vec![5..10, 20..25]);
        let kept = [5, 6, 7, 20].map(|layer| (two.layer(layer).norms, two.layer(layer).qkv));
        let (keep, drop) = (Save::Keep, Save::Recompute);
        assert_eq!(kept, [(drop, keep), (drop, keep), (drop, drop), (drop, drop)]);
    }

    #[test]
    fn compression_is_of_what_is_kept() {
        let policy = SavePolicy::new(Checkpointing::Full, Compression::Int8 { block: 64 }, 2).layer(0);
        assert_eq!([policy.input, policy.qkv], [Save::Int8 { block: 64 }, Save::Recompute]);
    }

    #[test]
    fn a_block_that_runs_for_its_output_keeps_nothing() {
        let LayerPolicy { input, norms, qkv, attention, middle, gate_up, activation } =
            LayerPolicy::nothing();
        assert_eq!([input, norms, qkv, attention, middle, gate_up, activation], [Save::Recompute; 7]);
    }

    #[test]
    fn groups_are_sets() {
        let groups: Groups = [Group::Qkv, Group::Norms, Group::Qkv].into_iter().collect();
        assert_eq!(groups.iter().collect::<Vec<_>>(), [Group::Norms, Group::Qkv]);
        assert!(!groups.contains(Group::Block));
    }
}
