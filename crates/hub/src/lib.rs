//! Models of the Hugging Face hub: from an id such as `org/name` to files on disk.
//!
//! Names, URLs and the cache's layout are those of `hf-hub` and of Python's `huggingface_hub`, so that a model fetched
//! by one is found by the others. The transfer itself is this crate's: `hf-hub` neither checks sizes and statuses nor
//! the names that a server sends before it uses them as paths.
//!
//! What a model's files mean, and how progress looks, is left to others.

#![forbid(unsafe_code)]

mod cache;
mod error;
mod fetch;
mod id;
mod listing;
mod progress;
mod remote;
mod settings;
mod transfer;
mod wanted;

pub use error::{HubError, IdError};
pub use fetch::Hub;
pub use id::HubId;
pub use progress::{FetchEvent, Progress};
pub use settings::{HubSettings, Login, Token};
