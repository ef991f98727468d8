//! Attention of a sequence that is visited in chunks: a chunk of queries sees the keys of every chunk before it, which live on a
//! lower tier and come a chunk at a time. No more than two chunks of them are on the device, however long the sequence is.
//!
//! Forward, a chunk leaves its keys and values, and what its attention gave. Backward, the chunks come from the last to the first:
//! what a chunk's keys owe to later queries is complete when the chunk's own turn comes.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{
    AttentionShape, DType, Device, DeviceExt, Elementwise, KeyPiece, PiecedAttention, Rounding, Running,
    Tensor,
};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Tag, Tier};
use plimsoll_model::ModelSpec;
use rustc_hash::FxHashMap;

use super::saved::{Attended, Qkv};
use super::sinks;
use crate::StepError;
use crate::context::Context;
use crate::tier::{Parcel, Parcels, Use};

/// Buffers of keys and values: one in use, and one on its way.
const BUFFERS: usize = 2;

/// The keys and values of a sequence in chunks, of all layers.
pub(crate) struct Keys<'a> {
    device: &'a dyn Device,
    /// Tokens of a chunk.
    chunk: u64,
    of_layers: RefCell<Parcels<'a, Kept, Kind>>,
    gradients: RefCell<Gradients<'a>>,
}

/// What keys and values owe to the queries so far, of the layer whose turn it is.
struct Gradients<'a> {
    parcels: Parcels<'a, u32, Kind>,
    /// The chunks of which there is anything.
    begun: BTreeSet<u32>,
}

/// What is kept of a layer's chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kept {
    Keys { layer: u32, chunk: u32 },
    Attended { layer: u32, chunk: u32 },
}

/// A tensor of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Key,
    Value,
    Out,
    Lse,
}

/// What a pass does with the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// What the attention gives is kept for the way back.
    Forward,
    /// It is not.
    Evaluate,
    /// What was kept is taken.
    Backward,
}

/// The chunk of a sequence whose turn it is.
#[derive(Clone, Copy)]
pub(crate) struct Chunk<'k> {
    pub keys: &'k dyn Attend,
    pub turn: Turn,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub number: u32,
    pub layer: u32,
    pub visit: Visit,
}

/// What attends to the keys of a sequence in chunks.
pub(crate) trait Attend {
    /// Attention of a chunk's queries over its own keys and those of all chunks before it, beside the sinks of heads.
    fn attend(
        &self,
        turn: Turn,
        ctx: &Context<'_>,
        qkv: (&Qkv, Option<&Tensor>),
    ) -> Result<Attended, StepError>;

    /// The gradients of the chunk's queries, keys and values, from that of what its attention gave.
    fn backward(
        &self,
        turn: Turn,
        ctx: &Context<'_>,
        qkv: &Qkv,
        attended: &Attended,
        dout: &Tensor,
    ) -> Result<[Tensor; 3], StepError>;
}

impl<'a> Keys<'a> {
    /// Of sequences of `length` tokens in chunks of `chunk`, on a lower tier.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        tier: Tier,
        spec: &ModelSpec,
        activations: DType,
        (length, chunk): (u64, u64),
    ) -> Result<Self, StepError> {
        let attention = &spec.attention;
        let [queries, keys] = [attention.heads, attention.kv_heads].map(|heads| heads * attention.head_dim);
        let (mut of_layers, mut gradients) = (FxHashMap::default(), FxHashMap::default());
        for (number, tokens) in (0..).zip(chunks(length, chunk)) {
            let tokens = tokens.end - tokens.start;
            for layer in 0..spec.num_layers {
                let mut parcel = Parcel::new();
                parcel.add(Kind::Key, activations, &[tokens, keys]);
                parcel.add(Kind::Value, activations, &[tokens, keys]);
                parcel.settle_later(tier, Tag::KvCache, "keys");
                of_layers.insert(Kept::Keys { layer, chunk: number }, parcel);
                let mut parcel = Parcel::new();
                parcel.add(Kind::Out, activations, &[tokens, queries]);
                parcel.add(Kind::Lse, DType::F32, &[1, attention.heads, tokens]);
                parcel.settle_later(tier, Tag::Activations, "attention");
                of_layers.insert(Kept::Attended { layer, chunk: number }, parcel);
            }
            let mut parcel = Parcel::new();
            parcel.add(Kind::Key, DType::F32, &[tokens, keys]);
            parcel.add(Kind::Value, DType::F32, &[tokens, keys]);
            parcel.settle_later(tier, Tag::KvCache, "keys.gradients");
            gradients.insert(number, parcel);
        }
        let of_layers = Parcels::of(device, tiers, of_layers, BUFFERS, "keys.staging")?;
        let parcels = Parcels::of(device, tiers, gradients, BUFFERS, "keys.gradients.staging")?;
        let gradients = RefCell::new(Gradients { parcels, begun: BTreeSet::new() });
        Ok(Keys { device, chunk, of_layers: RefCell::new(of_layers), gradients })
    }

    /// Waits until everything is where it lives, and forgets what a pass has left unfinished.
    pub fn settle(&self) -> Result<(), StepError> {
        let mut gradients = self.gradients.borrow_mut();
        gradients.begun.clear();
        gradients.parcels.flush()?;
        self.of_layers.borrow_mut().flush()
    }

    /// Feeds what lies in the buffers to a hasher.
    pub fn hash_buffers(&self, hasher: &mut impl Hasher) {
        let gradients = self.gradients.borrow();
        gradients.parcels.hash_buffers(hasher);
        gradients.begun.hash(hasher);
        self.of_layers.borrow().hash_buffers(hasher);
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<(), StepError> {
        Ok(self.device.run(Elementwise::Cast { x, out, rounding: Rounding::Nearest })?)
    }

    fn filled(&self, sizes: &[u64], tag: Tag, name: &'static str, value: f32) -> Result<Tensor, StepError> {
        let tensor = self.device.alloc(DType::F32, sizes, tag, name)?;
        self.device.run(Elementwise::Fill { out: &tensor, value })?;
        Ok(tensor)
    }

    /// The positions of a chunk of these sequences.
    fn positions(&self, number: u32, length: u64) -> Range<u64> {
        tokens_of(u64::from(number), self.chunk, length)
    }
}

/// The tokens of each chunk.
pub(crate) fn chunks(length: u64, chunk: u64) -> impl Iterator<Item = Range<u64>> {
    let chunk = chunk.max(1);
    (0..length.div_ceil(chunk)).map(move |number| tokens_of(number, chunk, length))
}

/// Those of one.
fn tokens_of(number: u64, chunk: u64, length: u64) -> Range<u64> {
    number * chunk..length.min((number + 1) * chunk)
}

impl Turn {
    fn kept_keys(self, chunk: u32) -> Kept {
        Kept::Keys { layer: self.layer, chunk }
    }

    fn kept_attended(self) -> Kept {
        Kept::Attended { layer: self.layer, chunk: self.number }
    }
}

impl Keys<'_> {
    /// The chunks before a chunk of which its queries see anything, in order.
    fn seen_before(&self, turn: Turn, shape: AttentionShape) -> Vec<u32> {
        let before = shape.kv_len.saturating_sub(shape.q_len);
        (0..turn.number).filter(|number| sees(shape, &self.positions(*number, before))).collect()
    }

    /// The keys of a chunk, as queries of this shape see them.
    fn piece(&self, number: u32, shape: AttentionShape) -> KeyPiece {
        let Range { start, end } = self.positions(number, shape.kv_len);
        KeyPiece { first: start, shape: AttentionShape { kv_capacity: end - start, ..shape } }
    }
}

impl Attend for Keys<'_> {
    fn attend(
        &self,
        turn: Turn,
        ctx: &Context<'_>,
        (qkv, sinks): (&Qkv, Option<&Tensor>),
    ) -> Result<Attended, StepError> {
        let (device, shape) = (ctx.device, ctx.attention);
        let alloc = |dtype, sizes: &[u64], name| device.alloc(dtype, sizes, Tag::Attention, name);
        let out = alloc(ctx.activations, &[qkv.q.rows(), qkv.q.columns()], "attention")?;
        let statistics = [shape.batch, shape.heads, shape.q_len];
        let lse = alloc(DType::F32, &statistics, "lse")?;
        let mut pool = self.of_layers.borrow_mut();
        if turn.visit == Visit::Backward {
            pool.announce([Use::of(turn.kept_attended())])?;
            let kept = pool.gather(turn.kept_attended())?;
            self.copy(of(&kept, Kind::Out)?, &out)?;
            self.copy(of(&kept, Kind::Lse)?, &lse)?;
            drop(kept);
            pool.release(turn.kept_attended(), false);
            return Ok(Attended { out, lse, probabilities: None });
        }
        let before = self.seen_before(turn, shape);
        let anew = |key| Use { key, fresh: true };
        let mut uses = vec![anew(turn.kept_keys(turn.number))];
        uses.extend(before.iter().map(|chunk| Use::of(turn.kept_keys(*chunk))));
        uses.extend((turn.visit == Visit::Forward).then(|| anew(turn.kept_attended())));
        pool.announce(uses)?;
        let own = pool.gather(turn.kept_keys(turn.number))?;
        self.copy(&qkv.k, of(&own, Kind::Key)?)?;
        self.copy(&qkv.v, of(&own, Kind::Value)?)?;
        drop(own);
        pool.release(turn.kept_keys(turn.number), true);
        let running = [
            self.filled(&[qkv.q.rows(), qkv.q.columns()], Tag::Attention, "attention.sums", 0.0)?,
            self.filled(&statistics, Tag::Attention, "attention.most", f32::NEG_INFINITY)?,
            self.filled(&statistics, Tag::Attention, "attention.total", 0.0)?,
        ];
        let [sums, most, total] = &running;
        let running = Running { sums, most, total };
        let add = |k: &Tensor, v: &Tensor, number| -> Result<(), StepError> {
            let (q, documents, compute) = (&qkv.q, ctx.documents, ctx.compute);
            let piece = self.piece(number, shape);
            Ok(device.run(PiecedAttention::Add { q, k, v, documents, running, piece, compute })?)
        };
        for chunk in before {
            let earlier = pool.gather(turn.kept_keys(chunk))?;
            add(of(&earlier, Kind::Key)?, of(&earlier, Kind::Value)?, chunk)?;
            drop(earlier);
            pool.release(turn.kept_keys(chunk), false);
        }
        add(&qkv.k, &qkv.v, turn.number)?;
        device.run(PiecedAttention::Finish { running, out: &out, lse: &lse, shape })?;
        sinks::apply(ctx, sinks, &out, &lse, None, shape)?;
        if turn.visit == Visit::Forward {
            let kept = pool.gather(turn.kept_attended())?;
            self.copy(&out, of(&kept, Kind::Out)?)?;
            self.copy(&lse, of(&kept, Kind::Lse)?)?;
            drop(kept);
            pool.release(turn.kept_attended(), true);
        }
        pool.advance()?;
        Ok(Attended { out, lse, probabilities: None })
    }

    fn backward(
        &self,
        turn: Turn,
        ctx: &Context<'_>,
        qkv: &Qkv,
        attended: &Attended,
        dout: &Tensor,
    ) -> Result<[Tensor; 3], StepError> {
        let (device, shape) = (ctx.device, ctx.attention);
        let Attended { out, lse, .. } = attended;
        let delta = device.alloc(DType::F32, lse.shape().dims(), Tag::Attention, "delta")?;
        device.run(PiecedAttention::Deltas { out, dout, delta: &delta, shape })?;
        let dq_sums = self.filled(&[qkv.q.rows(), qkv.q.columns()], Tag::Workspace, "dq.sums", 0.0)?;
        let mut before = self.seen_before(turn, shape);
        before.reverse();
        let mut pool = self.of_layers.borrow_mut();
        pool.announce(before.iter().map(|chunk| Use::of(turn.kept_keys(*chunk))))?;
        let mut all = self.gradients.borrow_mut();
        let Gradients { parcels: gradients, begun } = &mut *all;
        let order = [turn.number].into_iter().chain(before.iter().copied());
        gradients.announce(order.map(|key| Use { key, fresh: !begun.contains(&key) }))?;
        let owe = |k: &Tensor, v: &Tensor, gradients: &[(Kind, Tensor)], is_first, number| {
            let (dk, dv) = (of(gradients, Kind::Key)?, of(gradients, Kind::Value)?);
            if is_first {
                device.run(Elementwise::Fill { out: dk, value: 0.0 })?;
                device.run(Elementwise::Fill { out: dv, value: 0.0 })?;
            }
            let (q, documents, delta, dq) = (&qkv.q, ctx.documents, &delta, &dq_sums);
            let (piece, compute) = (self.piece(number, shape), ctx.compute);
            device.run(PiecedAttention::Backward {
                q,
                k,
                v,
                documents,
                lse,
                delta,
                dout,
                dq,
                dk,
                dv,
                piece,
                compute,
            })?;
            Ok::<(), StepError>(())
        };
        let narrow = |x: &Tensor, name| -> Result<Tensor, StepError> {
            let out = device.alloc(ctx.activations, &[x.rows(), x.columns()], Tag::Attention, name)?;
            self.copy(x, &out)?;
            Ok(out)
        };
        // Later chunks have added theirs.
        let own = gradients.gather(turn.number)?;
        owe(&qkv.k, &qkv.v, &own, !begun.remove(&turn.number), turn.number)?;
        let (dk, dv) = (narrow(of(&own, Kind::Key)?, "dk")?, narrow(of(&own, Kind::Value)?, "dv")?);
        drop(own);
        gradients.forget(turn.number);
        for chunk in before {
            let earlier = pool.gather(turn.kept_keys(chunk))?;
            let sums = gradients.gather(chunk)?;
            let (k, v) = (of(&earlier, Kind::Key)?, of(&earlier, Kind::Value)?);
            owe(k, v, &sums, begun.insert(chunk), chunk)?;
            drop((earlier, sums));
            pool.release(turn.kept_keys(chunk), false);
            gradients.release(chunk, true);
            gradients.advance()?;
        }
        drop(delta);
        Ok([narrow(&dq_sums, "dq")?, dk, dv])
    }
}

/// Whether any query sees any of these keys.
pub(super) fn sees(shape: AttentionShape, keys: &Range<u64>) -> bool {
    match shape.block_sparse {
        None => keys.start < shape.kv_len && keys.end > shape.first_seen(),
        Some(_) => (shape.kv_len.saturating_sub(shape.q_len)..shape.kv_len).any(|position| {
            let seen = shape.seen(position, 0);
            seen.iter().any(|seen| seen.start.max(keys.start) < seen.end.min(keys.end))
        }),
    }
}

/// A tensor of a parcel.
fn of(tensors: &[(Kind, Tensor)], kind: Kind) -> Result<&Tensor, StepError> {
    let found = tensors.iter().find(|(own, _)| *own == kind).map(|(_, tensor)| tensor);
    found.ok_or(StepError::Invariant { what: "a chunk has no keys" })
}
