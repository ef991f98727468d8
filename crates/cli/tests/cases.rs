//! The cases of docs/cases.md: each command prints the lines that the page has, so that the page cannot go stale. No line depends on the
//! speed of the machine that runs the test.

use std::path::PathBuf;

use crate::support::{plimsoll, text};

/// Commands that take longer than a second or two begin with this.
const SLOW: [&str; 1] = ["plimsoll plan --model llama-3.1-405b"];

/// A command of the page, and the lines that it prints, of which there are more.
struct Case {
    /// The page's line of the command, from 0 on.
    line: usize,
    arguments: Vec<String>,
    printed: Vec<(usize, String)>,
}

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/cases.md")
}

/// Words of a command line, some of them in single quotes.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut quoted) = (Vec::new(), false);
    let mut word = String::new();
    for c in command.chars() {
        match c {
            '\'' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => words.push(std::mem::take(&mut word)),
            c => word.push(c),
        }
    }
    words.push(word);
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

/// The indented blocks that begin with a command.
fn cases(page: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let (mut command, mut inside) = (String::new(), false);
    for (number, line) in page.lines().enumerate() {
        let Some(own) = line.strip_prefix("    ") else {
            inside &= line.is_empty();
            continue;
        };
        if own.starts_with("plimsoll ") || !command.is_empty() {
            command.push_str(own.trim_end_matches('\\'));
            if !own.ends_with('\\') {
                let arguments = words(&std::mem::take(&mut command)).split_off(1);
                cases.push(Case { line: number, arguments, printed: Vec::new() });
                inside = true;
            }
        } else if let Some(case) = cases.last_mut().filter(|_| inside) {
            case.printed.push((number, own.to_owned()));
        }
    }
    cases
}

/// What a line says without the widths of its columns.
fn plain(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn run(case: &Case) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let arguments: Vec<&str> = case.arguments.iter().map(String::as_str).collect();
    let output = plimsoll(folder.path(), &arguments);
    assert!(output.stderr.is_empty(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn is_slow(case: &Case) -> bool {
    let command = format!("plimsoll {}", case.arguments.join(" "));
    SLOW.iter().any(|slow| command.starts_with(slow))
}

/// Holds what the commands print against the page.
fn hold(slow: bool) {
    let page = std::fs::read_to_string(page()).unwrap();
    let cases = cases(&page);
    assert!(cases.len() > 15 && cases.iter().all(|case| !case.printed.is_empty()));
    for case in cases.iter().filter(|case| is_slow(case) == slow) {
        let output = run(case);
        let mut rest = output.iter();
        for (_, line) in &case.printed {
            let found = rest.any(|printed| plain(printed) == plain(line));
            let command = case.arguments.join(" ");
            assert!(
                found,
                "docs/cases.md: plimsoll {command}\ndoes not print, or not there: {line}\nbut\n{}",
                output.join("\n")
            );
        }
    }
}

#[test]
fn commands_print_what_the_page_says() {
    hold(false);
}

/// Planning for 128 cards takes some seconds.
#[test]
#[ignore = "takes some seconds"]
fn long_commands_print_what_the_page_says() {
    hold(true);
}

/// A line without its numbers and their units: what it is about. A row of numbers is about the first three.
fn subject(line: &str) -> String {
    let first: Vec<&str> = line.split_whitespace().take(3).collect();
    if first.iter().all(|word| word.parse::<u32>().is_ok()) {
        return first.join(" ");
    }
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "ms", "s", "min", "h", "%"];
    let is_number = |word: &&str| {
        let word = word.trim_matches(|c: char| c.is_ascii_punctuation());
        !word.starts_with(|c: char| c.is_ascii_digit()) && !units.contains(&word)
    };
    line.split_whitespace().filter(is_number).collect::<Vec<_>>().join(" ")
}

/// Writes the page's lines anew, each as the line of the output that is about the same.
#[test]
#[ignore = "writes docs/cases.md"]
fn the_page_is_written_anew() {
    let page = std::fs::read_to_string(page()).unwrap();
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    for case in cases(&page) {
        let output = run(&case);
        let mut from = 0;
        for (number, line) in &case.printed {
            let same = output.iter().skip(from).position(|printed| subject(printed) == subject(line));
            let Some(place) = same else {
                println!(
                    "line {} of docs/cases.md has no like in the output of line {}",
                    number + 1,
                    case.line + 1
                );
                continue;
            };
            lines[*number] = format!("    {}", output[from + place]);
            from += place + 1;
        }
    }
    std::fs::write(self::page(), lines.join("\n") + "\n").unwrap();
}

#[test]
fn a_block_of_the_page_is_a_command_and_what_it_prints() {
    let page = "# Page\n\n    plimsoll plan --set 'a={b: c}' \\\n      --json\n\n      weights  1 GiB\n    fits\n\nWords.\n\n    not one\n";
    let [case] = &cases(page)[..] else { panic!() };
    assert_eq!(case.arguments, ["plan", "--set", "a={b: c}", "--json"]);
    let printed: Vec<&str> = case.printed.iter().map(|(_, line)| line.as_str()).collect();
    assert_eq!(printed, ["  weights  1 GiB", "fits"]);
    assert_eq!(subject("  weights  1.5 GiB  20.0 %"), subject("weights 900 MiB 1 %"));
    assert_ne!(subject("fits"), subject("does NOT fit"));
    assert_ne!(subject("  0  2  2  1 GiB"), subject("  0  8  8  1 GiB"));
}
