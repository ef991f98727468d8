//! A feed-forward part of experts: the router's choice, rows sorted by expert, products with each expert's matrices, and the sum of
//! what comes back (Shazeer et al. 2017; rows by expert without dropping as in MegaBlocks, Gale et al. 2022).
//!
//! Shapes: N tokens, E experts, k of them for each token, R = N * k routed rows, or fewer where the experts' capacity is less; I an
//! expert's inner width. No shape depends on the choice, so that a plan holds for every routing. The weights of a token's experts
//! multiply the input of their down projections, which is linear; so the outputs of experts are never kept.
//!
//! Of ranks that share products each has some experts as a whole, and all tokens: rows of other ranks' experts are products of zeros here
//! (expert parallelism within the ranks of tensor parallelism). Routers are computed alike on each.

mod biases;
mod capacity;
mod gating_residual;
mod jitter;
mod ranks;
mod shared;
mod zero_computation;

use plimsoll_device::{Capacity, DType, DeviceExt, Elementwise, Router, RouterGroups, Routing, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{ExpertGroups, ExpertsSpec, FeedForwardRoles, Role, Scoring};

use super::mlp::{
    FeedForward, SavedWithin, activated, activated_in_place, activation_backward, down_backward,
    for_each_chunk, input_backward, project_inner, weights_backward,
};
use super::parts::activation_tensor;
use super::saved::{Held, Inner};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::rows;
use crate::linear::Linear;
use crate::policy::{LayerPolicy, Save};
use crate::products::Products;
use crate::store::{BlockWeights, ExpertVisit, load_parts};
use ranks::{Blocks, Tokens};
use shared::Shared;

/// What the router says of some tokens.
struct Routed {
    /// f32 `[N, E]`
    logits: Tensor,
    /// u32 `[N, k]`
    choice: Tensor,
    /// f32 `[N, k]`
    weights: Tensor,
    /// The choice without what is dropped, where experts take no more than their capacity.
    taken: Option<(Tensor, Capacity)>,
}

impl Routed {
    /// That of some of the tokens.
    fn part(&self, start: u64, end: u64) -> Result<Routed, StepError> {
        let part = |x: &Tensor| rows(x, start, end);
        let taken = match &self.taken {
            Some((taken, capacity)) => Some((part(taken)?, *capacity)),
            None => None,
        };
        let (logits, choice, weights) = (part(&self.logits)?, part(&self.choice)?, part(&self.weights)?);
        Ok(Routed { logits, choice, weights, taken })
    }

    /// The places that experts take.
    fn sent(&self) -> &Tensor {
        self.taken.as_ref().map_or(&self.choice, |(taken, _)| taken)
    }
}

/// Where the rows of experts come from and go to.
struct Order<'v> {
    /// u32 `[R]`: the place of each row.
    sources: Tensor,
    /// u32 `[N, k]`: the row of each place.
    places: Tensor,
    /// u32 `[E + 1]`: the first row of each expert.
    offsets: Tensor,
    /// The experts on their way, where they come by themselves.
    visit: Option<ExpertVisit<'v>>,
    /// The way of rows that ranks exchange, where they do.
    blocks: Option<Blocks>,
}

/// What multiplies the rows of an activation: the weights of experts, or the gate of a shared expert.
struct Factors<'f> {
    /// f32, one for each place.
    values: &'f Tensor,
    order: Option<&'f Order<'f>>,
}

/// The experts of a layer, with what they are computed by.
struct Experts<'e, 'c> {
    ctx: &'e Context<'c>,
    weights: &'e BlockWeights,
    spec: &'e ExpertsSpec,
}

/// The part forward. `add` is given what writes the part's output to a tensor, or adds it there; normed `[N, H]`.
pub(super) fn forward<R>(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    spec: &ExpertsSpec,
    policy: LayerPolicy,
    normed: &Tensor,
    add: impl FnOnce(&dyn Fn(&Tensor, bool) -> Result<(), StepError>) -> Result<R, StepError>,
) -> Result<(R, SavedWithin), StepError> {
    let experts = Experts { ctx, weights, spec };
    let routed = experts.route(normed, None)?;
    // Logits are few, and a rounding of theirs is one of the weights: they are kept as they are.
    // Where a later layer reads them, they stay anyway.
    let is_kept = policy.gate_up != Save::Recompute && experts.carried().is_none();
    let of_logits = if is_kept { Save::Keep } else { Save::Recompute };
    if let Some(chunk) = ctx.mlp_chunk(normed.rows()) {
        let out = add(&|out, accumulate| {
            experts.in_chunks(chunk, &routed, normed, out, accumulate)?;
            experts.add_zero_computation(&routed, normed, out)
        })?;
        return Ok((out, SavedWithin::dropped()));
    }
    let (shared_inner, shared) = match experts.shared(normed)? {
        None => (Held::Dropped, None),
        Some(shared) => {
            let (inner, activated) = kept_inner(ctx, policy, shared.inner(ctx, normed)?, shared.factors())?;
            (inner, Some((shared, activated)))
        }
    };
    let all = experts.of_all_ranks(normed, &routed)?;
    let order = experts.sort(&all)?;
    let part = experts.part(&order);
    let inner = project_inner(ctx, part, &experts.gather(&all.normed, &order)?)?;
    let factors = Factors { values: &all.weights, order: Some(&order) };
    let (inner, activated) = kept_inner(ctx, policy, inner, Some(factors))?;
    let weights_of_all = all.weights.clone();
    drop(all);
    let out = add(&|out, accumulate| {
        experts.write((&weights_of_all, &order), &activated, out, accumulate)?;
        add_shared(ctx, shared.as_ref().map(|(shared, activated)| (shared, activated)), out)?;
        experts.add_zero_computation(&routed, normed, out)
    })?;
    let activation = Held::new(ctx, policy.activation, activated)?;
    let shared_activation = match shared {
        Some((_, activated)) => Held::new(ctx, policy.activation, activated)?,
        None => Held::Dropped,
    };
    let logits = Held::new(ctx, of_logits, routed.logits)?;
    Ok((out, SavedWithin { inner, activation, logits, shared_inner, shared_activation }))
}

/// The gradient of the part's normed input `[N, H]`; weight gradients are added. `dout` as for any feed-forward part.
pub(super) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    spec: &ExpertsSpec,
    within: SavedWithin,
    normed: &Tensor,
    gradients: &mut Gradients<'_>,
    dout: impl FnOnce(
        &dyn Fn(&Tensor, bool) -> Result<(), StepError>,
        &mut Gradients<'_>,
    ) -> Result<Tensor, StepError>,
) -> Result<Tensor, StepError> {
    let experts = Experts { ctx, weights, spec };
    let logits = match within.logits {
        Held::Dropped => None,
        held => Some(held.restore(ctx, || Err(NO_LOGITS))?),
    };
    let routed = experts.route(normed, logits)?;
    let dweights =
        ctx.device.alloc(DType::F32, routed.weights.shape().dims(), Tag::Activations, "dweights")?;
    let dnormed;
    if let Some(chunk) = ctx.mlp_chunk(normed.rows()) {
        let again = |out: &Tensor, accumulate| {
            experts.in_chunks(chunk, &routed, normed, out, accumulate)?;
            experts.add_zero_computation(&routed, normed, out)
        };
        let dout = &dout(&again, gradients)?;
        dnormed = activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm")?;
        for_each_chunk(ctx, normed.rows(), chunk, |ctx, start, end| {
            let experts = Experts { ctx, ..experts };
            let (routed, normed) = (routed.part(start, end)?, rows(normed, start, end)?);
            let (dout, dnormed) = (rows(dout, start, end)?, rows(&dnormed, start, end)?);
            let all = experts.of_all_ranks(&normed, &routed)?;
            let order = experts.sort(&all)?;
            let factors = Factors { values: &all.weights, order: Some(&order) };
            let inner = project_inner(ctx, experts.part(&order), &experts.gather(&all.normed, &order)?)?;
            let activation = scaled(ctx, activated(ctx, &inner)?, Some(&factors))?;
            let dweights = rows(&dweights, start, end)?;
            experts.rows_backward(inner, activation, all, &order, &dout, &dweights, &dnormed, gradients)?;
            if let Some(shared) = experts.shared(&normed)? {
                let inner = shared.inner(ctx, &normed)?;
                let activation = scaled(ctx, activated(ctx, &inner)?, shared.factors().as_ref())?;
                shared.backward(&experts, inner, activation, &normed, &dout, &dnormed, gradients)?;
            }
            Ok(())
        })?;
        experts.zero_computation_backward(&routed, normed, dout, &dweights, &dnormed, gradients)?;
    } else {
        let all = experts.of_all_ranks(normed, &routed)?;
        let order = experts.sort(&all)?;
        let part = experts.part(&order);
        let factors = Factors { values: &all.weights, order: Some(&order) };
        let again = || project_inner(ctx, part, &experts.gather(&all.normed, &order)?);
        let inner = within.inner.restore(ctx, again)?;
        let again = || scaled(ctx, activated(ctx, &inner)?, Some(&factors));
        let activation = within.activation.restore(ctx, again)?;
        let shared = match experts.shared(normed)? {
            None => None,
            Some(shared) => {
                let inner = within.shared_inner.restore(ctx, || shared.inner(ctx, normed))?;
                let again = || scaled(ctx, activated(ctx, &inner)?, shared.factors().as_ref());
                let activation = within.shared_activation.restore(ctx, again)?;
                Some((shared, inner, activation))
            }
        };
        let again = |out: &Tensor, accumulate| {
            experts.write((&all.weights, &order), &activation, out, accumulate)?;
            add_shared(ctx, shared.as_ref().map(|(shared, _, activation)| (shared, activation)), out)?;
            experts.add_zero_computation(&routed, normed, out)
        };
        let dout = dout(&again, gradients)?;
        dnormed = activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm")?;
        experts.rows_backward(inner, activation, all, &order, &dout, &dweights, &dnormed, gradients)?;
        if let Some((shared, inner, activation)) = shared {
            shared.backward(&experts, inner, activation, normed, &dout, &dnormed, gradients)?;
        }
        experts.zero_computation_backward(&routed, normed, &dout, &dweights, &dnormed, gradients)?;
    }
    experts.router_backward(&routed, &dweights, normed, &dnormed, gradients)?;
    if let (Some(routes), Some(layer)) = (ctx.routes, weights.block().layer()) {
        routes.forget(layer);
    }
    Ok(dnormed)
}

const NO_LOGITS: StepError = StepError::Invariant { what: "logits that were kept cannot be made again" };

/// out += what the shared expert makes of its activation, where there is one.
fn add_shared(
    ctx: &Context<'_>,
    shared: Option<(&Shared<'_>, &Tensor)>,
    out: &Tensor,
) -> Result<(), StepError> {
    shared.map_or(Ok(()), |(shared, activation)| shared.part.down()?.forward(ctx, activation, out, true))
}

/// What is kept of gate and up projections, and their activation times its factors.
fn kept_inner(
    ctx: &Context<'_>,
    policy: LayerPolicy,
    projected: Inner,
    factors: Option<Factors<'_>>,
) -> Result<(Held<Inner>, Tensor), StepError> {
    let inner = Held::new(ctx, policy.gate_up, projected.clone())?;
    let activated = match policy.gate_up {
        Save::Keep => activated(ctx, &projected)?,
        Save::Int8 { .. } | Save::Recompute => activated_in_place(ctx, projected)?,
    };
    Ok((inner, scaled(ctx, activated, factors.as_ref())?))
}

/// x with each row times its factor, in its own memory.
fn scaled(ctx: &Context<'_>, x: Tensor, factors: Option<&Factors<'_>>) -> Result<Tensor, StepError> {
    if let Some(Factors { values, order }) = factors {
        let sources = order.map(|order| &order.sources);
        ctx.device.run(Routing::ScaleRows { x: &x, factors: values, sources, out: &x })?;
    }
    Ok(x)
}

/// The gradient of the activation before its rows were scaled, in the place of that of the scaled one, and that of the factors.
fn scaled_backward(
    ctx: &Context<'_>,
    inner: &Inner,
    dscaled: &Tensor,
    factors: &Factors<'_>,
    dfactors: &Tensor,
) -> Result<(), StepError> {
    let plain = activated(ctx, inner)?;
    let (sources, places) = (factors.order.map(|o| &o.sources), factors.order.map(|o| &o.places));
    ctx.device.run(Routing::RowDots { a: dscaled, b: &plain, places, out: dfactors })?;
    drop(plain);
    Ok(ctx.device.run(Routing::ScaleRows { x: dscaled, factors: factors.values, sources, out: dscaled })?)
}

impl<'e, 'c> Experts<'e, 'c> {
    /// Adds to dnormed what all ranks that share products have alike: one of them does, since what they have is added up.
    fn once(&self, add: impl FnOnce() -> Result<(), StepError>) -> Result<(), StepError> {
        if self.ctx.products.is_none_or(Products::is_first) { add() } else { Ok(()) }
    }

    fn router(&self) -> Result<Linear<'e>, StepError> {
        self.weights.linear(Role::Router, Some(Role::RouterBias))
    }

    fn rule(&self) -> Router {
        let router = self.spec.router;
        Router {
            sigmoid: router.scoring == Scoring::Sigmoid,
            normalise: router.normalise,
            scale: router.scale as f32,
            groups: router.groups.map(|ExpertGroups { count, chosen, by_two }| RouterGroups {
                count,
                chosen,
                by_two,
            }),
        }
    }

    /// The experts of tokens and their weights, by logits that were kept, or else by the router. A choice that was made for these
    /// tokens before stands.
    fn route(&self, normed: &Tensor, logits: Option<Tensor>) -> Result<Routed, StepError> {
        let (device, router) = (self.ctx.device, self.rule());
        let alloc =
            |dtype, columns, name| device.alloc(dtype, &[normed.rows(), columns], Tag::Activations, name);
        let layer = self.weights.block().layer().unwrap_or(0);
        let carried = self.carried();
        let logits = match logits.or_else(|| carried?.logits(layer)) {
            Some(logits) => logits,
            None => {
                let logits = alloc(DType::F32, self.spec.total(), "router")?;
                self.router()?.forward(self.ctx, &self.router_input(normed)?, &logits, false)?;
                self.add_residual(&logits)?;
                if let Some(carried) = carried {
                    carried.keep_logits(layer, &logits);
                }
                logits
            }
        };
        let made = self.ctx.routes.and_then(|routes| routes.choice(layer));
        let mut dropped = None;
        let choice = match made {
            Some(choice) => choice,
            None => {
                let choice = alloc(DType::U32, self.spec.per_token, "experts")?;
                let correction = self.weights.find(Role::RouterCorrection);
                device.run(Routing::Choose { logits: &logits, correction, router, choice: &choice })?;
                if let Some(routes) = self.ctx.routes
                    && routes.keep(device, layer, &logits, &choice)?
                    && let Some(load) = self.weights.find(Role::RouterLoad)
                {
                    let (counts, of_dropped) = load_parts(load)?;
                    device.run(Routing::Count { choice: &choice, counts: &counts })?;
                    dropped = Some(of_dropped);
                }
                choice
            }
        };
        let weights = alloc(DType::F32, self.spec.per_token, "expert.weights")?;
        device.run(Routing::Weigh { logits: &logits, choice: Some(&choice), router, weights: &weights })?;
        let taken = self.limit(&choice, dropped.as_ref())?;
        Ok(Routed { logits, choice, weights, taken })
    }

    /// Sorts the rows, and begins to bring experts that come by themselves.
    fn sort(&self, all: &Tokens) -> Result<Order<'c>, StepError> {
        let (device, choice) = (self.ctx.device, &all.choice);
        let alloc = |sizes: &[u64], name| device.alloc(DType::U32, sizes, Tag::Activations, name);
        let own = self.ctx.spec.own_experts(self.spec);
        let (sources, places) = (
            alloc(&[all.row_bound(own.end - own.start)], "sources")?,
            alloc(choice.shape().dims(), "places")?,
        );
        let offsets = alloc(&[own.end - own.start + 1], "offsets")?;
        let first = own.start as u32;
        device.run(Routing::Sort { choice, first, sources: &sources, places: &places, offsets: &offsets })?;
        let layer = self.weights.block().layer().unwrap_or(0);
        let begin = |weights| ExpertVisit::begin(device, weights, layer, &offsets, sources.elements());
        let visit = self.ctx.expert_weights.map(begin).transpose()?;
        let blocks = self.blocks(all, &sources, &offsets)?;
        Ok(Order { sources, places, offsets, visit, blocks })
    }

    fn part<'o>(&'o self, order: &'o Order<'_>) -> FeedForward<'o> {
        let (offsets, visit) = (Some(&order.offsets), order.visit.as_ref());
        FeedForward { weights: self.weights, roles: FeedForwardRoles::EXPERTS, offsets, visit }
    }

    /// Rows `[R, H]` for the experts, of x `[N, H]` of all ranks, or of this one where they exchange rows.
    fn gather(&self, x: &Tensor, order: &Order<'_>) -> Result<Tensor, StepError> {
        if let (Some(blocks), Some(ranks)) = (&order.blocks, self.ctx.expert_ranks) {
            return self.exchange_rows(ranks, blocks, x, order.sources.elements());
        }
        let sizes = [order.sources.elements(), x.columns()];
        let out = self.ctx.device.alloc(x.dtype(), &sizes, Tag::Activations, "routed")?;
        let each = order.places.columns();
        self.ctx.device.run(Routing::Gather { x, sources: &order.sources, each, out: &out })?;
        Ok(out)
    }

    /// out (+)= what the experts make of their rows' activations.
    fn write(
        &self,
        (weights, order): (&Tensor, &Order<'_>),
        activation: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let down = self.part(order).down()?;
        let y = activation_tensor(self.ctx, activation.rows(), down.outputs(), "expert.outputs")?;
        down.forward(self.ctx, activation, &y, false)?;
        self.add_down_bias(order, weights, &y)?;
        self.combine(order, &y, out, accumulate)
    }

    /// out `[N, H]` (+)= the rows of each token's experts, added up.
    fn combine(
        &self,
        order: &Order<'_>,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let places = &order.places;
        if let Some(ranks) = self.ctx.expert_ranks {
            return match &order.blocks {
                Some(blocks) => self.combine_blocks(ranks, blocks, x, out, accumulate),
                None => self.combine_ranks(ranks, places, x, out, accumulate),
            };
        }
        Ok(self.ctx.device.run(Routing::Combine { x, places, out, accumulate })?)
    }

    /// out (+)= the whole part, of which nothing is kept: only the rows of a chunk of tokens are `[., I]` wide at a time.
    fn in_chunks(
        &self,
        chunk: u64,
        routed: &Routed,
        normed: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        for_each_chunk(self.ctx, normed.rows(), chunk, |ctx, start, end| {
            let experts = Experts { ctx, ..*self };
            let (routed, normed) = (routed.part(start, end)?, rows(normed, start, end)?);
            let out = rows(out, start, end)?;
            let all = experts.of_all_ranks(&normed, &routed)?;
            let order = experts.sort(&all)?;
            let inner = project_inner(ctx, experts.part(&order), &experts.gather(&all.normed, &order)?)?;
            let factors = Factors { values: &all.weights, order: Some(&order) };
            let activation = scaled(ctx, activated_in_place(ctx, inner)?, Some(&factors))?;
            let weights = all.weights.clone();
            drop(all);
            experts.write((&weights, &order), &activation, &out, accumulate)?;
            drop(activation);
            let Some(shared) = experts.shared(&normed)? else { return Ok(()) };
            let activation = activated_in_place(ctx, shared.inner(ctx, &normed)?)?;
            let activation = scaled(ctx, activation, shared.factors().as_ref())?;
            add_shared(ctx, Some((&shared, &activation)), &out)
        })
    }

    /// Sets dnormed to what comes through the experts, and dweights to the gradient of their weights; adds to the gradients of
    /// their matrices.
    fn rows_backward(
        &self,
        inner: Inner,
        activation: Tensor,
        all: Tokens,
        order: &Order<'_>,
        dout: &Tensor,
        dweights: &Tensor,
        dnormed: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), StepError> {
        let ctx = self.ctx;
        let part = self.part(order);
        let drows = match order.blocks {
            Some(_) => self.gather(dout, order)?,
            None => self.gather(&self.rows_of_all_ranks(dout)?, order)?,
        };
        let dactivation = down_backward(ctx, part, activation, &drows, gradients)?;
        let of_biases = self.down_bias_backward((&all.weights, order), &drows, gradients)?;
        drop(drows);
        let factors = Factors { values: &all.weights, order: Some(order) };
        self.sum_of_ranks(dweights, |dweights| {
            scaled_backward(ctx, &inner, &dactivation, &factors, dweights)?;
            match &of_biases {
                Some(owed) => Ok(ctx.device.run(Elementwise::Add { a: dweights, b: owed, out: dweights })?),
                None => Ok(()),
            }
        })?;
        let dinner = activation_backward(ctx, inner, &dactivation)?;
        drop(dactivation);
        let through = weights_backward(ctx, part, &dinner, &self.gather(&all.normed, order)?, gradients)?;
        let drows = activation_tensor(ctx, order.sources.elements(), all.normed.columns(), "drouted")?;
        drop(all);
        input_backward(ctx, part, through, &dinner, &drows, false)?;
        drop(dinner);
        self.combine(order, &drows, dnormed, false)
    }

    /// dnormed += what comes through the router; adds to the gradient of its matrix.
    fn router_backward(
        &self,
        routed: &Routed,
        dweights: &Tensor,
        normed: &Tensor,
        dnormed: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), StepError> {
        let (device, products) = (self.ctx.device, self.ctx.products);
        // Each rank has what its own experts make of them.
        products.map_or(Ok(()), |products| products.sum(device, dweights))?;
        let Routed { logits, choice, .. } = routed;
        let dlogits = device.alloc(DType::F32, logits.shape().dims(), Tag::Activations, "drouter")?;
        let (choice, router) = (Some(choice), self.rule());
        device.run(Routing::WeighBackward { logits, choice, router, dweights, dlogits: &dlogits })?;
        if let Some(losses) = self.ctx.routes.and_then(|routes| routes.training()?.losses.as_ref()) {
            losses.backward(device, logits, &dlogits)?;
        }
        self.residual_backward(&dlogits, gradients)?;
        let linear = self.router()?;
        let through = linear.backward_weight(self.ctx, gradients, &dlogits, &self.router_input(normed)?)?;
        self.once(|| self.router_input_backward(&linear, through, &dlogits, dnormed))
    }
}
