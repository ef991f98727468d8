//! The vocabularies that llama.cpp tests with, and what it makes of its test texts: `examples/get-vocabs`
//! fetches them.

use std::path::{Path, PathBuf};

use plimsoll_model::tokenizer::{EncodeOptions, SpecialTokens, Tokenizer};

/// As llama.cpp made the vectors: nothing added, no special token recognised.
const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

/// Kinds that are refused.
const REFUSED: &[(&str, &[&str])] = &[("bert-bge", &["tokenizer.ggml.model", "bert", "WordPiece", "t5"])];

/// The files, or nothing where they were not fetched.
fn vocabularies() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/llamacpp_models");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!("skipped: models/llamacpp_models is missing; examples/get-vocabs fetches it");
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "gguf"));
    files.sort();
    files
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap().to_str().unwrap().trim_start_matches("ggml-vocab-").to_owned()
}

/// The texts and their ids; nothing where a vocabulary has none.
fn vectors(path: &Path) -> Vec<(String, Vec<u32>)> {
    let beside = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display()));
    let (Ok(texts), Ok(ids)) = (beside("inp"), beside("out")) else { return Vec::new() };
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<Vec<u32>> =
        ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect()).collect();
    // A separator at the very end begins no text.
    let texts = if texts.len() == ids.len() + 1 { &texts[..ids.len()] } else { &texts };
    assert_eq!(texts.len(), ids.len(), "{}", path.display());
    texts.iter().map(|t| t.to_string()).zip(ids).collect()
}

#[test]
fn texts_have_the_tokens_that_llamacpp_gives_them() {
    let (mut compared, mut differing) = (0, Vec::new());
    for path in vocabularies() {
        let name = name(&path);
        let tokenizer = match (Tokenizer::from_gguf_file(&path), REFUSED.iter().find(|(n, _)| *n == name)) {
            (Err(error), Some((_, words))) => {
                let error = error.to_string();
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
                continue;
            }
            (tokenizer, _) => tokenizer.unwrap(),
        };
        let vectors = vectors(&path);
        eprintln!("{name}: {} tokens, {} texts", tokenizer.vocab_size(), vectors.len());
        for (text, expected) in vectors {
            compared += 1;
            let ids = tokenizer.encode_with(&text, PLAIN).unwrap();
            if ids != expected {
                differing.push(format!("{name}: {text:?}\n  expected {expected:?}\n  got      {ids:?}"));
            }
            let back = tokenizer.decode_with(&ids, SpecialTokens::Keep).unwrap();
            if back != text {
                differing.push(format!("{name}: {text:?} comes back as {back:?}"));
            }
        }
    }
    eprintln!("{compared} texts compared");
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
