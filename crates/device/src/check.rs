//! What each operation reads and writes, and which tensors it refuses.

use std::cmp::Ordering;

use plimsoll_memory::Arena;

use crate::{AttentionShape, DType, DeviceError, Op, PIECE_ROWS, Tensor};

/// What an operation reads and writes, for the checks and the cost.
#[derive(Default)]
pub(crate) struct Access<'a> {
    pub reads: Vec<&'a Tensor>,
    pub writes: Vec<&'a Tensor>,
    /// Pairs (write, read) that may be the same memory.
    pub in_place: Vec<(&'a Tensor, &'a Tensor)>,
}

impl<'a> Op<'a> {
    pub(crate) fn access(&self) -> Access<'a> {
        let (reads, writes, in_place) = match *self {
            Op::Fill { out, .. } => (vec![], vec![out], vec![]),
            Op::Cast { x, out, .. } => (vec![x], vec![out], vec![]),
            Op::Add { a, b, out } => (vec![a, b], vec![out], vec![(out, a), (out, b)]),
            Op::Scale { x, .. } => (vec![x], vec![x], vec![(x, x)]),
            Op::Dropout { x, out, .. } => (vec![x], vec![out], vec![(out, x)]),
            Op::Embedding { tokens, table, out } => (vec![tokens, table], vec![out], vec![]),
            Op::EmbeddingBackward { tokens, dout, dtable, .. } => (vec![tokens, dout], vec![dtable], vec![]),
            Op::RmsNorm { x, weight, out, rstd, .. } => (vec![x, weight], vec![out, rstd], vec![]),
            Op::RmsNormBackward { x, weight, rstd, dout, dx, dweight, .. } => {
                (vec![x, weight, rstd, dout], [dx].into_iter().chain(dweight).collect(), vec![])
            }
            Op::LayerNorm { x, weight, bias, out, mean, rstd, .. } => {
                (vec![x, weight, bias], vec![out, mean, rstd], vec![])
            }
            Op::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, .. } => {
                let writes = [dx].into_iter().chain(dweight).chain(dbias).collect();
                (vec![x, weight, mean, rstd, dout], writes, vec![])
            }
            Op::Linear { x, weight, bias, out, .. } => {
                (vec![x, weight].into_iter().chain(bias).collect(), vec![out], vec![])
            }
            Op::LinearBackwardInput { dout, weight, dx, .. } => (vec![dout, weight], vec![dx], vec![]),
            Op::LinearBackwardWeight { dout, x, dweight, .. } => (vec![dout, x], vec![dweight], vec![]),
            Op::BiasBackward { dout, dbias, .. } => (vec![dout], vec![dbias], vec![]),
            Op::Rope { x, positions, cos, sin, .. } => (vec![x, positions, cos, sin], vec![x], vec![(x, x)]),
            Op::WriteCache { x, cache, .. } => (vec![x], vec![cache], vec![]),
            Op::Attention { q, k, v, documents, out, lse, probabilities, .. } => {
                let reads = [q, k, v].into_iter().chain(documents).collect();
                (reads, [out, lse].into_iter().chain(probabilities).collect(), vec![])
            }
            Op::AttentionBackward {
                q,
                k,
                v,
                documents,
                out,
                lse,
                probabilities,
                dout,
                delta,
                sums,
                dq,
                dk,
                dv,
                ..
            } => {
                let reads = [q, k, v, out, lse, dout].into_iter().chain(documents).chain(probabilities);
                let writes = [delta, dq, dk, dv].into_iter().chain(sums).collect();
                (reads.collect(), writes, vec![])
            }
            Op::Gated { gate, up, out, .. } => (vec![gate, up], vec![out], vec![(out, gate), (out, up)]),
            Op::GatedBackward { gate, up, dout, dgate, dup, .. } => (
                vec![gate, up, dout],
                vec![dgate, dup],
                vec![(dgate, gate), (dup, up), (dgate, dout), (dup, dout)],
            ),
            Op::Activate { x, out, .. } => (vec![x], vec![out], vec![(out, x)]),
            Op::ActivateBackward { x, dout, dx, .. } => (vec![x, dout], vec![dx], vec![(dx, x), (dx, dout)]),
            Op::CrossEntropy { logits, targets, weights, losses, .. } => {
                let reads = [logits, targets].into_iter().chain(weights).collect();
                (reads, vec![logits, losses], vec![(logits, logits)])
            }
            Op::LogitRuns { logits, targets, runs, target_logits, .. } => {
                (vec![logits, targets], vec![runs, target_logits], vec![])
            }
            Op::LossOfRuns { runs, target_logits, targets, weights, losses } => {
                let reads = [runs, target_logits, targets].into_iter().chain(weights).collect();
                (reads, vec![losses], vec![])
            }
            Op::GradientOfRuns { logits, targets, weights, runs, .. } => {
                let reads = [logits, targets, runs].into_iter().chain(weights).collect();
                (reads, vec![logits], vec![(logits, logits)])
            }
            Op::RowSquares { x, out } => (vec![x], vec![out], vec![]),
            Op::RowLengths { squares, cross, gram, b, lengths, .. } => {
                (vec![squares, cross, gram, b], vec![lengths], vec![])
            }
            Op::ScaleColumns { x, factors, divisors, bias, out, .. } => {
                let reads = [x, factors].into_iter().chain(divisors).chain(bias).collect();
                (reads, vec![out], vec![])
            }
            Op::ColumnDots { a, b, divisors, out, .. } => (vec![a, b, divisors], vec![out], vec![]),
            Op::QuantizeInt8 { x, codes, scales, .. } => (vec![x], vec![codes, scales], vec![]),
            Op::DequantizeInt8 { codes, scales, out, .. } => (vec![codes, scales], vec![out], vec![]),
            Op::QuantizeFp8 { x, out } => (vec![x], vec![out], vec![]),
            Op::SumSquares { x, out } => (vec![x], vec![out], vec![]),
            Op::Update(update) => return update.access(),
            Op::AdamDirection { grad, m, v, out, .. } => {
                (vec![grad, m, v], vec![m, v, out], vec![(m, m), (v, v), (out, grad)])
            }
            Op::NormRatios { a, b, out, .. } => (vec![a, b], vec![out], vec![]),
            Op::RandomNormal { out, .. } => (vec![], vec![out], vec![]),
            Op::Orthonormalize { x } => (vec![x], vec![x], vec![(x, x)]),
            Op::Eigenvectors { matrix, vectors, out } => {
                (vec![matrix], vec![matrix, vectors, out], vec![(matrix, matrix)])
            }
        };
        Access { reads, writes, in_place }
    }

    /// Refuses tensors of another arena, of wrong types or shapes, and outputs that overlap what they must not.
    pub fn check(&self, arena: &Arena) -> Result<(), DeviceError> {
        let fail = |reason: String| Err(DeviceError::Mismatch { op: self.name(), reason });
        let access = self.access();
        for tensor in access.reads.iter().chain(&access.writes) {
            if !tensor.is_in(arena) {
                return fail(format!("{tensor:?} belongs to another arena"));
            }
        }
        for (i, out) in access.writes.iter().enumerate() {
            if let Some(twin) = access.writes[i + 1..].iter().find(|other| out.overlaps(other)) {
                return fail(format!("outputs {out:?} and {twin:?} overlap"));
            }
            for read in &access.reads {
                let allowed = out.same_memory(read)
                    && access.in_place.iter().any(|(w, r)| w.same_memory(out) && r.same_memory(read));
                if out.overlaps(read) && !allowed {
                    return fail(format!("output {out:?} overlaps input {read:?}"));
                }
            }
        }
        match self.mismatch() {
            Some(reason) => fail(reason),
            None => Ok(()),
        }
    }

    /// The first thing about types and shapes that does not fit.
    fn mismatch(&self) -> Option<String> {
        let mut check = Mismatch(None);
        match *self {
            Op::Fill { out, .. } => check.float(out),
            Op::Cast { x, out, .. } => {
                check.same_size(x, out);
                let u32s = [x, out].map(|t| t.dtype() == DType::U32);
                check.that(u32s[0] == u32s[1], || format!("{x:?} and {out:?}: u32 casts only to itself"));
                let codes = |t: &Tensor| !t.dtype().is_float() && t.dtype() != DType::U32;
                check.that(!codes(x) && !codes(out), || format!("{x:?} to {out:?}: codes are not cast"));
            }
            Op::Add { a, b, out } => {
                [a, b, out].into_iter().for_each(|t| check.float(t));
                check.same_size(a, out);
                check.same_size(b, out);
            }
            Op::Scale { x, .. } => check.float(x),
            Op::Dropout { x, out, probability, .. } => {
                [x, out].into_iter().for_each(|t| check.float(t));
                check.same_size(x, out);
                check.that((0.0..1.0).contains(&probability), || {
                    format!("{probability} is no probability below 1")
                });
            }
            Op::Embedding { tokens, table, out } => {
                check.u32(tokens);
                check.table(table);
                check.float(out);
                check.size(out, tokens.elements(), table.columns());
            }
            Op::EmbeddingBackward { tokens, dout: rows, dtable: table, first_row, .. } => {
                check.u32(tokens);
                let tokens_end = u64::from(u32::MAX) + 1;
                check.that(first_row.checked_add(table.rows()).is_some_and(|end| end <= tokens_end), || {
                    format!("{table:?}: from row {first_row} on there are rows that no token can have")
                });
                [table, rows].into_iter().for_each(|t| check.float(t));
                check.size(rows, tokens.elements(), table.columns());
            }
            Op::RmsNorm { x, weight, out, rstd, .. } => {
                [x, weight, out].into_iter().for_each(|t| check.float(t));
                check.same_size(x, out);
                check.vector(weight, x.columns());
                check.f32_vector(rstd, x.rows());
            }
            Op::RmsNormBackward { x, weight, rstd, dout, dx, dweight, .. } => {
                [x, weight, dout, dx].into_iter().chain(dweight).for_each(|t| check.float(t));
                check.same_size(x, dout);
                check.same_size(x, dx);
                [weight].into_iter().chain(dweight).for_each(|t| check.vector(t, x.columns()));
                check.f32_vector(rstd, x.rows());
            }
            Op::LayerNorm { x, weight, bias, out, mean, rstd, .. } => {
                [x, weight, bias, out].into_iter().for_each(|t| check.float(t));
                check.same_size(x, out);
                [weight, bias].into_iter().for_each(|t| check.vector(t, x.columns()));
                [mean, rstd].into_iter().for_each(|t| check.f32_vector(t, x.rows()));
            }
            Op::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, .. } => {
                let gradients = || dweight.into_iter().chain(dbias);
                [x, weight, dout, dx].into_iter().chain(gradients()).for_each(|t| check.float(t));
                check.same_size(x, dout);
                check.same_size(x, dx);
                [weight].into_iter().chain(gradients()).for_each(|t| check.vector(t, x.columns()));
                [mean, rstd].into_iter().for_each(|t| check.f32_vector(t, x.rows()));
            }
            Op::Linear { x, weight, bias, out, .. } => {
                check.operand(x);
                check.float(out);
                check.weight(weight);
                check.linear(x, weight, out);
                if let Some(bias) = bias {
                    check.float(bias);
                    check.vector(bias, weight.rows());
                }
            }
            Op::LinearBackwardInput { dout, weight, dx, .. } => {
                check.operand(dout);
                check.float(dx);
                check.weight(weight);
                check.linear(dx, weight, dout);
            }
            Op::LinearBackwardWeight { dout, x, dweight, .. } => {
                [dout, x].into_iter().for_each(|t| check.operand(t));
                check.float(dweight);
                check.linear(x, dweight, dout);
            }
            Op::RowSquares { x, out } => {
                check.weight(x);
                check.f32_vector(out, x.rows());
            }
            Op::RowLengths { squares, cross, gram, b, lengths, .. } => {
                [cross, gram, b].into_iter().for_each(|t| check.f32(t));
                [squares, lengths].into_iter().for_each(|t| check.f32_vector(t, b.rows()));
                check.size(cross, b.columns(), b.rows());
                check.size(gram, b.columns(), b.columns());
            }
            Op::ScaleColumns { x, factors, divisors, bias, out, .. } => {
                [x, out].into_iter().chain(bias).for_each(|t| check.float(t));
                check.same_size(x, out);
                [factors].into_iter().chain(divisors).for_each(|t| check.f32_vector(t, x.columns()));
                bias.into_iter().for_each(|t| check.vector(t, x.columns()));
            }
            Op::ColumnDots { a, b, divisors, out, .. } => {
                [a, b, out].into_iter().for_each(|t| check.float(t));
                check.same_size(a, b);
                check.f32_vector(divisors, a.columns());
                check.vector(out, a.columns());
            }
            Op::BiasBackward { dout, dbias, .. } => {
                [dout, dbias].into_iter().for_each(|t| check.float(t));
                check.vector(dbias, dout.columns());
            }
            Op::Rope { x, positions, cos, sin, head_dim, .. } => {
                check.float(x);
                check.u32(positions);
                check.vector(positions, x.rows());
                check.same_size(cos, sin);
                [cos, sin].into_iter().for_each(|t| check.f32(t));
                check.that(head_dim > 0 && x.columns().is_multiple_of(head_dim), || {
                    format!("{x:?} is not whole heads of {head_dim}")
                });
                check.that(2 * cos.columns() <= head_dim, || {
                    format!("{cos:?} has more pairs than a head of {head_dim}")
                });
            }
            Op::WriteCache { x, cache, head_dim, .. } => {
                check.float(x);
                check.cached(cache);
                check.that(head_dim > 0 && x.columns().is_multiple_of(head_dim), || {
                    format!("{x:?} is not whole heads of {head_dim}")
                });
                check.that(x.rows() <= cache.rows(), || format!("{x:?} has more rows than {cache:?}"));
                let heads = x.columns() / head_dim.max(1);
                check.size(cache, cache.rows(), heads * cached_columns(cache, head_dim));
            }
            Op::Attention { q, k, v, documents, out, lse, probabilities, shape, .. } => {
                check.masks(documents, probabilities, shape);
                [q, out].into_iter().for_each(|t| check.float(t));
                [k, v].into_iter().for_each(|t| check.cached(t));
                check.attention(q, k, v, shape);
                check.same_size(q, out);
                check.f32_vector(lse, shape.batch * shape.heads * shape.q_len);
            }
            Op::AttentionBackward {
                q,
                k,
                v,
                documents,
                out,
                lse,
                probabilities,
                dout,
                delta,
                sums,
                dq,
                dk,
                dv,
                shape,
                ..
            } => {
                check.masks(documents, probabilities, shape);
                [q, k, v, out, dout, dq, dk, dv].into_iter().for_each(|t| check.float(t));
                check.attention(q, k, v, shape);
                check.same_size(k, v);
                [out, dout, dq].into_iter().for_each(|t| check.same_size(q, t));
                [dk, dv].into_iter().for_each(|t| check.same_size(k, t));
                [lse, delta]
                    .into_iter()
                    .for_each(|t| check.f32_vector(t, shape.batch * shape.heads * shape.q_len));
                match sums {
                    Some(sums) => check.f32_vector(sums, dq.elements() + dk.elements() + dv.elements()),
                    None => check.that([dq, dk, dv].iter().all(|t| t.dtype() == DType::F32), || {
                        "gradients that are not f32 need sums".to_owned()
                    }),
                }
                check.that(shape.kv_len == shape.q_len && shape.kv_capacity == shape.q_len, || {
                    format!("{shape:?}: the backward pass takes whole sequences")
                });
            }
            Op::Gated { gate, up, out, .. } => {
                [gate, up, out].into_iter().for_each(|t| check.float(t));
                [up, out].into_iter().for_each(|t| check.same_size(gate, t));
            }
            Op::GatedBackward { gate, up, dout, dgate, dup, .. } => {
                [gate, up, dout, dgate, dup].into_iter().for_each(|t| check.float(t));
                [up, dout, dgate, dup].into_iter().for_each(|t| check.same_size(gate, t));
            }
            Op::Activate { x, out, .. } => {
                [x, out].into_iter().for_each(|t| check.float(t));
                check.same_size(x, out);
            }
            Op::ActivateBackward { x, dout, dx, .. } => {
                [x, dout, dx].into_iter().for_each(|t| check.float(t));
                [dout, dx].into_iter().for_each(|t| check.same_size(x, t));
            }
            Op::CrossEntropy { logits, targets, weights, losses, .. } => {
                check.f32(logits);
                check.u32(targets);
                check.vector(targets, logits.rows());
                weights.into_iter().for_each(|w| check.f32_vector(w, logits.rows()));
                check.f32_vector(losses, logits.rows());
            }
            Op::LogitRuns { logits, first_column, targets, runs, target_logits, .. } => {
                check.runs(runs, targets);
                check.piece_of_logits(logits, first_column, runs);
                check.f32_vector(target_logits, runs.rows());
            }
            Op::LossOfRuns { runs, target_logits, targets, weights, losses } => {
                check.runs(runs, targets);
                [target_logits, losses]
                    .into_iter()
                    .chain(weights)
                    .for_each(|t| check.f32_vector(t, runs.rows()));
            }
            Op::GradientOfRuns { logits, first_column, targets, weights, runs, .. } => {
                check.runs(runs, targets);
                check.piece_of_logits(logits, first_column, runs);
                weights.into_iter().for_each(|w| check.f32_vector(w, runs.rows()));
            }
            Op::QuantizeInt8 { x, codes, scales, block }
            | Op::DequantizeInt8 { out: x, codes, scales, block } => {
                check.float(x);
                check.that(codes.dtype() == DType::I8, || format!("{codes:?} is not i8"));
                check.same_size(x, codes);
                check.that(block > 0, || "runs of no elements".to_owned());
                check.f32_vector(scales, x.elements().div_ceil(block.max(1)));
            }
            Op::QuantizeFp8 { x, out } => {
                check.float(x);
                check.that(out.dtype().is_fp8(), || format!("{out:?} is not e4m3 or e5m2"));
                check.same_size(x, out);
            }
            Op::SumSquares { x, out } => {
                check.float(x);
                check.f32_vector(out, 1);
            }
            Op::Update(ref update) => update.check(&mut check),
            Op::AdamDirection { grad, m, v, out, .. } => {
                [grad, m, v, out].into_iter().for_each(|t| check.f32(t));
                [m, v, out].into_iter().for_each(|t| check.same_size(grad, t));
            }
            Op::NormRatios { a, b, out, channels, .. } => {
                [a, b].into_iter().for_each(|t| check.f32(t));
                check.same_size(a, b);
                check.f32_vector(out, channels.count(a));
            }
            Op::RandomNormal { out: x, .. } | Op::Orthonormalize { x } => check.f32(x),
            Op::Eigenvectors { matrix, vectors, out } => {
                let n = matrix.rows();
                [matrix, vectors, out].into_iter().for_each(|t| check.f32(t));
                [matrix, vectors].into_iter().for_each(|t| check.size(t, n, n));
                check.that(out.rows() == n && out.columns() <= n, || {
                    format!("{out:?} is not columns of {matrix:?}")
                });
            }
        }
        check.0
    }
}

/// Collects the first complaint.
pub(crate) struct Mismatch(Option<String>);

impl Mismatch {
    pub(crate) fn that(&mut self, holds: bool, complaint: impl FnOnce() -> String) {
        if !holds && self.0.is_none() {
            self.0 = Some(complaint());
        }
    }

    pub(crate) fn float(&mut self, t: &Tensor) {
        self.that(t.dtype().is_float(), || format!("{t:?} is not f32, bf16 or f16"));
    }

    /// What a product multiplies beside a weight.
    fn operand(&mut self, t: &Tensor) {
        self.that(t.dtype().is_float() || t.dtype().is_fp8(), || {
            format!("{t:?} is not f32, bf16, f16, e4m3 or e5m2")
        });
    }

    fn weight(&mut self, t: &Tensor) {
        self.that(t.dtype().is_weight() || t.dtype().is_fp8(), || format!("{t:?} is no weight"));
        let block = t.dtype().row_multiple();
        self.that(t.columns().is_multiple_of(block), || {
            format!("{t:?}: rows are not whole blocks of {block}")
        });
    }

    /// A weight whose rows are read one by one.
    fn table(&mut self, t: &Tensor) {
        self.weight(t);
        let rows = t.dtype().has_rows() && t.columns().is_multiple_of(t.dtype().block_elements());
        self.that(rows, || format!("{t:?}: rows cannot be read one by one"));
    }

    pub(crate) fn f32(&mut self, t: &Tensor) {
        self.that(t.dtype() == DType::F32, || format!("{t:?} is not f32"));
    }

    fn u32(&mut self, t: &Tensor) {
        self.that(t.dtype() == DType::U32, || format!("{t:?} is not u32"));
    }

    pub(crate) fn same_size(&mut self, a: &Tensor, b: &Tensor) {
        let same = a.elements() == b.elements() && a.columns() == b.columns();
        self.that(same, || format!("{a:?} and {b:?} differ in shape"));
    }

    fn size(&mut self, t: &Tensor, rows: u64, columns: u64) {
        self.that(t.rows() == rows && t.columns() == columns, || format!("{t:?} is not [{rows}, {columns}]"));
    }

    fn vector(&mut self, t: &Tensor, n: u64) {
        self.that(t.elements() == n, || format!("{t:?} does not have {n} elements"));
    }

    pub(crate) fn f32_vector(&mut self, t: &Tensor, n: u64) {
        self.f32(t);
        self.vector(t, n);
    }

    fn linear(&mut self, x: &Tensor, weight: &Tensor, out: &Tensor) {
        let fits =
            x.columns() == weight.columns() && out.columns() == weight.rows() && x.rows() == out.rows();
        self.that(fits, || format!("{x:?} times {weight:?} does not give {out:?}"));
    }

    /// Runs of whole rows of logits, and the rows' targets.
    fn runs(&mut self, runs: &Tensor, targets: &Tensor) {
        self.f32(runs);
        self.that(runs.columns() > 0 && runs.columns().is_multiple_of(2), || {
            format!("{runs:?} is not pairs of largest logits and sums")
        });
        self.u32(targets);
        self.vector(targets, runs.rows());
    }

    /// Some columns of the logits that `runs` are of: whole runs, or up to the last column.
    fn piece_of_logits(&mut self, logits: &Tensor, first_column: u64, runs: &Tensor) {
        self.f32(logits);
        let piece = logits.columns();
        self.that(logits.rows() == runs.rows(), || format!("{logits:?} and {runs:?} differ in rows"));
        let fits = first_column.is_multiple_of(PIECE_ROWS)
            && match (first_column / PIECE_ROWS + piece.div_ceil(PIECE_ROWS)).cmp(&(runs.columns() / 2)) {
                Ordering::Less => piece.is_multiple_of(PIECE_ROWS),
                Ordering::Equal => true,
                Ordering::Greater => false,
            };
        self.that(fits, || {
            format!("{logits:?} from column {first_column} on is not whole runs of {PIECE_ROWS} of those of {runs:?}")
        });
    }

    fn attention(&mut self, q: &Tensor, k: &Tensor, v: &Tensor, shape: AttentionShape) {
        self.that(
            shape.kv_heads > 0
                && shape.heads.is_multiple_of(shape.kv_heads)
                && shape.q_len <= shape.kv_len
                && shape.kv_len - shape.first_seen() <= shape.kv_capacity
                && shape.window != Some(0)
                && shape.block_sparse.is_none_or(|sparse| sparse.block > 0 && sparse.local_blocks > 0)
                && shape.soft_cap.is_none_or(|cap| cap > 0.0),
            || format!("{shape:?} is impossible"),
        );
        self.size(q, shape.batch * shape.q_len, shape.heads * shape.head_dim);
        for cached in [k, v] {
            let columns = shape.kv_heads * cached_columns(cached, shape.head_dim);
            self.size(cached, shape.batch * shape.kv_capacity, columns);
        }
    }

    fn masks(&mut self, documents: Option<&Tensor>, probabilities: Option<&Tensor>, shape: AttentionShape) {
        if let Some(documents) = documents {
            self.u32(documents);
            self.vector(documents, shape.batch * shape.q_len);
        }
        if let Some(probabilities) = probabilities {
            self.f32_vector(probabilities, shape.batch * shape.heads * shape.q_len * shape.kv_len);
        }
    }

    fn cached(&mut self, t: &Tensor) {
        self.that(t.dtype().is_cache(), || format!("{t:?} is of no type for keys and values"));
    }
}

/// Elements of a head of `head_dim` in a cache: whole blocks.
fn cached_columns(cache: &Tensor, head_dim: u64) -> u64 {
    cache.dtype().cached_columns(head_dim)
}
