//! Saving: whole, sharded, over an older save, and not at all.

use std::collections::BTreeSet;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelFiles, ModelSpec, SaveWriter};
use serde_json::Value;

use crate::support::{save_tiny, tiny_spec, weights, write_file};

fn names(folder: &Path) -> BTreeSet<String> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn save(folder: &Path, spec: &ModelSpec, shard_bytes: u64) -> u64 {
    save_with(folder, spec, shard_bytes, None)
}

fn save_with(folder: &Path, spec: &ModelSpec, shard_bytes: u64, tokenizer: Option<&Tokenizer>) -> u64 {
    let writer = SaveWriter::new(spec, DType::Bf16).shard_bytes(shard_bytes).with_tokenizer(tokenizer);
    writer.write(folder, |parameter, out| out.write_all(&weights(spec, parameter, DType::Bf16))).unwrap()
}

fn check_weights(folder: &Path, spec: &ModelSpec) {
    let files = ModelFiles::open(folder).unwrap();
    for parameter in spec.parameters() {
        let mut out = vec![0; 2 * parameter.elements() as usize];
        files.weights().read_into(&parameter, DType::Bf16, &mut out).unwrap();
        assert_eq!(out, weights(spec, &parameter, DType::Bf16), "{}", parameter.name);
    }
}

const WHOLE: [&str; 3] = ["config.json", "generation_config.json", "model.safetensors"];

#[test]
fn a_folder_is_saved_whole_or_in_shards() {
    let place = tempfile::tempdir().unwrap();
    let spec = tiny_spec();
    // New, and with folders above it that are not there yet.
    let folder = place.path().join("runs").join("model");
    let bytes = save(&folder, &spec, u64::MAX);
    assert_eq!(names(&folder), BTreeSet::from(WHOLE.map(str::to_owned)));
    let on_disk: u64 = names(&folder).iter().map(|name| folder.join(name).metadata().unwrap().len()).sum();
    assert_eq!(bytes, on_disk);
    assert_eq!(names(&place.path().join("runs")).len(), 1, "nothing is left beside it");
    check_weights(&folder, &spec);

    // Over it, in shards, beside a file of somebody else's.
    write_file(&folder.join("README.md"), b"mine");
    save(&folder, &spec, 30_000);
    let after = names(&folder);
    assert!(after.contains("README.md") && !after.contains("model.safetensors"), "{after:?}");
    let index: Value =
        serde_json::from_slice(&std::fs::read(folder.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 2 * spec.parameter_count());
    assert_eq!(index["weight_map"].as_object().unwrap().len(), spec.parameters().len());
    assert!(after.iter().filter(|name| name.starts_with("model-0")).count() > 2, "{after:?}");
    check_weights(&folder, &spec);

    // And whole again: the shards would be loaded otherwise.
    save(&folder, &spec, u64::MAX);
    let mut expected = BTreeSet::from(WHOLE.map(str::to_owned));
    expected.insert("README.md".to_owned());
    assert_eq!(names(&folder), expected);
    check_weights(&folder, &spec);
}

/// What belongs to the tokenizer that was there goes with it, and what is somebody else's stays. Where there is no tokenizer to write, the
/// one that is there may be the model's own.
#[test]
fn a_tokenizer_takes_the_place_of_another() {
    let place = tempfile::tempdir().unwrap();
    let (spec, folder) = (tiny_spec(), place.path().join("model"));
    let tokenizer = Tokenizer::byte_level().unwrap();
    save_with(&folder, &spec, u64::MAX, Some(&tokenizer));
    let whole = names(&folder);
    assert!(whole.contains("tokenizer.json"), "{whole:?}");
    assert_eq!(names(place.path()).len(), 1, "nothing is left beside it");
    let stale = ["chat_template.jinja", "merges.txt", "additional_chat_templates/tool_use.jinja"];
    std::fs::create_dir(folder.join("additional_chat_templates")).unwrap();
    stale.iter().for_each(|name| write_file(&folder.join(name), b"stale"));
    save(&folder, &spec, u64::MAX);
    assert!(stale.iter().all(|name| folder.join(name).exists()));
    write_file(&folder.join("notes.txt"), b"mine");
    save_with(&folder, &spec, u64::MAX, Some(&tokenizer));
    let mut expected = whole;
    expected.insert("notes.txt".to_owned());
    assert_eq!(names(&folder), expected);
}

#[cfg(unix)]
#[test]
fn files_get_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("model");
    save_tiny(&folder, &tiny_spec(), DType::F32);
    let plain = place.path().join("plain");
    write_file(&plain, b"");
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.join("model.safetensors")), mode(&plain));
    std::fs::create_dir(place.path().join("dir")).unwrap();
    assert_eq!(mode(&folder), mode(&place.path().join("dir")));
}

#[test]
fn a_failed_save_leaves_things_as_they_were() {
    let place = tempfile::tempdir().unwrap();
    let spec = tiny_spec();
    let fail = |folder: &Path, after: usize| {
        let mut count = 0;
        let writer = SaveWriter::new(&spec, DType::Bf16).shard_bytes(30_000);
        let result = writer.write(folder, |parameter, out| {
            count += 1;
            if count > after {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            out.write_all(&weights(&spec, parameter, DType::Bf16))
        });
        result.unwrap_err().to_string()
    };
    let folder = place.path().join("model");
    assert!(fail(&folder, 5).contains("free some space"));
    assert!(names(place.path()).is_empty());

    save(&folder, &spec, u64::MAX);
    let before = names(&folder);
    fail(&folder, 12);
    assert_eq!(names(&folder), before);
    check_weights(&folder, &spec);

    let file = place.path().join("file");
    write_file(&file, b"");
    let error = fail(&file, 99);
    assert!(error.contains("file"), "{error}");
    let error = fail(&file.join("below"), 99);
    assert!(error.contains("file"), "{error}");
}

/// What a sharded checkpoint can get wrong.
#[test]
fn indices_are_checked_against_the_shards() {
    let refused = |change: &dyn Fn(&Path, &mut Value), expected: &str| {
        let place = tempfile::tempdir().unwrap();
        save(place.path(), &tiny_spec(), 30_000);
        let path = place.path().join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(place.path(), &mut index);
        std::fs::write(&path, index.to_string()).unwrap();
        let error = ModelFiles::open(place.path()).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
        assert!(error.contains("model.safetensors.index.json"), "{error}");
    };
    let first =
        |folder: &Path| names(folder).into_iter().find(|name| name.starts_with("model-00001")).unwrap();
    refused(&|folder, _| std::fs::remove_file(folder.join(first(folder))).unwrap(), "shards are missing");
    for outside in ["../x.safetensors", "/etc/x", "a/b.safetensors", "..", ".", "", "a\\b"] {
        refused(
            &|_, index| index["weight_map"]["model.norm.weight"] = outside.into(),
            "not a file name in this folder",
        );
    }
    refused(
        &|folder, index| index["weight_map"]["model.norm.weight"] = first(folder).into(),
        "\"model.norm.weight\" is said to be in",
    );
    refused(
        &|folder, index| index["weight_map"]["model.extra"] = first(folder).into(),
        "which does not hold it",
    );
    refused(&|_, index| index["weight_map"] = serde_json::json!({}), "lists no tensor");
    refused(&|_, index| *index = serde_json::json!({ "weights": 1 }), "weight_map");
    refused(&|_, index| index["weight_map"]["a"] = 3.into(), "line 1");
    refused(
        &|folder, index| {
            std::fs::copy(folder.join(first(folder)), folder.join("copy.safetensors")).unwrap();
            index["weight_map"]["model.embed_tokens.weight"] = "copy.safetensors".into();
        },
        "is in two shards",
    );
}

#[test]
fn a_tensor_listed_twice_is_refused() {
    let place = tempfile::tempdir().unwrap();
    save(place.path(), &tiny_spec(), u64::MAX);
    std::fs::rename(place.path().join("model.safetensors"), place.path().join("a.safetensors")).unwrap();
    let index = br#"{"weight_map":{"x":"a.safetensors","x":"b.safetensors"}}"#;
    write_file(&place.path().join("model.safetensors.index.json"), index);
    let error = ModelFiles::open(place.path()).unwrap_err().to_string();
    assert!(error.contains("\"x\" is listed twice"), "{error}");
}
