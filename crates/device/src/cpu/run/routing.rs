//! To experts and back on the CPU.

use super::KernelCall;
use crate::Routing;
use crate::cpu::kernels::dropout::{Words, jitter};
use crate::cpu::kernels::routing::{
    add_mass, adjust_correction, balance_backward, balance_loss, choose, combine, count, from_blocks, gather,
    limit, row_dots, scale_rows, sort, to_blocks, weigh, weigh_backward, z_backward, z_loss,
};
use crate::op::{MAX_EXPERTS, NOWHERE};

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
        Routing::Sort { choice, first, sources, places, offsets } => {
            let (rows, places, offsets) = (t.u32s_mut(sources), t.u32s_mut(places), t.u32s_mut(offsets));
            if !sort(t.u32s(choice), first, rows, places, offsets) {
                return Err(format!("{sources:?} are fewer rows than experts have places"));
            }
        }
        Routing::ToBlocks { sources, offsets, each, slots, taken } => {
            let (rows, offsets) = (t.u32s(sources), t.u32s(offsets));
            if !to_blocks(rows, offsets, each as usize, t.u32s_mut(slots), t.u32s_mut(taken)) {
                return Err(format!("rows of {sources:?} do not fit into the blocks of {slots:?}"));
            }
        }
        Routing::FromBlocks { sources, offsets, each, blocks, rows, slots } => {
            let (sorted, offsets) = (t.u32s(sources), t.u32s(offsets));
            let [each, blocks] = [each, blocks].map(|number| number as usize);
            if !from_blocks(sorted, offsets, each, blocks, t.u32s_mut(rows), t.u32s_mut(slots)) {
                return Err(format!("rows of {sources:?} do not fit into the blocks of {rows:?}"));
            }
        }
        Routing::Copy { x, out } => t.u32s_mut(out).copy_from_slice(t.u32s(x)),
        Routing::Gather { x, sources, each, out } => {
            let rows = t.u32s(sources);
            check_somewhere(Some(rows), x.rows().saturating_mul(each), "place")?;
            let row_bytes = (x.bytes() / x.rows().max(1)) as usize;
            gather(exec, t.bytes(x), rows, each as usize, t.bytes_mut(out), row_bytes);
        }
        Routing::Combine { x, places, out, accumulate } => {
            check_somewhere(Some(t.u32s(places)), x.rows(), "row")?;
            let (columns, each) = (out.columns() as usize, places.columns() as usize);
            combine(exec, t.floats(x), t.u32s(places), each, t.floats_mut(out), columns, accumulate);
        }
        Routing::ScaleRows { x, factors, sources, out } => {
            let (rows, columns) = (sources.map(|sources| t.u32s(sources)), x.columns() as usize);
            check_somewhere(rows, factors.elements(), "place")?;
            scale_rows(exec, t.input(x, &[out]), t.f32s(factors), rows, t.floats_mut(out), columns);
        }
        Routing::RowDots { a, b, places, out } => {
            let (rows, columns) = (places.map(|places| t.u32s(places)), a.columns() as usize);
            check_somewhere(rows, a.rows(), "row")?;
            row_dots(exec, t.floats(a), t.floats(b), rows, t.f32s_mut(out), columns);
        }
        Routing::Count { choice, counts } => {
            check(Some(t.u32s(choice)), counts.elements(), "expert")?;
            count(t.u32s(choice), t.u32s_mut(counts));
        }
        Routing::Limit { choice, capacity, taken, dropped } => {
            check(Some(t.u32s(choice)), MAX_EXPERTS, "expert")?;
            let more = limit(t.u32s(choice), capacity, t.u32s_mut(taken));
            if let Some(dropped) = dropped {
                let dropped = &mut t.u32s_mut(dropped)[0];
                *dropped = dropped.saturating_add(more);
            }
        }
        Routing::AddCounts { counts, out } => {
            let pairs = t.u32s_mut(out).iter_mut().zip(t.u32s(counts));
            pairs.for_each(|(out, count)| *out = out.saturating_add(*count));
        }
        Routing::AdjustCorrection { counts, speed, correction } => {
            adjust_correction(t.u32s(counts), speed, t.f32s_mut(correction));
        }
        Routing::Jitter { x, out, noise, seed, first, accumulate } => {
            let (x, words) = (t.input(x, &[out]), Words { seed, first });
            jitter(exec, x, t.floats_mut(out), noise, words, accumulate);
        }
        Routing::ZLoss { logits, factor, out } => {
            t.f32s_mut(out)[0] += z_loss(t.f32s(logits), logits.columns() as usize, factor);
        }
        Routing::ZBackward { logits, factor, dlogits } => {
            let (experts, dlogits) = (logits.columns() as usize, t.f32s_mut(dlogits));
            z_backward(exec, t.f32s(logits), factor, dlogits, experts);
        }
        Routing::Mass { logits, mass } => add_mass(t.f32s(logits), t.f64s_mut(mass)),
        Routing::BalanceLoss { counts, mass, rows, ratio, factor, out } => {
            let mass = t.f64s(mass);
            t.f32s_mut(out)[0] = balance_loss(t.u32s(counts), mass, rows, ratio, factor);
        }
        Routing::BalanceBackward { logits, counts, rows, ratio, factor, dlogits } => {
            let (logits, dlogits) = (t.f32s(logits), t.f32s_mut(dlogits));
            balance_backward(exec, logits, t.u32s(counts), rows, ratio, factor, dlogits);
        }
    }
    Ok(())
}

/// Refuses numbers that are not below a limit.
fn check(numbers: Option<&[u32]>, limit: u64, what: &str) -> Result<(), String> {
    refuse(numbers, what, limit, |number| u64::from(number) >= limit)
}

/// Refuses numbers that are neither below a limit nor nowhere.
pub(super) fn check_somewhere(numbers: Option<&[u32]>, limit: u64, what: &str) -> Result<(), String> {
    refuse(numbers, what, limit, |number| u64::from(number) >= limit && number != NOWHERE)
}

fn refuse(
    numbers: Option<&[u32]>,
    what: &str,
    limit: u64,
    is_wrong: impl Fn(u32) -> bool,
) -> Result<(), String> {
    let Some(numbers) = numbers else { return Ok(()) };
    match numbers.iter().position(|number| is_wrong(*number)) {
        None => Ok(()),
        Some(place) => Err(format!("{what} {} at {place} is not one of {limit}", numbers[place])),
    }
}
