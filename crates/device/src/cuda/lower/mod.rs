//! From operations to kernels: which ones an operation is, over how many blocks, with which parameters. A file for each group of
//! families.
//!
//! An operation that has no kernel is refused here, before anything is launched; a plan asks the same.

mod attention;
mod elementwise;
mod grouped;
mod loss;
mod parameters;
mod product;
mod reduction;
mod routing;
mod rows;
mod subspace;
mod tiles;
mod update;

pub(super) use parameters::{Boxes, Check, Launch, MAP_BYTES, MOST_SHARED_BYTES, Places};

use super::CudaError;
use crate::op::RowPieces;
use crate::{Op, Tensor};
use parameters::{Emit, View, vector_blocks};

/// Every kernel, by its name in the sources.
pub(super) const KERNELS: [&str; 109] = [
    "accumulate_all",
    "activate",
    "activate_backward",
    "adafactor",
    "adafactor_full",
    "adafactor_means",
    "adam_direction",
    "adam_mini",
    "adam_mini_moments",
    "adamw",
    "adamw_8bit",
    "add",
    "add_counts",
    "add_exact",
    "add_partials",
    "add_scaled_rows",
    "add_sum",
    "adjust_correction",
    "apollo",
    "apollo_norm",
    "attention",
    "attention_backward_keys",
    "attention_backward_queries",
    "attention_deltas",
    "attention_finish",
    "attention_paged",
    "attention_sinks",
    "attention_sinks_backward",
    "balance_backward",
    "balance_loss",
    "bias_factors_backward",
    "carry_exact",
    "cast",
    "channel_squares",
    "check_places",
    "clamped_swiglu",
    "clamped_swiglu_backward",
    "clear_words",
    "clip_factor",
    "column_sums",
    "combine_rows",
    "copy_heads",
    "count_experts",
    "cross_entropy",
    "dequantize_int8",
    "dropout",
    "eigenvectors",
    "embedding",
    "embedding_backward",
    "exact_squares",
    "fill",
    "fill_words",
    "gated",
    "gated_backward",
    "gather_rows",
    "gradient_of_runs",
    "grouped_bias",
    "grouped_column_dots",
    "grouped_product",
    "grouped_scale_columns",
    "grouped_weight",
    "host_words",
    "int8_scales",
    "jitter",
    "largest_magnitude",
    "layer_norm",
    "limit_experts",
    "lion",
    "lion_8bit",
    "logit_runs",
    "loss_of_runs",
    "mean_of",
    "norm_backward",
    "norm_ratios",
    "orthonormalize",
    "partial_squares",
    "place_experts",
    "product",
    "product_few",
    "quantize_fp8",
    "quantize_int8",
    "random_normal",
    "rms_norm",
    "rope",
    "round_exact",
    "route",
    "router_mass",
    "row_dots",
    "row_lengths",
    "row_squares",
    "rows_from_blocks",
    "rows_to_blocks",
    "scale",
    "scale_columns",
    "scale_rows",
    "sgd",
    "softmax_parts",
    "start_experts",
    "sum_heads",
    "sum_partials",
    "weigh",
    "weigh_backward",
    "weighted_bias",
    "write_cache",
    "write_rows",
    "z_backward",
    "z_loss",
    "zero_factors",
    "zero_factors_backward",
];

/// The kernels for tensor cores.
pub(super) const KERNELS_80: [&str; 13] = [
    "attention_bf16_128",
    "attention_bf16_64",
    "attention_bf16_keys_128",
    "attention_bf16_keys_64",
    "attention_bf16_queries_128",
    "attention_bf16_queries_64",
    "product_bf16",
    "product_bf16_few",
    "product_bf16_input",
    "product_bf16_weight",
    "product_f16",
    "product_f16_input",
    "product_f16_weight",
];

/// The kernels for products of whole tiles.
pub(super) const KERNELS_90: [&str; 13] = [
    "attention_90_128",
    "attention_90_64",
    "attention_90_keys_128",
    "attention_90_keys_64",
    "attention_90_queries_128",
    "attention_90_queries_64",
    "product_90",
    "product_90_input",
    "product_90_weight",
    "product_90_wide",
    "product_90_wide_input",
    "product_90_wide_weight",
    "round_part",
];

/// Bytes of workspace that kernels have beside the arena: for partial sums. More is needed for vectors of over a million.
pub(super) const WORKSPACE_BYTES: u64 = 16 << 20;
/// The same where operands are rounded to bf16 there, for products of whole tiles: enough columns of a 7B model's weights for all
/// multiprocessors.
pub(super) const PART_BYTES: u64 = 64 << 20;

/// Lowers an operation that has been checked: `launch` gets its kernels in their order.
pub(super) fn lower(
    op: Op<'_>,
    places: Places,
    launch: &mut dyn FnMut(Launch) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let emit = &mut Emit::new(op.name(), places, launch);
    // A family that is new has no kernels yet: that is an error of the plan, not of the build.
    #[allow(unreachable_patterns)]
    match op {
        Op::Activation(op) => elementwise::activation(op, emit),
        Op::Attention(op) => attention::whole(op, emit),
        Op::Elementwise(op) => elementwise::elementwise(op, emit),
        Op::Embedding(op) => rows::embedding(op, emit),
        Op::GroupedProduct(op) => grouped::product(op, emit),
        Op::Heads(op) => rows::heads(op, emit),
        Op::Loss(op) => loss::loss(op, emit),
        Op::Magnitude(op) => rows::magnitude(op, emit),
        Op::Norm(op) => rows::norm(op, emit),
        Op::PiecedAttention(op) => attention::pieced(op, emit),
        Op::Position(op) => rows::position(op, emit),
        Op::Product(op) => product::product(op, emit),
        Op::Quantization(op) => elementwise::quantization(op, emit),
        Op::Reduction(op) => reduction::reduction(op, emit),
        Op::Routing(op) => routing::routing(op, emit),
        Op::Sink(op) => attention::sink(op, emit),
        Op::Subspace(op) => subspace::subspace(op, emit),
        Op::Update(op) => update::update(op, emit),
        Op::WeightedBias(op) => grouped::weighted_bias(op, emit),
        Op::ZeroComputation(op) => routing::zero_computation(op, emit),
        _ => Err(emit.not_yet(None)),
    }
}

/// Columns of a block of `column_sums`, and the room for its warps' sums.
const SUMMED_COLUMNS: u64 = 128;
const SUMS_BYTES: u64 = 8 * SUMMED_COLUMNS * 4;

/// What a kernel sums over rows.
#[derive(Clone, Copy)]
enum Summed<'a> {
    /// A tensor.
    Values(&'a Tensor),
    /// The products of two, over divisors of the columns.
    Products(&'a Tensor, &'a Tensor, &'a Tensor),
    /// The first times the second as a norm has it: with the means, if it takes them, and one over the deviations.
    Units(&'a Tensor, &'a Tensor, Option<&'a Tensor>, &'a Tensor),
}

/// out (+)= sums over rows, one for each column: pieces of rows by themselves, then these in order. More columns than the
/// workspace has room for are taken by turns.
fn sum_rows(emit: &mut Emit<'_>, what: Summed<'_>, out: &Tensor, accumulate: bool) -> Result<(), CudaError> {
    let (number, a, b, mean, rstd, divisors) = match what {
        Summed::Values(a) => (0u32, a, None, None, None, None),
        Summed::Products(a, b, divisors) => (1, a, Some(b), None, None, Some(divisors)),
        Summed::Units(a, x, mean, rstd) => (2, a, Some(x), mean, Some(rstd), None),
    };
    let (rows, columns) = (a.rows(), a.columns());
    let most = WORKSPACE_BYTES / size_of::<f32>() as u64 / 32;
    for first in (0..columns).step_by(most as usize) {
        let width = most.min(columns - first);
        let pieces = RowPieces::new(rows as usize, width as usize);
        let (count, piece_rows) = (pieces.count as u64, pieces.rows as u64);
        if count > 0 {
            let blocks = [emit.blocks(width.div_ceil(SUMMED_COLUMNS))?, count as u32];
            let sums =
                emit.kernel("column_sums", blocks).shared(SUMS_BYTES).with(number).with(emit.view(a)).with(
                    match b {
                        Some(b) => emit.view(b),
                        None => View::NONE,
                    },
                );
            let sums = [mean, rstd, divisors].into_iter().fold(sums, |sums, x| sums.with(emit.address(x)));
            let sums = [rows, columns, first, width, piece_rows].into_iter().fold(sums, Launch::with);
            emit.launch(sums.with(emit.workspace(0)).with(width))?;
        }
        let add = emit.kernel("add_partials", vector_blocks(width)).with(emit.workspace(0));
        let add = add.with(count).with(width).with(emit.view(out)).with(first).with(width);
        emit.launch(add.with(u32::from(accumulate)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{SOURCES, SOURCES_80, SOURCES_90};
    use super::*;

    fn written(sources: &[(&str, &'static str)]) -> Vec<&'static str> {
        let lines = sources.iter().flat_map(|(_, source)| source.lines());
        // A macro with the parameters of a family is told apart from what it is defined as.
        let named = lines.filter_map(|line| {
            let (kind, rest) = line.split_once('(')?;
            let of_family = (kind.ends_with("_80") || kind.ends_with("_90")) && !kind.contains(' ');
            (kind.starts_with("KERNEL") && !kind.ends_with("_90") || of_family).then_some(rest)
        });
        let mut names: Vec<&str> = named.filter_map(|rest| rest.split(',').next()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn every_kernel_of_the_sources_is_known_and_no_other() {
        assert_eq!(written(&SOURCES), KERNELS);
        assert_eq!(written(&SOURCES_80), KERNELS_80);
        assert_eq!(written(&SOURCES_90), KERNELS_90);
    }
}
