//! The operations, by family: what each allocates, saves, and does with its gradient.

pub(crate) mod attention;
mod embedding;
mod liger;
mod linear;
mod loss;
mod normalise;
mod pointwise;
mod quantised;
mod routing;
mod views;

pub use pointwise::Unary;
pub(crate) use quantised::FourBitForm;
