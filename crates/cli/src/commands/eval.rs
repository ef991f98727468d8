//! `plimsoll eval`: the mean loss of a text, window by window, each window scored alone.

use plimsoll_data::EvalWindows;
use plimsoll_model::Parameter;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_plan::{DryRun, loss_chunk_tokens};
use plimsoll_step::{Evaluator, MicroBatch};
use plimsoll_train::TrainError;
use serde_json::json;

use crate::args::EvalArgs;
use crate::failure::Failure;
use crate::output::outln;
use crate::progress;
use crate::session::{Engine, inference_precision, model_with_weights, quantized_type, weight_type};

/// Windows are taken together up to about this many tokens.
const TOKENS_PER_PASS: u64 = 2048;

pub fn run(args: &EvalArgs) -> Result<(), Failure> {
    let precision = inference_precision(&args.dtype)?;
    if args.sequence_length < 2 {
        return Err(Failure::usage("--sequence-length must be at least 2: the first token is context"));
    }
    let files = model_with_weights(&args.model, "evaluate")?;
    let spec = files.spec().clone();
    let windows = {
        let tokenizer: Tokenizer = files.tokenizer()?;
        EvalWindows::read(&args.data, &tokenizer, args.sequence_length as usize)?
    };
    let engine = Engine::start(args.threads)?;
    let longest = windows.longest() as u64;
    let most = (TOKENS_PER_PASS / longest.max(1)).clamp(1, windows.len().max(1) as u64);
    let chunk = loss_chunk_tokens(spec.vocab_size, most * longest);
    let quantized = quantized_type(args.quantize.as_deref())?;
    let weight_types = |p: &Parameter| weight_type(&files, p, precision.weights, quantized);
    let dry_run = DryRun::evaluation(&spec, precision, &weight_types, most, longest, chunk)?;
    let device = engine.device(&dry_run, args.memory)?;
    let mut evaluator =
        Evaluator::with_weight_types(&device, spec, precision, &weight_types, longest, chunk)?;
    evaluator.load::<TrainError>(|p, dtype, out| Ok(files.weights().read_into(p, dtype, out)?))?;

    let bar = progress::counter(windows.len() as u64, "windows", args.json);
    let (mut loss, mut targets) = (0.0, 0);
    let mut next = 0;
    while next < windows.len() {
        // Windows of one length go together; only the last may be shorter.
        let length = windows.window(next).len();
        let together = (next..windows.len())
            .take(most as usize)
            .take_while(|i| windows.window(*i).len() == length)
            .count();
        let tokens: Vec<u32> =
            (next..next + together).flat_map(|i| windows.window(i).iter().copied()).collect();
        let labels = plimsoll_data::targets(&tokens, length);
        let batch = MicroBatch { tokens: &tokens, targets: &labels };
        let (sum, count) = evaluator.losses(together as u64, &batch)?;
        loss += sum;
        targets += count;
        next += together;
        bar.inc(together as u64);
    }
    bar.finish_and_clear();
    let mean = loss / targets.max(1) as f64;
    if args.json {
        outln!("{}", json!({ "tokens": targets, "loss": mean, "perplexity": mean.exp() }))?;
    } else {
        outln!("loss {mean:.6}, perplexity {:.4}, over {targets} tokens", mean.exp())?;
    }
    Ok(())
}
