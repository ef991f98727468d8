//! Text from a model: sampling over a [`Decoder`](plimsoll_step::Decoder)'s logits. It knows nothing of training.

#![forbid(unsafe_code)]

mod generate;
mod sampler;

pub use generate::{GenerateError, Generated, generate};
pub use sampler::{Sampler, SamplerError, SamplerSettings, SamplerStep};
