//! Decoders as transformers' modeling files write them, on the dry PyTorch.
//!
//! `layers` has linears, with what PEFT and bitsandbytes make of them, and norms; `attention`, `mlp`, `experts` and `decoder`
//! the parts of a model; `loss` what becomes of its output. Which step they run in is left to `program`.

mod attention;
mod decoder;
mod experts;
mod layers;
mod loss;
mod mlp;
mod positions;

pub(crate) use decoder::{Cache, Decoder, Output};
pub(crate) use experts::are_modules;
pub(crate) use layers::{BLOCK, NESTED_BLOCK};
pub(crate) use positions::{Tables, position_tables};
