//! Every kernel but matrix products. Kernels work on slices and know no tensors.
//!
//! All compute in f32 whatever the storage. Tasks are cut by the size of the work alone and sums are combined in a
//! fixed order, so that the results are the same bits for any number of threads.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod cache;
pub(super) mod cast;
pub(super) mod column_sums;
pub(super) mod cross_entropy;
pub(super) mod dora;
pub(super) mod dropout;
pub(super) mod elementwise;
pub(super) mod embedding;
pub(super) mod fp8;
pub(super) mod heads;
pub(super) mod int8;
pub(super) mod layer_norm;
mod math;
pub(super) mod random;
pub(super) mod rms_norm;
pub(super) mod rope;
mod rounding;
pub(super) mod routing;
mod simd;
pub(super) mod sink;
mod soft_cap;
mod split;
mod storage;
pub(super) mod subspace;
pub(super) mod sum_squares;
pub(super) mod update;
pub(super) mod weighted_bias;
pub(super) mod zero_computation;

pub(super) use elementwise::Input;
pub(super) use rounding::Dither;
pub(super) use simd::Simd;
pub(super) use storage::{Floats, FloatsMut};

use super::Pool;
use crate::op::{PIECE, rows_per_task, task_elements};

/// What a kernel runs on.
#[derive(Clone, Copy)]
pub(super) struct Exec<'a> {
    pub pool: &'a Pool,
    pub simd: Simd,
}
