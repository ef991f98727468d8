//! NVIDIA GPUs: the third device. It needs nothing but the driver, which is loaded when it is asked for.
//!
//! `driver` is the library and what can go wrong with it, `context` a card in use: memory, streams, events. `programs` has the kernels
//! compiled, `graphs` begins many at once. `lower` says which kernels an operation is; their sources are CUDA C++ in `kernels/`, shipped as PTX that the driver compiles
//! for its card.
//! [`Cuda`] puts these together. `nccl` sends from card to card. What the card cannot do yet is an error of the plan: `missing`.

mod context;
mod device;
mod driver;
mod graphs;
mod host;
mod lower;
mod nccl;
mod programs;
mod tables;

pub use device::{Cuda, OpenCard};
pub use driver::{Card, CudaError, Driver, LEAST_CAPABILITY, LEAST_DRIVER};
pub use graphs::{GRAPH_HOST_BYTES, Replays};
pub use nccl::{CardLink, FarMessage, FarSpan, Nccl, UniqueId};

use crate::{DeviceTraits, Op};

/// The kernels, as the driver takes them.
pub(crate) const PTX: &str = include_str!("kernels.ptx");
/// Those for [`TENSOR_CORES`] beside them.
pub(crate) const PTX_80: &str = include_str!("kernels_80.ptx");
/// Those for [`WHOLE_TILES`] beside both.
pub(crate) const PTX_90: &str = include_str!("kernels_90.ptx");

/// The compute capability, in tenths, from which on cards have what `kernels/tensor.cuh` asks for.
pub const TENSOR_CORES: u32 = 80;
/// The one that has what `kernels/hopper.cuh` asks for. Later ones do not.
pub const WHOLE_TILES: u32 = 90;
/// The first version of CUDA whose drivers take these kernels: PTX 8.0.
pub const WHOLE_TILES_DRIVER: u32 = 12_000;

/// The sources of the kernels, in the order in which they make one program.
pub const SOURCES: [(&str, &str); 15] = [
    ("prelude.cuh", include_str!("kernels/prelude.cuh")),
    ("units.cuh", include_str!("kernels/units.cuh")),
    ("shapes.cuh", include_str!("kernels/shapes.cuh")),
    ("elementwise.cu", include_str!("kernels/elementwise.cu")),
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("product.cu", include_str!("kernels/product.cu")),
    ("attention.cu", include_str!("kernels/attention.cu")),
    ("loss.cu", include_str!("kernels/loss.cu")),
    ("reduction.cu", include_str!("kernels/reduction.cu")),
    ("update.cu", include_str!("kernels/update.cu")),
    ("quantization.cu", include_str!("kernels/quantization.cu")),
    ("subspace.cu", include_str!("kernels/subspace.cu")),
    ("routing.cu", include_str!("kernels/routing.cu")),
    ("grouped.cu", include_str!("kernels/grouped.cu")),
    ("sink.cu", include_str!("kernels/sink.cu")),
];

/// The sources of the kernels for [`TENSOR_CORES`]; with those of [`SOURCES`] that [`SHARED_80`] names they make another program.
pub const SOURCES_80: [(&str, &str); 5] = [
    ("tensor.cuh", include_str!("kernels/tensor.cuh")),
    ("product_80.cu", include_str!("kernels/product_80.cu")),
    ("attention_tiles.cuh", include_str!("kernels/attention_tiles.cuh")),
    ("attention_80.cu", include_str!("kernels/attention_80.cu")),
    ("attention_backward_80.cu", include_str!("kernels/attention_backward_80.cu")),
];
/// What both programs have in common.
pub const SHARED_80: [&str; 3] = ["prelude.cuh", "units.cuh", "shapes.cuh"];

/// The sources of the kernels for [`WHOLE_TILES`]; with those of the others that [`SHARED_90`] names they make a third program.
pub const SOURCES_90: [(&str, &str); 3] = [
    ("hopper.cuh", include_str!("kernels/hopper.cuh")),
    ("product_90.cu", include_str!("kernels/product_90.cu")),
    ("attention_90.cu", include_str!("kernels/attention_90.cu")),
];
/// What that one has in common with the others.
pub const SHARED_90: [&str; 5] =
    ["prelude.cuh", "units.cuh", "shapes.cuh", "tensor.cuh", "attention_tiles.cuh"];

impl DeviceTraits {
    /// A GPU's: memory of its own, in which tensors begin at multiples of 256 bytes.
    pub const CUDA: DeviceTraits = DeviceTraits { unified: false, alignment: 256, cuda: true };
}

/// Why a GPU cannot carry out an operation yet, if it cannot.
pub(crate) fn missing(op: Op<'_>) -> Option<CudaError> {
    lower::lower(op, lower::Places::default(), &mut |_| Ok(())).err()
}
