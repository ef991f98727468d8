//! `plimsoll merge`: a base model with adapters in its weights, written a few rows at a time.

use plimsoll_model::adapter::MergeSet;

use super::convert;
use crate::args::MergeArgs;
use crate::failure::Failure;
use crate::models;
use crate::weights::{another_base, folders_and_weights};

pub fn run(args: &MergeArgs) -> Result<(), Failure> {
    let files = models::with_weights(&args.model, "merge", args.output.json)?;
    let set = MergeSet::open(&folders_and_weights(&args.adapter)?, files.spec())
        .map_err(|error| Failure::other(error.to_string()))?;
    let mut notes = Vec::new();
    for (adapter, _) in set.adapters() {
        let unknown = &adapter.config().unknown;
        if !unknown.is_empty() {
            notes.push(format!(
                "an adapter's configuration has keys that are without effect: {}",
                unknown.join(", ")
            ));
        }
        if let Some(base) = another_base(adapter, &args.model) {
            notes.push(format!("an adapter was trained on {base}, and the model is {}", args.model));
        }
    }
    if set.spec().tie_word_embeddings != files.spec().tie_word_embeddings {
        notes.push(
            "an adapter changes the embedding or the head alone; what was one matrix is written as two"
                .to_owned(),
        );
    }
    convert::write(&files, set.spec(), &set.merged(files.weights()), &args.output, notes)
}
