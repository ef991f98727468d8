//! Why the planner took a value of a key, and what the values next to it would do: each is planned by the same search.

use plimsoll_memory::ByteSize;
use plimsoll_step::StepError;
use serde::Serialize;

use crate::config::{ConfigError, RawConfig, Shaping, Takes};
use crate::limits::Limits;
use crate::origin::ModelOrigin;
use crate::resolve::{AS_FAST, Choice, resolved_config};
use crate::shortage::Shortage;
use crate::training_plan::{Decided, Machine, TrainingPlan, decided};

/// A value of a key, and those next to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The dotted path.
    pub key: String,
    /// The value in the plan, or in words what stands for it.
    pub value: String,
    /// Whose value it is.
    pub chosen_by: ChosenBy,
    /// Where the user wrote it.
    pub place: Option<String>,
    /// Why it is this value, in sentences.
    pub reason: String,
    /// The step with it.
    pub own: Planned,
    /// Other values; none of a key that does not shape the step, as far as values next to its own tell.
    pub neighbours: Vec<Neighbour>,
}

/// Who has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChosenBy {
    /// The planner.
    Planner,
    /// The user.
    User,
    /// Nobody: it is the default.
    Default,
}

/// Another value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Neighbour {
    /// The value.
    pub value: String,
    /// What the planner makes of it, where that is `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub becomes: Option<String>,
    /// What it leads to.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What a value leads to.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Outcome {
    /// A step.
    Planned(Planned),
    /// Nothing: it does not go with the rest.
    Refused {
        /// Why not.
        refused: String,
    },
}

/// A step that a search has chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// Whether it keeps to the limits.
    pub fits: bool,
    /// What there is too little of.
    pub shortages: Vec<Shortage>,
    /// The peak of the device, in bytes.
    pub device_peak_bytes: u64,
    /// Bytes of host memory, with the data pipeline.
    pub host_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
    /// Seconds of an optimizer step.
    pub step_seconds: f64,
    /// Tokens over that time.
    pub tokens_per_second: f64,
    /// Whether it leaves free what automatic choices leave (`memory.target_utilization`).
    within_target: bool,
}

impl TrainingPlan {
    /// Why a key has its value in this plan, and what the values next to it would do. `origin` is that of the plan.
    ///
    /// # Errors
    /// There is no such key.
    pub fn explain(&self, key: &str, origin: &ModelOrigin) -> Result<Explanation, ConfigError> {
        let argument = format!("--explain {key}");
        let (asked, resolved) =
            (self.asked.key_state(key, &argument)?, self.config.key_state(key, &argument)?);
        let value = resolved.value.clone().unwrap_or(resolved.default.clone());
        let shaping = Shaping::of(key);
        let chosen_by = match shaping.takes {
            _ if asked.is_fixed() => ChosenBy::User,
            Takes::Never => ChosenBy::Default,
            _ if resolved.is_fixed() => ChosenBy::Planner,
            _ => ChosenBy::Default,
        };
        let own = Planned::of(&self.choice, self.limits);
        let open = (asked.is_fixed() && asked.may_be_auto()).then(|| "auto".to_owned());
        // Another model is another question: its plan is not made here.
        let values = match key.starts_with("model.") {
            true => Vec::new(),
            false => shaping.neighbours(&resolved, &value).into_iter().chain(open).collect(),
        };
        let values = values.into_iter();
        let mut neighbours: Vec<Neighbour> =
            values.map(|value| self.neighbour(shaping, value, origin)).collect();
        // That a value does not go with the rest is nothing to read of a key that may have nothing to do with the plan.
        neighbours.retain(|other| shaping.is_known() || matches!(other.outcome, Outcome::Planned(_)));
        let place = Some(key).filter(|_| chosen_by == ChosenBy::User).and_then(|key| self.asked.place(key));
        let place = place.map(ToString::to_string);
        let reason = Reason { key, value: &value, chosen_by, place: place.as_deref(), shaping, own: &own };
        let changes_nothing = !shaping.is_known() && neighbours.iter().all(|other| other.is_like(&own));
        let reason =
            if changes_nothing { reason.without(&neighbours) } else { reason.sentences(&neighbours) };
        if changes_nothing {
            neighbours.clear();
        }
        Ok(Explanation { key: key.to_owned(), value, chosen_by, place, reason, own, neighbours })
    }

    /// What another value would lead to.
    fn neighbour(&self, shaping: Shaping<'_>, value: String, origin: &ModelOrigin) -> Neighbour {
        let config = shaping.with(&self.asked, &value, self.choice.sequences());
        let planned = config
            .map_err(|error| error.to_string())
            .and_then(|config| self.planned_with(&config, origin).map_err(|error| error.to_string()));
        let (becomes, outcome) = match planned {
            Ok((planned, resolved)) => {
                let taken = resolved.key_state(shaping.key, shaping.key).ok().and_then(|state| state.value);
                (taken.filter(|_| value == "auto"), Outcome::Planned(planned))
            }
            Err(refused) => (None, Outcome::Refused { refused }),
        };
        Neighbour { value, becomes, outcome }
    }

    /// The step that is chosen for another configuration, and that configuration with nothing left open.
    fn planned_with(
        &self,
        config: &RawConfig,
        origin: &ModelOrigin,
    ) -> Result<(Planned, RawConfig), StepError> {
        // The machine has what the pipeline of the configuration that was asked for holds of a token.
        let [asked, other] = [&self.asked, config].map(|config| config.data.host_bytes_per_token());
        let of_token = self.machine.host_bytes_per_token.saturating_add(other).saturating_sub(asked);
        let machine = &Machine { host_bytes_per_token: of_token, ..self.machine };
        let Decided { config, choice, .. } = decided(config, &self.spec, origin.weights(), machine)?;
        let limits = Limits::of(&config, machine);
        let resolved = resolved_config(&config, &choice);
        // As in a plan: of a pipeline, what the stage of this rank takes where all fit.
        let choice = match limits.allow(&choice) {
            true => choice.of_own_stage(&self.spec, &self.machine.rates)?,
            false => choice,
        };
        Ok((Planned::of(&choice, limits), resolved))
    }
}

impl Planned {
    fn of(choice: &Choice, limits: Limits) -> Planned {
        Planned {
            fits: limits.allow(choice),
            shortages: limits.shortages(choice).collect(),
            device_peak_bytes: choice.peak_bytes(),
            host_bytes: limits.host_tier(choice),
            disk_bytes: choice.dry_run.disk_bytes(),
            step_seconds: choice.time.step_seconds,
            tokens_per_second: choice.time.tokens_per_second,
            within_target: limits.allow_within(choice, limits.target_bytes),
        }
    }

    /// How much longer a token takes than in another step, as a share.
    fn slower_than(&self, other: &Planned) -> f64 {
        other.tokens_per_second / self.tokens_per_second - 1.0
    }

    /// The most that is missing of anything, in words.
    fn short(&self) -> String {
        let most = self.shortages.iter().max_by_key(|shortage| shortage.bytes());
        most.map_or(String::new(), |short| {
            format!("{} of {}", ByteSize(short.bytes()), short.resource.words())
        })
    }
}

/// What a reason is made of.
struct Reason<'a> {
    key: &'a str,
    value: &'a str,
    chosen_by: ChosenBy,
    place: Option<&'a str>,
    shaping: Shaping<'a>,
    own: &'a Planned,
}

impl Reason<'_> {
    fn sentences(&self, neighbours: &[Neighbour]) -> String {
        let mut all = vec![self.whose(neighbours)];
        if !self.own.fits {
            all.push("nothing that the planner tried with it fits".to_owned());
        }
        all.extend(neighbours.iter().filter_map(|other| self.beside(other)));
        format!("{}.", all.join(". "))
    }

    /// The sentences of a key whose other values change nothing.
    fn without(&self, neighbours: &[Neighbour]) -> String {
        let values: Vec<&str> = neighbours.iter().map(|other| &*other.value).collect();
        match values.is_empty() {
            true => format!("{}.", self.whose(neighbours)),
            false => format!(
                "{}. With {} a step takes the same memory and time.",
                self.whose(neighbours),
                values.join(" or ")
            ),
        }
    }

    /// Whose value it is.
    fn whose(&self, neighbours: &[Neighbour]) -> String {
        let Reason { key, value, chosen_by, .. } = self;
        match (chosen_by, self.shaping.takes) {
            (ChosenBy::User, _) => match self.place {
                Some(place) => format!("{key} is {value} because you set it ({place})"),
                None => format!("{key} is {value}, as the configuration has it"),
            },
            (_, Takes::Never) => format!("planning does not decide {key}: it is {value} unless you set it"),
            (ChosenBy::Default, _) if *value == "auto" => {
                format!("{key} is left open, and nothing depends on it in this plan")
            }
            (ChosenBy::Default, _) => {
                format!("{key} is {value}: the planner decides it only where it is set to auto")
            }
            (ChosenBy::Planner, Takes::ByRule(rule)) => format!("the planner took {value}: {rule}"),
            (ChosenBy::Planner, Takes::Fastest) => self.fastest(neighbours),
        }
    }

    /// That the planner took the fastest, where that is so.
    fn fastest(&self, neighbours: &[Neighbour]) -> String {
        let fitting = neighbours.iter().filter_map(Neighbour::fitting);
        let faster =
            fitting.filter(|other| other.within_target && self.own.slower_than(other) > AS_FAST - 1.0);
        let value = self.value;
        match (self.own.fits, faster.count()) {
            (true, 0) => format!("the planner took {value}: no value next to it is faster and fits"),
            (true, _) => {
                format!("the planner took {value}, before it knew what the whole step takes with others")
            }
            (false, _) => format!("the planner took {value}, which is nearest to fitting"),
        }
    }

    /// What another value does beside this one, where that says why it was not taken.
    fn beside(&self, other: &Neighbour) -> Option<String> {
        let (value, own) = (&other.value, self.own);
        let planned = match &other.outcome {
            Outcome::Planned(planned) => planned,
            Outcome::Refused { .. } => return None,
        };
        if value == "auto" {
            let becomes = match other.becomes.as_deref() {
                None | Some("auto") => String::new(),
                Some(taken) => format!(" it would be {taken}, and"),
            };
            return Some(format!("left open,{becomes} the step would {}", difference(planned, own)));
        }
        if !planned.fits {
            return own.fits.then(|| format!("{value} does not fit: {} short", planned.short()));
        }
        let more = match own.fits && !planned.within_target && own.within_target {
            true => ", but leave less free than memory.target_utilization asks for",
            false => "",
        };
        Some(format!("{value} would {}{more}", difference(planned, own)))
    }
}

impl Neighbour {
    /// Whether it leads to a step that takes just as much.
    fn is_like(&self, own: &Planned) -> bool {
        matches!(&self.outcome, Outcome::Planned(planned) if planned == own)
    }

    fn fitting(&self) -> Option<&Planned> {
        match &self.outcome {
            Outcome::Planned(planned) => Some(planned).filter(|planned| planned.fits),
            Outcome::Refused { .. } => None,
        }
    }
}

/// What one step is beside another, to follow "would".
fn difference(one: &Planned, other: &Planned) -> String {
    let share = one.slower_than(other);
    let time = match share {
        share if share.abs() <= AS_FAST - 1.0 => "be as fast to 1 %".to_owned(),
        share if share > 1.0 => format!("take {:.1} times as long", share + 1.0),
        share if share > 0.0 => format!("be {:.0} % slower", share * 100.0),
        share => format!("be {:.0} % faster", (1.0 / (1.0 + share) - 1.0) * 100.0),
    };
    let tiers = [
        (one.device_peak_bytes, other.device_peak_bytes, ""),
        (one.host_bytes, other.host_bytes, " on the host"),
        (one.disk_bytes, other.disk_bytes, " on disk"),
    ];
    let changes: Vec<String> = tiers
        .into_iter()
        .filter_map(|(one, other, place)| match one.cmp(&other) {
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Less => Some(format!("{} less{place}", ByteSize(other - one))),
            std::cmp::Ordering::Greater => Some(format!("{} more{place}", ByteSize(one - other))),
        })
        .collect();
    let memory = if changes.is_empty() { "as much memory".to_owned() } else { changes.join(", ") };
    format!("{time} and take {memory}")
}
