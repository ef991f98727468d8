//! Rows of tables on the CPU.

use super::{KernelCall, in_table};
use crate::Embedding;
use crate::cpu::kernels::embedding::{embedding, embedding_backward};

pub(super) fn run(op: Embedding<'_>, job: KernelCall<'_>) -> Result<(), String> {
    let (exec, t) = (job.exec, job.t);
    match op {
        Embedding::Lookup { tokens, table, out } => {
            in_table("token", t.u32s(tokens), table.rows(), None, table)?;
            let (rows, out) = (0..table.rows(), t.floats_mut(out));
            embedding(exec, t.u32s(tokens), (t.bytes(table), rows), table.dtype(), out);
        }
        Embedding::LookupPiece { tokens, table, first_row, out } => {
            // The check has found the last row to be below 2^32.
            let (rows, out) = (first_row..first_row + table.rows(), t.floats_mut(out));
            embedding(exec, t.u32s(tokens), (t.bytes(table), rows), table.dtype(), out);
        }
        Embedding::Backward { tokens, dout, dtable, first_row, rounding } => {
            // The check has found the last row to be below 2^32.
            let rows = first_row..first_row + dtable.rows();
            let (tokens, dout, dtable) = (t.u32s(tokens), t.floats(dout), t.floats_mut(dtable));
            embedding_backward(exec, tokens, dout, dtable, rows, rounding, job.workspace);
        }
    }
    Ok(())
}
