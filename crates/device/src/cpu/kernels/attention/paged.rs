//! Attention of sequences whose keys and values lie in pages of one cache. Sequences of one query go through the cache together, as
//! many as there is room for what their pieces leave; others go by tiles, one after the other.

use super::{Rows, RowsMut, by_tiles, decode};
use crate::cpu::kernels::attention::Geometry;
use crate::cpu::kernels::split::Shared;
use crate::cpu::kernels::{Exec, Floats, FloatsMut};
use crate::op::KeyPieces;
use crate::{AttentionShape, Compute, DType, PagedRun};

/// The sequences and their pages.
pub(in crate::cpu) struct Paged<'a> {
    pub runs: &'a [PagedRun<'a>],
    /// Rows of a page.
    pub page: u64,
    /// What all have in common.
    pub shape: AttentionShape,
}

/// out [N, heads * D] and lse [heads, q_len] of each run, from q and from k and v as they are stored. `workspace` is for the parts of
/// single queries.
#[allow(clippy::too_many_arguments)]
pub(in crate::cpu) fn paged(
    exec: Exec<'_>,
    q: Floats<'_>,
    [k, v]: [(&[u8], DType); 2],
    out: FloatsMut<'_>,
    lse: &mut [f32],
    Paged { runs, page, shape }: Paged<'_>,
    compute: Compute,
    workspace: &mut [f32],
) {
    let types = [k.1, v.1];
    let [k, v] = [k, v].map(|(bytes, dtype)| Rows::stored(bytes, dtype));
    let (out, lse) = (RowsMut::new(out), Shared::new(lse, 1));
    let mut first_query = 0;
    for (group, _) in KeyPieces::groups(runs, page, shape) {
        let geometries: Vec<Geometry<'_>> = (runs[group].iter())
            .map(|run| {
                let own = Geometry::of_run(run, page, shape, first_query).cached(types[0], types[1]);
                first_query += own.q_len;
                own
            })
            .filter(|own| own.d > 0)
            .collect();
        if !decode::forward(exec, q, [k, v], out, &lse, &geometries, workspace) {
            for own in geometries {
                by_tiles(exec, [Rows::new(q), k, v], out, &lse, own, compute);
            }
        }
    }
}
