//! Biases of experts behind weights on the CPU: those of each group, one after the other.

use super::KernelCall;
use super::grouped_product::{groups, rest};
use super::routing::check_somewhere;
use crate::WeightedBias;
use crate::cpu::kernels::weighted_bias::{Factors, add, backward, factors_backward};

pub(super) fn run(op: WeightedBias<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) -> Result<(), String> {
    match op {
        WeightedBias::Add { bias, factors, sources, offsets, out } => {
            let (values, sources) = (t.f32s(factors), t.u32s(sources));
            check_somewhere(Some(sources), factors.elements(), "place")?;
            let factors = Factors { values, sources };
            let columns = out.columns() as usize;
            rest(t.u32s(offsets), out)?;
            for (group, rows) in groups(t.u32s(offsets)).filter(|(_, rows)| !rows.is_empty()) {
                add(exec, t.floats(bias).row(group, columns), factors, rows, t.floats_mut(out));
            }
        }
        WeightedBias::Backward { dout, factors, sources, offsets, dbias, accumulate } => {
            let (values, sources) = (t.f32s(factors), t.u32s(sources));
            check_somewhere(Some(sources), factors.elements(), "place")?;
            rest(t.u32s(offsets), dout)?;
            let factors = Factors { values, sources };
            for (group, rows) in groups(t.u32s(offsets)) {
                let mut dbias = t.floats_mut(dbias);
                let own = dbias.row(group, dout.columns() as usize);
                backward(exec, t.floats(dout), factors, rows, own, accumulate);
            }
        }
        WeightedBias::FactorsBackward { dout, bias, places, offsets, dfactors } => {
            let (places, offsets) = (t.u32s(places), t.u32s(offsets));
            check_somewhere(Some(places), dout.rows(), "row")?;
            rest(offsets, dout)?;
            let columns = dout.columns() as usize;
            let inputs = [dout, bias].map(|x| t.floats(x));
            factors_backward(exec, inputs, places, offsets, t.f32s_mut(dfactors), columns);
        }
    }
    Ok(())
}
