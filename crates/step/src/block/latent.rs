//! Multi-head latent attention (DeepSeek-V2, 2024): queries, keys and values from narrow vectors and back.
//!
//! ```text
//! x [N, H] -> q' [N, query_rank] -> norm -> q [N, heads * D], the last R of each head rotated
//! x -> (c, r) [N, kv_rank + R];  c -> norm -> [N, heads * (D - R + V)] -> k, v of each head;  r rotated -> the last R of every k
//! ```
//!
//! From there on it is attention with a head of keys and values for each head of queries. Values are as wide as keys there, with
//! zeros behind the V that they have; what attention gives is made narrow again before it is multiplied or kept.
//!
//! In generation attention is over a cache of narrow vectors ([`cached`]).

mod cached;

use plimsoll_device::{DeviceExt, Elementwise, HeadColumns, Heads as Columns, RotatedHeads, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{LatentAttention, ModelSpec, NormSpec, Role};

use super::attention::{project, project_backward, raw_backward, rotate};
use super::parts::before;
use super::saved::{Attended, Qkv, Raw};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::norm::{Norm, Normed};
use crate::store::BlockWeights;

pub(crate) use cached::{Absorbed, LatentCache, values_of_cache};

/// The widths of latent attention.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    latent: LatentAttention,
    heads: u64,
    /// D: of a head's queries and keys.
    dim: u64,
    /// R: how much of it is rotated.
    rotated: u64,
}

impl Heads {
    /// Those of a model that has it.
    pub fn of(ctx: &Context<'_>) -> Option<Heads> {
        Heads::of_model(ctx.spec)
    }

    fn of_model(spec: &ModelSpec) -> Option<Heads> {
        let attention = &spec.attention;
        let (heads, dim, rotated) = (attention.heads, attention.head_dim, attention.rotated_dim());
        attention.latent.map(|latent| Heads { latent, heads, dim, rotated })
    }

    /// Those of a model whose values are narrower than its keys.
    fn with_narrow_values(ctx: &Context<'_>) -> Option<Heads> {
        Heads::of(ctx).filter(|own| own.latent.value_dim < own.dim)
    }

    /// What of a head's keys comes from the vector.
    fn plain(&self) -> u64 {
        self.dim.saturating_sub(self.rotated)
    }

    /// What comes from the vector for a head: a part of its keys, and its values behind it.
    fn of_vector(&self) -> u64 {
        self.plain() + self.latent.value_dim
    }

    /// Where queries are rotated.
    fn rotated_queries(&self) -> RotatedHeads {
        RotatedHeads { dim: self.dim, first: self.plain(), interleaved: true }
    }

    /// Where what all keys have in common is.
    fn rotated_keys(&self) -> RotatedHeads {
        RotatedHeads { dim: self.rotated, first: 0, interleaved: true }
    }

    /// Queries, keys and values of the normed input.
    pub fn project(
        &self,
        ctx: &Context<'_>,
        weights: &BlockWeights,
        normed: &Tensor,
    ) -> Result<Qkv, StepError> {
        let (heads, plain) = (self.heads, self.plain());
        let alloc = |columns, name| new(ctx, normed.rows(), columns, name);
        let (q, raw_q) = self.project_queries(ctx, weights, normed)?;
        let Vectors { normed, common, raw } = self.project_vectors(ctx, weights, normed)?;
        let up = project(ctx, weights, (Role::KvUpProj, None), &normed, "kv")?;
        drop(normed);
        let (k, v) = (alloc(heads * self.dim, "k")?, alloc(heads * self.dim, "v")?);
        let (of_keys, of_up) = (HeadColumns::new(&k, self.dim), HeadColumns::new(&up, self.of_vector()));
        copy(ctx, of_up, of_keys, heads, plain)?;
        copy(ctx, HeadColumns::new(&common, 0), of_keys.from(plain), heads, self.rotated)?;
        self.widen(ctx, of_up.from(plain), &v)?;
        Ok(Qkv { q, k, v, raw_q, raw_k: Some(raw) })
    }

    /// Queries of heads, rotated, and the narrow vector that they come from.
    fn project_queries(
        &self,
        ctx: &Context<'_>,
        weights: &BlockWeights,
        normed: &Tensor,
    ) -> Result<(Tensor, Option<Raw>), StepError> {
        let project = |role, x: &Tensor, name| project(ctx, weights, (role, None), x, name);
        let (q, raw) = match self.latent.query_rank {
            None => (project(Role::QProj, normed, "q")?, None),
            Some(_) => {
                let down = project(Role::QDownProj, normed, "q.latent")?;
                let (normed, raw) = normalise(ctx, weights, Role::QNorm, down)?;
                (project(Role::QUpProj, &normed, "q")?, Some(raw))
            }
        };
        rotate(ctx, &q, self.rotated_queries(), false)?;
        Ok((q, raw))
    }

    /// What keys and values of all heads come from.
    fn project_vectors(
        &self,
        ctx: &Context<'_>,
        weights: &BlockWeights,
        normed: &Tensor,
    ) -> Result<Vectors, StepError> {
        let rank = self.latent.kv_rank;
        let alloc = |columns, name| new(ctx, normed.rows(), columns, name);
        let down = project(ctx, weights, (Role::KvDownProj, None), normed, "kv.down")?;
        let (vector, common) = (alloc(rank, "kv.latent")?, alloc(self.rotated, "k.common")?);
        columns(ctx, (&down, 0), (&vector, 0), rank)?;
        columns(ctx, (&down, rank), (&common, 0), self.rotated)?;
        drop(down);
        rotate(ctx, &common, self.rotated_keys(), false)?;
        let (normed, raw) = normalise(ctx, weights, Role::KNorm, vector)?;
        Ok(Vectors { normed, common, raw })
    }

    /// Values of heads, and zeros behind those of each.
    fn widen(&self, ctx: &Context<'_>, values: HeadColumns<'_>, out: &Tensor) -> Result<(), StepError> {
        if self.latent.value_dim < self.dim {
            ctx.device.run(Elementwise::Fill { out, value: 0.0 })?;
        }
        copy(ctx, values, HeadColumns::new(out, self.dim), self.heads, self.latent.value_dim)
    }

    /// The gradient of the normed input from those of queries, keys and values.
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        weights: &BlockWeights,
        [raw_q, raw_k]: [Option<Raw>; 2],
        [dq, dk, dv]: [Tensor; 3],
        normed: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<Tensor, StepError> {
        let (heads, plain, rank) = (self.heads, self.plain(), self.latent.kv_rank);
        let alloc = |columns, name| new(ctx, normed.rows(), columns, name);
        let missing = |role| StepError::MissingWeight { block: weights.block(), role };

        rotate(ctx, &dq, self.rotated_queries(), true)?;
        let (role, dq) = match self.latent.query_rank {
            None => (Role::QProj, dq),
            Some(_) => {
                let raw = raw_q.ok_or_else(|| missing(Role::QNorm))?;
                let roles = (Role::QNorm, Role::QUpProj);
                (Role::QDownProj, through_norm(ctx, weights, roles, &raw, dq, gradients)?)
            }
        };
        let dnormed = project_backward(ctx, weights, (role, None), (normed, &dq), None, gradients)?;
        drop(dq);

        let (dup, dcommon) = (alloc(heads * self.of_vector(), "dkv")?, alloc(self.rotated, "dk.common")?);
        let (of_keys, of_up) = (HeadColumns::new(&dk, self.dim), HeadColumns::new(&dup, self.of_vector()));
        copy(ctx, of_keys, of_up, heads, plain)?;
        copy(ctx, HeadColumns::new(&dv, self.dim), of_up.from(plain), heads, self.latent.value_dim)?;
        let (from, to) = (of_keys.from(plain), HeadColumns::new(&dcommon, 0));
        ctx.device.run(Columns::Sum { from, to, heads, width: self.rotated })?;
        drop((dk, dv));
        rotate(ctx, &dcommon, self.rotated_keys(), true)?;
        let raw = raw_k.ok_or_else(|| missing(Role::KNorm))?;
        let dvector = through_norm(ctx, weights, (Role::KNorm, Role::KvUpProj), &raw, dup, gradients)?;
        let ddown = alloc(rank + self.rotated, "dkv.down")?;
        columns(ctx, (&dvector, 0), (&ddown, 0), rank)?;
        columns(ctx, (&dcommon, 0), (&ddown, rank), self.rotated)?;
        drop((dvector, dcommon));
        let own = (normed, &ddown);
        project_backward(ctx, weights, (Role::KvDownProj, None), own, Some(dnormed), gradients)
    }
}

/// Of every token, what keys and values of all heads come from.
struct Vectors {
    /// The narrow vector, normalised, `[N, kv_rank]`.
    normed: Tensor,
    /// What the keys of all heads have in common, rotated, `[N, R]`.
    common: Tensor,
    /// The narrow vector before its norm.
    raw: Raw,
}

fn new(ctx: &Context<'_>, rows: u64, columns: u64, name: &'static str) -> Result<Tensor, StepError> {
    Ok(ctx.device.alloc(ctx.activations, &[rows, columns], Tag::Attention, name)?)
}

fn copy(
    ctx: &Context<'_>,
    from: HeadColumns<'_>,
    to: HeadColumns<'_>,
    heads: u64,
    width: u64,
) -> Result<(), StepError> {
    Ok(ctx.device.run(Columns::Copy { from, to, heads, width })?)
}

/// Columns of one tensor, from one place to another.
fn columns(
    ctx: &Context<'_>,
    (from, first): (&Tensor, u64),
    (to, at): (&Tensor, u64),
    width: u64,
) -> Result<(), StepError> {
    copy(ctx, HeadColumns::new(from, 0).from(first), HeadColumns::new(to, 0).from(at), 1, width)
}

/// The norm of a narrow vector: files say no epsilon for it.
fn norm(weights: &BlockWeights, role: Role) -> Result<Norm<'_>, StepError> {
    weights.norm(role, None, &NormSpec::rms(LatentAttention::NORM_EPSILON))
}

/// A narrow vector normalised, as linears take it, and itself.
fn normalise(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    role: Role,
    x: Tensor,
) -> Result<(Tensor, Raw), StepError> {
    let norm = norm(weights, role)?;
    let missing = StepError::MissingWeight { block: norm.block, role };
    let Normed { out, statistics } = before(ctx, Some(norm), &x)?;
    Ok((out, Raw { x, statistics: statistics.ok_or(missing)? }))
}

/// The gradient of a narrow vector from that of what a linear made of it, normalised.
fn through_norm(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    (of_norm, of_linear): (Role, Role),
    raw: &Raw,
    dout: Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let norm = norm(weights, of_norm)?;
    let normed = before(ctx, Some(norm), &raw.x)?.out;
    let dnormed = project_backward(ctx, weights, (of_linear, None), (&normed, &dout), None, gradients)?;
    drop((normed, dout));
    raw_backward(ctx, &norm, raw, &dnormed, "dlatent", gradients)
}

/// What attention gave, with heads as wide as values are.
pub(super) fn narrowed(ctx: &Context<'_>, out: Tensor) -> Result<Tensor, StepError> {
    let Some(own) = Heads::with_narrow_values(ctx) else { return Ok(out) };
    let width = own.latent.value_dim;
    let narrow = new(ctx, out.rows(), own.heads * width, "attention.values")?;
    copy(ctx, HeadColumns::new(&out, own.dim), HeadColumns::new(&narrow, width), own.heads, width)?;
    Ok(narrow)
}

/// The other way round: what attention gave and the gradient of it, with zeros in every head behind its values.
pub(super) fn widened_attended(
    ctx: &Context<'_>,
    dout: Tensor,
    attended: Attended,
) -> Result<(Tensor, Attended), StepError> {
    let Some(own) = Heads::with_narrow_values(ctx) else { return Ok((dout, attended)) };
    let wide = |x: &Tensor, name| -> Result<Tensor, StepError> {
        let out = new(ctx, x.rows(), own.heads * own.dim, name)?;
        own.widen(ctx, HeadColumns::new(x, own.latent.value_dim), &out)?;
        Ok(out)
    };
    let dout = wide(&dout, "dattention.wide")?;
    let out = wide(&attended.out, "attention.wide")?;
    Ok((dout, Attended { out, ..attended }))
}
