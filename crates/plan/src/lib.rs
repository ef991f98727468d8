//! Configuration, hardware, and planning: the step program is run dry for every candidate, and the plan says what
//! every byte is for, how long a step takes, and what else could be done. It does not know how kernels work.

#![forbid(unsafe_code)]

mod advice;
mod axes;
mod bounds;
mod breakdown;
mod catalogue;
mod colours;
pub mod config;
mod cost;
mod divide;
mod dry_run;
mod evaluating;
mod expert_slots;
mod explain;
mod export;
mod filling;
mod find;
mod generation;
pub mod hardware;
mod inference;
mod ladder;
mod limits;
mod load_line;
mod measured;
mod method;
mod needs;
mod offload;
pub mod oom;
mod optimizer;
mod origin;
mod ranks;
mod resolve;
mod run_needs;
mod runs;
mod scratch;
mod search;
mod shortage;
mod stages;
mod streaming;
mod svg;
mod technique;
mod time;
mod timeline;
mod training_plan;
mod waterfall;
mod zero_table;

pub use advice::{Alternative, Extent, LeastNeed, MemoryAndDisk, Refusal};
pub use axes::{byte_ticks, nice_step};
pub use breakdown::{ActivationMemory, MemoryBreakdown, Optimization};
pub use catalogue::{
    Catalogue, CatalogueError, DeviceModel, MOST_DOLLARS, MeasuredCpu, Price, Reached, Spill, Target,
};
pub use colours::{COLOURS, Colour, OTHER_COLOUR, colour_of};
pub use cost::RunCost;
pub use divide::Division;
pub use dry_run::{DryRun, EvaluationPass, EvaluationPhase};
pub use expert_slots::ExpertReads;
pub use explain::{ChosenBy, Explanation, Neighbour, Outcome, Planned};
pub use export::{ExportError, ExportFormat, Exported};
pub use find::{FindError, Finder, Found, Sought, fitting_devices};
pub use generation::{
    Apart, Below, CacheContext, DoesNotFit, GenerationPlan, GenerationPlanError, GenerationRequest,
    cache_name,
};
pub use inference::{CACHES, InferenceChange, InferencePlan, InferenceQuestion, InferenceStage, LayerPlaces};
pub use limits::{Limits, PipelineBytes};
pub use load_line::{ADDRESS_SPACE_BESIDE, LimitedBy, LoadLine, ProcessLimits};
pub use measured::{DiskName, MachineName, Measured, RatesFile};
pub use method::quantized_as;
pub use needs::{Need, needs};
pub use optimizer::optimizer_settings;
pub use origin::{ModelOrigin, OriginError};
pub use ranks::RankGroup;
pub use resolve::{Choice, lighter_choices, loss_chunk_tokens};
pub use run_needs::{DiskNeeds, Past, RunNeeds, SavedBytes, ValidationNeeds};
pub use scratch::ScratchTokenizer;
pub use search::{FrontPoint, SearchReport, device_for_goal};
pub use shortage::{Resource, Shortage};
pub use streaming::{PassFootprint, fitting_residency, streaming_overhead_bytes};
pub use time::{Bound, BoundBy, DiskRates, Network, Rates, TimeEstimate, Wiring};
pub use timeline::{
    Allocation, LiveChange, Moment, Part, Stretch, TierTimeline, Timeline, TimelineError, TimelineFormat,
};
pub use training_plan::{LayerBytes, Machine, TrainingPlan, tags_json};
pub use waterfall::{FurtherStep, Waterfall, WaterfallEntry};
pub use zero_table::ZeroRow;
