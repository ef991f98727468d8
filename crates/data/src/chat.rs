//! Chats and instructions: records to turns (`fields`), turns to text and the parts of it that are trained
//! (`render`), text to tokens with a weight each (`encoder`), tokens to windows (`windows`). What cannot be
//! trained on is left out, counted and reported (`report`).

mod encoder;
mod fields;
mod render;
mod report;
mod windows;

pub use encoder::{EncodedSample, PromptTemplate, SampleEncoder, SampleOptions, TrainOn, Truncation};
pub use fields::Columns;
pub use report::{SampleReport, Skip, SkipReason, Skipped};
pub(crate) use report::{check_share, count};
pub use windows::{SampleWindows, SampleWriter};
