//! What an operation reads and writes, which tensors it refuses and what it needs beside the arena: how families describe
//! their operations.

use plimsoll_memory::Arena;
use smallvec::SmallVec;

use crate::cost::product_of;
use crate::op::{MAX_PARTIAL_COLUMNS, RowPieces, Workspace, task_elements};
use crate::{Cost, DType, Tensor};

/// As many tensors as nearly every operation has.
type Few<T> = SmallVec<[T; 8]>;

/// An operation, described. The checks that follow each other are made in their order; the first that fails counts. In a box, as it is
/// handed from each to the next.
pub(crate) struct Description<'a>(Box<Described<'a>>);

struct Described<'a> {
    name: &'static str,
    reads: Few<&'a Tensor>,
    writes: Few<&'a Tensor>,
    /// Pairs (write, read) that may be the same memory.
    in_place: Few<(&'a Tensor, &'a Tensor)>,
    mismatch: Option<String>,
    /// Memory beside the arena.
    workspace: Workspace,
}

/// Which tensors an operation uses, and how.
impl<'a> Description<'a> {
    /// An operation that reads the first tensors and writes the others.
    pub fn new<const R: usize, const W: usize>(
        name: &'static str,
        reads: [&'a Tensor; R],
        writes: [&'a Tensor; W],
    ) -> Description<'a> {
        let (reads, writes) = (Few::from_slice(&reads), Few::from_slice(&writes));
        Description(Box::new(Described {
            name,
            reads,
            writes,
            in_place: Few::new(),
            mismatch: None,
            workspace: Workspace::default(),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// The memory beside the arena that it needs.
    pub fn workspace(&self) -> Workspace {
        self.0.workspace
    }

    /// Reads these too.
    pub fn reading(mut self, more: impl IntoIterator<Item = &'a Tensor>) -> Self {
        self.0.reads.extend(more);
        self
    }

    /// Writes these too.
    pub fn writing(mut self, more: impl IntoIterator<Item = &'a Tensor>) -> Self {
        self.0.writes.extend(more);
        self
    }

    /// Reads and writes these too.
    pub fn changing(mut self, more: impl IntoIterator<Item = &'a Tensor>) -> Self {
        for tensor in more {
            self.0.reads.push(tensor);
            self.0.writes.push(tensor);
            self.0.in_place.push((tensor, tensor));
        }
        self
    }

    /// Lets each output be the same memory as its input.
    pub fn in_place<const P: usize>(mut self, pairs: [(&'a Tensor, &'a Tensor); P]) -> Self {
        self.0.in_place.extend(pairs);
        self
    }

    /// What reading and writing all of its tensors once costs.
    pub fn once(&self) -> Cost {
        let narrow = |tensor: &&Tensor| matches!(tensor.dtype(), DType::Bf16 | DType::F16);
        Cost {
            bytes: self.tensors().map(Tensor::bytes).sum(),
            conversions: self.tensors().filter(narrow).map(Tensor::elements).sum(),
            ..Cost::default()
        }
    }

    pub fn tensors(&self) -> impl Iterator<Item = &'a Tensor> {
        self.0.reads.iter().chain(&self.0.writes).copied()
    }

    /// Why the operation cannot be carried out in the arena, if so.
    pub fn refusal(&mut self, arena: &Arena) -> Option<String> {
        if let Some(tensor) = self.tensors().find(|tensor| !tensor.is_in(arena)) {
            return Some(format!("{tensor:?} belongs to another arena"));
        }
        for (i, out) in self.0.writes.iter().enumerate() {
            if let Some(twin) = self.0.writes[i + 1..].iter().find(|other| out.overlaps(other)) {
                return Some(format!("outputs {out:?} and {twin:?} overlap"));
            }
            for read in &self.0.reads {
                let allowed = || {
                    let is_pair = |(w, r): &(&Tensor, &Tensor)| w.same_memory(out) && r.same_memory(read);
                    out.same_memory(read) && self.0.in_place.iter().any(is_pair)
                };
                if out.overlaps(read) && !allowed() {
                    return Some(format!("output {out:?} overlaps input {read:?}"));
                }
            }
        }
        self.0.mismatch.take()
    }
}

/// Which types and shapes fit.
impl Description<'_> {
    pub fn that(mut self, holds: bool, complaint: impl FnOnce() -> String) -> Self {
        if !holds && self.0.mismatch.is_none() {
            self.0.mismatch = Some(complaint());
        }
        self
    }

    /// What holds for each of the tensors.
    pub fn each<'t>(
        self,
        tensors: impl IntoIterator<Item = &'t Tensor>,
        check: impl Fn(Self, &'t Tensor) -> Self,
    ) -> Self {
        tensors.into_iter().fold(self, check)
    }

    pub fn floats<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>) -> Self {
        self.each(tensors, |op, t| op.that(t.dtype().is_float(), || format!("{t:?} is not f32, bf16 or f16")))
    }

    pub fn f32s<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>) -> Self {
        self.each(tensors, |op, t| op.that(t.dtype() == DType::F32, || format!("{t:?} is not f32")))
    }

    pub fn u32(self, t: &Tensor) -> Self {
        self.that(t.dtype() == DType::U32, || format!("{t:?} is not u32"))
    }

    /// A weight in any storage that products read.
    pub fn weight(self, t: &Tensor) -> Self {
        let block = t.dtype().row_multiple();
        self.that(t.dtype().is_weight() || t.dtype().is_fp8(), || format!("{t:?} is no weight"))
            .that(t.columns().is_multiple_of(block), || {
                format!("{t:?}: rows are not whole blocks of {block}")
            })
    }

    /// All are of the first's size.
    pub fn same_size<'t>(self, first: &Tensor, others: impl IntoIterator<Item = &'t Tensor>) -> Self {
        self.each(others, |op, t| {
            let same = first.elements() == t.elements() && first.columns() == t.columns();
            op.that(same, || format!("{first:?} and {t:?} differ in shape"))
        })
    }

    pub fn size(self, t: &Tensor, rows: u64, columns: u64) -> Self {
        self.that(t.rows() == rows && t.columns() == columns, || format!("{t:?} is not [{rows}, {columns}]"))
    }

    pub fn vectors<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>, n: u64) -> Self {
        self.each(tensors, |op, t| op.that(t.elements() == n, || format!("{t:?} does not have {n} elements")))
    }

    pub fn f32_vectors<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>, n: u64) -> Self {
        self.each(tensors, |op, t| op.f32s([t]).vectors([t], n))
    }

    pub fn u32_vector(self, t: &Tensor, n: u64) -> Self {
        self.u32(t).vectors([t], n)
    }

    /// Whole heads beside each other.
    pub fn heads(self, x: &Tensor, head_dim: u64) -> Self {
        self.that(head_dim > 0 && x.columns().is_multiple_of(head_dim), || {
            format!("{x:?} is not whole heads of {head_dim}")
        })
    }
}

/// Which memory beside the arena is needed. What cannot do with less than there is refuses; what can takes turns.
impl Description<'_> {
    /// So many bytes for all tasks together, or all that there are.
    pub fn shared(mut self, bytes: u64) -> Self {
        self.0.workspace.shared = self.0.workspace.shared.max(bytes.min(Workspace::MOST.shared));
        self
    }

    /// `count` f32 sums over `rows` rows for each element of `row`.
    pub fn row_sums(self, rows: u64, row: &Tensor, count: u64) -> Self {
        let (columns, most) = (row.elements(), MAX_PARTIAL_COLUMNS as u64 / count);
        self.sums_of_pieces(rows, count.saturating_mul(columns))
            .that(columns <= most, || format!("{row:?} has more than {most} columns"))
    }

    /// So many f32 sums for each piece of `rows` rows. A group of rows has no more rows, and no more pieces of them.
    pub fn sums_of_pieces(self, rows: u64, sums: u64) -> Self {
        let pieces = RowPieces::new(rows as usize, sums as usize).count as u64;
        self.shared(product_of(&[pieces, sums, size_of::<f32>() as u64]))
    }

    /// An f64 sum for each task of whole rows of `columns` elements of `t`.
    pub fn task_sums(self, t: &Tensor, columns: u64) -> Self {
        let tasks = t.elements().div_ceil(task_elements(columns as usize) as u64);
        self.shared(tasks.saturating_mul(size_of::<f64>() as u64))
    }

    /// `bytes` for each task, for every `run` of columns of a row.
    pub fn each_task(mut self, row: &Tensor, run: u64, bytes: u64) -> Self {
        self.0.workspace.each_task = row.columns().div_ceil(run) * bytes;
        let most = Workspace::MOST.each_task / bytes * run;
        self.that(row.columns() <= most, || format!("{row:?} has more than {most} columns"))
    }
}
