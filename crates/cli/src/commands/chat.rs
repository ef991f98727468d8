//! `plimsoll chat`: a conversation with a model, line by line.

mod command;
mod console;
mod input;
mod storage;
mod talk;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_generate::{Conversation, Sampler};
use plimsoll_memory::ByteSize;
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::GenerationPlan;

use crate::args::ChatArgs;
use crate::chat_format::{self, ChatFormat};
use crate::failure::Failure;
use crate::guessing::{self, DraftArgs, Guessing};
use crate::inference::Inference;
use crate::ranks::{self, Lines, Stopping};
use crate::session::Engine;
use crate::signals;
use crate::weights;
use console::Console;
use input::{Input, history_file};
use talk::Talk;

/// The context where none is asked for, if the model was made for as much and memory allows it.
const USUAL_CONTEXT: usize = 4096;
/// No chat begins with less room than this unless it is asked to.
const SMALLEST_CONTEXT: usize = 64;

/// With this part of the usual context an answer is better had fast, from weights in memory.
const ENOUGH: usize = 4;

/// Ctrl-C: stops the answer under way; where there is none, ends the program.
#[derive(Clone, Debug)]
pub struct Interrupts {
    raised: Arc<AtomicBool>,
    idle: Arc<AtomicBool>,
}

impl Interrupts {
    /// Of a process that is alone, or one of several ranks, which a launcher tells otherwise and of which only the first answers.
    fn listen(ranks: &dyn Communicator) -> Result<Interrupts, Failure> {
        let answers = ranks.rank() == 0;
        let interrupts = Interrupts { raised: Arc::default(), idle: Arc::new(AtomicBool::new(answers)) };
        let signal = signals::to_interrupt(!ranks.is_alone());
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&interrupts.idle))?;
        signal_hook::flag::register(signal, Arc::clone(&interrupts.raised))?;
        Ok(interrupts)
    }

    /// From here on Ctrl-C ends the answer.
    fn begin_answer(&self) {
        self.raised.store(false, Ordering::Relaxed);
        self.idle.store(false, Ordering::Relaxed);
    }

    /// From here on it ends the program.
    fn end_answer(&self) {
        self.idle.store(true, Ordering::Relaxed);
    }

    fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }
}

pub fn run(args: &ChatArgs) -> Result<(), Failure> {
    guessing::check_ranks(&args.speculation, args.ranks)?;
    if ranks::starts(args.ranks) {
        check(args)?;
    }
    ranks::on_each_with(Lines::OfFirst, Stopping::Interrupted, args.ranks, |ranks| run_rank(args, ranks))
}

/// Refuses what all ranks would, before any has started: it is said once.
fn check(args: &ChatArgs) -> Result<(), Failure> {
    Sampler::new(&args.sampling.settings())?;
    chat_format::check(args.chat_template.as_deref())?;
    weights::check(&args.inference.weights, "talk with", args.json)
}

/// One rank, or the only one. The first one talks, and the others compute what it tells them.
fn run_rank(args: &ChatArgs, ranks: &dyn Communicator) -> Result<(), Failure> {
    let leads = ranks.rank() == 0;
    if !leads {
        ranks::be_quiet()?;
    }
    let settings = args.sampling.settings();
    Sampler::new(&settings)?;
    let mut model = Inference::open(&args.inference, "talk with", args.json || !leads)?;
    args.sampling.check_tokens(model.spec().vocab_size)?;
    model.divide(ranks)?;
    let draft_args = DraftArgs::new(&args.speculation, &args.inference);
    let guessing = Guessing::open(&args.speculation, &draft_args, &mut model, ranks, args.json || !leads)?;
    let format = ChatFormat::new(&model.tokenizer, args.chat_template.as_deref(), &model.end_tokens())?;
    let max_tokens = args.max_tokens.unwrap_or(usize::MAX);
    let limits = args.stopping.limits(&model.tokenizer, max_tokens, format.ends)?;
    let conversation = Conversation::new(args.system.clone());
    // A template that cannot be used is known before the weights are read.
    let mut tried = conversation.clone();
    tried.ask("?");
    let least = tried.prompt(&format.template, &model.tokenizer, usize::MAX, 0)?.tokens.len();

    let interrupts = Interrupts::listen(ranks)?;
    let engine = model.start(ranks)?;
    let most = most_context(&model);
    let draft_memory = guessing.prepare(&engine, &mut model, most)?;
    let plan = plan(&model, ranks, &engine)?;
    let context = usize::try_from(plan.settings.context).unwrap_or(usize::MAX);
    if least >= context {
        return Err(Failure::usage(format!(
            "the context of {context} tokens is too small: the template and the system message alone take {least}; give more with --context or --memory"
        )));
    }
    let device = model.device(&engine, &plan)?;
    // A folder that was made for what is streamed stays as long.
    let (mut session, _streaming) = model.session_of(ranks, &*device, &plan)?;
    if !leads {
        return Ok(session.follow()?);
    }
    session.lead();
    if let Some(draft) = guessing.draft(ranks, draft_memory.as_ref())? {
        session = session.with_draft(draft);
    }
    let console = Console { json: args.json, guesses: args.speculation.is_wanted() };
    let input = match ranks.is_alone() {
        true => Input::new(!args.json, if args.no_history { None } else { history_file() })?,
        false => Input::through_launcher(args.typed),
    };
    if input.is_interactive() && !args.json {
        let peak = ByteSize(plan.dry_run.peak_bytes());
        let name = &model.spec().name;
        eprintln!("{name}, context {context} tokens, {peak} planned. /help lists the commands, Ctrl-D ends.");
    }
    let mut talk = Talk {
        model: &model,
        template: format.template,
        plan: plan.dry_run,
        session,
        conversation,
        settings,
        limits,
        is_changed: false,
        answers: 0,
        interrupts,
        console,
        leads: !ranks.is_alone(),
        failed: false,
    };
    let outcome = talk.run(input);
    // Where something went wrong, all ranks are ended.
    if outcome.as_ref().map_or_else(Failure::is_silent, |()| true) {
        talk.session.dismiss()?;
    }
    outcome
}

/// The context that is asked for, or the usual one.
fn most_context(model: &Inference<'_>) -> usize {
    model.asked_context().unwrap_or(model.trained_context().clamp(1, USUAL_CONTEXT))
}

/// The context and what it needs. Where none is asked for: the usual one, or the largest that memory allows.
fn plan(model: &Inference<'_>, ranks: &dyn Communicator, engine: &Engine) -> Result<GenerationPlan, Failure> {
    let (context, enough) = match model.asked_context() {
        Some(asked) => (asked..=asked, asked),
        None => {
            let usual = most_context(model);
            (SMALLEST_CONTEXT.min(usual)..=usual, usual / ENOUGH)
        }
    };
    let usual = *context.end();
    let (plan, _) = model.plan_together(ranks, engine, context, None, enough)?;
    if ranks.rank() == 0 && plan.settings.context < usual as u64 {
        eprintln!("memory allows a context of {} tokens", plan.settings.context);
    }
    Ok(plan)
}
