//! To experts and back, and experts without matrices.

use super::parameters::{Emit, View, plain, row_blocks, vector_blocks};
use super::{Launch, WORKSPACE_BYTES};
use crate::cuda::CudaError;
use crate::op::{MAX_EXPERTS, NOWHERE};
use crate::{LoadRatio, Router, Routing, Tensor, ZeroComputation, ZeroExperts};

plain! {
    /// How scores and weights are made: `RouterOf` of the kernels.
    RouterOf { groups: u64, groups_chosen: u64, sigmoid: u32, normalise: u32, scale: f32, by_two: u32 }
    /// Where the experts without matrices begin, which give something: `ZeroExpertsOf` of the kernels.
    ZeroExpertsOf { copies: u64, constants: u64, end: u64 }
}

impl From<Router> for RouterOf {
    fn from(router: Router) -> RouterOf {
        let Router { sigmoid, normalise, scale, groups } = router;
        let (groups, groups_chosen, by_two) =
            groups.map_or((0, 0, false), |groups| (groups.count, groups.chosen, groups.by_two));
        let [sigmoid, normalise] = [sigmoid, normalise].map(u32::from);
        RouterOf { groups, groups_chosen, sigmoid, normalise, scale, by_two: u32::from(by_two) }
    }
}

/// Bytes of shared memory: a number of eight bytes for each thread, then what is given.
fn shared(bytes: u64) -> u64 {
    256 * 8 + bytes
}

/// Adds a place for each of several counts of experts behind each other in the workspace.
const COUNTS_BYTES: u64 = 4 * (MAX_EXPERTS + 2);

pub(super) fn routing(op: Routing<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Routing::Choose { logits, correction, router, choice } => {
            let (tokens, experts) = (logits.rows(), logits.columns());
            let groups = router.groups.map_or(0, |groups| groups.count);
            let kernel = emit.kernel("route", row_blocks(tokens)).shared(shared(experts * 12 + groups * 8));
            let kernel = kernel.with(emit.address(logits));
            let kernel = kernel.with(correction.map_or(View::NONE, |correction| emit.view(correction)));
            let kernel = kernel.with(RouterOf::from(router)).with(emit.address(choice));
            emit.launch(kernel.with(tokens).with(experts).with(choice.columns()))
        }
        Routing::Weigh { logits, choice, router, weights } => {
            check_choice(emit, choice, logits)?;
            let (tokens, experts) = (logits.rows(), logits.columns());
            let kernel = emit.kernel("weigh", row_blocks(tokens)).shared(shared(experts * 4));
            let kernel = kernel.with(emit.address(logits)).with(emit.address(choice));
            let kernel = kernel.with(RouterOf::from(router)).with(emit.address(weights));
            emit.launch(kernel.with(tokens).with(experts).with(weights.columns()))
        }
        Routing::WeighBackward { logits, choice, router, dweights, dlogits } => {
            check_choice(emit, choice, logits)?;
            let (tokens, experts) = (logits.rows(), logits.columns());
            let kernel = emit.kernel("weigh_backward", row_blocks(tokens)).shared(shared(experts * 8));
            let kernel = kernel.with(emit.address(logits)).with(emit.address(choice));
            let kernel = kernel.with(RouterOf::from(router)).with(emit.address(dweights));
            let kernel = kernel.with(emit.address(dlogits));
            emit.launch(kernel.with(tokens).with(experts).with(dweights.columns()))
        }
        Routing::Sort { choice, first, sources, places, offsets } => {
            sort(emit, choice, first, [sources, places, offsets])
        }
        Routing::ToBlocks { sources, offsets, each, slots, taken } => {
            let experts = offsets.elements() - 1;
            emit.check("first row of an expert", offsets, sources.elements() + 1, sources, false)?;
            for words in [slots, taken] {
                fill(emit, emit.address(words), words.elements())?;
            }
            let kernel = emit.kernel("rows_to_blocks", vector_blocks(sources.elements()));
            let kernel = kernel.with(emit.address(sources)).with(emit.address(offsets)).with(experts);
            let kernel =
                kernel.with(each).with(slots.elements() / (experts / each)).with(emit.address(slots));
            emit.launch(kernel.with(emit.address(taken)).with(sources.elements()).with(taken.elements()))
        }
        Routing::FromBlocks { sources, offsets, each, blocks, rows, slots } => {
            let experts = offsets.elements() - 1;
            emit.check("first row of an expert", offsets, sources.elements() + 1, sources, false)?;
            for words in [rows, slots] {
                fill(emit, emit.address(words), words.elements())?;
            }
            let kernel = emit.kernel("rows_from_blocks", [emit.blocks(blocks)?, 1]).scratch::<u32>();
            let kernel = kernel.with(emit.address(sources)).with(emit.address(offsets)).with(experts);
            let kernel = kernel.with(each).with(rows.elements() / blocks).with(emit.address(rows));
            emit.launch(kernel.with(emit.address(slots)).with(sources.elements()))
        }
        Routing::Copy { x, out } => {
            let n = out.elements();
            let copy = emit.kernel("cast", vector_blocks(n)).with(emit.view(x)).with(emit.view(out));
            emit.launch(copy.with(n).with(super::parameters::Rounding::from(crate::Rounding::Nearest)))
        }
        Routing::Gather { x, sources, each, out } => {
            let places = x.rows().saturating_mul(each);
            emit.check("place", sources, places, x, true)?;
            let kernel = emit.kernel("gather_rows", vector_blocks(out.elements())).with(emit.view(x));
            let kernel = kernel.with(emit.address(sources)).with(places).with(each.max(1));
            emit.launch(kernel.with(emit.view(out)).with(out.rows()).with(out.columns()))
        }
        Routing::Combine { x, places, out, accumulate } => {
            emit.check("row", places, x.rows(), x, true)?;
            let each = places.elements() / out.rows().max(1);
            let kernel = emit.kernel("combine_rows", vector_blocks(out.elements())).with(emit.view(x));
            let kernel = kernel.with(x.rows()).with(emit.address(places)).with(each).with(emit.view(out));
            emit.launch(kernel.with(out.rows()).with(out.columns()).with(u32::from(accumulate)))
        }
        Routing::ScaleRows { x, factors, sources, out } => {
            sources.map_or(Ok(()), |rows| emit.check("place", rows, factors.elements(), factors, true))?;
            let kernel = emit.kernel("scale_rows", vector_blocks(out.elements())).with(emit.view(x));
            let kernel = kernel.with(emit.address(factors)).with(factors.elements());
            let kernel = kernel.with(emit.address(sources)).with(emit.view(out));
            emit.launch(kernel.with(out.rows()).with(out.columns()))
        }
        Routing::RowDots { a, b, places, out } => {
            places.map_or(Ok(()), |places| emit.check("row", places, a.rows(), a, true))?;
            let kernel = emit.kernel("row_dots", row_blocks(out.elements())).scratch::<f32>();
            let kernel = kernel.with(emit.view(a)).with(emit.view(b)).with(emit.address(places));
            let kernel = kernel.with(emit.address(out)).with(out.elements());
            emit.launch(kernel.with(a.rows()).with(a.columns()))
        }
        Routing::Count { choice, counts } => {
            emit.check("expert", choice, counts.elements(), counts, false)?;
            count(emit, choice, 0, counts.elements(), emit.address(counts), true)
        }
        Routing::Limit { choice, capacity, taken, dropped } => {
            emit.check("expert", choice, MAX_EXPERTS, choice, false)?;
            let n = choice.elements();
            fill(emit, emit.address(taken), n)?;
            let kernel = emit.kernel("limit_experts", [MAX_EXPERTS as u32, 1]).scratch::<u32>();
            let kernel = kernel.with(emit.address(choice)).with(n);
            let kernel = kernel.with(capacity.each).with(capacity.first).with(capacity.others);
            emit.launch(kernel.with(emit.address(taken)).with(emit.address(dropped)))
        }
        Routing::AddCounts { counts, out } => {
            let n = out.elements();
            let kernel = emit.kernel("add_counts", vector_blocks(n)).with(emit.address(counts));
            emit.launch(kernel.with(emit.address(out)).with(n))
        }
        Routing::AdjustCorrection { counts, speed, correction } => {
            let kernel = emit.kernel("adjust_correction", [1, 1]).scratch::<u64>();
            let kernel = kernel.with(emit.address(counts)).with(counts.elements()).with(speed);
            emit.launch(kernel.with(emit.address(correction)))
        }
        Routing::Jitter { x, out, noise, seed, first, accumulate } => {
            let n = out.elements();
            let kernel = emit.kernel("jitter", vector_blocks(n)).with(emit.view(x)).with(emit.view(out));
            emit.launch(kernel.with(n).with(noise).with(seed).with(first).with(u32::from(accumulate)))
        }
        Routing::ZLoss { logits, factor, out } => {
            softmax_parts(emit, logits)?;
            let kernel = emit.kernel("z_loss", [1, 1]).scratch::<f64>().with(emit.workspace(0));
            emit.launch(kernel.with(logits.rows()).with(factor).with(emit.address(out)))
        }
        Routing::ZBackward { logits, factor, dlogits } => {
            let kernel = emit.kernel("z_backward", row_blocks(logits.rows())).scratch::<f32>();
            let kernel = kernel.with(emit.address(logits)).with(logits.rows()).with(logits.columns());
            emit.launch(kernel.with(factor).with(emit.address(dlogits)))
        }
        Routing::Mass { logits, mass } => {
            softmax_parts(emit, logits)?;
            let blocks = [emit.blocks(logits.columns())?, 1];
            let kernel = emit.kernel("router_mass", blocks).scratch::<f64>().with(emit.address(logits));
            let kernel = kernel.with(emit.workspace(0)).with(logits.rows()).with(logits.columns());
            emit.launch(kernel.with(emit.address(mass)))
        }
        Routing::BalanceLoss { counts, mass, rows, ratio, factor, out } => {
            let kernel = emit.kernel("balance_loss", [1, 1]).scratch::<f64>().with(emit.address(counts));
            let kernel = kernel.with(emit.address(mass)).with(counts.elements()).with(rows.max(1) as f64);
            emit.launch(of_ratio(kernel, ratio).with(factor).with(emit.address(out)))
        }
        Routing::BalanceBackward { logits, counts, rows, ratio, factor, dlogits } => {
            let experts = logits.columns();
            let kernel = emit.kernel("balance_backward", row_blocks(logits.rows()));
            let kernel = kernel.shared(shared(experts * 4)).with(emit.address(logits));
            let kernel = kernel.with(emit.address(counts)).with(logits.rows()).with(experts);
            let kernel = of_ratio(kernel.with(rows.max(1) as f64), ratio);
            emit.launch(kernel.with(factor).with(emit.address(dlogits)))
        }
    }
}

fn of_ratio(kernel: Launch, ratio: LoadRatio) -> Launch {
    kernel.with(ratio.first).with(ratio.of_others)
}

fn check_choice(emit: &mut Emit<'_>, choice: Option<&Tensor>, logits: &Tensor) -> Result<(), CudaError> {
    choice.map_or(Ok(()), |choice| emit.check("expert", choice, logits.columns(), logits, true))
}

/// [`NOWHERE`] in so many places.
fn fill(emit: &mut Emit<'_>, at: u64, n: u64) -> Result<(), CudaError> {
    let kernel = emit.kernel("fill_words", vector_blocks(n)).with(at);
    emit.launch(kernel.with(n).with(NOWHERE))
}

/// How many places each of so many experts has.
fn count(
    emit: &mut Emit<'_>,
    choice: &Tensor,
    first: u32,
    experts: u64,
    counts: u64,
    add: bool,
) -> Result<(), CudaError> {
    // Those of other experts are counted too, where they are sorted.
    let blocks = [emit.blocks(experts + u64::from(!add))?, 1];
    let kernel = emit.kernel("count_experts", blocks).scratch::<u64>().with(emit.address(choice));
    let kernel = kernel.with(choice.elements()).with(first).with(experts);
    emit.launch(kernel.with(counts).with(u32::from(add)))
}

fn sort(
    emit: &mut Emit<'_>,
    choice: &Tensor,
    first: u32,
    [sources, places, offsets]: [&Tensor; 3],
) -> Result<(), CudaError> {
    let experts = offsets.elements() - 1;
    let (counts, starts) = (emit.workspace(0), emit.workspace(COUNTS_BYTES));
    count(emit, choice, first, experts, counts, false)?;
    let start = emit.kernel("start_experts", [1, 1]).with(counts).with(experts);
    emit.launch(start.with(starts).with(emit.address(offsets)))?;
    emit.check("first row of an expert", offsets, sources.elements() + 1, sources, false)?;
    for words in [sources, places] {
        fill(emit, emit.address(words), words.elements())?;
    }
    let blocks = [emit.blocks(experts + 1)?, 1];
    let place = emit.kernel("place_experts", blocks).scratch::<u32>().with(emit.address(choice));
    let place = place.with(choice.elements()).with(first).with(experts).with(starts);
    emit.launch(place.with(emit.address(sources)).with(sources.elements()).with(emit.address(places)))
}

/// The largest logit of each token, and the sum of exponentials below it, in the workspace.
fn softmax_parts(emit: &mut Emit<'_>, logits: &Tensor) -> Result<(), CudaError> {
    emit.needs(logits.rows() * 2 * size_of::<f32>() as u64)?;
    let kernel = emit.kernel("softmax_parts", row_blocks(logits.rows())).scratch::<f32>();
    let kernel = kernel.with(emit.address(logits)).with(logits.rows()).with(logits.columns());
    emit.launch(kernel.with(emit.workspace(0)))
}

impl From<ZeroExperts> for ZeroExpertsOf {
    fn from(experts: ZeroExperts) -> ZeroExpertsOf {
        let copies = experts.first + experts.zero;
        let constants = copies + experts.copy;
        ZeroExpertsOf { copies, constants, end: constants + experts.constant }
    }
}

pub(super) fn zero_computation(op: ZeroComputation<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        ZeroComputation::Factors { choice, weights, gates, experts, inputs, vectors } => {
            let kernel = emit.kernel("zero_factors", vector_blocks(choice.rows()));
            let kernel = kernel.with(emit.address(choice)).with(emit.address(weights));
            let kernel = kernel.with(emit.address(gates)).with(ZeroExpertsOf::from(experts));
            let kernel = kernel.with(emit.address(inputs)).with(emit.address(vectors));
            emit.launch(kernel.with(choice.rows()).with(choice.columns()))
        }
        ZeroComputation::FactorsBackward {
            choice,
            weights,
            gates,
            experts,
            dinputs,
            dvectors,
            dweights,
            dgates,
        } => {
            let kernel = emit.kernel("zero_factors_backward", vector_blocks(choice.rows()));
            let kernel = kernel.with(emit.address(choice)).with(emit.address(weights));
            let kernel = kernel.with(emit.address(gates)).with(ZeroExpertsOf::from(experts));
            let kernel = kernel.with(emit.address(dinputs)).with(emit.address(dvectors));
            let kernel = kernel.with(emit.address(dweights)).with(emit.address(dgates));
            emit.launch(kernel.with(choice.rows()).with(choice.columns()))
        }
        ZeroComputation::AddScaled { x, factors, out } => {
            let n = out.elements();
            let kernel = emit.kernel("add_scaled_rows", vector_blocks(n)).with(emit.view(x));
            let kernel = kernel.with(emit.address(factors)).with(emit.view(out));
            emit.launch(kernel.with(n).with(out.columns()))
        }
    }
}

const _: () = assert!(2 * COUNTS_BYTES <= WORKSPACE_BYTES);
