//! Memory of processes, of ours and of others: samples, health, forecasts, leaks, and a flight recorder. It knows neither training nor
//! terminals.

#![forbid(unsafe_code)]

mod conditions;
mod gpu;
mod group;
mod health;
mod history;
mod post_mortem;
mod process;
mod recorder;
mod sample;
pub mod trend;
mod watch;

pub use conditions::Conditions;
pub use gpu::{GpuProcessSample, GpuSample, Gpus};
pub use group::{GroupSample, group};
pub use health::{Health, Status, Thresholds};
pub use history::{Forecast, History};
pub use post_mortem::{Cause, Grown, PostMortem};
pub use process::{ProcessSample, process};
pub use recorder::{
    About, FLIGHT_RECORDER, Follower, News, Owner, Record, Recorder, RecorderError, Recording, Slots,
};
pub use sample::{LimitedBy, Room, Sample, Sampler, Watched};
pub use watch::{Growing, Judgement, Leak, Quantity, Unit, Watch};
