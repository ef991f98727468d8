//! What the common uses of a model need, at a glance: of `inspect`, and of `plan` where no method is chosen.

use plimsoll_device::DType;
use plimsoll_memory::ByteSize;
use plimsoll_plan::{ModelOrigin, Need, needs};
use plimsoll_step::StepError;

use crate::row;
use crate::table;

/// What stands above the table.
pub const TITLE: &str = "needs (by dry runs; the program itself comes on top)";

/// The needs of a model, in the types that its files have; one that is known by its dimensions alone is taken in bf16.
pub fn of(origin: &ModelOrigin) -> Result<Vec<Need>, StepError> {
    let stored = origin.weights();
    needs(origin.spec(), &|p| stored.map_or(DType::Bf16, |stored| stored.inference_dtype(p, DType::F32)))
}

/// A row for each use; nothing where there are none.
pub fn table(needs: &[Need]) -> String {
    if needs.is_empty() {
        return String::new();
    }
    let mut rows = vec![row!["", "tokens", "weights", "in all"]];
    for need in needs {
        let what = format!("{}: {}", need.what, need.settings);
        rows.push(row![what, need.tokens, ByteSize(need.weight_bytes), ByteSize(need.peak_bytes)]);
    }
    table::render(&rows)
}
