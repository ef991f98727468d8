//! Where a chat's lines come from: an editor on a terminal, plain lines elsewhere. Knows nothing of what they mean.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Cmd, Config, Context, Editor, Helper, KeyCode, KeyEvent, Modifiers};

use super::command::COMMANDS;
use crate::failure::Failure;
use crate::output::errln;

const PROMPT: &str = "> ";
/// Before and after a message of more than one line.
const QUOTES: &str = "\"\"\"";
/// Lines that the history keeps.
const HISTORY_LINES: usize = 1000;

/// What was heard.
#[derive(Debug, PartialEq)]
pub enum Heard {
    /// A message or command, its lines put together.
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    /// Ctrl-D, or the end of the file.
    End,
}

/// Where lines come from.
pub enum Input {
    Editor { editor: Box<Editor<Typing, FileHistory>>, history: Option<PathBuf> },
    Lines { number: usize, prompt: bool },
}

impl Input {
    /// An editor where both ends are terminals and `edited`, else plain lines; `history` is the editor's file.
    pub fn new(edited: bool, history: Option<PathBuf>) -> Result<Input, Failure> {
        if !(edited && std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(Input::Lines { number: 0, prompt: std::io::stdin().is_terminal() });
        }
        let failed = |e: ReadlineError| Failure::other(format!("the terminal cannot be used: {e}"));
        let config = Config::builder().max_history_size(HISTORY_LINES).map_err(failed)?;
        let mut editor = Editor::with_config(config.build()).map_err(failed)?;
        editor.set_helper(Some(Typing));
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        let history = history.filter(|path| match prepare(path).and_then(|()| load(&mut editor, path)) {
            Ok(()) => true,
            Err(error) => {
                errln!("what is typed is not kept: {}: {error}", path.display());
                false
            }
        });
        Ok(Input::Editor { editor: Box::new(editor), history })
    }

    /// Whether somebody sits there who can try again.
    pub fn is_interactive(&self) -> bool {
        !matches!(self, Input::Lines { prompt: false, .. })
    }

    /// Plain lines that come through a launcher; `typed`: from somebody who types them.
    pub fn through_launcher(typed: bool) -> Input {
        Input::Lines { number: 0, prompt: typed || std::io::stdin().is_terminal() }
    }

    /// The next message or command.
    pub fn read(&mut self) -> Result<Heard, Failure> {
        match self {
            Input::Editor { editor, history } => match editor.readline(PROMPT) {
                Ok(text) => {
                    if !text.trim().is_empty() {
                        let added = editor.add_history_entry(text.as_str()).unwrap_or(false);
                        let kept = match history {
                            Some(path) if added => editor.append_history(path),
                            _ => Ok(()),
                        };
                        if let Err(error) = kept {
                            errln!("what is typed is not kept any more: {error}");
                            *history = None;
                        }
                    }
                    Ok(Heard::Text(joined(&text)))
                }
                Err(ReadlineError::Interrupted) => Ok(Heard::Interrupted),
                Err(ReadlineError::Eof) => Ok(Heard::End),
                Err(error) => Err(Failure::other(format!("the terminal cannot be read: {error}"))),
            },
            Input::Lines { number, prompt } => {
                if *prompt {
                    eprint!("{PROMPT}");
                    std::io::stderr().flush()?;
                }
                let mut text = String::new();
                loop {
                    let Some(line) = line(number)? else {
                        return Ok(if text.is_empty() { Heard::End } else { Heard::Text(joined(&text)) });
                    };
                    text.push_str(&line);
                    if !is_unfinished(&text) {
                        return Ok(Heard::Text(joined(&text)));
                    }
                    text.push('\n');
                }
            }
        }
    }
}

/// A line of standard input without its line break; `None` at the end.
fn line(number: &mut usize) -> Result<Option<String>, Failure> {
    let mut bytes = Vec::new();
    if std::io::stdin().lock().read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    *number += 1;
    let line = String::from_utf8(bytes)
        .map_err(|_| Failure::usage(format!("line {number} of standard input is no UTF-8 text")))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Some(line.strip_suffix('\r').unwrap_or(line).to_owned()))
}

/// Whether more lines belong to it.
fn is_unfinished(text: &str) -> bool {
    match text.strip_prefix(QUOTES) {
        Some(rest) => !rest.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message without the marks that held its lines together.
fn joined(text: &str) -> String {
    match text.strip_prefix(QUOTES) {
        Some(rest) => rest.split(QUOTES).next().unwrap_or(rest).trim_matches('\n').to_owned(),
        None => text.strip_suffix('\\').unwrap_or(text).replace("\\\n", "\n"),
    }
}

/// The file of the lines that were typed: in `XDG_STATE_HOME`, by default `~/.local/state` (XDG Base Directory
/// Specification 0.8; paths that are not absolute do not count). `None` where there is no home.
pub fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("plimsoll").join("chat_history"))
}

/// Makes the folder of the history, for the user alone.
fn prepare(path: &std::path::Path) -> std::io::Result<()> {
    let mut folder = std::fs::DirBuilder::new();
    folder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
    path.parent().map_or(Ok(()), |parent| folder.create(parent))
}

fn load(editor: &mut Editor<Typing, FileHistory>, path: &std::path::Path) -> std::io::Result<()> {
    match editor.load_history(path) {
        Ok(()) => Ok(()),
        Err(ReadlineError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(std::io::Error::other(error.to_string())),
    }
}

/// What helps while typing: when a message is whole, and which commands there are.
pub struct Typing;

impl Helper for Typing {}
impl Highlighter for Typing {}

impl Hinter for Typing {
    type Hint = String;
}

impl Validator for Typing {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        match is_unfinished(context.input()) {
            true => Ok(ValidationResult::Incomplete),
            false => Ok(ValidationResult::Valid(None)),
        }
    }
}

impl Completer for Typing {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..position).filter(|typed| typed.starts_with('/'));
        let known = COMMANDS.iter().map(|(name, ..)| *name);
        let matching =
            |typed: &str| known.filter(|name| name.starts_with(typed)).map(str::to_owned).collect();
        Ok((0, typed.map_or_else(Vec::new, matching)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_held_together_by_a_backslash_or_quotes() {
        for (unfinished, whole, text) in [
            ("one\\", "one\\\ntwo", "one\ntwo"),
            ("\"\"\"one", "\"\"\"\none\\\n\"two\"\n\"\"\"", "one\\\n\"two\""),
            ("\"\"\"", "\"\"\"one\"\"\"", "one"),
        ] {
            assert!(is_unfinished(unfinished) && !is_unfinished(whole), "{whole}");
            assert_eq!(joined(whole), text);
        }
        assert!(!is_unfinished("a \"\"\" b"));
        // The input ended before the message did.
        assert_eq!(joined("one\\"), "one");
        assert_eq!(joined("\"\"\"one\ntwo"), "one\ntwo");
    }
}
