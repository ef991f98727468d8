//! What is read from documents and files, listed, and written.

use plimsoll_memory::ByteSize;

use super::*;

#[test]
fn a_whole_document_is_read() {
    let config = read(
        "
model: { path: models/smollm2 }
data: { train: [a.txt, 'b/*.jsonl'], sequence_length: 1e3, shuffle: false, buffer_size: 512MB }
training:
  steps: 100
  batch_size: 4
  effective_batch_size: auto
  learning_rate: 3e-4
  mixed_precision: BF16
  gradient_checkpointing: full
memory: { device_budget: 4GiB, host_budget: auto, offload: { optimizer: device } }
output: { dir: 2024, save_steps: 0 }
",
    );
    assert_eq!(config.validate().map_err(|e| e.to_string()), Ok(()));
    assert_eq!(config.model.path.as_deref(), Some("models/smollm2"));
    assert_eq!(config.training_data().unwrap().patterns(), ["a.txt", "b/*.jsonl"]);
    assert_eq!(config.data.sequence_length(), 1000);
    assert!(!config.data.shuffle());
    assert_eq!(config.data.buffer_size(), Auto::Set(ByteSize(512_000_000)));
    assert_eq!(config.training.length(), TrainingLength::Steps(100));
    assert_eq!(config.training.batch_size(), Auto::Set(4));
    assert_eq!(config.training.effective_batch_size, Some(Auto::Auto));
    assert_eq!(config.training.gradient_accumulation_steps, None);
    assert_eq!(config.training.learning_rate(), 3e-4);
    assert_eq!(config.training.mixed_precision(), Auto::Set(MixedPrecision::Bf16));
    assert_eq!(
        config.training.gradient_checkpointing(),
        Auto::Set(GradientCheckpointing::Form(plimsoll_step::Checkpointing::Full))
    );
    assert_eq!(config.training.adam_beta2(), 0.999);
    assert_eq!(config.memory.device_budget(), Auto::Set(ByteSize(4 << 30)));
    assert_eq!(config.memory.offload.optimizer(), Auto::Set(OffloadTarget::Device));
    assert_eq!(config.output.dir().to_str(), Some("2024"));
    assert_eq!(config.place("training.batch_size").unwrap().to_string(), "config.yaml:6:15");
    assert_eq!(config.place("training.epochs"), None);
}

#[test]
fn a_model_may_be_a_bare_name_or_sizes() {
    assert_eq!(read("model: smollm2-135m").model.path.as_deref(), Some("smollm2-135m"));
    assert_eq!(read("model: 7").model.path.as_deref(), Some("7"));
    let config = read(
        "model: {from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, tokenizer: tok}}",
    );
    assert_eq!(config.validate().map_err(|e| e.to_string()), Ok(()));
    assert_eq!(config.model.from_scratch.architecture(), Architecture::Llama);
    assert_eq!(config.model.from_scratch.tokenizer(), TokenizerSource::Path("tok".into()));
}

#[test]
fn paths_may_be_dotted_and_nulls_unset() {
    assert_eq!(read("training.batch_size: 4").training.batch_size, Some(Auto::Set(4)));
    assert_eq!(read("training: {steps: null}\nmemory:\nmodel: x"), read("model: x"));
}

#[test]
fn files_are_read_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "\u{feff}model: a\r\ntraining: {steps: x}\r\n").unwrap();
    let message = RawConfig::from_file(&path).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{}:2:19: training.steps", path.display())), "{message}");
    let missing = RawConfig::from_file(&folder.path().join("none.yaml")).unwrap_err().to_string();
    assert!(missing.contains("none.yaml: the configuration cannot be read"), "{missing}");
    assert!(matches!(RawConfig::from_file(folder.path()), Err(ConfigError::Read { .. })));
}

#[test]
fn any_two_sizes_of_the_batch_give_the_third() {
    let check = |text: &str, expected: [Option<u64>; 3]| {
        let BatchSettings { batch_size, gradient_accumulation_steps, effective_batch_size } =
            read(&format!("model: x\ntraining: {{{text}}}")).batch_settings().unwrap();
        assert_eq!([batch_size, gradient_accumulation_steps, effective_batch_size], expected, "{text}");
    };
    check("", [None, None, None]);
    check("batch_size: 2", [Some(2), None, None]);
    check("effective_batch_size: 8", [None, None, Some(8)]);
    check("batch_size: 2, gradient_accumulation_steps: 4", [Some(2), Some(4), Some(8)]);
    check("batch_size: 2, effective_batch_size: 8", [Some(2), Some(4), Some(8)]);
    check("gradient_accumulation_steps: 4, effective_batch_size: 8", [Some(2), Some(4), Some(8)]);
    check(
        "batch_size: 2, gradient_accumulation_steps: 4, effective_batch_size: 8",
        [Some(2), Some(4), Some(8)],
    );
    check(
        "batch_size: 2, gradient_accumulation_steps: auto, effective_batch_size: 8",
        [Some(2), Some(4), Some(8)],
    );
}

#[test]
fn defaults_in_the_listing_can_be_written_or_are_described() {
    let keys = keys();
    let of = |path: &str| keys.iter().find(|key| key.path == path).unwrap().to_string();
    assert_eq!(
        of("training.batch_size"),
        "training.batch_size: whole number | auto, 1 to 16777216  (default: auto)\n    Sequences in one forward and backward pass (the micro-batch)."
    );
    assert_eq!(
        of("memory.offload.optimizer"),
        "memory.offload.optimizer: device | host | disk | auto  (default: auto)\n    Optimizer states and master weights."
    );
    // A default that cannot be written says in words what happens: more than one word.
    for key in &keys {
        let written = RawConfig::from_overrides([format!("{}={}", key.path, key.default).as_str()]);
        let words = key.default.contains([' ', '_', '.']) || key.default == "none";
        assert!(written.is_ok() || words, "{key}");
    }
    assert!(keys.iter().all(|key| !key.help.is_empty() && key.help.ends_with('.')));
    for target in keys::foreign_targets() {
        assert!(keys.iter().any(|key| key.path == target), "{target}");
    }
}

#[test]
fn written_configurations_leave_out_what_is_not_set() {
    let config =
        read("model: x\ntraining: {batch_size: auto, learning_rate: 5e-5}\nmemory: {device_budget: 2GiB}");
    assert_eq!(
        config.to_yaml().unwrap(),
        "model:\n  path: x\ntraining:\n  batch_size: auto\n  learning_rate: 0.00005\nmemory:\n  device_budget: 2147483648\n"
    );
    assert_eq!(
        serde_json::to_value(&config).unwrap(),
        serde_json::json!({
            "model": {"path": "x"},
            "training": {"batch_size": "auto", "learning_rate": 5e-5},
            "memory": {"device_budget": 2147483648u64},
        })
    );
}

#[test]
fn checkpointing_and_compression_have_arguments() {
    use plimsoll_step::{Checkpointing, Compression, Group, Groups};
    let form = |text: &str| {
        let config = read(&format!("training: {{ gradient_checkpointing: {text} }}"));
        config.training.gradient_checkpointing().set().unwrap()
    };
    let selective = Checkpointing::Selective([Group::Norms, Group::Swiglu].into_iter().collect());
    let swiglu: Groups = [Group::Swiglu].into_iter().collect();
    let mixed = |first, others| Checkpointing::Mixed { layers: 8, first, others };
    for (text, expected) in [
        ("none", Checkpointing::None),
        ("sqrt", Checkpointing::Sqrt),
        ("{every: 4}", Checkpointing::Every(4)),
        ("{ratio: 0.5}", Checkpointing::Ratio(0.5)),
        ("{selective: [norms, swiglu]}", selective),
        ("{mixed: {layers: 8, first: full, others: none}}", mixed(Groups::BLOCK, Groups::NONE)),
        ("{mixed: {layers: 8, first: none, others: [swiglu]}}", mixed(Groups::NONE, swiglu)),
    ] {
        assert_eq!(form(text), GradientCheckpointing::Form(expected));
        assert_eq!(form(text).to_string().replace("swiglu, norms", "norms, swiglu"), text);
    }
    assert_eq!(form("{auto: 2GiB}"), GradientCheckpointing::Within(ByteSize(2 << 30)));
    for (text, block) in [("int8", 256), ("{int8: 64}", 64), ("{int8: tensor}", u64::MAX)] {
        let config = read(&format!("training: {{ activation_compression: {text} }}"));
        assert_eq!(config.training.activation_compression().0, Compression::Int8 { block });
    }
    let mut config = RawConfig::default();
    config.apply_set("training.gradient_checkpointing={every: 3}").unwrap();
    config.apply_set("training.gradient_checkpointing=every: 5").unwrap();
    let five = GradientCheckpointing::Form(Checkpointing::Every(5));
    assert_eq!(config.training.gradient_checkpointing(), Auto::Set(five));
    let wrong = ["{every: 0}", "{ratio: 2}", "{selective: []}", "{selective: [mlp]}", "every", "{sqrt: 2}"];
    let mixes = [
        "{mixed: full}",
        "{mixed: {layers: 0, first: full, others: none}}",
        "{mixed: {layers: 3, first: full}}",
        "{mixed: {layers: 3, first: full, others: sqrt}}",
        "{mixed: {layers: 3, first: full, others: none, last: full}}",
    ];
    for wrong in wrong.into_iter().chain(mixes) {
        let error = config.apply_set(&format!("training.gradient_checkpointing={wrong}")).unwrap_err();
        assert!(error.to_string().contains("gradient_checkpointing"), "{error}");
    }
}

#[test]
fn attention_has_arguments() {
    use plimsoll_step::{AttentionKind, BlockSparse};
    let pattern = |global_blocks| BlockSparse { block: 64, local_blocks: 4, global_blocks };
    for (text, expected) in [
        ("flash", AttentionKind::Flash),
        ("standard", AttentionKind::Standard),
        ("{sliding_window: 256}", AttentionKind::SlidingWindow(256)),
        (
            "{block_sparse: {block: 64, local_blocks: 4, global_blocks: 1}}",
            AttentionKind::BlockSparse(pattern(1)),
        ),
        ("{block_sparse: {block: 64, local_blocks: 4}}", AttentionKind::BlockSparse(pattern(0))),
    ] {
        let config = read(&format!("training: {{ attention: {text} }}"));
        assert_eq!(config.training.attention(), Auto::Set(Attention(expected)));
        assert_eq!(read(&config.to_yaml().unwrap()), config);
    }
    for (wrong, said) in [
        ("{sliding_window: 0}", "a window of 0, where 1 is the least: a token sees itself"),
        ("{sliding_window: wide}", "'wide'"),
        ("{block_sparse: {block: 64, local_blocks: 0}}", "local_blocks of 0, where 1 is the least"),
        ("{block_sparse: {block: 0, local_blocks: 1}}", "block of 0, where 1 is the least"),
        ("{block_sparse: {block: 64}}", "a pattern without local_blocks"),
        ("{block_sparse: {block: 64, local_blocks: 1, window: 3}}", "a pattern with 'window'"),
        ("{block_sparse: 64}", "the number 64"),
        ("{flash: 2}", "expected flash | standard"),
        ("sliding_window", "it has an argument; use {sliding_window: 256}"),
        ("eager", "use standard"),
        ("sdpa", "use flash"),
    ] {
        let set = format!("training.attention={wrong}");
        let read = RawConfig::from_overrides(["model=x", &set]);
        let error = read.and_then(|config| config.validate()).unwrap_err().to_string();
        assert!(error.contains("training.attention") && error.contains(said), "{error}");
    }
}

#[test]
fn updates_in_the_backward_pass_need_a_norm_to_clip_by() {
    let validate = |text: &str| {
        let model = "model: m\ndata: {train: t}\n";
        read(&format!("{model}training: {{ {text} }}")).validate().map_err(|e| e.to_string())
    };
    let error = validate("optimizer_in_backward: true").unwrap_err();
    assert!(error.contains("previous_norm") && error.contains("second_backward"), "{error}");
    validate("optimizer_in_backward: true, max_gradient_norm: 0").unwrap();
    validate("optimizer_in_backward: true, in_backward_clipping: previous_norm").unwrap();
    let error = validate("in_backward_clipping: previous_norm").unwrap_err();
    assert!(error.contains("optimizer_in_backward"), "{error}");
}
