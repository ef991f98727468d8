//! Every kernel but matrix products and attention, against plain f64 versions written for reading.

mod activations;
mod elementwise;
mod embeddings;
mod harness;
mod loss;
mod norms;
mod optimizer;
mod reference;
