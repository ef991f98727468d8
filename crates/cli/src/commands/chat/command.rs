//! What begins with a slash: the commands of a chat, each in one place together with its help.

use std::path::PathBuf;

/// A command.
#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    Reset,
    /// What the system says from now on; `None` for nothing.
    System(Option<String>),
    Undo,
    Retry,
    Save(PathBuf),
    Load(PathBuf),
    /// A setting and its new value; `None` to list all.
    Set(Option<(String, String)>),
    Tokens,
    Memory,
    Exit,
}

/// Name, argument, help.
pub const COMMANDS: [(&str, &str, &str); 11] = [
    ("/help", "", "list the commands"),
    ("/reset", "", "forget all turns; the system message stays"),
    ("/system", "TEXT", "set the system message; without a text there is none"),
    ("/undo", "", "take back the last message and its answer"),
    ("/retry", "", "answer the last message again, with the next seed"),
    ("/save", "FILE", "write the conversation as JSON"),
    ("/load", "FILE", "go on with a conversation that was saved"),
    ("/set", "NAME VALUE", "change a setting, as /set temperature 0.7; alone it lists them"),
    ("/tokens", "", "say how much of the context is in use"),
    ("/memory", "", "say what memory is used for"),
    ("/exit", "", "end; so do /quit and Ctrl-D"),
];

/// How messages are typed.
pub const TYPING: &str = "\
A message ends with its line. A line that ends with \\ goes on in the next one, and so does all between \"\"\" and \"\"\".
In a terminal Alt-Enter begins a new line and Ctrl-C stops an answer. A message that begins with / is typed with //.";

/// What a line means.
#[derive(Debug, PartialEq)]
pub enum Line {
    /// There is nothing in it.
    Empty,
    /// For the model.
    Message(String),
    /// For the program.
    Command(Command),
}

impl Line {
    /// Reads a whole input; the error says what is wrong with a command.
    pub fn parse(input: &str) -> Result<Line, String> {
        if let Some(message) = input.strip_prefix("//") {
            return Ok(Line::Message(format!("/{message}")));
        }
        match input.starts_with('/') {
            true => command(input).map(Line::Command),
            false if input.trim().is_empty() => Ok(Line::Empty),
            false => Ok(Line::Message(input.to_owned())),
        }
    }
}

fn command(input: &str) -> Result<Command, String> {
    let (name, argument) = input.split_once(char::is_whitespace).unwrap_or((input, ""));
    let argument = argument.trim();
    let name = if name == "/quit" { "/exit" } else { name };
    let Some((_, wanted, _)) = COMMANDS.iter().find(|(known, ..)| *known == name) else {
        return Err(unknown(name));
    };
    match (wanted.is_empty(), argument.is_empty()) {
        (true, false) => {
            return Err(format!("{name} takes no argument; a message that begins with / is typed with //"));
        }
        (false, true) if matches!(name, "/save" | "/load") => {
            return Err(format!("give a file: {name} {wanted}"));
        }
        _ => {}
    }
    Ok(match name {
        "/help" => Command::Help,
        "/reset" => Command::Reset,
        "/system" => Command::System(Some(argument.to_owned()).filter(|text| !text.is_empty())),
        "/undo" => Command::Undo,
        "/retry" => Command::Retry,
        "/save" => Command::Save(PathBuf::from(argument)),
        "/load" => Command::Load(PathBuf::from(argument)),
        "/set" if argument.is_empty() => Command::Set(None),
        "/set" => {
            let pair = argument.split_once(|c: char| c.is_whitespace() || c == '=');
            let (name, value) = pair.ok_or("give a name and a value: /set temperature 0.7")?;
            Command::Set(Some((name.to_owned(), value.trim().to_owned())))
        }
        "/tokens" => Command::Tokens,
        "/memory" => Command::Memory,
        _ => Command::Exit,
    })
}

fn unknown(name: &str) -> String {
    let distance = |known: &str| strsim::damerau_levenshtein(known, name);
    let near = COMMANDS.iter().map(|(known, ..)| *known).min_by_key(|known| distance(known));
    match near.filter(|known| distance(known) <= 2) {
        Some(near) => format!(
            "there is no command {name}; did you mean {near}? A message that begins with / is typed with //"
        ),
        None => format!(
            "there is no command {name}; /help lists them. A message that begins with / is typed with //"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        let parsed = |input| Line::parse(input).unwrap();
        assert_eq!(parsed("  "), Line::Empty);
        assert_eq!(parsed(" /no command"), Line::Message(" /no command".into()));
        assert_eq!(parsed("//etc/hosts?"), Line::Message("/etc/hosts?".into()));
        assert_eq!(parsed("/system be\nkind "), Line::Command(Command::System(Some("be\nkind".into()))));
        assert_eq!(parsed("/system"), Line::Command(Command::System(None)));
        let set = Some(("top_k".to_owned(), "5".to_owned()));
        assert_eq!(parsed("/set top_k 5"), Line::Command(Command::Set(set)));
        assert_eq!(parsed("/set"), Line::Command(Command::Set(None)));
        assert_eq!(parsed("/quit"), Line::Command(Command::Exit));
        for (name, argument, _) in COMMANDS {
            assert!(Line::parse(&format!("{name} {}", argument.to_lowercase())).is_ok(), "{name}");
        }
    }

    #[test]
    fn wrong_commands_are_named() {
        for (input, words) in [
            ("/rest", "/reset"),
            ("/frobnicate", "/help"),
            ("/save", "give a file"),
            ("/undo it", "no argument"),
            ("/set temperature", "/set temperature 0.7"),
        ] {
            let error = Line::parse(input).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
