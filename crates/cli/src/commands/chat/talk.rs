//! The loop of a chat: a line in, an answer or a command's reply out.

use plimsoll_generate::{Conversation, Limits, Sampler, SamplerSettings, Session, SettingError, StopReason};
use plimsoll_memory::{ByteSize, Tag};
use plimsoll_model::chat_template::ChatTemplate;
use plimsoll_plan::DryRun;
use serde_json::{Map, Value, json};

use super::command::{COMMANDS, Command, Line, TYPING};
use super::console::Console;
use super::input::{Heard, Input};
use super::{Interrupts, storage};
use crate::failure::Failure;
use crate::inference::Inference;
use crate::row;
use crate::session::resident_bytes;
use crate::table;

/// The setting that is no sampler's.
const MAX_TOKENS: &str = "max_tokens";

/// A conversation, and the model that answers.
pub struct Talk<'t> {
    pub model: &'t Inference<'t>,
    pub template: ChatTemplate,
    pub plan: DryRun,
    pub session: Session<'t>,
    /// Whether other ranks follow this one.
    pub leads: bool,
    /// Whether an answer has failed beside ranks that follow: these wait for what never comes.
    pub failed: bool,
    pub conversation: Conversation,
    pub settings: SamplerSettings,
    pub limits: Limits,
    /// Whether the cache has what is no part of the conversation any more.
    pub is_changed: bool,
    /// How many were given: each is drawn with a seed of its own.
    pub answers: u64,
    pub interrupts: Interrupts,
    pub console: Console,
}

/// Whether the chat goes on.
#[derive(PartialEq)]
enum Next {
    Line,
    End,
}

impl Talk<'_> {
    /// Until the input ends. Where nobody could try again, an error ends it as well.
    pub fn run(&mut self, mut input: Input) -> Result<(), Failure> {
        loop {
            let next = match input.read()? {
                Heard::End => return Ok(()),
                Heard::Interrupted => {
                    self.console.note("Ctrl-D or /exit ends")?;
                    continue;
                }
                Heard::Text(text) => match Line::parse(&text) {
                    Ok(Line::Empty) => continue,
                    Ok(Line::Message(message)) => self.ask(message),
                    Ok(Line::Command(command)) => self.obey(command),
                    Err(wrong) => Err(Failure::usage(wrong)),
                },
            };
            match next {
                Ok(Next::Line) => {}
                Ok(Next::End) => return Ok(()),
                Err(failure) if input.is_interactive() && !failure.is_silent() && !self.failed => {
                    self.console.error(&failure.to_string())?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The conversation, to be changed: until the next answer the cache may have what is no part of it any more.
    fn edited(&mut self) -> &mut Conversation {
        self.is_changed = true;
        &mut self.conversation
    }

    /// A message that is taken back where it cannot be answered.
    fn ask(&mut self, message: String) -> Result<Next, Failure> {
        self.edited().ask(message);
        let answered = self.answer();
        if !matches!(answered, Ok(true)) {
            self.edited().undo();
        }
        match answered? {
            true => {}
            false => self.console.note("stopped before anything was said; the message is taken back")?,
        }
        Ok(Next::Line)
    }

    /// Answers the last turn; whether there is an answer. What was said until Ctrl-C is one.
    fn answer(&mut self) -> Result<bool, Failure> {
        let context = self.session.context();
        let reserve = self.limits.max_tokens.min(context / 4);
        let tokenizer = &self.model.tokenizer;
        let prompt = self.conversation.prompt(&self.template, tokenizer, context, reserve)?;
        let seed = self.settings.seed.wrapping_add(self.answers);
        let mut sampler = Sampler::new(&SamplerSettings { seed, ..self.settings.clone() })?;
        self.answers = self.answers.wrapping_add(1);
        let (console, interrupts) = (self.console, self.interrupts.clone());
        interrupts.begin_answer();
        let generated = self.session.generate(
            tokenizer,
            &prompt.tokens,
            &mut sampler,
            &self.limits,
            &|| interrupts.is_raised(),
            |text| console.piece(text),
        );
        interrupts.end_answer();
        self.failed = self.leads && generated.is_err();
        let generated = generated?;
        let interrupted = generated.stop_reason == StopReason::Interrupted;
        if interrupted && generated.tokens.is_empty() {
            return Ok(false);
        }
        let question = self.conversation.turns().last().map(|turn| turn.user.clone()).unwrap_or_default();
        self.conversation.answer(generated.text.as_str());
        self.is_changed = false;
        console.answer(&question, prompt.tokens.len(), prompt.dropped_turns, &generated)?;
        if !console.json {
            match &generated.stop_reason {
                StopReason::Context => console.note(&format!(
                    "(the context of {context} tokens is full; the next message leaves the oldest turns out, /reset all of them)"
                ))?,
                StopReason::MaxTokens => {
                    console.note(&format!("(cut off after {} tokens)", generated.tokens.len()))?;
                }
                StopReason::Interrupted => console.note("(stopped)")?,
                StopReason::StopToken(_) | StopReason::StopString(_) => {}
            }
            if prompt.dropped_turns > 0 {
                let turns = prompt.dropped_turns;
                console.note(&format!(
                    "(the model no longer sees the first {turns} turns: the context is full)"
                ))?;
            }
        }
        Ok(true)
    }

    fn obey(&mut self, command: Command) -> Result<Next, Failure> {
        let console = self.console;
        match command {
            Command::Exit => return Ok(Next::End),
            Command::Help => self.help()?,
            Command::Reset => {
                self.edited().reset();
                console.note("all turns are forgotten")?;
            }
            Command::System(text) => {
                let said =
                    if text.is_some() { "the system message is set" } else { "there is no system message" };
                self.edited().set_system(text);
                console.note(said)?;
            }
            Command::Undo => match self.edited().undo() {
                Some(turn) => console.note(&format!("taken back: {}", turn.user))?,
                None => return Err(Failure::usage("there is no turn to take back")),
            },
            Command::Retry => self.retry()?,
            Command::Save(path) => {
                storage::save(&self.conversation, &path)?;
                let messages = self.conversation.messages().len();
                console.note(&format!("{messages} messages are in {}", path.display()))?;
            }
            Command::Load(path) => {
                *self.edited() = storage::load(&path).map_err(Failure::other)?;
                let open = self.conversation.turns().last().is_some_and(|turn| turn.assistant.is_none());
                let hint = if open { "; /retry answers the last one" } else { "" };
                let messages = self.conversation.messages().len();
                console.note(&format!("{messages} messages from {}{hint}", path.display()))?;
            }
            Command::Set(None) => self.settings_listed()?,
            Command::Set(Some((name, value))) => {
                self.set(&name, &value)?;
                console.note(&format!("{name} is {value}"))?;
            }
            Command::Tokens => self.tokens()?,
            Command::Memory => self.memory()?,
        }
        Ok(Next::Line)
    }

    /// Answers the last turn again; the answer that was there stays where there is no new one.
    fn retry(&mut self) -> Result<(), Failure> {
        let before = self.conversation.clone();
        if !self.edited().take_back_answer() {
            return Err(Failure::usage("there is no message to answer again"));
        }
        let answered = self.answer();
        if !matches!(answered, Ok(true)) {
            *self.edited() = before;
        }
        match answered? {
            true => Ok(()),
            false => self.console.note("stopped before anything was said; the answer stays"),
        }
    }

    fn help(&self) -> Result<(), Failure> {
        let rows: Vec<String> = (COMMANDS.iter())
            .map(|(name, argument, help)| format!("  {:<18} {help}\n", format!("{name} {argument}")))
            .collect();
        let commands: Vec<Value> = (COMMANDS.iter())
            .map(|(name, argument, help)| json!({ "name": name, "argument": argument, "help": help }))
            .collect();
        self.console.reply(&format!("{}{TYPING}", rows.concat()), json!({ "commands": commands }))
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        if name.replace('-', "_") != MAX_TOKENS {
            return self.settings.set(name, value).map_err(|error| {
                Failure::usage(match error {
                    SettingError::Unknown { .. } => format!("{error}, {MAX_TOKENS}"),
                    error => error.to_string(),
                })
            });
        }
        self.limits.max_tokens = match value {
            "all" => usize::MAX,
            number => number.parse().map_err(|_| {
                Failure::usage(format!("{MAX_TOKENS}: {value:?} is no whole number, nor `all`"))
            })?,
        };
        Ok(())
    }

    fn settings_listed(&self) -> Result<(), Failure> {
        let max_tokens = match self.limits.max_tokens {
            usize::MAX => "all".to_owned(),
            number => number.to_string(),
        };
        let named = [self.settings.named(), vec![(MAX_TOKENS, max_tokens)]].concat();
        let rows: Vec<Vec<String>> = named.iter().map(|(name, value)| row![name, value]).collect();
        let values: Map<String, Value> =
            named.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        self.console.reply(&table::render(&rows), json!({ "settings": values }))
    }

    /// Tokens of the conversation that are in the cache. What was undone stays there until the next prompt, and is not counted.
    fn cached_tokens(&self) -> usize {
        let cached = self.session.cached();
        if !self.is_changed {
            return cached.len();
        }
        if self.conversation.messages().is_empty() {
            return 0;
        }
        let (tokenizer, context) = (&self.model.tokenizer, self.session.context());
        match self.conversation.clone().prompt(&self.template, tokenizer, context, 0) {
            Ok(prompt) => prompt.tokens.iter().zip(cached).take_while(|(own, cached)| own == cached).count(),
            // What cannot be a prompt, as a system message alone where the template refuses it, is not in the cache.
            Err(_) => 0,
        }
    }

    fn tokens(&self) -> Result<(), Failure> {
        let (cached, context) = (self.cached_tokens(), self.session.context());
        let turns = self.conversation.turns().len();
        self.console.reply(
            &format!("{cached} of {context} tokens of the context are in use; {turns} turns"),
            json!({ "cached_tokens": cached, "context": context, "turns": turns }),
        )
    }

    fn memory(&self) -> Result<(), Failure> {
        let at_peak = self.plan.tags_at_peak();
        let (weights, cache) = (at_peak.get(Tag::Weights), at_peak.get(Tag::KvCache));
        let peak = self.plan.peak_bytes();
        let rest = peak.saturating_sub(weights).saturating_sub(cache);
        let process = resident_bytes();
        let rows = [
            row!["weights", ByteSize(weights)],
            row![format!("key-value cache of {} tokens", self.session.context()), ByteSize(cache)],
            row!["workspace", ByteSize(rest)],
            row!["planned", ByteSize(peak)],
            row!["the process, files that it maps included", ByteSize(process)],
        ];
        let document = json!({ "memory": {
            "weights_bytes": weights,
            "kv_cache_bytes": cache,
            "workspace_bytes": rest,
            "planned_bytes": peak,
            "process_rss_bytes": process,
        }});
        self.console.reply(&table::render(&rows), document)
    }
}
