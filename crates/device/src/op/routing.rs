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

/// How a router makes scores of logits, and weights of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Scores are the sigmoid of each logit; else the softmax of all logits of a token.
    pub sigmoid: bool,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups of experts, and how many of them the experts of a token may be in; a group counts for its two best experts together.
    pub groups: Option<(u64, u64)>,
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
    /// and rows `offsets[e]..offsets[e + 1]` are of expert `first + e`. Places of other experts come last, in order. choice and places
    /// u32 `[N, k]`, sources u32 `[R]`, offsets u32 `[E + 1]`.
    Sort { choice: &'a Tensor, first: u32, sources: &'a Tensor, places: &'a Tensor, offsets: &'a Tensor },
    /// `out = x`: choices that go to other ranks; u32 of the same size.
    Copy { x: &'a Tensor, out: &'a Tensor },
    /// `out[r] = x[sources[r] / k]`; x `[N, H]`, out `[R, H]` of the same type.
    Gather { x: &'a Tensor, sources: &'a Tensor, out: &'a Tensor },
    /// `out[n]` (+)= the sum over j of `x[places[n, j]]`, in order; x `[R, H]`, out `[N, H]`.
    Combine { x: &'a Tensor, places: &'a Tensor, out: &'a Tensor, accumulate: bool },
    /// `out[r] = x[r] * factors[sources[r]]`, of row r itself without sources; x, out `[R, I]`, factors f32, one for
    /// each place. In place: out = x.
    ScaleRows { x: &'a Tensor, factors: &'a Tensor, sources: Option<&'a Tensor>, out: &'a Tensor },
    /// `out[p]` = the dot product of rows `places[p]` of a and b, of rows p without places; a, b `[R, I]`, out f32 `[R]`.
    RowDots { a: &'a Tensor, b: &'a Tensor, places: Option<&'a Tensor>, out: &'a Tensor },
    /// `counts[e]` += how often e was chosen; counts u32 `[E]`.
    Count { choice: &'a Tensor, counts: &'a Tensor },
    /// `mass[e]` += the softmax of logits in e, of each token in turn; mass f64 `[E]`.
    Mass { logits: &'a Tensor, mass: &'a Tensor },
    /// The load-balancing loss (Fedus et al. 2021) of so many rows of logits: `out[0]` = factor * E * the sum over e of
    /// `counts[e] / rows * mass[e] / rows`; out f32 `[1]`.
    BalanceLoss { counts: &'a Tensor, mass: &'a Tensor, rows: u64, factor: f64, out: &'a Tensor },
    /// dlogits += the gradient of that loss; f32 `[N, E]`.
    BalanceBackward { logits: &'a Tensor, counts: &'a Tensor, rows: u64, factor: f64, dlogits: &'a Tensor },
}

impl<'a> Family<'a> for Routing<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Routing::Choose { logits, correction, router, choice } => {
                let (experts, each) = (logits.columns(), choice.columns());
                let among = router.groups.map_or(experts, |(count, chosen)| experts / count.max(1) * chosen);
                let whole = router.groups.is_none_or(|(count, chosen)| {
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
                    .u32_vector(sources, choice.elements())
                    .u32(places)
                    .same_size(choice, [places])
                    .u32(offsets)
                    .that((2..=MAX_EXPERTS + 1).contains(&offsets.elements()), || {
                        format!("{offsets:?} are no offsets of 1 to {MAX_EXPERTS} experts")
                    })
            }
            Routing::Copy { x, out } => {
                Description::new("copy_choice", [x], [out]).u32(x).u32(out).same_size(x, [out])
            }
            Routing::Gather { x, sources, out } => {
                let routed = sources.elements();
                let whole = x.rows() > 0 && routed.is_multiple_of(x.rows());
                Description::new("gather_rows", [x, sources], [out])
                    .floats([x, out])
                    .u32(sources)
                    .that(x.dtype() == out.dtype(), || format!("{x:?} and {out:?} differ in type"))
                    .that(whole || routed == 0, || format!("{sources:?} are not as many for each of {x:?}"))
                    .size(out, routed, x.columns())
            }
            Routing::Combine { x, places, out, .. } => Description::new("combine_rows", [x, places], [out])
                .floats([x, out])
                .choice(places, out.rows())
                .size(x, places.elements(), out.columns()),
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
                .f32_vectors([out], a.rows())
                .each(places, |op, places| op.u32(places).vectors([places], a.rows())),
            Routing::Count { choice, counts } => Description::new("count_experts", [choice], [])
                .changing([counts])
                .choice(choice, choice.rows())
                .u32(counts),
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
