//! Attention, whole and by pieces of the keys, its sinks and its cache.

use super::parameters::{Boxes, Emit, View, plain, vector_blocks};
use crate::cuda::CudaError;
use crate::{
    Attention, AttentionShape, Compute, DType, KeyPiece, MAX_HEAD_DIM, PagedRun, PiecedAttention, Running,
    Sink, Tensor,
};

/// Queries or keys that a block takes together: `TOGETHER` of the kernels.
const TOGETHER: u64 = 256;
/// Values of a head that a thread of a block has: `PARTS` of the kernels.
const PARTS: u64 = 3;

const _: () = assert!(MAX_HEAD_DIM <= PARTS * TOGETHER);

/// Threads of a warp, of which each has a query's head where their numbers are summed.
const WARP: u64 = 32;
/// Queries that a block has on tensor cores: `QUERIES` of the kernels. For few of them it would mostly multiply zeros.
const QUERIES: u64 = 128;
const FEW_QUERIES: u64 = 16;
/// Words that a kernel is given at once: `Words512` of the kernels.
const WORDS: usize = 512;
/// Keys that a block has, and those that are taken together.
const OWN_KEYS: u64 = 64;
const KEYS: u64 = 32;

plain! {
    /// `Shape` of the kernels.
    Shape {
        batch: u64,
        q_len: u64,
        kv_len: u64,
        kv_capacity: u64,
        heads: u64,
        kv_heads: u64,
        head_dim: u64,
        k_columns: u64,
        v_columns: u64,
        first: u64,
        window: u64,
        block: u64,
        local_blocks: u64,
        global_blocks: u64,
        scale: f32,
        soft_cap: f32,
        narrow: u32,
        unused: u32,
    }
}

impl Shape {
    fn new(s: AttentionShape, [k, v]: [Option<&Tensor>; 2], compute: Compute) -> Shape {
        let columns = |x: Option<&Tensor>| x.map_or(s.head_dim, |x| x.dtype().cached_columns(s.head_dim));
        Shape {
            batch: s.batch,
            q_len: s.q_len,
            kv_len: s.kv_len,
            kv_capacity: s.kv_capacity,
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            k_columns: columns(k),
            v_columns: columns(v),
            first: 0,
            window: s.window.unwrap_or(u64::MAX),
            // Kernels divide positions as 32-bit numbers.
            block: s.block_sparse.map_or(0, |sparse| sparse.block.min(u64::from(u32::MAX))),
            local_blocks: s.block_sparse.map_or(0, |sparse| sparse.local_blocks),
            global_blocks: s.block_sparse.map_or(0, |sparse| sparse.global_blocks),
            scale: s.scale,
            soft_cap: s.soft_cap.unwrap_or(0.0),
            narrow: u32::from(compute == Compute::Bf16),
            unused: 0,
        }
    }

    fn of_piece(piece: KeyPiece, compute: Compute) -> Shape {
        Shape { first: piece.first, ..Shape::new(piece.shape, [None, None], compute) }
    }

    fn queries(&self) -> u64 {
        self.batch * self.heads * self.q_len
    }

    fn keys(&self) -> u64 {
        self.batch * self.kv_heads * self.kv_capacity
    }
}

/// Queries, keys, values and where documents begin.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    documents: Option<&'a Tensor>,
}

pub(super) fn whole(op: Attention<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Attention::WriteCache { x, cache, first, head_dim } => write_cache(emit, x, cache, first, head_dim),
        Attention::Forward { q, k, v, documents, out, lse, probabilities, shape, compute } => {
            let shape = Shape::new(shape, [Some(k), Some(v)], compute);
            let results = (Some(out), Some(lse), probabilities);
            forward(emit, Inputs { q, k, v, documents }, results, None, shape)
        }
        Attention::WriteRows { x, cache, rows, head_dim } => write_rows(emit, x, cache, rows, head_dim),
        Attention::Paged { q, k, v, out, lse, runs, page, shape, compute } => {
            let shape = Shape::new(shape, [Some(k), Some(v)], compute);
            paged(emit, Inputs { q, k, v, documents: None }, [out, lse], runs, page, shape)
        }
        Attention::Backward {
            q,
            k,
            v,
            documents,
            out,
            lse,
            probabilities,
            dout,
            delta,
            dq,
            dk,
            dv,
            shape,
            compute,
            ..
        } => {
            let shape = Shape::new(shape, [Some(k), Some(v)], compute);
            deltas(emit, [out, dout, delta], shape)?;
            let inputs = Inputs { q, k, v, documents };
            backward(emit, inputs, [lse, delta, dout], probabilities, [dq, dk, dv], false, shape)
        }
    }
}

pub(super) fn pieced(op: PiecedAttention<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        PiecedAttention::Add { q, k, v, documents, running, piece, compute } => {
            let inputs = Inputs { q, k, v, documents };
            forward(emit, inputs, (None, None, None), Some(running), Shape::of_piece(piece, compute))
        }
        PiecedAttention::Finish { running: Running { sums, most, total }, out, lse, shape } => {
            let shape = Shape::new(shape, [None, None], Compute::F32);
            let kernel = emit.kernel("attention_finish", vector_blocks(out.elements()));
            let kernel = [sums, most, total].into_iter().fold(kernel, |k, t| k.with(emit.address(t)));
            emit.launch(kernel.with(emit.view(out)).with(emit.address(lse)).with(shape))
        }
        PiecedAttention::Deltas { out, dout, delta, shape } => {
            deltas(emit, [out, dout, delta], Shape::new(shape, [None, None], Compute::F32))
        }
        PiecedAttention::Backward { q, k, v, documents, lse, delta, dout, dq, dk, dv, piece, compute } => {
            let inputs = Inputs { q, k, v, documents };
            let shape = Shape::of_piece(piece, compute);
            backward(emit, inputs, [lse, delta, dout], None, [dq, dk, dv], true, shape)
        }
    }
}

pub(super) fn sink(op: Sink<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Sink::Apply { sinks, out, lse, probabilities, shape } => {
            let shape = Shape::new(shape, [None, None], Compute::F32);
            if shape.queries() == 0 {
                return Ok(());
            }
            let blocks = emit.blocks(shape.queries())?;
            let kernel =
                emit.kernel("attention_sinks", [blocks, 1]).with(emit.view(sinks)).with(emit.view(out));
            emit.launch(kernel.with(emit.address(lse)).with(emit.address(probabilities)).with(shape))
        }
        Sink::Backward { sinks, out, lse, dout, dsinks, accumulate, shape } => {
            let shape = Shape::new(shape, [None, None], Compute::F32);
            if shape.heads == 0 {
                return Ok(());
            }
            let blocks = emit.blocks(shape.heads)?;
            let kernel = emit.kernel("attention_sinks_backward", [blocks, 1]).scratch::<f64>();
            let kernel = kernel.with(emit.view(sinks)).with(emit.view(out)).with(emit.address(lse));
            let kernel = kernel.with(emit.view(dout)).with(emit.view(dsinks)).with(u32::from(accumulate));
            emit.launch(kernel.with(shape))
        }
    }
}

/// Forward, gradients of queries, gradients of keys.
type ByTiles = [&'static str; 3];
const OF_64: ByTiles = ["attention_bf16_64", "attention_bf16_queries_64", "attention_bf16_keys_64"];
const OF_128: ByTiles = ["attention_bf16_128", "attention_bf16_queries_128", "attention_bf16_keys_128"];

/// The kernels by tiles, and the numbers of a head that they have room for: where products are in bf16, of more than a few queries.
fn on_tensor_cores(emit: &Emit<'_>, shape: &Shape) -> Option<(ByTiles, u64)> {
    let takes = emit.has_tensor_cores() && shape.narrow != 0 && shape.q_len >= FEW_QUERIES;
    match shape.head_dim {
        1..=64 if takes => Some((OF_64, 64)),
        65..=128 if takes => Some((OF_128, 128)),
        _ => None,
    }
}

/// The same of whole tiles.
const WHOLE_64: ByTiles = ["attention_90_64", "attention_90_queries_64", "attention_90_keys_64"];
const WHOLE_128: ByTiles = ["attention_90_128", "attention_90_queries_128", "attention_90_keys_128"];
/// Lines of queries, or of keys, that a block of those has; lines that it takes together for outputs, and for gradients.
const LINES_90: u64 = 128;
const TOGETHER_90: u32 = 128;
const TOGETHER_OF_GRADIENTS_90: u32 = 64;

/// Attention by whole tiles.
struct WholeTiles {
    names: ByTiles,
    shared: u64,
    shape: Shape,
    /// Keys that there are.
    keys: u64,
}

impl WholeTiles {
    /// Where all tensors are in bf16 and lie so that boxes of them can be copied, and no key lies where an older one did.
    fn new(emit: &Emit<'_>, shape: &Shape, is_piece: bool, tensors: &[&Tensor]) -> Option<WholeTiles> {
        let fits = |t: &&Tensor| t.dtype() == DType::Bf16 && emit.address(*t).is_multiple_of(16);
        let keys = shape.kv_len.checked_sub(shape.first)?;
        // A piece has the keys behind its first one; all else has all.
        let apart = is_piece || shape.kv_capacity >= shape.kv_len;
        let takes = emit.has_whole_tiles() && shape.head_dim.is_multiple_of(8) && apart && keys > 0;
        let ((_, depth), true) = (on_tensor_cores(emit, shape)?, takes && tensors.iter().all(fits)) else {
            return None;
        };
        let names = if depth == 64 { WHOLE_64 } else { WHOLE_128 };
        // Five times 128 lines of a head at most; then what is kept beside them, and what aligns them.
        let shared = 5 * LINES_90 * depth * 2 + 4096;
        Some(WholeTiles { names, shared, shape: *shape, keys: keys.min(shape.kv_capacity) })
    }

    /// Lines of heads: so many of each sequence, `apart` from those of the next one.
    fn boxes(
        &self,
        emit: &Emit<'_>,
        t: &Tensor,
        heads: u64,
        [lines, apart]: [u64; 2],
        together: u32,
    ) -> Boxes {
        let Shape { head_dim, batch, .. } = self.shape;
        let (head, line) = (2 * head_dim, 2 * head_dim * heads);
        let (sizes, strides) = ([head_dim, heads, lines, batch], [head, line, line * apart]);
        Boxes { address: emit.address(t), rank: 4, sizes, strides, tile: [64, 1, together, 1] }
    }

    fn queries(&self, emit: &Emit<'_>, t: &Tensor, together: u32) -> Boxes {
        self.boxes(emit, t, self.shape.heads, [self.shape.q_len; 2], together)
    }

    fn keys(&self, emit: &Emit<'_>, t: &Tensor, together: u32) -> Boxes {
        self.boxes(emit, t, self.shape.kv_heads, [self.keys, self.shape.kv_capacity], together)
    }
}

fn forward(
    emit: &mut Emit<'_>,
    Inputs { q, k, v, documents }: Inputs<'_>,
    (out, lse, probabilities): (Option<&Tensor>, Option<&Tensor>, Option<&Tensor>),
    running: Option<Running<'_>>,
    shape: Shape,
) -> Result<(), CudaError> {
    if shape.queries() == 0 || shape.kv_capacity == 0 {
        return Ok(());
    }
    let state = running.map_or([None; 3], |r| [r.sums, r.most, r.total].map(Some));
    let whole = if probabilities.is_none() {
        WholeTiles::new(emit, &shape, running.is_some(), &[q, k, v])
    } else {
        None
    };
    if let Some(whole) = whole {
        let [name, ..] = whole.names;
        let blocks = emit.blocks(shape.batch * shape.heads * shape.q_len.div_ceil(LINES_90))?;
        let kernel = emit.kernel(name, [blocks, 1]).shared(whole.shared);
        let kernel = kernel.with_matrix(whole.queries(emit, q, LINES_90 as u32));
        let kernel =
            [k, v].into_iter().fold(kernel, |kernel, t| kernel.with_matrix(whole.keys(emit, t, TOGETHER_90)));
        let kernel = kernel.with(emit.address(documents)).with(out.map_or(View::NONE, |out| emit.view(out)));
        let kernel =
            state.into_iter().fold(kernel.with(emit.address(lse)), |kernel, t| kernel.with(emit.address(t)));
        return emit.launch(kernel.with(shape));
    }
    let by_tiles = if probabilities.is_none() { on_tensor_cores(emit, &shape) } else { None };
    let kernel = match by_tiles {
        Some(([name, ..], depth)) => {
            let blocks = emit.blocks(shape.batch * shape.heads * shape.q_len.div_ceil(QUERIES))?;
            emit.kernel(name, [blocks, 1]).shared(QUERIES * depth * 2)
        }
        None => {
            let blocks = emit.blocks(shape.queries())?;
            emit.kernel("attention", [blocks, 1]).shared(4 * (2 * TOGETHER + shape.head_dim))
        }
    };
    let kernel =
        kernel.with(emit.view(q)).with(emit.view(k)).with(emit.view(v)).with(emit.address(documents));
    let kernel = kernel.with(out.map_or(View::NONE, |out| emit.view(out))).with(emit.address(lse));
    let kernel = if by_tiles.is_none() { kernel.with(emit.address(probabilities)) } else { kernel };
    let kernel = state.into_iter().fold(kernel, |kernel, t| kernel.with(emit.address(t)));
    emit.launch(kernel.with(shape))
}

/// One query of one head a block, of all sequences.
fn paged(
    emit: &mut Emit<'_>,
    Inputs { q, k, v, .. }: Inputs<'_>,
    [out, lse]: [&Tensor; 2],
    runs: &[PagedRun<'_>],
    page: u64,
    shape: Shape,
) -> Result<(), CudaError> {
    let (mut queries, mut pages) = (0, 4 * runs.len() as u64);
    let mut table = Vec::new();
    for run in runs {
        queries += run.q_len;
        table.extend([queries, run.q_len, run.kv_len, pages].map(|number| number as u32));
        pages += run.pages.len() as u64;
    }
    runs.iter().for_each(|run| table.extend(run.pages));
    if queries * shape.heads == 0 {
        return Ok(());
    }
    put_words(emit, &table)?;
    let blocks = emit.blocks(queries * shape.heads)?;
    let kernel = emit.kernel("attention_paged", [blocks, 1]).shared(4 * (2 * TOGETHER + shape.head_dim));
    let kernel = [q, k, v, out].into_iter().fold(kernel, |kernel, t| kernel.with(emit.view(t)));
    let kernel = kernel.with(emit.address(lse)).with(emit.workspace(0)).with(queries).with(page);
    emit.launch(kernel.with(shape))
}

/// Puts words of the host's at the beginning of the workspace.
fn put_words(emit: &mut Emit<'_>, words: &[u32]) -> Result<(), CudaError> {
    emit.needs_for("its rows or pages need more workspace than there is", 4 * words.len() as u64)?;
    for (part, words) in words.chunks(WORDS).enumerate() {
        let mut given = [0u32; WORDS];
        given.iter_mut().zip(words).for_each(|(given, word)| *given = *word);
        let count = words.len() as u64;
        let kernel = emit.kernel("host_words", vector_blocks(count)).with(given).with(count);
        emit.launch(kernel.with(emit.workspace(4 * (part * WORDS) as u64)))?;
    }
    Ok(())
}

fn deltas(emit: &mut Emit<'_>, [out, dout, delta]: [&Tensor; 3], shape: Shape) -> Result<(), CudaError> {
    let kernel = emit.kernel("attention_deltas", vector_blocks(WARP * shape.queries())).with(emit.view(out));
    emit.launch(kernel.with(emit.view(dout)).with(emit.address(delta)).with(shape))
}

fn backward(
    emit: &mut Emit<'_>,
    Inputs { q, k, v, documents }: Inputs<'_>,
    [lse, delta, dout]: [&Tensor; 3],
    probabilities: Option<&Tensor>,
    [dq, dk, dv]: [&Tensor; 3],
    accumulate: bool,
    shape: Shape,
) -> Result<(), CudaError> {
    let whole = if probabilities.is_none() {
        WholeTiles::new(emit, &shape, accumulate, &[q, k, v, dout])
    } else {
        None
    };
    if let (Some(whole), true) = (whole, shape.kv_capacity > 0) {
        let [_, of_queries, of_keys] = whole.names;
        let queries = shape.batch * shape.heads * shape.q_len.div_ceil(LINES_90);
        let keys = shape.batch * shape.kv_heads * shape.kv_capacity.div_ceil(LINES_90);
        let (own, together) = (LINES_90 as u32, TOGETHER_OF_GRADIENTS_90);
        let of_q = (of_queries, queries, [own, together], &[dq][..]);
        for (name, blocks, [q_lines, kv_lines], gradients) in
            [of_q, (of_keys, keys, [together, own], &[dk, dv])]
        {
            let blocks = emit.blocks(blocks)?;
            let kernel = emit.kernel(name, [blocks, 1]).shared(whole.shared);
            let kernel = kernel.with_matrix(whole.queries(emit, q, q_lines));
            let kernel = [k, v]
                .into_iter()
                .fold(kernel, |kernel, t| kernel.with_matrix(whole.keys(emit, t, kv_lines)));
            let kernel =
                [documents, Some(lse), Some(delta)].into_iter().fold(kernel, |k, t| k.with(emit.address(t)));
            let kernel = kernel.with_matrix(whole.queries(emit, dout, q_lines));
            let kernel = gradients.iter().fold(kernel, |kernel, t| kernel.with(emit.view(t)));
            emit.launch(kernel.with(u32::from(accumulate)).with(shape))?;
        }
        return Ok(());
    }
    let by_tiles = if probabilities.is_none() { on_tensor_cores(emit, &shape) } else { None };
    let kernels = match by_tiles {
        Some(([_, of_queries, of_keys], depth)) => {
            let heads_of = |heads: u64, blocks: u64| shape.batch * heads * blocks;
            let queries = heads_of(shape.heads, shape.q_len.div_ceil(QUERIES));
            let keys = heads_of(shape.kv_heads, shape.kv_capacity.div_ceil(OWN_KEYS));
            let bytes = |lines: u64| lines * depth * 2;
            [(of_queries, queries, bytes(QUERIES)), (of_keys, keys, bytes(2 * (OWN_KEYS + KEYS)))]
        }
        None => {
            let shared = 4 * (2 * TOGETHER + 2 * shape.head_dim);
            let (queries, keys) = (shape.queries(), shape.keys());
            [("attention_backward_queries", queries, shared), ("attention_backward_keys", keys, shared)]
        }
    };
    for ((name, blocks, shared), gradients) in kernels.into_iter().zip([&[dq][..], &[dk, dv]]) {
        if blocks == 0 || shape.kv_capacity == 0 {
            continue;
        }
        let blocks = emit.blocks(blocks)?;
        let kernel = emit.kernel(name, [blocks, 1]).shared(shared).with(emit.view(q)).with(emit.view(k));
        let kernel = kernel.with(emit.view(v)).with(emit.address(documents)).with(emit.address(lse));
        let kernel = kernel.with(emit.address(delta));
        let kernel = if by_tiles.is_none() { kernel.with(emit.address(probabilities)) } else { kernel };
        let kernel = kernel.with(emit.view(dout));
        let kernel = gradients.iter().fold(kernel, |kernel, t| kernel.with(emit.view(t)));
        emit.launch(kernel.with(u32::from(accumulate)).with(shape))?;
    }
    Ok(())
}

fn write_rows(
    emit: &mut Emit<'_>,
    x: &Tensor,
    cache: &Tensor,
    rows: &[u32],
    head_dim: u64,
) -> Result<(), CudaError> {
    let (heads, dtype) = (x.columns() / head_dim.max(1), cache.dtype());
    let blocks = head_dim.div_ceil(dtype.block_elements());
    put_words(emit, rows)?;
    let kernel = emit.kernel("write_rows", vector_blocks(x.rows() * heads * blocks)).with(emit.view(x));
    let kernel = kernel.with(emit.view(cache)).with(emit.workspace(0));
    let numbers = [x.rows(), heads, head_dim, blocks, dtype.block_bytes()];
    emit.launch(numbers.into_iter().fold(kernel, super::Launch::with))
}

fn write_cache(
    emit: &mut Emit<'_>,
    x: &Tensor,
    cache: &Tensor,
    first: u64,
    head_dim: u64,
) -> Result<(), CudaError> {
    let (heads, dtype) = (x.columns() / head_dim.max(1), cache.dtype());
    let blocks = head_dim.div_ceil(dtype.block_elements());
    let parts = x.rows() * heads * blocks;
    let kernel = emit.kernel("write_cache", vector_blocks(parts)).with(emit.view(x)).with(emit.view(cache));
    let numbers = [x.rows(), cache.rows(), first, heads, head_dim, blocks, dtype.block_bytes()];
    emit.launch(numbers.into_iter().fold(kernel, super::Launch::with))
}
