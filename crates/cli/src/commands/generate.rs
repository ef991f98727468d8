//! `plimsoll generate`: continues a prompt.

use std::io::Write;

use plimsoll_generate::{Sampler, generate};
use plimsoll_model::Parameter;
use plimsoll_model::chat_template::{ChatMessage, ChatOptions};
use plimsoll_model::tokenizer::{SpecialTokens, Tokenizer};
use plimsoll_plan::DryRun;
use plimsoll_step::{DecodeSettings, Decoder};
use plimsoll_train::TrainError;
use serde_json::json;

use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::output::outln;
use crate::session::{
    Engine, cache_type, inference_precision, model_with_weights, quantized_type, weight_type,
};

/// Tokens of a prompt that are taken in one pass.
const PROMPT_CHUNK_TOKENS: u64 = 512;

pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let precision = inference_precision(&args.dtype)?;
    let mut sampler = Sampler::new(&args.sampling.settings())?;
    let files = model_with_weights(&args.model, "generate from")?;
    let spec = files.spec().clone();
    let tokenizer = files.tokenizer()?;
    let text = match args.chat {
        true => chat_text(&tokenizer, args)?,
        false => args.prompt.clone(),
    };
    let prompt = tokenizer.encode(&text)?;
    let engine = Engine::start(args.threads)?;
    let context = (prompt.len() + args.max_tokens).max(1) as u64;
    let cache = cache_type(args.kv_cache.as_deref())?.unwrap_or(precision.activations);
    let settings = DecodeSettings { precision, cache, context, prompt_chunk_tokens: PROMPT_CHUNK_TOKENS };
    let quantized = quantized_type(args.quantize.as_deref())?;
    let weight_types = |p: &Parameter| weight_type(&files, p, precision.weights, quantized);
    let dry_run = DryRun::generation(&spec, settings, &weight_types, prompt.len() as u64)?;
    let device = engine.device(&dry_run, args.memory)?;
    let end_tokens = match args.stop_at_eos || args.chat {
        true => [&spec.eos_tokens, tokenizer.eos_tokens()].concat(),
        false => Vec::new(),
    };
    let mut decoder = Decoder::with_weight_types(&device, spec, settings, &weight_types)?;
    decoder.load::<TrainError>(|p, dtype, out| Ok(files.weights().read_into(p, dtype, out)?))?;

    let mut stream = tokenizer.stream_decoder(SpecialTokens::Skip);
    let mut out = std::io::stdout();
    let mut failed = None;
    if !args.json && !args.chat {
        write!(out, "{}", args.prompt)?;
    }
    let generated = generate(&mut decoder, &mut sampler, &prompt, args.max_tokens, &end_tokens, |token| {
        if args.json {
            return true;
        }
        let shown = match stream.push(token) {
            Ok(text) => write!(out, "{text}").and_then(|()| out.flush()).map_err(Failure::from),
            Err(error) => Err(error.into()),
        };
        failed = shown.err();
        failed.is_none()
    })?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let rate =
        generated.tokens.len().saturating_sub(1) as f64 / generated.decode_seconds.max(f64::MIN_POSITIVE);
    if args.json {
        let document = json!({
            "prompt_tokens": prompt,
            "tokens": generated.tokens,
            "text": tokenizer.decode(&generated.tokens)?,
            "tokens_per_second": rate,
        });
        outln!("{document}")?;
    } else {
        outln!("{}", stream.finish()?)?;
        eprintln!(
            "{} tokens at {rate:.1} tokens/s after a prompt of {} in {:.2} s",
            generated.tokens.len(),
            prompt.len(),
            generated.prompt_seconds
        );
    }
    Ok(())
}

/// The prompt as a user's message, up to where the assistant's begins.
fn chat_text(tokenizer: &Tokenizer, args: &GenerateArgs) -> Result<String, Failure> {
    let template = tokenizer.chat_template(None)?.ok_or_else(|| {
        Failure::usage(format!("{} has no chat template; leave --chat out", tokenizer.origin()))
    })?;
    let system = args.system.iter().map(|text| ChatMessage::new("system", text));
    let messages: Vec<ChatMessage> = system.chain([ChatMessage::new("user", &args.prompt)]).collect();
    let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    Ok(template.render(&messages, &options)?)
}
