//! Attention of sequences of which each rank has a part (ring attention; Liu et al. 2023): keys and values go from rank to rank, a
//! run at a time, and queries stay where they are. A rank has a run near the beginning of each sequence and one as near its end, so
//! that all have as much to do (Korthikanti et al. and Megatron's context parallelism divide sequences so).
//!
//! Forward, a rank sends its keys to every rank whose queries see them. Backward it sends them once more, and gets back what they owe
//! to those queries. Everything is added up in an order that the number of ranks alone decides.

use std::ops::Range;

use plimsoll_device::{
    AttentionShape, Collective, DType, DeviceExt, Elementwise, KeyPiece, PiecedAttention, Rounding, Running,
    Tensor,
};
use plimsoll_memory::Tag;
use plimsoll_parallel::{Collectives, Communicator, Mesh};

use super::keys::sees;
use super::saved::{Attended, Qkv};
use super::sinks;
use crate::StepError;
use crate::context::Context;
use crate::head::{reshaped, rows};
use crate::inputs::Places;

/// The ranks that have parts of the same sequences.
pub(crate) struct Ring<'a> {
    ranks: Box<dyn Communicator + 'a>,
    mesh: Mesh,
}

/// The ring that sequences of a length go around in.
#[derive(Clone, Copy)]
pub(crate) struct Around<'r> {
    pub ring: &'r Ring<'r>,
    /// Tokens of a whole sequence.
    pub length: u64,
}

/// A run of every sequence: where it is, and the rows that this rank's tensors have for it.
#[derive(Clone, Debug)]
struct Run {
    places: Range<u64>,
    rows: Range<u64>,
}

impl Run {
    fn tokens(&self) -> u64 {
        self.places.end - self.places.start
    }

    /// Attention of its queries over everything up to its end.
    fn queries(&self, ctx: &Context<'_>) -> AttentionShape {
        AttentionShape { q_len: self.tokens(), kv_len: self.places.end, ..ctx.attention }
    }

    /// Its keys, as queries of this shape see them.
    fn keys(&self, shape: AttentionShape) -> KeyPiece {
        let shape = AttentionShape { kv_capacity: self.tokens(), ..shape };
        KeyPiece { first: self.places.start, shape }
    }

    /// The part of a tensor that has a row for each token.
    fn of(&self, x: &Tensor) -> Result<Tensor, StepError> {
        rows(x, self.rows.start, self.rows.end)
    }
}

impl<'a> Ring<'a> {
    /// Of the ranks along the context of a mesh.
    pub fn new(ranks: Box<dyn Communicator + 'a>, mesh: Mesh) -> Ring<'a> {
        Ring { ranks, mesh }
    }

    /// What this rank has of some sequences.
    pub fn own_places(&self, batch_size: u64, length: u64) -> Places {
        Places { batch_size, length, runs: self.mesh.runs(self.ranks.rank(), length) }
    }
}

impl Around<'_> {
    /// What a rank has of the sequences.
    fn runs(&self, rank: u32, batch: u64) -> Vec<Run> {
        let mut first = 0;
        let run = |places: Range<u64>| {
            let rows = first..first + batch * (places.end - places.start);
            first = rows.end;
            Run { places, rows }
        };
        self.ring.mesh.runs(rank, self.length).into_iter().map(run).collect()
    }

    fn own(&self, ctx: &Context<'_>) -> Vec<Run> {
        self.runs(self.ring.ranks.rank(), ctx.attention.batch)
    }

    /// The rows of this rank's runs of queries, and what attention of each is.
    pub fn own_queries(&self, ctx: &Context<'_>) -> Vec<(Range<u64>, AttentionShape)> {
        self.own(ctx).into_iter().map(|run| (run.rows.clone(), run.queries(ctx))).collect()
    }

    /// Attention of this rank's queries over the keys and values of all ranks, beside the sinks of heads where there are any.
    pub fn attend(
        &self,
        ctx: &Context<'_>,
        qkv: &Qkv,
        sinks: Option<&Tensor>,
    ) -> Result<Attended, StepError> {
        let device = ctx.device;
        let alloc = |dtype, sizes: &[u64], name| device.alloc(dtype, sizes, Tag::Attention, name);
        let (tokens, heads) = (qkv.q.rows(), ctx.attention.heads);
        let filled = |sizes: &[u64], name, value| -> Result<Tensor, StepError> {
            let out = alloc(DType::F32, sizes, name)?;
            device.run(Elementwise::Fill { out: &out, value })?;
            Ok(out)
        };
        let out = alloc(ctx.activations, &[tokens, qkv.q.columns()], "attention")?;
        let lse = alloc(DType::F32, &[tokens, heads], "lse")?;
        let sums = filled(&[tokens, qkv.q.columns()], "attention.sums", 0.0)?;
        let most = filled(&[tokens, heads], "attention.most", f32::NEG_INFINITY)?;
        let total = filled(&[tokens, heads], "attention.total", 0.0)?;
        let own = self.own(ctx);
        let add = |keys: &Run, k: &Tensor, v: &Tensor| -> Result<(), StepError> {
            for queries in &own {
                let shape = queries.queries(ctx);
                if !sees(shape, &keys.places) {
                    continue;
                }
                let (q, documents) = (&queries.of(&qkv.q)?, documents_of(ctx, queries)?);
                let [sums, most, total] = &[queries.of(&sums)?, queries.of(&most)?, queries.of(&total)?];
                let running = Running { sums, most, total };
                let (documents, piece, compute) = (documents.as_ref(), keys.keys(shape), ctx.compute);
                device.run(PiecedAttention::Add { q, k, v, documents, running, piece, compute })?;
            }
            Ok(())
        };
        for run in &own {
            add(run, &run.of(&qkv.k)?, &run.of(&qkv.v)?)?;
        }
        self.exchange(ctx, qkv, |hop| match hop.received {
            Some((run, k, v)) => add(run, &k, &v),
            None => Ok(()),
        })?;
        for queries in &own {
            let [sums, most, total] = &[queries.of(&sums)?, queries.of(&most)?, queries.of(&total)?];
            let running = Running { sums, most, total };
            let (out, lse, shape) = (&queries.of(&out)?, &queries.of(&lse)?, queries.queries(ctx));
            device.run(PiecedAttention::Finish { running, out, lse, shape })?;
            sinks::apply(ctx, sinks, out, lse, None, shape)?;
        }
        Ok(Attended { out, lse, probabilities: None })
    }

    /// The gradients of this rank's queries, keys and values, from that of what its attention gave.
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        qkv: &Qkv,
        attended: &Attended,
        dout: &Tensor,
    ) -> Result<[Tensor; 3], StepError> {
        let device = ctx.device;
        let zeros = |like: &Tensor, name| -> Result<Tensor, StepError> {
            let out = device.alloc(DType::F32, &[like.rows(), like.columns()], Tag::Attention, name)?;
            device.run(Elementwise::Fill { out: &out, value: 0.0 })?;
            Ok(out)
        };
        let Attended { out, lse, .. } = attended;
        let delta = device.alloc(DType::F32, lse.shape().dims(), Tag::Attention, "delta")?;
        let own = self.own(ctx);
        for queries in &own {
            let (out, dout, delta) = (&queries.of(out)?, &queries.of(dout)?, &queries.of(&delta)?);
            device.run(PiecedAttention::Deltas { out, dout, delta, shape: queries.queries(ctx) })?;
        }
        let (dq, dk, dv) = (zeros(&qkv.q, "dq.sums")?, zeros(&qkv.k, "dk.sums")?, zeros(&qkv.v, "dv.sums")?);
        let owe = |keys: &Run, [k, v]: [&Tensor; 2], [dk, dv]: [&Tensor; 2]| -> Result<(), StepError> {
            for queries in &own {
                let shape = queries.queries(ctx);
                if !sees(shape, &keys.places) {
                    continue;
                }
                let documents = documents_of(ctx, queries)?;
                device.run(PiecedAttention::Backward {
                    q: &queries.of(&qkv.q)?,
                    k,
                    v,
                    documents: documents.as_ref(),
                    lse: &queries.of(lse)?,
                    delta: &queries.of(&delta)?,
                    dout: &queries.of(dout)?,
                    dq: &queries.of(&dq)?,
                    dk,
                    dv,
                    piece: keys.keys(shape),
                    compute: ctx.compute,
                })?;
            }
            Ok(())
        };
        for run in &own {
            owe(run, [&run.of(&qkv.k)?, &run.of(&qkv.v)?], [&run.of(&dk)?, &run.of(&dv)?])?;
        }
        self.exchange(ctx, qkv, |hop| {
            let theirs = match hop.received {
                None => None,
                Some((run, k, v)) => {
                    let owed = [zeros(&k, "dk.theirs")?, zeros(&v, "dv.theirs")?];
                    owe(run, [&k, &v], owed.each_ref())?;
                    Some(owed)
                }
            };
            // What this rank's keys owe to the queries that they were sent to.
            for (place, own) in [&dk, &dv].into_iter().enumerate() {
                let theirs = theirs.as_ref().and_then(|owed| owed.get(place));
                let own = hop.sent.map(|run| run.of(own)).transpose()?;
                let room = |own: &Tensor| {
                    let sizes = own.shape();
                    device.alloc(DType::F32, sizes.dims(), Tag::Communication, "keys.owed")
                };
                let owed = own.as_ref().map(room).transpose()?;
                let (send, receive) =
                    (theirs.map(|x| (hop.from, x)), owed.as_ref().map(|owed| (hop.to, owed)));
                self.ring.ranks.send_receive(device, Collective::Send, send, receive)?;
                if let (Some(own), Some(owed)) = (&own, &owed) {
                    device.run(Elementwise::Add { a: own, b: owed, out: own })?;
                }
            }
            Ok(())
        })?;
        drop(delta);
        let narrow = |x: Tensor, name| narrowed(ctx, x, name);
        Ok([narrow(dq, "dq")?, narrow(dk, "dk")?, narrow(dv, "dv")?])
    }

    /// Whether any query of a rank sees any of these places.
    fn sees(&self, ctx: &Context<'_>, rank: u32, keys: &Range<u64>) -> bool {
        self.runs(rank, ctx.attention.batch).iter().any(|run| sees(run.queries(ctx), keys))
    }

    /// In each round sends this rank's keys and values to one rank and receives another's, a run at a time, and no run that queries
    /// there do not see.
    fn exchange(
        &self,
        ctx: &Context<'_>,
        qkv: &Qkv,
        mut body: impl FnMut(Hop<'_>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let (device, ranks) = (ctx.device, &*self.ring.ranks);
        let own = self.own(ctx);
        for (to, from) in ranks.rounds() {
            let theirs = self.runs(from, ctx.attention.batch);
            for place in 0..own.len().max(theirs.len()) {
                let sent = own.get(place).filter(|run| self.sees(ctx, to, &run.places));
                let run = theirs.get(place).filter(|run| self.sees(ctx, ranks.rank(), &run.places));
                let room = |like: &Tensor, name| {
                    let sizes = |run: &Run| [run.rows.end - run.rows.start, like.columns()];
                    let room = |run| device.alloc(like.dtype(), &sizes(run), Tag::Communication, name);
                    run.map(room).transpose()
                };
                let (k, v) = (room(&qkv.k, "keys.received")?, room(&qkv.v, "values.received")?);
                for (x, out) in [(&qkv.k, &k), (&qkv.v, &v)] {
                    let x = sent.map(|run| run.of(x)).transpose()?;
                    let (send, receive) = (x.as_ref().map(|x| (to, x)), out.as_ref().map(|out| (from, out)));
                    ranks.send_receive(device, Collective::Send, send, receive)?;
                }
                let received = run.zip(k).zip(v).map(|((run, k), v)| (run, k, v));
                body(Hop { sent, to, received, from })?;
            }
        }
        Ok(())
    }
}

/// Keys that were sent, and those that came.
struct Hop<'r> {
    sent: Option<&'r Run>,
    to: u32,
    received: Option<(&'r Run, Tensor, Tensor)>,
    from: u32,
}

/// Where the documents of a run's queries begin, where they are told apart.
fn documents_of(ctx: &Context<'_>, run: &Run) -> Result<Option<Tensor>, StepError> {
    ctx.documents.map(|starts| run.of(&reshaped(starts, &[starts.elements(), 1])?)).transpose()
}

/// Sums as activations are kept.
fn narrowed(ctx: &Context<'_>, x: Tensor, name: &'static str) -> Result<Tensor, StepError> {
    if x.dtype() == ctx.activations {
        return Ok(x);
    }
    let out = ctx.device.alloc(ctx.activations, &[x.rows(), x.columns()], Tag::Attention, name)?;
    ctx.device.run(Elementwise::Cast { x: &x, out: &out, rounding: Rounding::Nearest })?;
    Ok(out)
}
