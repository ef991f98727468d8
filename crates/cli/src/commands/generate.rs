//! `plimsoll generate`: continues a prompt, once or more often, or every prompt of a file.

pub(super) mod document;
mod many;
mod prompts;

use plimsoll_generate::{Generated, Limits, Sampler, SamplerSettings, Session, StopReason};
use plimsoll_model::chat_template::{ChatMessage, ChatOptions};
use plimsoll_parallel::{Collectives, Communicator};
use serde_json::Value;

use crate::args::GenerateArgs;
use crate::chat_format::{self, ChatFormat};
use crate::failure::Failure;
use crate::guessing::{self, DraftArgs, Guessing};
use crate::inference::Inference;
use crate::output::{out, outln};
use crate::ranks::{self, Stopping};
use crate::streaming;
use crate::weights;
use document::Document;
use prompts::PromptText;

/// Prompts of a file that are answered at once where nobody says how many.
const USUAL_PARALLEL: u64 = 16;

/// A prompt as text and as tokens.
struct Prompt {
    text: String,
    tokens: Vec<u32>,
}

pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    guessing::check_ranks(&args.speculation, args.ranks)?;
    if ranks::starts(args.ranks) {
        check(args)?;
    }
    ranks::on_each(Stopping::AtOnce, args.ranks, |ranks| run_rank(args, ranks))
}

/// Refuses what all ranks would, before any has started: it is said once.
fn check(args: &GenerateArgs) -> Result<(), Failure> {
    refuse_input(args)?;
    Sampler::new(&args.sampling.settings())?;
    if let Some(path) = &args.prompts {
        prompts::many(path)?;
    }
    if args.chat {
        chat_format::check(args.chat_template.as_deref())?;
    }
    weights::check(&args.inference.weights, "generate from", args.json)
}

/// Refuses standard input, which only one of several ranks has.
fn refuse_input(args: &GenerateArgs) -> Result<(), Failure> {
    match args.prompt.as_deref() {
        Some("-") => {
            Err(Failure::usage("standard input reaches one rank; give the prompt with --prompt or --prompts"))
        }
        _ => Ok(()),
    }
}

/// One rank, or the only one. All of them read the same prompts, draw the same tokens and come to the same end.
fn run_rank(args: &GenerateArgs, ranks: &dyn Communicator) -> Result<(), Failure> {
    let leads = ranks.rank() == 0;
    if !leads {
        ranks::be_quiet()?;
    }
    if !ranks.is_alone() {
        refuse_input(args)?;
    }
    if args.speculation.is_wanted() && args.parallel.is_some_and(|parallel| parallel > 1) {
        return Err(Failure::usage(
            "--parallel answers several prompts at once, and guesses are for one; leave out --parallel, or --speculative and --draft-model",
        ));
    }
    let settings = args.sampling.settings();
    Sampler::new(&settings)?;
    let mut model = Inference::open(&args.inference, "generate from", args.json || !leads)?;
    args.sampling.check_tokens(model.spec().vocab_size)?;
    model.divide(ranks)?;
    let draft_args = DraftArgs::new(&args.speculation, &args.inference);
    let guessing = Guessing::open(&args.speculation, &draft_args, &mut model, ranks, args.json || !leads)?;
    let end_tokens = if args.stop_at_eos || args.chat { model.end_tokens() } else { Vec::new() };
    let format = match args.chat {
        true => Some(ChatFormat::new(&model.tokenizer, args.chat_template.as_deref(), &end_tokens)?),
        false => None,
    };
    let ends = match &format {
        Some(format) => format.ends.clone(),
        None => Limits { stop_tokens: end_tokens, ..Limits::default() },
    };
    let limits = args.stopping.limits(&model.tokenizer, args.max_tokens, ends)?;
    let texts = match (&args.prompt, &args.prompts) {
        (Some(prompt), _) => vec![prompts::one(prompt)?],
        (None, Some(path)) => prompts::many(path)?,
        (None, None) => return Err(Failure::usage("give --prompt TEXT or --prompts FILE")),
    };
    let prompts: Vec<Prompt> = texts
        .into_iter()
        .map(|text| tokens_of(text, &model, format.as_ref(), args))
        .collect::<Result<_, _>>()?;

    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    let context = context(&model, longest, args.max_tokens);
    let engine = model.start(ranks)?;
    // A context that was not asked for gives way where memory is short.
    let least = match model.asked_context() {
        Some(_) => context,
        None => context.min(longest.saturating_add(args.max_tokens.min(1))),
    };
    let draft_memory = guessing.prepare(&engine, &mut model, context)?;
    let at_once = args.prompts.is_some() && !args.speculation.is_wanted();
    if at_once {
        let requests = (prompts.len() as u64).saturating_mul(args.samples);
        let most = args.parallel.unwrap_or(USUAL_PARALLEL).min(requests);
        model.answer_at_once(most, args.parallel.is_some());
    }
    let (plan, planned) = model.plan_together(ranks, &engine, least..=context, Some(longest), context)?;
    if leads && plan.settings.context < context as u64 {
        eprintln!("memory allows a context of {} tokens instead of {context}", plan.settings.context);
    }
    let wanted = args.parallel.unwrap_or(0).min((prompts.len() as u64).saturating_mul(args.samples));
    if leads && plan.settings.sequences < wanted {
        eprintln!("memory allows {} answers at once instead of {wanted}", plan.settings.sequences);
    }
    let device = model.device(&engine, &plan)?;
    if at_once {
        let (batch, streaming) = model.batch_of(ranks, &*device, &plan)?;
        let document = Document { planned, streaming, batch: Some(plan.settings) };
        let many = many::Many { args, tokenizer: &model.tokenizer, settings, limits, document, tells: leads };
        return many.answer(batch, &prompts);
    }
    let (session, streaming) = model.session_of(ranks, &*device, &plan)?;
    let session = match guessing.draft(ranks, draft_memory.as_ref())? {
        Some(draft) => session.with_draft(draft),
        None => session,
    };
    let document = Document { planned, streaming, batch: None };
    let mut run = Run { args, model: &model, settings, limits, session, document, tells: leads };
    if args.prompts.is_some() {
        return run.every(&prompts);
    }
    prompts.iter().try_for_each(|prompt| if args.json { run.document(prompt) } else { run.show(prompt) })?;
    if let Some(streaming) = run.document.streaming.filter(|_| leads && !args.json) {
        streaming.report();
        if let Some(traffic) = run.session.expert_traffic() {
            streaming::report_experts(traffic);
        }
    }
    Ok(())
}

/// The tokens of a prompt; an error where there are none, or more than the context holds.
fn tokens_of(
    prompt: PromptText,
    model: &Inference<'_>,
    format: Option<&ChatFormat>,
    args: &GenerateArgs,
) -> Result<Prompt, Failure> {
    let PromptText { place, text } = prompt;
    let tokens = match format {
        Some(format) => {
            let system = args.system.iter().map(|text| ChatMessage::new("system", text.as_str()));
            let messages: Vec<ChatMessage> =
                system.chain([ChatMessage::new("user", text.as_str())]).collect();
            let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
            model.tokenizer.encode(&format.template.render(&messages, &options)?)?
        }
        None => model.tokenizer.encode_beginning(&text)?,
    };
    if tokens.is_empty() {
        return Err(Failure::usage(format!(
            "{place}the prompt is empty; give at least one character to continue, or --chat for an answer to nothing"
        )));
    }
    let most = model.asked_context().unwrap_or(model.trained_context());
    if tokens.len().saturating_add(args.max_tokens.min(1)) > most {
        let origin = match model.asked_context() {
            Some(_) => "that --context gives it",
            None => "that the model was made for",
        };
        let remedy = match model.has_learned_positions() {
            true => "shorten the prompt",
            false => "shorten the prompt, or give more with --context",
        };
        return Err(Failure::usage(format!(
            "{place}the prompt has {} tokens, and with an answer it does not fit the context of {most} {origin}; {remedy}",
            tokens.len()
        )));
    }
    Ok(Prompt { text, tokens })
}

/// Tokens of the longest prompt with its answer: within what was asked for or has positions; else an answer may go on
/// beyond what the model was made for.
fn context(model: &Inference<'_>, longest: usize, max_tokens: usize) -> usize {
    let wanted = longest.saturating_add(max_tokens).max(1);
    match (model.asked_context(), model.has_learned_positions()) {
        (Some(most), _) => wanted.min(most),
        (None, true) => wanted.min(model.trained_context()),
        (None, false) => wanted,
    }
}

/// What is the same for all prompts.
struct Run<'r> {
    args: &'r GenerateArgs,
    model: &'r Inference<'r>,
    settings: SamplerSettings,
    limits: Limits,
    session: Session<'r>,
    document: Document,
    /// Whether what was done is told, too: other ranks have done the same.
    tells: bool,
}

impl Run<'_> {
    fn seed(&self, sample: u64) -> u64 {
        self.settings.seed.wrapping_add(sample)
    }

    fn sample(
        &mut self,
        prompt: &Prompt,
        sample: u64,
        on_text: impl FnMut(&str) -> Result<(), Failure>,
    ) -> Result<Generated, Failure> {
        let settings = SamplerSettings { seed: self.seed(sample), ..self.settings.clone() };
        let (tokenizer, mut sampler) = (&self.model.tokenizer, Sampler::new(&settings)?);
        self.session.generate(tokenizer, &prompt.tokens, &mut sampler, &self.limits, &|| false, on_text)
    }

    /// One prompt for people: the text as it comes.
    fn show(&mut self, prompt: &Prompt) -> Result<(), Failure> {
        for sample in 0..self.args.samples {
            if self.args.samples > 1 {
                outln!("--- sample {} of {}, seed {}", sample + 1, self.args.samples, self.seed(sample))?;
            }
            if !self.args.chat {
                out!("{}", prompt.text)?;
            }
            let generated = self.sample(prompt, sample, |text| out!("{text}"))?;
            outln!()?;
            if !self.tells {
                continue;
            }
            eprintln!(
                "{} tokens at {:.1} tokens/s after a prompt of {} in {:.2} s{}{}",
                generated.tokens.len(),
                generated.tokens_per_second(),
                prompt.tokens.len(),
                generated.prompt_seconds,
                document::guesses(&generated.drafted),
                match &generated.stop_reason {
                    StopReason::Context =>
                        format!("; the context of {} tokens is full", self.session.context()),
                    _ => String::new(),
                }
            );
        }
        Ok(())
    }

    /// One prompt as one JSON document.
    fn document(&mut self, prompt: &Prompt) -> Result<(), Failure> {
        let document = self.described(prompt)?;
        outln!("{document}")
    }

    /// Every prompt of a file, one after the other: an object a line as they are done, or one JSON document.
    fn every(&mut self, prompts: &[Prompt]) -> Result<(), Failure> {
        let mut all = Vec::new();
        for prompt in prompts {
            let document = document::with_prompt(prompt, self.described(prompt)?);
            match self.args.json {
                true => all.push(document),
                false => outln!("{document}")?,
            }
        }
        if self.args.json {
            outln!("{}", Value::from(all))?;
        }
        Ok(())
    }

    /// The first sample's fields, and all of them in `samples` where there are more.
    fn described(&mut self, prompt: &Prompt) -> Result<Value, Failure> {
        let mut samples = Vec::new();
        for sample in 0..self.args.samples {
            let generated = self.sample(prompt, sample, |_| Ok(()))?;
            samples.push(document::sample(&generated, self.seed(sample), self.args.speculation.is_wanted()));
        }
        Ok(self.document.of(prompt, samples))
    }
}
