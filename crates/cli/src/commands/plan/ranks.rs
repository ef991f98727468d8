//! What several ranks take, for people.

use plimsoll_memory::ByteSize;
use plimsoll_parallel::Mesh;
use plimsoll_plan::{Division, TrainingPlan, ZeroRow};
use plimsoll_step::ZeroStage;

use crate::failure::Failure;
use crate::row;
use crate::table;

/// Whose messages the plan has counted.
fn who_sends(mesh: Mesh) -> &'static str {
    if mesh.pipeline > 1 { "the first sends" } else { "each sends" }
}

/// How many ranks there are, and how they divide the work: the layers in runs, so many of each stage.
fn ways(mesh: Mesh, runs: u32) -> String {
    let of = |ranks: u32, what: &str| (ranks > 1).then(|| format!("{ranks} {what}"));
    let stages = match runs {
        1 => "pipeline stages".to_owned(),
        runs => format!("pipeline stages of {runs} runs of layers"),
    };
    let all = [
        of(mesh.pipeline, &stages),
        of(mesh.data / mesh.expert.max(1), "data parallel"),
        of(mesh.expert, "expert parallel"),
        of(mesh.context, "context parallel"),
        of(mesh.tensor, "tensor parallel"),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    match mesh.replicas() < mesh.size() || mesh.context > 1 {
        true => format!("{} ({})", mesh.size(), all.join(" x ")),
        false => mesh.size().to_string(),
    }
}

/// The ranks in a line, where there are several.
pub fn words(plan: &TrainingPlan) -> String {
    let (Some(largest), settings) = (plan.largest_rank(), &plan.choice.settings) else {
        return String::new();
    };
    let shared = match settings.sharding.stage {
        ZeroStage::Nothing if settings.ranks.mesh.replicas() < settings.ranks.count() => {
            "each with its part of the model"
        }
        ZeroStage::Nothing => "each with everything",
        ZeroStage::States => "with shares of optimizer states (ZeRO 1)",
        ZeroStage::Gradients => "with shares of optimizer states and gradients (ZeRO 2)",
        ZeroStage::Weights => "with shares of optimizer states, gradients and weights (ZeRO 3)",
    };
    let first = largest.ranks.first().copied().unwrap_or(0);
    let least = plan.ranks.iter().map(|group| group.device_peak_bytes).min().unwrap_or(0);
    let span = match least == largest.device_peak_bytes {
        true => "all take the same".to_owned(),
        false => format!("rank {first} takes most, the others at least {} of arena", ByteSize(least)),
    };
    let sent = plan.choice.dry_run.moved.sent;
    let count = ways(settings.ranks.mesh, settings.pipeline_schedule.rounds());
    format!(
        "ranks: {count}, {shared}; {span}; {} {} a step\n",
        who_sends(settings.ranks.mesh),
        ByteSize(sent.total_bytes())
    )
}

/// How the planner has divided the ranks, and why, in a line.
pub fn division(division: &Division) -> String {
    let Division {
        tensor_parallel, pipeline_parallel, context_parallel, data_parallel, expert_parallel, ..
    } = *division;
    let ways = [
        (tensor_parallel, "tensor"),
        (pipeline_parallel, "pipeline"),
        (context_parallel, "context"),
        (data_parallel / expert_parallel.max(1), "data"),
        (expert_parallel, "expert"),
    ];
    let several = ways.into_iter().filter(|(ranks, _)| *ranks > 1);
    let mut way: Vec<String> = several.map(|(ranks, name)| format!("{name} {ranks}")).collect();
    if way.is_empty() {
        way.push("one rank".to_owned());
    }
    let chosen = format!("{}, ZeRO {}", way.join(" x "), division.zero_stage);
    let Division { fitting, not_fitting, slower, candidates, .. } = *division;
    let why = match (fitting, slower) {
        (0, _) => format!("none of {candidates} ways fits, and this one takes least at rest"),
        (1, 0) => "the only way that fits".to_owned(),
        (_, 0) => format!("fastest of {fitting} ways that fit"),
        _ => format!("fastest of {} ways, {fitting} of them planned in every form", fitting + slower),
    };
    let rest = match not_fitting {
        _ if fitting == 0 => String::new(),
        0 => String::new(),
        1 => "; one does not fit".to_owned(),
        n => format!("; {n} do not fit"),
    };
    format!("divided: {chosen}: {why}{rest}\n")
}

/// What a rank holds, by stage and number of ranks.
pub fn zero_table(plan: &TrainingPlan) -> Result<String, Failure> {
    let mut rows =
        vec![row!["ZeRO", "data", "ranks", "weights", "gradients", "states", "messages", "paper", "arena"]];
    for line in plan.zero_table()? {
        let ZeroRow { zero_stage, ranks, data_parallel, weights, gradients, states, communication, .. } =
            line;
        let bytes = [weights, gradients, states, communication, line.paper_bytes, line.device_peak_bytes];
        let numbers = [zero_stage, data_parallel, ranks].map(|number| number.to_string());
        rows.push(numbers.into_iter().chain(bytes.map(|bytes| ByteSize(bytes).to_string())).collect());
    }
    Ok(format!(
        "what the first rank holds, the most of each kind, on whatever tier, for so many data parallel ranks:\n{}\
         paper: weights, gradients and states by the formula of the ZeRO paper. The arena has besides: activations,\n\
         workspace, and the gradients of a layer in whole before each rank has its share.\n",
        table::render(&rows)
    ))
}
