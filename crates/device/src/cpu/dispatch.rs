//! From operations on tensors to kernels on slices.

use std::cell::RefCell;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_memory::{Arena, Region, Reservation, Tier};

use super::kernels::column_sums::MAX_PARTIAL_COLUMNS;
use super::kernels::cross_entropy::Labels;
use super::kernels::rms_norm::Weight;
use super::kernels::rope::Angles;
use super::kernels::{
    Exec, Simd, activation, attention, cache, cast, column_sums, cross_entropy, dora, dropout, elementwise,
    embedding, fp8, int8, layer_norm, random, rms_norm, rope, subspace, sum_squares, update,
};
use super::slices::Slices;
use super::{Isa, Pool, matmul, optimizer};
use crate::{Compute, DType, Device, DeviceError, IGNORED_TARGET, Lent, Op, PIECE_ROWS, Tensor};

/// Bytes for partial sums and sort keys: what kernels need beside the arena and the threads' scratch.
const WORKSPACE_BYTES: usize = MAX_PARTIAL_COLUMNS * size_of::<f32>();

/// How a [`Cpu`] is to work. The default is all cores and the best instructions.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the caller's included; all cores where `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best there is where `None`, or where the machine lacks the one given.
    pub isa: Option<Isa>,
}

/// The CPU as a device: an arena in RAM and threads to compute.
///
/// One thread at a time may use it: it is not `Sync`.
pub struct Cpu {
    arena: Arena,
    memory: RefCell<Memory>,
    pool: Arc<Pool>,
    simd: Simd,
}

/// Borrowed to read by [`Device::read`], to write by all else, so that no slice lent out is written beside.
struct Memory {
    /// Behind the arena. Regions of it may be lent to other threads; no tensor is a view of them then.
    arena: Arc<Reservation>,
    workspace: Reservation,
}

impl Cpu {
    /// A device with an arena of `arena_bytes` and threads of its own.
    pub fn new(arena_bytes: u64, options: CpuOptions) -> Result<Cpu, DeviceError> {
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = options.threads.unwrap_or_else(cores);
        let pool = Pool::new(threads, Cpu::SCRATCH_BYTES)?;
        Cpu::with_pool(Arc::new(pool), options.isa.unwrap_or_else(Isa::detect), arena_bytes)
    }

    /// A device that shares its threads with others. The pool's scratch must be of [`Cpu::SCRATCH_BYTES`] at least.
    pub fn with_pool(pool: Arc<Pool>, isa: Isa, arena_bytes: u64) -> Result<Cpu, DeviceError> {
        let memory = Memory {
            arena: Arc::new(Reservation::new(arena_bytes)?),
            workspace: Reservation::new(WORKSPACE_BYTES as u64)?,
        };
        let arena = Arena::new(Tier::Device, arena_bytes);
        Ok(Cpu { arena, memory: RefCell::new(memory), pool, simd: Simd::new(isa) })
    }

    /// Scratch that each thread of a shared pool needs, in bytes.
    pub const SCRATCH_BYTES: usize = attention::SCRATCH_BYTES;

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.simd.isa()
    }

    /// The pool, to share with another device.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The tensor's place in memory, or an error where it belongs to another arena.
    fn place(
        &self,
        tensor: &Tensor,
        op: &'static str,
        memory: &Memory,
    ) -> Result<(*mut u8, usize), DeviceError> {
        if !tensor.is_in(&self.arena) {
            return Err(DeviceError::Mismatch { op, reason: format!("{tensor:?} belongs to another arena") });
        }
        let range = tensor.range();
        Ok((memory.arena.as_ptr().wrapping_add(range.start as usize), (range.end - range.start) as usize))
    }
}

/// The device's memory is lent to a closure that asks for more of it.
fn lent(op: &'static str) -> DeviceError {
    DeviceError::Mismatch { op, reason: "called from inside this device's `read` or `write`".to_owned() }
}

impl Device for Cpu {
    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn run(&self, op: Op<'_>) -> Result<(), DeviceError> {
        op.check(&self.arena)?;
        let mut memory = self.memory.try_borrow_mut().map_err(|_| lent(op.name()))?;
        let memory = &mut *memory;
        // SAFETY: the reservation is as large as the arena, aligned to 2 MiB, and borrowed until the end of this
        // function; what is lent of it belongs to no tensor. `check` has found every tensor in the arena and no output overlapping another tensor, but for
        // what may be in place: there the kernel is given the output alone, by `Slices::input` or as its only operand.
        let slices = unsafe { Slices::new(memory.arena.as_ptr()) };
        // SAFETY: the workspace is as long, aligned to 2 MiB, borrowed as above and used by nothing else.
        let workspace: &mut [u64] = unsafe {
            std::slice::from_raw_parts_mut(
                memory.workspace.as_ptr().cast(),
                WORKSPACE_BYTES / size_of::<u64>(),
            )
        };
        self.compute(op, slices, workspace)
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let memory = self.memory.try_borrow_mut().map_err(|_| lent("write"))?;
        let (start, bytes) = self.place(out, "write", &memory)?;
        // SAFETY: the tensor lies in the arena behind which the reservation stands, and the mutable borrow keeps
        // every other use of it away.
        fill(unsafe { std::slice::from_raw_parts_mut(start, bytes) });
        Ok(())
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let memory = self.memory.try_borrow().map_err(|_| lent("read"))?;
        let (start, bytes) = self.place(x, "read", &memory)?;
        // SAFETY: as in `write`; the borrow keeps writers away.
        look(unsafe { std::slice::from_raw_parts(start, bytes) });
        Ok(())
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        let refuse = |reason: String| DeviceError::Mismatch { op: "lend", reason };
        let block = tensor.into_lent_block(&self.arena)?;
        // A borrow that is out keeps pointers into the arena alive, though not to this tensor, which is moved in here.
        let memory = self.memory.try_borrow_mut().map_err(|_| lent("lend"))?;
        // SAFETY: the block is of the arena that the reservation stands behind. No tensor is a view of it, as this
        // handle of it is the only one, so that no operation can be asked to access its bytes until it is reclaimed.
        let region = unsafe { Region::of_block(Arc::clone(&memory.arena), block) };
        region.map(Lent::Memory).ok_or_else(|| refuse("the block lies outside the arena's memory".to_owned()))
    }

    fn reclaim(&self, memory: Region) -> Result<Tensor, DeviceError> {
        let refuse = |reason: &str| DeviceError::Mismatch { op: "reclaim", reason: reason.to_owned() };
        let block = memory.into_block(&self.arena).map_err(|_| {
            refuse("the memory is not of this device's arena, or parts of it are still elsewhere")
        })?;
        Tensor::of_block(block).ok_or_else(|| refuse("a block of that size cannot be"))
    }
}

impl Cpu {
    /// Calls the operation's kernel. The operation has been checked.
    fn compute(&self, op: Op<'_>, t: Slices<'_>, workspace: &mut [u64]) -> Result<(), DeviceError> {
        let exec = Exec { pool: &self.pool, simd: self.simd };
        let name = op.name();
        match op {
            Op::Fill { out, value } => elementwise::fill(exec, t.floats_mut(out), value),
            Op::Cast { x, out, .. } if x.dtype() == DType::U32 => {
                cast::copy_u32(exec, t.u32s(x), t.u32s_mut(out))
            }
            Op::Cast { x, out, rounding } => cast::cast(exec, t.floats(x), t.floats_mut(out), rounding),
            Op::Add { a, b, out } => {
                elementwise::add(exec, t.input(a, &[out]), t.input(b, &[out]), t.floats_mut(out));
            }
            Op::Scale { x, factor } => elementwise::scale(exec, t.floats_mut(x), factor),
            Op::Dropout { x, out, probability, seed, first, accumulate } => {
                let mask = dropout::Mask { probability, seed, first };
                dropout::dropout(exec, t.input(x, &[out]), t.floats_mut(out), mask, accumulate);
            }

            Op::Embedding { tokens, table, out } => {
                in_table(name, "token", t.u32s(tokens), table.rows(), table)?;
                embedding::embedding(exec, t.u32s(tokens), t.bytes(table), table.dtype(), t.floats_mut(out));
            }
            Op::EmbeddingBackward { tokens, dout, dtable, first_row, rounding } => {
                // The check has found the last row to be below 2^32.
                let rows = first_row..first_row + dtable.rows();
                embedding::embedding_backward(
                    exec,
                    t.u32s(tokens),
                    t.floats(dout),
                    t.floats_mut(dtable),
                    rows,
                    rounding,
                    workspace,
                );
            }

            Op::RmsNorm { x, weight, weight_offset, epsilon, out, rstd } => {
                let (out, rstd) = (t.floats_mut(out), t.f32s_mut(rstd));
                let weight = Weight { values: t.floats(weight), offset: weight_offset };
                rms_norm::rms_norm(exec, t.floats(x), weight, epsilon, out, rstd);
            }
            Op::RmsNormBackward { x, weight, weight_offset, rstd, dout, dx, dweight, accumulate_weight } => {
                fits_workspace(name, weight, 1)?;
                rms_norm::rms_norm_backward(
                    exec,
                    t.floats(x),
                    Weight { values: t.floats(weight), offset: weight_offset },
                    t.f32s(rstd),
                    t.floats(dout),
                    t.floats_mut(dx),
                    dweight.map(|dweight| t.floats_mut(dweight)),
                    accumulate_weight,
                    bytemuck::cast_slice_mut(workspace),
                );
            }
            Op::LayerNorm { x, weight, bias, epsilon, out, mean, rstd } => layer_norm::layer_norm(
                exec,
                t.floats(x),
                t.floats(weight),
                t.floats(bias),
                epsilon,
                t.floats_mut(out),
                t.f32s_mut(mean),
                t.f32s_mut(rstd),
            ),
            Op::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, accumulate_weight } => {
                fits_workspace(name, weight, 2)?;
                layer_norm::layer_norm_backward(
                    exec,
                    t.floats(x),
                    t.floats(weight),
                    [t.f32s(mean), t.f32s(rstd)],
                    t.floats(dout),
                    t.floats_mut(dx),
                    [dweight, dbias].map(|gradient| gradient.map(|gradient| t.floats_mut(gradient))),
                    accumulate_weight,
                    bytemuck::cast_slice_mut(workspace),
                );
            }

            Op::Linear { x, weight, bias, out, accumulate, compute } => {
                if let Some(bias) = bias {
                    elementwise::add_rows(exec, t.floats(bias), t.floats_mut(out), accumulate);
                }
                let accumulate = accumulate || bias.is_some();
                self.matmul(compute, t.matrix(x), t.transposed(weight), t.output(out), accumulate);
            }
            Op::LinearBackwardInput { dout, weight, dx, accumulate, compute } => {
                self.matmul(compute, t.matrix(dout), t.matrix(weight), t.output(dx), accumulate);
            }
            Op::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute } => {
                let sums = t.sums(dweight, rounding);
                self.matmul(compute, t.transposed(dout), t.matrix(x), sums, accumulate);
            }
            Op::RowSquares { x, out } => {
                dora::row_squares(exec, t.bytes(x), x.dtype(), t.f32s_mut(out), x.columns() as usize);
            }
            Op::RowLengths { squares, cross, gram, b, scale, lengths } => {
                let [squares, cross, gram, b] = [squares, cross, gram, b].map(|tensor| t.f32s(tensor));
                let of = dora::Sum { squares, cross, gram, b, scale };
                dora::row_lengths(exec, of, t.f32s_mut(lengths));
            }
            Op::ScaleColumns { x, factors, divisors, bias, out, accumulate } => {
                let divisors = divisors.map(|divisors| t.f32s(divisors));
                let factors = dora::ColumnFactors { factors: t.f32s(factors), divisors };
                let bias = bias.map(|bias| t.floats(bias));
                dora::scale_columns(exec, t.floats(x), factors, bias, t.floats_mut(out), accumulate);
            }
            Op::ColumnDots { a, b, divisors, out, accumulate } => {
                fits_workspace(name, divisors, 1)?;
                let partials = bytemuck::cast_slice_mut(workspace);
                let (a, b, divisors) = (t.floats(a), t.floats(b), t.f32s(divisors));
                dora::column_dots(exec, a, b, divisors, t.floats_mut(out), accumulate, partials);
            }
            Op::BiasBackward { dout, dbias, accumulate } => {
                let partials = bytemuck::cast_slice_mut(workspace);
                column_sums::bias_backward(exec, t.floats(dout), t.floats_mut(dbias), accumulate, partials);
            }

            Op::Rope { x, positions, cos, sin, head_dim, inverse } => {
                in_table(name, "position", t.u32s(positions), cos.rows(), cos)?;
                let angles = Angles { cos: t.f32s(cos), sin: t.f32s(sin), pairs: cos.columns() as usize };
                let head_dim = head_dim as usize;
                rope::rope(exec, t.floats_mut(x), t.u32s(positions), angles, head_dim, inverse);
            }
            Op::WriteCache { x, cache, first, head_dim } => {
                let to = cache::Cache {
                    dtype: cache.dtype(),
                    rows: cache.rows() as usize,
                    bytes: t.bytes_mut(cache),
                };
                cache::write(exec, t.floats(x), to, x.rows() as usize, first, head_dim as usize);
            }
            Op::Attention { q, k, v, documents, out, lse, probabilities, shape, compute } => {
                let cached = [k, v].map(|x| (t.bytes(x), x.dtype()));
                let (out, lse) = (t.floats_mut(out), t.f32s_mut(lse));
                let probabilities = probabilities.map(|x| t.f32s_mut(x));
                let g = attention::Geometry::new(shape, documents.map(|x| t.u32s(x)));
                let workspace = bytemuck::cast_slice_mut(workspace);
                attention::forward(exec, t.floats(q), cached, out, lse, probabilities, g, compute, workspace);
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
                compute,
            } => {
                let inputs = [q, k, v, out, dout].map(|x| t.floats(x));
                let gradients = [dq, dk, dv].map(|x| t.floats_mut(x));
                let (lse, delta, sums) = (t.f32s(lse), t.f32s_mut(delta), sums.map(|x| t.f32s_mut(x)));
                let probabilities = probabilities.map(|x| t.f32s(x));
                let g = attention::Geometry::new(shape, documents.map(|x| t.u32s(x)));
                attention::backward(exec, inputs, lse, delta, gradients, sums, probabilities, g, compute);
            }

            Op::Gated { gate, up, out, activation } => {
                let (gate, up) = (t.input(gate, &[out]), t.input(up, &[out]));
                activation::gated(exec, gate, up, t.floats_mut(out), activation);
            }
            Op::GatedBackward { gate, up, dout, dgate, dup, activation } => {
                let [gate, up, dout] = [gate, up, dout].map(|x| t.input(x, &[dgate, dup]));
                let (dgate, dup) = (t.floats_mut(dgate), t.floats_mut(dup));
                activation::gated_backward(exec, gate, up, dout, dgate, dup, activation);
            }
            Op::Activate { x, out, activation } => {
                activation::activate(exec, t.input(x, &[out]), t.floats_mut(out), activation);
            }
            Op::ActivateBackward { x, dout, dx, activation } => {
                let (x, dout) = (t.input(x, &[dx]), t.input(dout, &[dx]));
                activation::activate_backward(exec, x, dout, t.floats_mut(dx), activation);
            }

            Op::CrossEntropy { logits, targets, weights, losses, soft_cap, gradient_scale } => {
                in_table(name, "target", t.u32s(targets), logits.columns(), logits)?;
                if logits.columns() > cross_entropy::MAX_COLUMNS as u64 {
                    let reason = format!("{logits:?} has more than {} columns", cross_entropy::MAX_COLUMNS);
                    return Err(DeviceError::Mismatch { op: name, reason });
                }
                let (logits, losses) = (t.f32s_mut(logits), t.f32s_mut(losses));
                let labels = labels(t, targets, weights);
                cross_entropy::cross_entropy(exec, logits, labels, losses, soft_cap, gradient_scale);
            }
            Op::LogitRuns { logits, first_column, targets, soft_cap, runs, target_logits } => {
                in_piece(name, t.u32s(targets), logits, first_column, runs)?;
                let columns = columns(logits, first_column);
                let (runs, target_logits) = (t.f32s_mut(runs), t.f32s_mut(target_logits));
                let targets = t.u32s(targets);
                cross_entropy::logit_runs(
                    exec,
                    t.f32s(logits),
                    columns,
                    targets,
                    soft_cap,
                    runs,
                    target_logits,
                );
            }
            Op::LossOfRuns { runs, target_logits, targets, weights, losses } => {
                let labels = labels(t, targets, weights);
                cross_entropy::loss_of_runs(
                    exec,
                    t.f32s(runs),
                    t.f32s(target_logits),
                    labels,
                    t.f32s_mut(losses),
                );
            }
            Op::GradientOfRuns { logits, first_column, targets, weights, runs, soft_cap, gradient_scale } => {
                in_piece(name, t.u32s(targets), logits, first_column, runs)?;
                let columns = columns(logits, first_column);
                let (logits, labels) = (t.f32s_mut(logits), labels(t, targets, weights));
                cross_entropy::gradient_of_runs(
                    exec,
                    logits,
                    columns,
                    labels,
                    t.f32s(runs),
                    soft_cap,
                    gradient_scale,
                );
            }

            Op::QuantizeInt8 { x, codes, scales, block } => {
                let (codes, scales) = (t.i8s_mut(codes), t.f32s_mut(scales));
                int8::quantize(exec, t.floats(x), codes, scales, block as usize);
            }
            Op::DequantizeInt8 { codes, scales, block, out } => {
                let (codes, scales) = (t.i8s(codes), t.f32s(scales));
                int8::dequantize(exec, codes, scales, block as usize, t.floats_mut(out));
            }

            Op::QuantizeFp8 { x, out } => {
                let format = if out.dtype() == DType::F8E4m3 { fp8::E4M3 } else { fp8::E5M2 };
                fp8::quantize(exec, t.floats(x), format, t.bytes_mut(out));
            }

            Op::SumSquares { x, out } => {
                let sum = sum_squares::sum_squares(exec, t.floats(x), bytemuck::cast_slice_mut(workspace));
                t.f32s_mut(out).fill(sum as f32);
            }
            Op::Update(ref step) => optimizer::update(exec, t, step, bytemuck::cast_slice_mut(workspace)),
            Op::AdamDirection { grad, m, v, out, hyper } => {
                let (m, v) = (t.f32s_mut(m), t.f32s_mut(v));
                update::adam_direction(exec, t.input(grad, &[out]), m, v, t.floats_mut(out), hyper);
            }
            Op::NormRatios { a, b, out, channels, epsilon } => {
                let (columns, out) = (a.columns() as usize, t.f32s_mut(out));
                let partials = bytemuck::cast_slice_mut(workspace);
                update::norm_ratios(
                    exec,
                    [t.floats(a), t.floats(b)],
                    columns,
                    out,
                    channels,
                    epsilon,
                    partials,
                );
            }
            Op::RandomNormal { out, std, seed } => random::random_normal(exec, t.f32s_mut(out), std, seed),
            Op::Orthonormalize { x } => {
                subspace::orthonormalize(exec, t.f32s_mut(x), x.columns() as usize);
            }
            Op::Eigenvectors { matrix, vectors, out } => {
                let n = matrix.rows() as usize;
                subspace::eigenvectors(exec, t.f32s_mut(matrix), t.f32s_mut(vectors), t.f32s_mut(out), n);
            }
        }
        Ok(())
    }

    fn matmul(
        &self,
        compute: Compute,
        a: matmul::Operand,
        b: matmul::Operand,
        c: matmul::Output,
        accumulate: bool,
    ) {
        // SAFETY: the matrices are tensors of an operation whose check found the shapes to fit and the output to
        // overlap no input; the memory is borrowed for the operation.
        unsafe { matmul::matmul(&self.pool, self.isa(), compute, a, b, c, accumulate) }
    }
}

/// Refuses numbers that are not below `limit`, the rows or columns of `table`. Ignored targets pass.
fn in_table(
    op: &'static str,
    what: &str,
    numbers: &[u32],
    limit: u64,
    table: &Tensor,
) -> Result<(), DeviceError> {
    let ignored = |number: u32| what == "target" && number == IGNORED_TARGET;
    match numbers.iter().position(|&number| u64::from(number) >= limit && !ignored(number)) {
        None => Ok(()),
        Some(place) => {
            let reason = format!("{what} {} at {place} is outside {table:?}", numbers[place]);
            Err(DeviceError::Mismatch { op, reason })
        }
    }
}

/// Refuses targets outside the vocabulary, as far as the piece shows where that ends.
fn in_piece(
    op: &'static str,
    targets: &[u32],
    logits: &Tensor,
    first_column: u64,
    runs: &Tensor,
) -> Result<(), DeviceError> {
    let (end, most) = (first_column + logits.columns(), runs.columns() / 2 * PIECE_ROWS);
    let is_last = end > most - PIECE_ROWS;
    in_table(op, "target", targets, if is_last { end } else { most }, logits)
}

/// The columns of the vocabulary that a piece of the logits holds.
fn columns(logits: &Tensor, first_column: u64) -> Range<usize> {
    first_column as usize..(first_column + logits.columns()) as usize
}

fn labels<'a>(t: Slices<'a>, targets: &Tensor, weights: Option<&Tensor>) -> Labels<'a> {
    Labels { targets: t.u32s(targets), weights: weights.map(|weights| t.f32s(weights)) }
}

/// Refuses sums over rows of more columns than the workspace holds.
fn fits_workspace(op: &'static str, sums: &Tensor, count: u64) -> Result<(), DeviceError> {
    let most = MAX_PARTIAL_COLUMNS as u64 / count;
    if sums.elements() <= most {
        return Ok(());
    }
    Err(DeviceError::Mismatch { op, reason: format!("{sums:?} has more than {most} columns") })
}
