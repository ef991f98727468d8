//! What sends tokens to experts and brings their outputs back (Shazeer et al. 2017), of static shape: with k experts for each of N
//! tokens there are R = N * k routed rows, sorted by expert, whatever the choice.
//!
//! A place (n, j) of a choice, number n * k + j, is the j-th expert of token n. E experts.

use super::Family;
use crate::check::Description;
use crate::{Cost, DType, Tensor};

/// Experts of a layer at most, so that the scores of a token fit a stack.
pub const MAX_EXPERTS: u64 = 2048;
/// Experts of a token at most.
pub const MAX_EXPERTS_PER_TOKEN: u64 = 64;
/// The expert of a place that nobody takes, the row of a place without one, and the place of a row without one.
pub const NOWHERE: u32 = u32::MAX;

/// How a router makes scores of logits, and weights of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Scores are the sigmoid of each logit; else the softmax of all logits of a token.
    pub sigmoid: bool,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups that the experts of a token may be in, where not all come into question.
    pub groups: Option<RouterGroups>,
}

/// Groups of experts that follow each other, of which a token's experts are in the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// Groups of a layer.
    pub count: u64,
    /// How many of them the experts of a token may be in.
    pub chosen: u64,
    /// Whether a group counts for its two best experts together (DeepSeek-V3); else for its best one (DeepSeek-V2).
    pub by_two: bool,
}

/// How many places experts take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Each of the first experts.
    pub each: u64,
    /// How many these are.
    pub first: u64,
    /// Each of the others.
    pub others: u64,
}

/// What experts count in the load-balancing loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadRatio {
    /// So many experts count 1.
    pub first: u64,
    /// The others count so much.
    pub of_others: f64,
}

impl LoadRatio {
    /// All experts count alike.
    pub const EVEN: LoadRatio = LoadRatio { first: u64::MAX, of_others: 1.0 };

    /// What an expert counts.
    pub fn of(self, expert: usize) -> f64 {
        if (expert as u64) < self.first { 1.0 } else { self.of_others }
    }
}

/// A part of the way of tokens to experts and back.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Routing<'a> {
    /// `choice[n]` = the k experts with the highest scores, the best first; of equal ones the first. `correction` is added to the
    /// scores for that. logits f32 `[N, E]`, correction `[E]`, choice u32 `[N, k]`.
    Choose { logits: &'a Tensor, correction: Option<&'a Tensor>, router: Router, choice: &'a Tensor },
    /// `weights[n, j]` = what the score of expert `choice[n, j]` makes; weights f32 `[N, k]`. Without a choice, of all experts.
    Weigh { logits: &'a Tensor, choice: Option<&'a Tensor>, router: Router, weights: &'a Tensor },
    /// dlogits from dweights; f32, of the shapes of logits and weights.
    WeighBackward {
        logits: &'a Tensor,
        choice: Option<&'a Tensor>,
        router: Router,
        dweights: &'a Tensor,
        dlogits: &'a Tensor,
    },
    /// Sorts places by expert, those of an expert in order: `sources[r]` is the place in row r, `places[n, j]` the row of a place,
    /// and rows `offsets[e]..offsets[e + 1]` are of expert `first + e`. Places of other experts come last, in order, as far as there are
    /// rows for them. What has none is [`NOWHERE`], as is the place of a row that nobody needs, and a place of nobody. choice and places
    /// u32 `[N, k]`, sources u32 `[R]`, at least as many as places of these experts, offsets u32 `[E + 1]`.
    Sort { choice: &'a Tensor, first: u32, sources: &'a Tensor, places: &'a Tensor, offsets: &'a Tensor },
    /// Rows that ranks exchange, in blocks of as many slots for each: of rows sorted by expert, those of as many experts as `each` come to a
    /// block of their own, from its first slot on. `slots[q]` is the place of the row in slot q, and `taken[n, j]` the slot of a place;
    /// what has none is [`NOWHERE`]. sources u32 `[R]` and offsets u32 `[E + 1]` of a sort, slots u32 `[P M]` with `P = E / each`, taken
    /// u32 `[N, k]`. A block has slots for all of its rows.
    ToBlocks { sources: &'a Tensor, offsets: &'a Tensor, each: u64, slots: &'a Tensor, taken: &'a Tensor },
    /// The same rows at the ranks of their experts: of rows sorted by expert, over the places of all ranks, those of the places of a rank,
    /// of which each has `each`, come to a block of their own, in order. `rows[q]` is the row in slot q, and `slots[r]` the slot of row r;
    /// what has none is [`NOWHERE`]. sources u32 `[R]` and offsets u32 `[E + 1]` of a sort, rows u32 `[P M]`, slots u32 `[R]`.
    FromBlocks {
        sources: &'a Tensor,
        offsets: &'a Tensor,
        each: u64,
        blocks: u64,
        rows: &'a Tensor,
        slots: &'a Tensor,
    },
    /// `out = x`: choices and counts that go to other ranks; u32 of the same size.
    Copy { x: &'a Tensor, out: &'a Tensor },
    /// `out[r] = x[sources[r] / each]`, 0 where that is nowhere; x `[N, H]`, out `[R, H]` of the same type.
    Gather { x: &'a Tensor, sources: &'a Tensor, each: u64, out: &'a Tensor },
    /// `out[n]` (+)= the sum over j of `x[places[n, j]]`, in order, of places that have a row; x `[R, H]`, out `[N, H]`.
    Combine { x: &'a Tensor, places: &'a Tensor, out: &'a Tensor, accumulate: bool },
    /// `out[r] = x[r] * factors[sources[r]]`, of row r itself without sources; x, out `[R, I]`, factors f32, one for
    /// each place; a row of nobody becomes 0. In place: out = x.
    ScaleRows { x: &'a Tensor, factors: &'a Tensor, sources: Option<&'a Tensor>, out: &'a Tensor },
    /// `out[p]` = the dot product of rows `places[p]` of a and b, 0 of none, of rows p without places; a, b `[R, I]`, out f32, one for
    /// each place.
    RowDots { a: &'a Tensor, b: &'a Tensor, places: Option<&'a Tensor>, out: &'a Tensor },
    /// `counts[e]` += how often e was chosen; counts u32 `[E]`.
    Count { choice: &'a Tensor, counts: &'a Tensor },
    /// `taken[n, j]` = `choice[n, j]`, or [`NOWHERE`] where as many places before it, in the order of tokens, have the same expert as it
    /// takes; `dropped[0]` += how many. choice, taken u32 `[N, k]`, dropped u32 `[1]`.
    Limit { choice: &'a Tensor, capacity: Capacity, taken: &'a Tensor, dropped: Option<&'a Tensor> },
    /// out += counts; u32 `[E]`.
    AddCounts { counts: &'a Tensor, out: &'a Tensor },
    /// `correction[e]` += speed * sign(mean of counts - `counts[e]`): balance without a loss (Wang et al. 2024; DeepSeek-V3). counts u32
    /// `[E]`, correction f32 `[E]`.
    AdjustCorrection { counts: &'a Tensor, speed: f32, correction: &'a Tensor },
    /// out (+)= x times 1 + u, with u between -noise and noise for each element: a function of `seed` and `first` + its index. In place:
    /// out = x.
    Jitter { x: &'a Tensor, out: &'a Tensor, noise: f32, seed: u64, first: u64, accumulate: bool },
    /// `out[0]` += factor * the sum over tokens of logsumexp(logits)^2 (the router z-loss, Zoph et al. 2022); out f32 `[1]`.
    ZLoss { logits: &'a Tensor, factor: f64, out: &'a Tensor },
    /// dlogits += the gradient of that; f32 `[N, E]`.
    ZBackward { logits: &'a Tensor, factor: f64, dlogits: &'a Tensor },
    /// `mass[e]` += the softmax of logits in e, of each token in turn; mass f64 `[E]`.
    Mass { logits: &'a Tensor, mass: &'a Tensor },
    /// The load-balancing loss (Fedus et al. 2021) of so many rows of logits: `out[0]` = factor * E * the sum over e of
    /// `ratio[e] * counts[e] / rows * mass[e] / rows`; out f32 `[1]`.
    BalanceLoss {
        counts: &'a Tensor,
        mass: &'a Tensor,
        rows: u64,
        ratio: LoadRatio,
        factor: f64,
        out: &'a Tensor,
    },
    /// dlogits += the gradient of that loss; f32 `[N, E]`.
    BalanceBackward {
        logits: &'a Tensor,
        counts: &'a Tensor,
        rows: u64,
        ratio: LoadRatio,
        factor: f64,
        dlogits: &'a Tensor,
    },
}

impl<'a> Family<'a> for Routing<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Routing::Choose { logits, correction, router, choice } => {
                let (experts, each) = (logits.columns(), choice.columns());
                let among =
                    router.groups.map_or(experts, |groups| experts / groups.count.max(1) * groups.chosen);
                let whole = router.groups.is_none_or(|RouterGroups { count, chosen, .. }| {
                    count > 0 && chosen <= count && experts.is_multiple_of(count)
                });
                Description::new("route", [logits], [choice])
                    .reading(correction)
                    .logits(logits)
                    .floats(correction)
                    .vectors(correction, experts)
                    .choice(choice, logits.rows())
                    .that(whole, || format!("{logits:?} does not fall into groups as {:?}", router.groups))
                    .that(each <= among, || format!("{each} of {among} experts cannot be chosen"))
            }
            Routing::Weigh { logits, choice, weights, .. } => Description::new("weigh", [logits], [weights])
                .reading(choice)
                .logits(logits)
                .weights_of(logits, choice, weights),
            Routing::WeighBackward { logits, choice, dweights, dlogits, .. } => {
                Description::new("weigh_backward", [logits, dweights], [dlogits])
                    .reading(choice)
                    .logits(logits)
                    .weights_of(logits, choice, dweights)
                    .f32s([dlogits])
                    .same_size(logits, [dlogits])
            }
            Routing::Sort { choice, sources, places, offsets, .. } => {
                Description::new("sort_by_expert", [choice], [sources, places, offsets])
                    .choice(choice, choice.rows())
                    .u32(sources)
                    .that(sources.elements() <= choice.elements(), || {
                        format!("{sources:?} are more rows than places of {choice:?}")
                    })
                    .u32(places)
                    .same_size(choice, [places])
                    .u32(offsets)
                    .that((2..=MAX_EXPERTS + 1).contains(&offsets.elements()), || {
                        format!("{offsets:?} are no offsets of 1 to {MAX_EXPERTS} experts")
                    })
            }
            Routing::ToBlocks { sources, offsets, each, slots, taken } => {
                let experts = offsets.elements().saturating_sub(1);
                let blocks = experts / each.max(1);
                let whole =
                    blocks > 0 && experts.is_multiple_of(each) && slots.elements().is_multiple_of(blocks);
                Description::new("rows_to_blocks", [sources, offsets], [slots, taken])
                    .u32(sources)
                    .u32(offsets)
                    .u32(slots)
                    .choice(taken, taken.rows())
                    .that(whole, || format!("{slots:?} are no blocks for {each} of {experts} experts"))
                    .that(slots.elements() < u64::from(NOWHERE), || format!("{slots:?} are too many"))
            }
            Routing::FromBlocks { sources, offsets, each, blocks, rows, slots } => {
                let whole = blocks > 0 && each > 0 && rows.elements().is_multiple_of(blocks);
                Description::new("rows_from_blocks", [sources, offsets], [rows, slots])
                    .u32(sources)
                    .u32(offsets)
                    .that(offsets.elements() > 1, || format!("{offsets:?} are of no expert"))
                    .u32(rows)
                    .u32_vector(slots, sources.elements())
                    .that(whole, || format!("{rows:?} are no blocks for {blocks} ranks"))
                    .that(rows.elements() < u64::from(NOWHERE), || format!("{rows:?} are too many"))
            }
            Routing::Copy { x, out } => {
                Description::new("copy_choice", [x], [out]).u32(x).u32(out).same_size(x, [out])
            }
            Routing::Gather { x, sources, each, out } => Description::new("gather_rows", [x, sources], [out])
                .floats([x, out])
                .u32(sources)
                .that(x.dtype() == out.dtype(), || format!("{x:?} and {out:?} differ in type"))
                .that((1..=MAX_EXPERTS_PER_TOKEN).contains(&each), || format!("{each} experts of a token"))
                .size(out, sources.elements(), x.columns()),
            Routing::Combine { x, places, out, .. } => Description::new("combine_rows", [x, places], [out])
                .floats([x, out])
                .choice(places, out.rows())
                .size(x, x.rows(), out.columns()),
            Routing::ScaleRows { x, factors, sources, out } => {
                Description::new("scale_rows", [x, factors], [out])
                    .reading(sources)
                    .in_place([(out, x)])
                    .floats([x, out])
                    .same_size(x, [out])
                    .f32s([factors])
                    .that(sources.is_some() || factors.elements() == x.rows(), || {
                        format!("{factors:?} are not as many as rows of {x:?}")
                    })
                    .each(sources, |op, sources| op.u32_vector(sources, x.rows()))
            }
            Routing::RowDots { a, b, places, out } => Description::new("row_dots", [a, b], [out])
                .reading(places)
                .floats([a, b])
                .same_size(a, [b])
                .f32s([out])
                .that(out.elements() == places.map_or(a.rows(), Tensor::elements), || {
                    format!("{out:?} is not one for each place of {a:?}")
                })
                .each(places, |op, places| op.u32(places)),
            Routing::Count { choice, counts } => Description::new("count_experts", [choice], [])
                .changing([counts])
                .choice(choice, choice.rows())
                .u32(counts),
            Routing::Limit { choice, taken, dropped, .. } => {
                Description::new("limit_experts", [choice], [taken])
                    .changing(dropped)
                    .choice(choice, choice.rows())
                    .u32(taken)
                    .same_size(choice, [taken])
                    .each(dropped, |op, dropped| op.u32_vector(dropped, 1))
            }
            Routing::AddCounts { counts, out } => Description::new("add_counts", [counts], [])
                .changing([out])
                .u32_vector(counts, out.elements())
                .u32(out),
            Routing::AdjustCorrection { counts, speed, correction } => {
                Description::new("adjust_correction", [counts], [])
                    .changing([correction])
                    .u32_vector(counts, correction.elements())
                    .f32s([correction])
                    .that(speed.is_finite(), || format!("{speed} is no speed"))
            }
            Routing::Jitter { x, out, noise, .. } => Description::new("jitter", [x], [out])
                .in_place([(out, x)])
                .floats([x, out])
                .same_size(x, [out])
                .that((0.0..=1.0).contains(&noise), || format!("{noise} is no noise")),
            Routing::ZLoss { logits, out, .. } => Description::new("router_z_loss", [logits], [])
                .changing([out])
                .logits(logits)
                .f32_vectors([out], 1),
            Routing::ZBackward { logits, dlogits, .. } => Description::new("router_z_backward", [logits], [])
                .changing([dlogits])
                .logits(logits)
                .f32s([dlogits])
                .same_size(logits, [dlogits]),
            Routing::Mass { logits, mass } => Description::new("router_mass", [logits], [])
                .changing([mass])
                .logits(logits)
                .mass(mass, logits.columns()),
            Routing::BalanceLoss { counts, mass, out, .. } => {
                Description::new("balance_loss", [counts, mass], [out])
                    .u32(counts)
                    .mass(mass, counts.elements())
                    .f32_vectors([out], 1)
            }
            Routing::BalanceBackward { logits, counts, dlogits, .. } => {
                Description::new("balance_backward", [logits, counts], [])
                    .changing([dlogits])
                    .logits(logits)
                    .f32s([dlogits])
                    .same_size(logits, [dlogits])
                    .u32_vector(counts, logits.columns())
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        let exps = match *self {
            Routing::Choose { router, logits, .. } if router.sigmoid => logits.elements(),
            Routing::Weigh { logits, .. }
            | Routing::WeighBackward { logits, .. }
            | Routing::Mass { logits, .. }
            | Routing::ZLoss { logits, .. }
            | Routing::ZBackward { logits, .. }
            | Routing::BalanceBackward { logits, .. } => logits.elements(),
            _ => 0,
        };
        Cost { exps, ..once }
    }
}

impl Description<'_> {
    fn logits(self, logits: &Tensor) -> Self {
        let experts = logits.columns();
        self.f32s([logits]).that((1..=MAX_EXPERTS).contains(&experts), || {
            format!("{logits:?} is not of 1 to {MAX_EXPERTS} experts")
        })
    }

    fn choice(self, choice: &Tensor, tokens: u64) -> Self {
        self.u32(choice)
            .size(choice, tokens, choice.columns())
            .that((1..=MAX_EXPERTS_PER_TOKEN).contains(&choice.columns()), || {
                format!("{choice:?} is not of 1 to {MAX_EXPERTS_PER_TOKEN} experts a token")
            })
            .that(choice.elements() < u64::from(u32::MAX), || format!("{choice:?} has too many places"))
    }

    fn weights_of(self, logits: &Tensor, choice: Option<&Tensor>, weights: &Tensor) -> Self {
        let each = choice.map_or(logits.columns(), Tensor::columns);
        self.f32s([weights])
            .size(weights, logits.rows(), each)
            .each(choice, |op, choice| op.choice(choice, logits.rows()))
    }

    fn mass(self, mass: &Tensor, experts: u64) -> Self {
        self.that(mass.dtype() == DType::F64, || format!("{mass:?} is not f64")).vectors([mass], experts)
    }
}
