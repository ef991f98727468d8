//! Text from a model: sampling over a [`Decoder`](plimsoll_step::Decoder)'s logits, what ends an answer, many prompts at once, guesses that
//! are verified, and conversations whose turns share a cache. It knows nothing of training and of terminals.

#![forbid(unsafe_code)]

mod answer;
mod batch;
mod conversation;
mod draft;
mod generate;
mod sampler;
mod session;
mod stop;

pub use batch::{Batch, BatchSummary, Request};
pub use conversation::{Conversation, ConversationError, Prompt, Turn};
pub use draft::{Draft, DraftModel, Lookup};
pub use generate::{Drafted, GenerateError, Generated, Limits, StopReason};
pub use sampler::{Sampler, SamplerError, SamplerSettings, SamplerStep, SettingError};
pub use session::{Prefill, Session};
pub use stop::{EmptyStopString, StopStream, StopStrings};
