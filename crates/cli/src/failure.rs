//! Every error, rendered once, with its exit code: 0 done, 2 bad usage or configuration, 3 does not fit, 1 else; 128 and the
//! signal for a run that was asked to stop.

use std::fmt;

use plimsoll_data::DataError;
use plimsoll_device::{CudaError, DeviceError};
use plimsoll_disk::DiskError;
use plimsoll_generate::{ConversationError, GenerateError, SamplerError};
use plimsoll_hub::HubError;
use plimsoll_model::chat_template::ChatTemplateError;
use plimsoll_model::tokenizer::TokenizerError;
use plimsoll_model::{AdapterError, ModelError, SaveError};
use plimsoll_parallel::CommunicationError;
use plimsoll_plan::config::ConfigError;
use plimsoll_plan::{CatalogueError, ExportError, GenerationPlanError, OriginError, TimelineError};
use plimsoll_stacks::AnswerError;
use plimsoll_step::StepError;
use plimsoll_train::TrainError;

/// Exit code of wrong arguments and configurations.
pub const USAGE: u8 = 2;
/// Exit code of plans that do not fit.
pub const DOES_NOT_FIT: u8 = 3;
/// Exit code of everything else.
pub const OTHER: u8 = 1;

/// What ends the program before its time.
#[derive(Debug)]
pub struct Failure {
    message: String,
    exit_code: u8,
}

impl Failure {
    /// A wrong argument or configuration.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), exit_code: USAGE }
    }

    /// A plan that does not fit its budget.
    pub fn does_not_fit(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), exit_code: DOES_NOT_FIT }
    }

    /// Anything else.
    pub fn other(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), exit_code: OTHER }
    }

    /// A run that was asked to stop and has done so: everything is said.
    pub fn stopped(exit_code: u8) -> Failure {
        Failure { message: String::new(), exit_code }
    }

    /// Nothing to say: nobody reads the output any more.
    pub fn silent() -> Failure {
        Failure { message: String::new(), exit_code: 0 }
    }

    /// A plan that does not fit its budget, of which everything was said on standard output.
    pub fn shown_not_to_fit() -> Failure {
        Failure { message: String::new(), exit_code: DOES_NOT_FIT }
    }

    /// Whether there is nothing to say.
    pub fn is_silent(&self) -> bool {
        self.message.is_empty()
    }

    /// The program's exit code.
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The exit code of each error, by itself or by what it is.
macro_rules! failure_from {
    ($($error:ty => $code:expr),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                let code: fn(&$error) -> u8 = $code;
                Failure { exit_code: code(&error), message: error.to_string() }
            }
        })*
    };
}

failure_from! {
    ConfigError => |_| USAGE,
    OriginError => |_| USAGE,
    TimelineError => |_| USAGE,
    CatalogueError => |_| USAGE,
    ExportError => |_| USAGE,
    SamplerError => |_| USAGE,
    ModelError => |_| OTHER,
    TokenizerError => |_| OTHER,
    SaveError => |_| OTHER,
    CommunicationError => |_| OTHER,
    serde_json::Error => |_| OTHER,
    std::io::Error => |_| OTHER,
    ChatTemplateError => |error| match error {
        // Such a template is of no use whatever the messages are.
        ChatTemplateError::Syntax { .. } => USAGE,
        _ => OTHER,
    },
    AnswerError => |error| match error {
        AnswerError::Request(_) => USAGE,
        AnswerError::Estimate(_) => OTHER,
    },
    DeviceError => |error| match error {
        DeviceError::OutOfMemory(_)
        | DeviceError::Reservation(_)
        | DeviceError::Cuda(CudaError::OutOfMemory { .. }) => DOES_NOT_FIT,
        _ => OTHER,
    },
    DiskError => |error| match error {
        DiskError::OverBudget { .. } | DiskError::Reservation(_) => DOES_NOT_FIT,
        DiskError::NoSpill { .. } => USAGE,
        _ => OTHER,
    },
    HubError => |error| match error {
        HubError::Setting { .. }
        | HubError::NoSuchModel { .. }
        | HubError::NoSuchRevision { .. }
        | HubError::NoSuchFile { .. }
        | HubError::SeveralGguf { .. } => USAGE,
        _ => OTHER,
    },
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Failure {
        match error {
            DataError::ChatTemplate(error) => error.into(),
            error => Failure::other(error.to_string()),
        }
    }
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Failure {
        match error {
            StepError::Device(error) => error.into(),
            error @ (StepError::CacheType { .. }
            | StepError::Mesh { .. }
            | StepError::NoExperts { .. }
            | StepError::NoRouterBias
            | StepError::Spec(_)
            | StepError::TooManyExpertSlots { .. }
            | StepError::TrainedExperts
            | StepError::ExpertsOfLayers { .. }
            | StepError::TooFewPositions { .. }
            | StepError::UnevenProducts { .. }
            | StepError::UnevenExperts { .. }
            | StepError::TooManyStages { .. }
            | StepError::TooManyRounds { .. }
            | StepError::UnevenGroups { .. }) => Failure::usage(error.to_string()),
            StepError::Adapter(adapters) if matches!(*adapters, AdapterError::Layout(_)) => {
                Failure::usage(StepError::Adapter(adapters).to_string())
            }
            other => Failure::other(other.to_string()),
        }
    }
}

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Failure {
        match error {
            GenerateError::Step(error) => error.into(),
            error @ (GenerateError::EmptyPrompt | GenerateError::PromptTooLong { .. }) => {
                Failure::usage(error.to_string())
            }
            other => Failure::other(other.to_string()),
        }
    }
}

impl From<ConversationError> for Failure {
    fn from(error: ConversationError) -> Failure {
        match error {
            ConversationError::Template(error) => error.into(),
            error @ ConversationError::TooLong { .. } => Failure::usage(error.to_string()),
            other => Failure::other(other.to_string()),
        }
    }
}

impl From<GenerationPlanError> for Failure {
    fn from(error: GenerationPlanError) -> Failure {
        match error {
            GenerationPlanError::Step(error) => error.into(),
            error @ GenerationPlanError::DoesNotFit(_) => Failure::does_not_fit(error.to_string()),
        }
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Failure {
        match error {
            TrainError::Step(error) => error.into(),
            TrainError::Device(error) => error.into(),
            TrainError::Config(error) => error.into(),
            TrainError::Origin(error) => error.into(),
            TrainError::Data(error) => error.into(),
            TrainError::Disk(error @ (DiskError::OverBudget { .. } | DiskError::Full { .. })) => {
                Failure::does_not_fit(format!("memory.disk_path: {error}"))
            }
            TrainError::Disk(error @ DiskError::NoSpill { .. }) => {
                Failure::usage(format!("memory.disk_path: {error}"))
            }
            // Beside what lives below the device there is no room on its disk.
            error @ TrainError::NoRoom { needs, .. } if needs.spill_bytes > 0 => {
                Failure::does_not_fit(error.to_string())
            }
            error @ (TrainError::OutputInUse { .. }
            | TrainError::FolderTaken { .. }
            | TrainError::OtherOptimizer { .. }
            | TrainError::OtherConfiguration { .. }
            | TrainError::Adapter(AdapterError::Layout(_))
            | TrainError::NotTheSameRun { .. }) => Failure::usage(error.to_string()),
            other => Failure::other(other.to_string()),
        }
    }
}
