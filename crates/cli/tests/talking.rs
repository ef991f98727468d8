//! `generate` and `chat` as a user runs them, on a tiny model of bytes.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 128}
data: {train: text.txt, sequence_length: 12}
training: {steps: 2, batch_size: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 0}
";

const TEMPLATE: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// A folder with the model `out`, which has a chat template.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    ok(folder.path(), &["train", "c.yaml"], "");
    std::fs::write(folder.path().join("out/chat_template.jinja"), TEMPLATE).unwrap();
    folder
}

/// Runs the program with a text on its standard input.
fn plimsoll(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.current_dir(folder).args(arguments).env("XDG_STATE_HOME", folder.join("state"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that ends without reading closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(folder: &Path, arguments: &[&str], input: &str) -> String {
    let output = plimsoll(folder, arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must fail with that code; its standard error.
fn fails(folder: &Path, code: i32, arguments: &[&str], input: &str) -> String {
    let output = plimsoll(folder, arguments, input);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    error
}

fn with<'a>(arguments: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [arguments, more].concat()
}

fn generate<'a>(more: &[&'a str]) -> Vec<&'a str> {
    with(&["generate", "--model", "out", "--threads", "1"], more)
}

fn chat<'a>(more: &[&'a str]) -> Vec<&'a str> {
    with(&["chat", "--model", "out", "--threads", "1", "--max-tokens", "4"], more)
}

fn lines(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Only this byte can be drawn.
const ONLY_A: &str = "--logit-bias=65=1000";

#[test]
fn generate_stops_at_strings_and_tokens_and_says_why() {
    let folder = folder();
    let one = |more: &[&str]| -> Value {
        let usual = generate(&["--prompt", "word", "--max-tokens", "6", "--json", ONLY_A]);
        serde_json::from_str(&ok(folder.path(), &with(&usual, more), "")).unwrap()
    };
    let free = one(&[]);
    assert_eq!((&free["text"], &free["stop_reason"]), (&"AAAAAA".into(), &"max_tokens".into()));
    for key in ["prompt_tokens", "tokens", "text", "tokens_per_second"] {
        assert!(!free[key].is_null(), "{key}");
    }
    let stopped = one(&["--stop", "never", "--stop", "AAA"]);
    assert_eq!((&stopped["text"], &stopped["stop_reason"]), (&"".into(), &"stop_string".into()));
    assert_eq!((stopped["tokens"].as_array().unwrap().len(), &stopped["stop"]), (3, &"AAA".into()));
    assert_eq!(one(&["--stop", "AB"])["text"], "AAAAAA");
    for token in ["65", "A"] {
        let stopped = one(&["--stop-token", token]);
        assert_eq!((&stopped["stop_reason"], &stopped["stop"]), (&"stop_token".into(), &65.into()));
    }
    // The text of a special token is never shown, but it stops.
    let end = one(&["--stop", "<|endoftext|>", "--logit-bias=256=2000"]);
    assert_eq!((&end["stop_reason"], &end["stop"]), (&"stop_token".into(), &256.into()));
    // What is shown as it comes is the same text.
    let shown = ok(folder.path(), &generate(&["--prompt", "word", "--max-tokens", "6", ONLY_A]), "");
    assert_eq!(shown, "wordAAAAAA\n");

    for (more, words) in [
        (&["--stop", ""][..], "stop string is empty"),
        (&["--stop-token", "nothing"], "nothing"),
        (&["--stop-token", "999"], "999"),
    ] {
        let usual = generate(&["--prompt", "word"]);
        let error = fails(folder.path(), 2, &with(&usual, more), "");
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn generate_takes_prompts_from_input_and_files_and_gives_several_samples() {
    let folder = folder();
    let path = folder.path();
    let args = generate(&["--prompt", "-", "--max-tokens", "3", "--json"]);
    let from_input: Value = serde_json::from_str(&ok(path, &args, "word\n")).unwrap();
    assert_eq!(from_input["prompt_tokens"], serde_json::json!([119, 111, 114, 100]));

    let drawn = ["--temperature", "1", "--max-tokens", "8", "--seed", "5", "--json"];
    let args = with(&generate(&["--prompt", "word", "--samples", "3"]), &drawn);
    let several: Value = serde_json::from_str(&ok(path, &args, "")).unwrap();
    let samples = several["samples"].as_array().unwrap();
    assert_eq!((samples.len(), &samples[0]["tokens"]), (3, &several["tokens"]));
    assert_ne!(samples[0]["tokens"], samples[1]["tokens"]);
    // The prompt is computed once, and a sample's seed alone gives it again.
    assert_eq!((&samples[0]["reused_tokens"], &samples[2]["reused_tokens"]), (&0.into(), &4.into()));
    let args = with(&generate(&["--prompt", "word", "--json", "--seed", "7"]), &drawn[..4]);
    let third: Value = serde_json::from_str(&ok(path, &args, "")).unwrap();
    assert_eq!((&samples[2]["seed"], &samples[2]["tokens"]), (&7.into(), &third["tokens"]));

    std::fs::write(path.join("p.txt"), "word1\n\nword2 and\n").unwrap();
    std::fs::write(path.join("p.jsonl"), "{\"prompt\": \"word1\"}\n{\"prompt\": \"word2 and\", \"id\": 3}\n")
        .unwrap();
    let many = |file: &str, json: &[&str]| {
        ok(path, &with(&generate(&["--prompts", file, "--max-tokens", "4"]), json), "")
    };
    let plain = lines(&many("p.txt", &[]));
    assert_eq!(plain.iter().map(|line| &line["prompt"]).collect::<Vec<_>>(), ["word1", "word2 and"]);
    let tokens = |lines: &[Value]| lines.iter().map(|line| line["tokens"].clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&lines(&many("p.jsonl", &[]))), tokens(&plain));
    let array: Value = serde_json::from_str(&many("p.jsonl", &["--json"])).unwrap();
    assert_eq!(tokens(array.as_array().unwrap()), tokens(&plain));
    // Alone, the second has no cache to begin with, and the same tokens.
    let args = generate(&["--prompt", "word2 and", "--max-tokens", "4", "--json"]);
    let alone: Value = serde_json::from_str(&ok(path, &args, "")).unwrap();
    assert_eq!(alone["tokens"], plain[1]["tokens"]);
}

/// However many are answered at once, each prompt has its own answer, in the order of the file.
#[test]
fn prompts_are_answered_at_once_and_as_alone() {
    let folder = folder();
    let path = folder.path();
    let prompts: Vec<String> = (0..7).map(|i| format!("word{i} and{}", " so on".repeat(i))).collect();
    std::fs::write(path.join("p.txt"), prompts.join("\n")).unwrap();
    let drawn = ["--temperature", "1", "--seed", "3", "--max-tokens", "20", "--stop", "e", "--json"];
    let alone: Vec<Value> = prompts
        .iter()
        .map(|prompt| {
            serde_json::from_str(&ok(path, &with(&generate(&["--prompt", prompt]), &drawn), "")).unwrap()
        })
        .collect();
    for parallel in ["1", "3", "7"] {
        let args = with(&generate(&["--prompts", "p.txt", "--parallel", parallel]), &drawn);
        let all: Value = serde_json::from_str(&ok(path, &args, "")).unwrap();
        let all = all.as_array().unwrap();
        for (one, alone) in all.iter().zip(&alone) {
            for key in ["tokens", "text", "stop_reason", "prompt_tokens", "seed"] {
                assert_eq!(one[key], alone[key], "{parallel}: {key}");
            }
        }
        let batch = &all[6]["batch"];
        assert_eq!(batch["parallel"].as_u64().unwrap().to_string(), parallel);
        assert!(batch["at_once"].as_u64().unwrap() <= batch["parallel"].as_u64().unwrap(), "{batch}");
        let tokens: usize = all.iter().map(|one| one["tokens"].as_array().unwrap().len()).sum();
        assert_eq!((batch["tokens"].as_u64().unwrap() as usize, batch["waits"].as_u64()), (tokens, Some(0)));
        assert!(batch["tokens_per_second"].as_f64().unwrap() > 0.0);
        assert_eq!(batch["kv_cache_pages"].is_null(), parallel == "1");
        assert_eq!(all.len(), 7);
    }
    // Samples are answers of their own.
    let args = with(&generate(&["--prompts", "p.txt", "--samples", "2"]), &drawn);
    let all: Value = serde_json::from_str(&ok(path, &args, "")).unwrap();
    assert_eq!(all[2]["samples"][0]["tokens"], alone[2]["tokens"]);
    assert_eq!((&all[2]["samples"][1]["seed"], &all[6]["batch"]["parallel"]), (&4.into(), &14.into()));
}

#[test]
fn guesses_change_no_token_and_are_refused_where_they_cannot_be() {
    let folder = folder();
    let path = folder.path();
    let prompt = "word3 word10 word17 word1 word8 word3 word10";
    for drawn in [["--temperature", "0"], ["--temperature", "0.8"]] {
        let one = |more: &[&str]| -> Value {
            let usual = generate(&["--prompt", prompt, "--max-tokens", "30", "--json"]);
            serde_json::from_str(&ok(path, &[&usual, &drawn[..], more].concat(), "")).unwrap()
        };
        let plain = one(&[]);
        assert!(plain["acceptance_rate"].is_null());
        let looked_up = one(&["--speculative", "lookup", "--draft-tokens", "6"]);
        let by_itself = one(&["--draft-model", "out"]);
        for guessed in [&looked_up, &by_itself] {
            assert_eq!((&guessed["tokens"], &guessed["text"]), (&plain["tokens"], &plain["text"]));
        }
        if drawn[1] == "0" {
            assert_eq!(by_itself["acceptance_rate"], 1.0);
        }
        // What the process was measured to take beside models drifts by more than these need.
        let planned = |of: &Value| of["memory"]["planned_model_bytes"].as_u64().unwrap();
        assert!(planned(&by_itself) > planned(&plain));
    }
    // A conversation is the same, too.
    let turns = |more: &[&str]| -> Vec<Value> {
        let lines = lines(&ok(path, &with(&chat(&["--json"]), more), "word3\nword3 word10\n"));
        for line in &lines {
            assert_eq!(line.get("drafted_tokens").is_some(), !more.is_empty(), "{line}");
            assert_eq!(line.get("accepted_tokens").is_some(), !more.is_empty(), "{line}");
        }
        lines.iter().map(|line| line["tokens"].clone()).collect()
    };
    assert_eq!(turns(&["--speculative", "lookup"]), turns(&[]));

    let other = path.join("other");
    std::fs::create_dir(&other).unwrap();
    for entry in std::fs::read_dir(path.join("out")).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
        }
    }
    let file = other.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (one, two) = (vocabulary["a"].clone(), vocabulary["b"].clone());
    vocabulary.extend([("a".to_owned(), two), ("b".to_owned(), one)]);
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    std::fs::write(path.join("p.txt"), "word\nword\n").unwrap();
    for (more, words) in [
        (&["--prompt", "word", "--draft-model", "other"][..], &["other", "\"b\"", "vocabulary"][..]),
        (&["--prompt", "word", "--draft-model", "missing"], &["missing"]),
        (&["--prompt", "word", "--speculative", "lookup", "--ranks", "2"], &["--ranks"]),
        (&["--prompt", "word", "--speculative", "lookup", "--draft-model", "out"], &["--draft-model"]),
        (&["--prompt", "word", "--speculative", "lookup", "--draft-tokens", "24"], &["24"]),
        (&["--prompts", "p.txt", "--speculative", "lookup", "--parallel", "2"], &["--parallel"]),
        (&["--prompt", "word", "--parallel", "2"], &["--parallel"]),
    ] {
        let error = fails(path, 2, &generate(more), "");
        assert!(words.iter().all(|word| error.contains(word)), "{more:?}: {error}");
    }

    // The line that is named is enough for both models.
    let guessed = generate(&["--prompt", "word", "--draft-model", "out", "--memory"]);
    let error = fails(path, 3, &with(&guessed, &["20MiB"]), "");
    assert!(error.contains("the models need "), "{error}");
    let enough = error.split(": ").last().and_then(|end| end.split(" is enough").next()).unwrap();
    ok(path, &with(&guessed, &[&enough.replace(' ', "")]), "");
}

#[test]
fn prompts_that_cannot_be_continued_are_refused_with_place_and_remedy() {
    let folder = folder();
    let path = folder.path();
    let long = "x".repeat(130);
    std::fs::write(path.join("p.txt"), format!("fine\n{long}\n")).unwrap();
    std::fs::write(path.join("p.jsonl"), "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n").unwrap();
    std::fs::write(path.join("empty.txt"), "\n").unwrap();
    for (arguments, words) in [
        (generate(&["--prompt", ""]), &["empty"][..]),
        (generate(&["--prompt", &long]), &["130 tokens", "128", "--context"]),
        (generate(&["--prompt", &long, "--context", "100"]), &["130 tokens", "100"]),
        (generate(&["--prompts", "p.txt"]), &["p.txt, line 2", "130 tokens", "128"]),
        (generate(&["--prompts", "p.jsonl"]), &["p.jsonl, line 2", "\"prompt\""]),
        (generate(&["--prompts", "empty.txt"]), &["no prompt"]),
        (generate(&["--prompts", "missing.txt"]), &["missing.txt"]),
        (generate(&["--prompt", "a", "--samples", "0"]), &["0"]),
        (generate(&[]), &["--prompt"]),
    ] {
        let error = fails(path, 2, &arguments, "");
        for word in words {
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }
    // Given more, it goes.
    ok(path, &generate(&["--prompt", &long, "--context", "140", "--max-tokens", "2"]), "");
}

#[test]
fn a_chat_has_turns_that_share_the_cache() {
    let folder = folder();
    let input = "one\ntwo\\\nlines\n\n\"\"\"\nq\n\"\"\"\n/tokens\n/exit\nnot read\n";
    let said = lines(&ok(folder.path(), &chat(&["--system", "S", "--json", ONLY_A]), input));
    assert_eq!(said.len(), 4, "{said:?}");
    let users: Vec<&Value> = said[..3].iter().map(|turn| &turn["user"]).collect();
    assert_eq!(users, ["one", "two\nlines", "q"]);
    assert!(said[..3].iter().all(|turn| turn["text"] == "AAAA" && turn["stop_reason"] == "max_tokens"));
    let prompts = ["s:S;u:one;a:", "s:S;u:one;a:AAAA;u:two\nlines;a:"];
    assert_eq!(said[0]["prompt_tokens"], prompts[0].len());
    assert_eq!(said[1]["prompt_tokens"], prompts[1].len());
    // All of the first prompt and its answer but the last token, which was never computed.
    assert_eq!(said[1]["reused_tokens"], prompts[0].len() + 3);
    assert_eq!((&said[3]["turns"], &said[3]["context"]), (&3.into(), &128.into()));

    let plain = plimsoll(folder.path(), &chat(&[ONLY_A, "--stop-token", "65"]), "one\n//slash\n");
    assert_eq!((text(&plain.stdout), text(&plain.stderr)), ("\n\n".into(), String::new()));
    // No lines of a pipe are kept.
    assert!(!folder.path().join("state").exists());
}

#[test]
fn commands_change_the_conversation() {
    let folder = folder();
    let path = folder.path();
    let input = "/set temperature 1\none\n/retry\n/save talk.json\n/undo\n/load talk.json\n/system T\n/reset\ntwo\n/memory\n/help\n/set\n";
    let said = lines(&ok(path, &chat(&["--json"]), input));
    assert_eq!(said.len(), 12);
    assert_eq!(said[1]["user"], said[2]["user"]);
    // Another seed; the prompt was there, and so was what followed it.
    assert_ne!(said[1]["tokens"], said[2]["tokens"]);
    assert_eq!(said[2]["reused_tokens"], said[2]["prompt_tokens"]);
    let saved: Value = serde_json::from_slice(&std::fs::read(path.join("talk.json")).unwrap()).unwrap();
    let messages = serde_json::json!([
        { "role": "user", "content": "one" },
        { "role": "assistant", "content": said[2]["text"] },
    ]);
    assert_eq!(saved["messages"], messages);
    assert_eq!(said[8]["prompt_tokens"], "s:T;u:two;a:".len());
    assert!(said[9]["memory"]["weights_bytes"].as_u64().unwrap() > 0);
    assert_eq!(said[11]["settings"]["temperature"], "1");

    std::fs::write(path.join("bad.json"), "[{\"role\": \"tool\", \"content\": \"x\"}]").unwrap();
    for (input, code, words) in [
        ("/rest\n", 2, "/reset"),
        ("/undo\n", 2, "no turn"),
        ("/retry\n", 2, "no message"),
        ("/load nothing.json\n", 1, "nothing.json"),
        ("/load bad.json\n", 1, "message 1"),
        ("/set top_p 2\n", 2, "top_p is 2"),
        ("/set warmth 2\n", 2, "temperature"),
        ("/save no/folder.json\n", 1, "no/folder.json"),
    ] {
        let error = fails(path, code, &chat(&[]), input);
        assert!(error.contains(words), "{input}: {error}");
    }
}

#[test]
fn what_was_taken_back_is_not_counted() {
    let folder = folder();
    let input = "one\n/tokens\ntwo\n/save talk.json\n/undo\n/tokens\n/undo\n/tokens\n/system\n/tokens\n/load talk.json\n/tokens\nsix\n/tokens\n";
    let said = lines(&ok(folder.path(), &chat(&["--system", "S", "--json", ONLY_A]), input));
    let counted: Vec<(u64, u64)> = (said.iter())
        .filter_map(|line| Some((line["cached_tokens"].as_u64()?, line["turns"].as_u64()?)))
        .collect();
    // The last token of an answer is not computed unless something follows it.
    let (system, one) = ("s:S;".len() as u64, "s:S;u:one;a:AAAA;".len() as u64);
    let all = "s:S;u:one;a:AAAA;u:two;a:AAAA;u:six;a:AAA".len() as u64;
    let loaded = "s:S;u:one;a:AAAA;u:two;a:AAA".len() as u64;
    assert_eq!(counted, [(one - 2, 1), (one, 1), (system, 0), (0, 0), (loaded, 2), (all, 3)]);
}

#[test]
fn adapters_and_templates_that_are_none_are_bad_usage() {
    let folder = folder();
    let path = folder.path();
    std::fs::write(path.join("bad.jinja"), "{% if %}").unwrap();
    let eval = |more: &[&'static str]| with(&["eval", "--model", "out", "--threads", "1"], more);
    let say = ["--prompt", "x"];
    for (arguments, words) in [
        (eval(&["--data", "text.txt", "--adapter", "none"]), "--adapter none: there is no such folder"),
        (generate(&with(&say, &["--adapter", "text.txt=2"])), "--adapter text.txt: it is a file"),
        (chat(&["--adapter", "out"]), "--adapter out: there is no adapter_config.json"),
        (
            vec!["merge", "--model", "out", "--adapter", "none", "--output", "merged"],
            "--adapter none: there is no such folder",
        ),
        (chat(&["--chat-template", "bad.jinja"]), "bad.jinja: chat template, line 1"),
        (generate(&with(&say, &["--chat", "--chat-template", "bad.jinja"])), "line 1"),
    ] {
        let error = fails(path, 2, &arguments, "");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    // The same of a model's own template.
    std::fs::write(path.join("out/chat_template.jinja"), "{% if %}").unwrap();
    assert!(fails(path, 2, &chat(&[]), "").contains("out/chat_template.jinja: chat template, line 1"));
}

/// A program that has no MPI refuses ranks, and so what is said before that is said before any has started.
#[test]
fn what_is_wrong_on_every_rank_is_said_once_and_before_they_start() {
    let folder = folder();
    let path = folder.path();
    for (arguments, words) in [
        (vec!["generate", "--model", "none", "--prompt", "x"], "none: there is no such file or folder"),
        (generate(&["--prompt", "x", "--adapter", "none"]), "--adapter none: "),
        (generate(&["--prompts", "none.txt"]), "--prompts none.txt: "),
        (generate(&["--prompt", "-"]), "standard input reaches one rank"),
        (generate(&["--prompt", "x", "--chat", "--chat-template", "no.jinja"]), "--chat-template no.jinja: "),
        (vec!["eval", "--model", "none", "--data", "text.txt"], "none: there is no such file or folder"),
        (vec!["chat", "--model", "none"], "none: there is no such file or folder"),
    ] {
        let error = fails(path, 2, &with(&arguments, &["--ranks", "2"]), "");
        assert!(error.starts_with("error: ") && error.contains(words), "{arguments:?}: {error}");
        assert_eq!((error.matches("error: ").count(), error.contains("rank 1")), (1, false), "{error}");
    }
}

#[test]
fn a_full_context_drops_the_oldest_turns_and_says_so() {
    let folder = folder();
    let input = "a question of some length\n".repeat(5);
    let arguments = chat(&["--system", "S", "--context", "100", ONLY_A]);
    let said = lines(&ok(folder.path(), &with(&arguments, &["--json"]), &input));
    let dropped: Vec<u64> = said.iter().map(|turn| turn["dropped_turns"].as_u64().unwrap()).collect();
    assert_eq!(dropped, [0, 0, 2, 2, 4]);
    assert!(said.iter().all(|turn| turn["prompt_tokens"].as_u64().unwrap() + 4 <= 100));
    let plain = plimsoll(folder.path(), &arguments, &input);
    assert!(text(&plain.stderr).contains("no longer sees the first 4 turns"), "{}", text(&plain.stderr));

    let error = fails(folder.path(), 2, &arguments, &"x".repeat(120));
    assert!(error.contains("100") && error.contains("129 tokens"), "{error}");
    let error = fails(folder.path(), 2, &chat(&["--context", "5"]), "");
    assert!(error.contains("5 tokens") && error.contains("--context"), "{error}");
}

#[test]
fn templates_that_are_missing_or_never_end_are_errors_before_the_first_line() {
    let folder = folder();
    let path = folder.path();
    let template = path.join("out/chat_template.jinja");
    let forever = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    std::fs::write(&template, forever).unwrap();
    for arguments in [chat(&[]), generate(&["--chat", "--prompt", "x"])] {
        let error = fails(path, 1, &arguments, "x\n");
        assert!(error.contains("chat_template.jinja") && error.contains("for ever"), "{error}");
    }
    std::fs::write(
        &template,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x",
    )
    .unwrap();
    assert!(fails(path, 1, &chat(&["--system", "S"]), "").contains("no system"));
    std::fs::remove_file(&template).unwrap();
    for arguments in [chat(&[]), generate(&["--chat", "--prompt", "x"])] {
        let error = fails(path, 2, &arguments, "");
        assert!(error.contains("no chat template") && error.contains("--chat-template plain"), "{error}");
    }
    let plain = chat(&["--chat-template", "plain", "--system", "Be kind.", "--json", ONLY_A]);
    let said = lines(&ok(path, &plain, "hi\nho\n"));
    assert_eq!(said[0]["prompt_tokens"], "Be kind.\n\nUser: hi\nAssistant:".len());
    assert_eq!(said[1]["prompt_tokens"], "Be kind.\n\nUser: hi\nAssistant: AAAA\nUser: ho\nAssistant:".len());
    std::fs::write(path.join("own.jinja"), TEMPLATE).unwrap();
    let said = lines(&ok(path, &chat(&["--chat-template", "own.jinja", "--json"]), "hi\n"));
    assert_eq!(said[0]["prompt_tokens"], "u:hi;a:".len());
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused_and_a_smaller_one_is_not() {
    let folder = folder();
    let path = folder.path();
    let file = path.join("out/tokenizer.json");
    let whole: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let mut larger = whole.clone();
    let mut added = larger["added_tokens"][0].clone();
    (added["id"], added["content"]) = (300.into(), "<|more|>".into());
    larger["added_tokens"].as_array_mut().unwrap().push(added);
    larger["model"]["vocab"]["<|more|>"] = 300.into();
    std::fs::write(&file, larger.to_string()).unwrap();
    for arguments in [generate(&["--prompt", "x"]), chat(&[])] {
        let error = fails(path, 1, &arguments, "x\n");
        assert!(error.contains("300") && error.contains("257"), "{error}");
    }
    // Rows that no token has are never drawn for greedy text, and are an error when they are.
    let mut smaller = whole;
    smaller["model"]["vocab"].as_object_mut().unwrap().retain(|token, _| token != "Z");
    std::fs::write(&file, smaller.to_string()).unwrap();
    ok(path, &generate(&["--prompt", "x", "--max-tokens", "3", ONLY_A]), "");
    let error = fails(path, 1, &generate(&["--prompt", "x", "--logit-bias=90=1000"]), "");
    assert!(error.contains("token 90"), "{error}");
}
