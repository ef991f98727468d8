//! Every kernel against plain f64 versions written for reading.

mod activations;
mod adapters;
mod attention;
mod cache;
mod dequantize;
mod elementwise;
mod embeddings;
mod experts;
mod fp8;
mod harness;
mod heads;
mod int8;
mod linear;
mod loss;
#[path = "../cuda/mock.rs"]
mod mock;
mod norms;
mod optimizer;
mod pieced_attention;
mod pieces;
mod products;
mod reference;
mod sinks;
mod step_numbers;
mod zero_computation;
