//! A run as it is seen from outside. [`View`] is what is known of it, as a plain value of bounded size. It is fed by the loop's own events
//! ([`Live`]) or by the files in the run's folder ([`RunFiles`]), and shown in three ways: as cells of a terminal ([`terminal`]), as a page for
//! a browser ([`page`]), and as lines ([`Lines`]).
//!
//! What shows a view knows nothing of training, and nothing here holds a run up: the loop hands over small values. Opening terminals and
//! listening on ports are left to the command line.

#![forbid(unsafe_code)]

mod band;
mod curve;
mod event;
mod files;
mod lines;
mod live;
pub mod page;
mod plan;
mod tail;
pub mod terminal;
mod time_left;
mod view;

pub use band::{Band, Held, Moment};
pub use curve::Curve;
pub use event::{Event, Kind};
pub use files::{RunFiles, now};
pub use lines::Lines;
pub use live::Live;
pub use plan::PlanView;
pub use time_left::TimeLeft;
pub use view::{State, Tier, View};
