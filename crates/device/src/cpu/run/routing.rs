//! To experts and back on the CPU.

use super::KernelCall;
use crate::Routing;
use crate::cpu::kernels::routing::{
    add_mass, balance_backward, balance_loss, choose, combine, count, gather, row_dots, scale_rows, sort,
    weigh, weigh_backward,
};

pub(super) fn run(op: Routing<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) -> Result<(), String> {
    match op {
        Routing::Choose { logits, correction, router, choice } => {
            let correction = correction.map(|correction| t.floats(correction));
            let experts = logits.columns() as usize;
            choose(exec, t.f32s(logits), correction, router, t.u32s_mut(choice), experts);
        }
        Routing::Weigh { logits, choice, router, weights } => {
            let chosen = choice.map(|choice| t.u32s(choice));
            check(chosen, logits.columns(), "expert")?;
            let experts = logits.columns() as usize;
            weigh(exec, t.f32s(logits), chosen, router, t.f32s_mut(weights), experts);
        }
        Routing::WeighBackward { logits, choice, router, dweights, dlogits } => {
            let chosen = choice.map(|choice| t.u32s(choice));
            check(chosen, logits.columns(), "expert")?;
            let experts = logits.columns() as usize;
            let dlogits = t.f32s_mut(dlogits);
            weigh_backward(exec, t.f32s(logits), chosen, router, t.f32s(dweights), dlogits, experts);
        }
        Routing::Sort { choice, sources, places, offsets } => {
            sort(t.u32s(choice), t.u32s_mut(sources), t.u32s_mut(places), t.u32s_mut(offsets));
        }
        Routing::Gather { x, sources, out } => {
            let rows = t.u32s(sources);
            check(Some(rows), sources.elements(), "place")?;
            let each = (sources.elements() / x.rows().max(1)) as usize;
            let row_bytes = (x.bytes() / x.rows().max(1)) as usize;
            gather(exec, t.bytes(x), rows, each, t.bytes_mut(out), row_bytes);
        }
        Routing::Combine { x, places, out, accumulate } => {
            check(Some(t.u32s(places)), x.rows(), "row")?;
            let (columns, each) = (out.columns() as usize, places.columns() as usize);
            combine(exec, t.floats(x), t.u32s(places), each, t.floats_mut(out), columns, accumulate);
        }
        Routing::ScaleRows { x, factors, sources, out } => {
            let (rows, columns) = (sources.map(|sources| t.u32s(sources)), x.columns() as usize);
            check(rows, factors.elements(), "place")?;
            scale_rows(exec, t.input(x, &[out]), t.f32s(factors), rows, t.floats_mut(out), columns);
        }
        Routing::RowDots { a, b, places, out } => {
            let (rows, columns) = (places.map(|places| t.u32s(places)), a.columns() as usize);
            check(rows, a.rows(), "row")?;
            row_dots(exec, t.floats(a), t.floats(b), rows, t.f32s_mut(out), columns);
        }
        Routing::Count { choice, counts } => {
            check(Some(t.u32s(choice)), counts.elements(), "expert")?;
            count(t.u32s(choice), t.u32s_mut(counts));
        }
        Routing::Mass { logits, mass } => add_mass(t.f32s(logits), t.f64s_mut(mass)),
        Routing::BalanceLoss { counts, mass, rows, factor, out } => {
            let mass = t.f64s(mass);
            t.f32s_mut(out)[0] = balance_loss(t.u32s(counts), mass, rows, factor);
        }
        Routing::BalanceBackward { logits, counts, rows, factor, dlogits } => {
            balance_backward(exec, t.f32s(logits), t.u32s(counts), rows, factor, t.f32s_mut(dlogits));
        }
    }
    Ok(())
}

/// Refuses numbers that are not below a limit.
pub(super) fn check(numbers: Option<&[u32]>, limit: u64, what: &str) -> Result<(), String> {
    let Some(numbers) = numbers else { return Ok(()) };
    match numbers.iter().position(|number| u64::from(*number) >= limit) {
        None => Ok(()),
        Some(place) => Err(format!("{what} {} at {place} is not one of {limit}", numbers[place])),
    }
}
