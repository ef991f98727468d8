//! Where a plan's memory goes, what its techniques save, and what activations take for other shapes.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{ActivationMemory, TrainingPlan};

use crate::failure::Failure;
use crate::row;
use crate::table;
use crate::units::seconds;

/// Memory in all, and each technique that the plan has.
pub fn words(plan: &TrainingPlan) -> String {
    let found = plan.breakdown();
    let mut rows = vec![
        row!["of the budget", ByteSize(found.total_bytes)],
        row!["allocated at the peak", ByteSize(found.allocated_bytes)],
        row!["reserved: the arena and the overhead", ByteSize(found.reserved_bytes)],
        row!["free", ByteSize(found.free_bytes)],
        row![
            "gaps at the peak",
            format!("{} ({:.2} % of the arena)", ByteSize(found.gap_bytes), 100.0 * found.fragmentation)
        ],
    ];
    for (phase, bytes) in &found.by_phase {
        rows.push(row![format!("the arena's highest in the {phase} phase"), ByteSize(*bytes)]);
    }
    let mut out = table::render(&rows);
    let mut rows = vec![row!["what is on", "without it, the peak is higher by", "it adds to a step"]];
    let (on, off): (Vec<_>, Vec<_>) = plan.optimizations().into_iter().partition(|one| one.enabled);
    for one in &on {
        let saved = match one.bytes_saved {
            Some(bytes) if bytes < 0 => format!("-{}", ByteSize(bytes.unsigned_abs())),
            Some(bytes) => ByteSize(bytes.unsigned_abs()).to_string(),
            None => "there is no such step".to_owned(),
        };
        let added = one.seconds_added.map_or(String::new(), |added| match added < 0.0 {
            true => format!("-{}", seconds(-added)),
            false => seconds(added),
        });
        rows.push(row![&one.name, saved, added]);
    }
    out.push_str(&format!("\n{}", table::render(&rows)));
    let is_set = |key: &&str| on.iter().any(|one| one.keys.contains(key));
    let mut keys: Vec<&str> = Vec::new();
    for key in off.iter().flat_map(|one| one.keys.iter().copied()).filter(|key| !is_set(key)) {
        // A key may stand for several techniques.
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    out.push_str(&format!("off: {}\n", keys.join(", ")));
    out
}

/// Activations of the shapes that were asked for.
pub fn activations(plan: &TrainingPlan, shapes: &[String]) -> Result<Vec<ActivationMemory>, Failure> {
    let mut all = Vec::new();
    for shape in shapes {
        let shape = plan.config.batch_shape(shape);
        let (batch, length) = shape.map_err(|reason| Failure::usage(format!("--activations: {reason}")))?;
        all.extend(plan.activations(batch, length)?);
    }
    Ok(all)
}

/// The same for people.
pub fn activation_words(all: &[ActivationMemory]) -> String {
    let mut rows = vec![row![
        "batch",
        "tokens",
        "checkpointing",
        "attention",
        "activations",
        "saved",
        "peak of the step"
    ]];
    for one in all {
        rows.push(row![
            one.batch_size.to_string(),
            one.sequence_length.to_string(),
            if one.gradient_checkpointing { "full" } else { "none" },
            if one.flash_attention { "flash" } else { "standard" },
            ByteSize(one.activation_bytes),
            match one.saved_by_checkpointing_bytes {
                0 => String::new(),
                saved => ByteSize(saved.unsigned_abs()).to_string(),
            },
            ByteSize(one.peak_bytes)
        ]);
    }
    table::render(&rows)
}
