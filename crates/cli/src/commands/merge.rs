//! `plimsoll merge`: a base model with an adapter in its weights, written a few rows at a time.

use plimsoll_model::Adapter;

use super::convert;
use crate::args::MergeArgs;
use crate::failure::Failure;
use crate::models;
use crate::output::outln;
use crate::weights::another_base;

pub fn run(args: &MergeArgs) -> Result<(), Failure> {
    let files = models::with_weights(&args.model, "merge", args.output.json)?;
    let (adapter, spec) = Adapter::open_to_merge(&args.adapter, files.spec())
        .map_err(|error| Failure::other(error.to_string()))?;
    let unknown = &adapter.config().unknown;
    if !unknown.is_empty() && !args.output.json {
        outln!("note: the adapter's configuration has keys that are without effect: {}", unknown.join(", "))?;
    }
    if let Some(base) = another_base(&adapter, &args.model).filter(|_| !args.output.json) {
        outln!("note: the adapter was trained on {base}, and the model is {}", args.model)?;
    }
    if spec.tie_word_embeddings != files.spec().tie_word_embeddings && !args.output.json {
        outln!(
            "note: the adapter changes the embedding or the head alone; what was one matrix is written as two"
        )?;
    }
    convert::write(&files, &spec, &adapter.merged(&spec, files.weights()), &args.output)
}
