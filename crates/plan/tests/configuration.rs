//! The configuration from outside: what the listing says of a key, how a value is written again, what is refused and
//! what is not. Every expectation is written out.

use std::path::{Path, PathBuf};

use plimsoll_plan::config::{
    Architecture, ConfigError, LearningRateScaling, Names, Override, RawConfig, Targets, keys,
};
use plimsoll_plan::optimizer_settings;
use plimsoll_step::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, OptimizerKind,
    SgdSettings,
};

const MOST_BYTES: usize = 1 << 20;

fn read(text: &str) -> RawConfig {
    RawConfig::from_str(text, "run.yaml").unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn set(assignments: &[&str]) -> RawConfig {
    let config = RawConfig::from_overrides(assignments.iter().copied());
    config.unwrap_or_else(|error| panic!("{assignments:?}: {error}"))
}

/// What is wrong with a document of `model: x` and this, or that it is right.
fn verdict(text: &str) -> String {
    let text = if text.contains("model:") { text.to_owned() } else { format!("model: x\n{text}") };
    match RawConfig::from_str(&text, "run.yaml").and_then(|config| config.validate()) {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_listing_says_what_a_key_takes() {
    let keys = keys();
    for (path, values, default) in [
        ("training.activation_compression", "none | int8 | {int8: ELEMENTS} | {int8: tensor}", "none"),
        (
            "training.gradient_checkpointing",
            "none | full | sqrt | {every: BLOCKS} | {ratio: SHARE} | {selective: [swiglu, norms, attention, qkv, ffn, block]} | {mixed: {layers: BLOCKS, first: none or full or GROUPS, others: the same}} | {auto: SIZE} | auto",
            "auto",
        ),
        (
            "training.lora.init_lora_weights",
            "kaiming | gaussian | pissa | pissa_niter_N with N up to 1000",
            "kaiming",
        ),
        ("training.lora.target_modules", "all-linear | list of names | regular expression", "all-linear"),
        ("training.lora.modules_to_save", "list of names", "none"),
        ("training.lora.rank_pattern", "{pattern: whole number above 0}", "none"),
        ("training.lora.alpha_pattern", "{pattern: number above 0}", "none"),
        (
            "training.parameter_groups",
            "list of {pattern, learning_rate or learning_rate_scale, weight_decay}",
            "none",
        ),
        (
            "model.from_scratch.tokenizer",
            "byte-level | folder | .gguf file | {train: bpe, vocab_size: 257 to 1048576}",
            "byte-level",
        ),
        ("data.text_field", "text", "text"),
        ("memory.disk_path", "path", "spill in output.dir"),
        ("memory.device_budget", "size (24GiB, 512MB, or a number of bytes) | auto", "auto"),
    ] {
        let key = keys.iter().find(|key| key.path == path).unwrap();
        assert_eq!((key.values.as_str(), key.default.as_str()), (values, default), "{path}");
    }
    let quantization = keys.iter().find(|key| key.path == "training.quantization").unwrap();
    let named = ["none", "stored", "nf4", "q4_k", "q8_0", "auto"];
    let listed: Vec<&str> = quantization.values.split(" | ").collect();
    assert!(named.iter().all(|name| listed.iter().any(|word| word.eq_ignore_ascii_case(name))), "{listed:?}");
}

/// Values as `config` and the changes of a resumed run show them.
#[test]
fn a_value_is_shown_as_it_would_be_written() {
    for (assignment, shown) in [
        ("output.dir=runs/7", "runs/7"),
        ("data.text_field=body", "body"),
        ("memory.device_budget=1536", "1.50 KiB"),
        ("memory.device_budget=1e9", "953.7 MiB"),
        ("training.quantization=nf4", "nf4"),
        ("training.quantization=stored", "stored"),
        ("training.lora.modules_to_save=embed_tokens, lm_head", "embed_tokens, lm_head"),
        ("training.lora.modules_to_save=[lm_head]", "lm_head"),
        ("training.lora.target_modules=q_proj, v_proj", "q_proj, v_proj"),
        ("training.lora.target_modules=.*\\.q_proj", ".*\\.q_proj"),
        ("training.lora.rank_pattern={v_proj: 4, q_proj: 8}", "{q_proj: 8, v_proj: 4}"),
        ("training.lora.init_lora_weights=pissa_niter_4", "pissa_niter_4"),
        ("model.from_scratch.tokenizer=tok.gguf", "tok.gguf"),
        ("model.from_scratch.tokenizer={train: bpe, vocab_size: 300}", "{train: bpe, vocab_size: 300}"),
        ("training.parameter_groups=[{pattern: 'a*'}, {pattern: b, weight_decay: 0}]", "[a*, b]"),
        ("training.activation_compression={int8: 64}", "{int8: 64}"),
        ("training.activation_compression=int8", "int8"),
    ] {
        let changes = set(&[assignment]).changes_since(&RawConfig::default());
        let changes: Vec<&str> = changes.iter().map(|change| change.after.as_str()).collect();
        assert_eq!(changes, [shown], "{assignment}");
    }
    let config = set(&[
        "training.attention={sliding_window: 64}",
        "training.activation_compression={int8: tensor}",
        "training.quantization=nf4",
    ]);
    assert_eq!(config.training.attention().set().unwrap().to_string(), "{sliding_window: 64}");
    assert_eq!(config.training.activation_compression().to_string(), "{int8: tensor}");
    assert_eq!(config.training.quantization().set().unwrap().to_string(), "nf4");
    let yaml = set(&["training.activation_compression=int8"]).to_yaml().unwrap();
    assert_eq!(yaml, "training:\n  activation_compression: int8\n");
}

#[test]
fn modules_are_names_or_an_expression() {
    use plimsoll_model::adapter::TargetModules;
    let names = |names: &[&str]| TargetModules::Names(names.iter().map(|name| name.to_string()).collect());
    for (written, expected) in [
        ("all-linear", TargetModules::AllLinear),
        ("q_proj", names(&["q_proj"])),
        ("q_proj, layers.0.v-proj", names(&["q_proj", "layers.0.v-proj"])),
        ("[q_proj, v_proj]", names(&["q_proj", "v_proj"])),
        ("(q|v)_proj", TargetModules::Pattern("(q|v)_proj".to_owned())),
    ] {
        let config = set(&[&format!("training.lora.target_modules={written}")]);
        assert_eq!(config.training.lora.target_modules, Some(Targets(expected)), "{written}");
    }
    let saved = set(&["training.lora.modules_to_save=lm_head"]).training.lora.modules_to_save;
    assert_eq!(saved, Some(Names(vec!["lm_head".to_owned()])));
}

#[test]
fn what_goes_together_is_let_through_and_the_rest_is_refused_for_one_reason() {
    let scratch = |sizes: &str| {
        format!("model: {{from_scratch: {{intermediate_size: 8, num_hidden_layers: 1, {sizes}}}}}")
    };
    let sparse = |length: u64, block: u64| {
        format!(
            "data: {{sequence_length: {length}}}\ntraining: {{attention: {{block_sparse: {{block: {block}, local_blocks: 2}}}}}}"
        )
    };
    for right in [
        // Heads may have another width than their share.
        &scratch("hidden_size: 10, num_attention_heads: 4, head_dim: 8"),
        &scratch("hidden_size: 8, num_attention_heads: 4, num_key_value_heads: 2"),
        &sparse(512, 64),
        "data: {format: chat, packing: false}",
        "data: {format: chat, packing: false, document_mask: false}",
        "data: {format: instruction, document_mask: true}",
        "data: {document_mask: true}",
        "data: {document_mask: false}",
        "training: {method: lora, mixed_precision: bf16, lora: {dropout: 0.1}}",
        "training: {method: lora, mixed_precision: fp8, lora: {dropout: 0}}",
        "training: {mixed_precision: fp16, master_weights: f32}",
        "training: {mixed_precision: bf16, master_weights: none, optimizer_in_backward: true, max_gradient_norm: 0}",
        "training: {optimizer: adafactor, optimizer_options: {decay_rate: -0.5}}",
        "training: {optimizer: adafactor, optimizer_options: {warmup_init: true}}",
        "training: {optimizer: adamw_8bit, optimizer_options: {embedding_bits: 32}}",
        "training: {quantization: none}",
    ] {
        assert_eq!(verdict(right), "ok", "{right}");
    }
    for (wrong, said) in [
        (
            "training: {method: lora, lora: {rank_pattern: {q_proj: x}}}",
            "expected {pattern: whole number above 0}, got 'x'",
        ),
        ("training: {method: lora, lora: {alpha_pattern: {q_proj: 0}}}", "got 0.0 for q_proj"),
        ("training: {gradient_checkpointing: {selective: []}}", "got an empty list"),
        ("training: {activation_compression: {int8: row}}", "got 'row'"),
        (
            "training: {optimizer: adamw_8bit, optimizer_options: {embedding_bits: 16}}",
            "must be 8 or 32, got 16",
        ),
        ("training: {optimizer: adafactor, optimizer_options: {decay_rate: 0}}", "must be below 0, got 0.0"),
        (
            "training: {optimizer: adafactor, optimizer_options: {decay_rate: 0.5}}",
            "must be below 0, got 0.5",
        ),
        ("training: {parameter_groups: [{pattern: a, learning_rate: 0}]}", "got learning_rate 0"),
        (
            "training: {optimizer: adafactor, learning_rate: 1, optimizer_options: {warmup_init: true}}",
            "it is a part of the relative step",
        ),
        ("data: {buffer_size: 0}", "data.buffer_size: must be at least 1"),
        ("data: {format: chat, document_mask: false}", "samples that share a sequence are always told apart"),
        ("data: {packing: false}", "running text is always joined and cut into full sequences"),
        (
            "training: {mixed_precision: fp16, optimizer_in_backward: true, max_gradient_norm: 0}",
            "a step whose scaled gradients overflow is skipped",
        ),
        (
            "training: {mixed_precision: fp16, master_weights: none}",
            "fp16 weights are updated behind f32 master weights",
        ),
        ("model: {from_scratch: {tokenizer: [1]}}", "expected byte-level | folder | .gguf file |"),
        ("model: {from_scratch: {tokenizer: {train: wordpiece, vocab_size: 500}}}", "got train: 'wordpiece'"),
        // The nearest length: 448 is 12 tokens below 460 and 512 is 52 above; 480 is as far from both.
        (&sparse(460, 64), "set data.sequence_length to 448, or the block to 46"),
        (&sparse(500, 64), "set data.sequence_length to 512, or the block to 50"),
        (&sparse(480, 64), "set data.sequence_length to 448, or the block to 60"),
        (&sparse(20, 64), "set data.sequence_length to 64, or the block to 20"),
        (
            &scratch("hidden_size: 8, num_attention_heads: 0"),
            "model.from_scratch.num_attention_heads: must be 1",
        ),
        (
            &scratch("hidden_size: 8, num_attention_heads: 4, num_key_value_heads: 0"),
            "model.from_scratch.num_key_value_heads: must be 1",
        ),
        // A missing model is that alone.
        ("model:\ntraining: {method: lora}", "'model' is not set"),
        ("\"a\\x1bb\": 1", "unknown key 'a\\u{1b}b'"),
    ] {
        let text = if wrong.contains("model:") { wrong.to_owned() } else { format!("model: x\n{wrong}") };
        let error = RawConfig::from_str(&text, "run.yaml").and_then(|config| config.validate()).unwrap_err();
        assert!(error.to_string().contains(said), "{wrong}: {error}");
        assert!(!matches!(error, ConfigError::Several(_)), "{wrong}: {error}");
    }
}

#[test]
fn numbers_are_names_as_they_were_written() {
    for (text, path) in [
        ("model: 2024", Some("2024")),
        ("model: 007", Some("007")),
        ("model: 1.50", Some("1.50")),
        ("model: \"2024\"", Some("2024")),
    ] {
        assert_eq!(read(text).model.path.as_deref(), path, "{text}");
    }
    let said = verdict("model: !!int \"2024\"");
    assert!(said.contains("model.path: expected text, got the number 2024"), "{said}");
}

#[test]
fn keys_and_places() {
    let mut config = read("model: x\ntraining: {seed: 1}\n");
    let place = config.place("training.seed").unwrap();
    assert_eq!((place.line_and_column(), place.is_argument()), (Some((2, 18)), false));
    config.apply_set("training.steps=3").unwrap();
    assert_eq!(config.place("training.steps").unwrap().line_and_column(), None);
    config.apply_set("training.seed=").unwrap();
    assert_eq!(config.place("training.seed"), None);
    // Fifty characters on either side of what is wrong are shown.
    let long = format!("{{{}training.steps: many{}}}", " ".repeat(70), " ".repeat(90));
    let message = RawConfig::from_str(&long, "run.yaml").unwrap_err().to_string();
    let shown = format!("{}training.steps: many", " ".repeat(34));
    let expected = format!("\n   |\n 1 | {shown}\n   | {}^^^^", " ".repeat(50));
    assert!(message.ends_with(&expected), "{message}");
}

#[test]
fn a_key_of_the_same_section_is_nearer_by_a_letter() {
    for (written, meant) in [
        ("data: {Seed: 1}", Some("data.seed")),
        ("training: {Seed: 1}", Some("training.seed")),
        ("training: {lerningg_rat: 1}", Some("training.learning_rate")),
        // Two letters from a key of the section, one from training.optimizer_options.decay_rate.
        ("training: {decay_rat: 1}", Some("training.decay_ratio")),
        (&format!("training: {{batch{}size: 4}}", "_".repeat(55)), Some("training.batch_size")),
        (&format!("training: {{batch{}size: 4}}", "_".repeat(56)), None),
    ] {
        let message = verdict(written);
        let line = message.lines().next().unwrap();
        match meant {
            Some(key) => assert!(line.ends_with(&format!("; did you mean '{key}'?")), "{line}"),
            None => assert!(!line.contains("did you mean"), "{line}"),
        }
    }
}

#[test]
fn texts_are_read_up_to_a_mebibyte() {
    let text = |bytes: usize| format!("model: x\n#{}", "x".repeat(bytes - 10));
    let too_large = |error: ConfigError| matches!(error, ConfigError::TooLarge { .. });
    let (most, more) = (text(MOST_BYTES), text(MOST_BYTES + 1));
    assert_eq!(most.len(), MOST_BYTES);
    RawConfig::from_str(&most, "run.yaml").unwrap();
    RawConfig::from_slice(most.as_bytes(), "run.yaml").unwrap();
    assert!(too_large(RawConfig::from_str(&more, "run.yaml").unwrap_err()));
    assert!(too_large(RawConfig::from_slice(&vec![0xff; MOST_BYTES + 1], "run.yaml").unwrap_err()));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    std::fs::write(&file, &most).unwrap();
    RawConfig::from_file(&file).unwrap();
    std::fs::write(&file, &more).unwrap();
    assert!(too_large(RawConfig::from_file(&file).unwrap_err()));
    let value = |bytes: usize| format!("{}7", " ".repeat(bytes - 1));
    let mut config = RawConfig::default();
    config.apply_override("training.seed", &value(MOST_BYTES), "--seed").unwrap();
    assert_eq!(config.training.seed, Some(7));
    let error = config.apply_override("training.seed", &value(MOST_BYTES + 1), "--seed").unwrap_err();
    assert!(too_large(error));
}

#[test]
fn all_that_is_wrong_is_said_at_once_wherever_it_was_written() {
    let overrides: Vec<Override> = ["training.stepz=1", "training.batch_size=many", "training.seed=3"]
        .map(|set| Override::set(set).unwrap())
        .to_vec();
    let count = |error: ConfigError| match error {
        ConfigError::Several(all) => all.len(),
        other => panic!("{other}"),
    };
    let file = "model: x\ntraining: {epochs: many, seed: odd}";
    // The seed is mended.
    assert_eq!(count(RawConfig::from_str_with(file, "run.yaml", &overrides).unwrap_err()), 3);
    assert_eq!(count(RawConfig::of_command_line(&overrides).unwrap_err()), 2);
    assert_eq!(RawConfig::of_command_line(&overrides[2..]).unwrap().training.seed(), 3);
}

#[test]
fn what_the_command_line_unsets_mends_nothing_else() {
    let with = |assignment: &str| {
        let overrides = [Override::set(assignment).unwrap()];
        RawConfig::from_str_with("model: x\ntraining: {epochs: many}", "run.yaml", &overrides)
    };
    assert!(with("training.steps=5").is_ok());
    let error = with("training.steps=null").unwrap_err();
    assert!(matches!(&error, ConfigError::WrongValue { key, .. } if key == "training.epochs"), "{error}");
}

#[test]
fn defaults_that_follow_from_other_keys() {
    assert_eq!(set(&["output.dir=runs/7"]).disk_path(), Path::new("runs/7/spill"));
    assert_eq!(set(&["output.dir=a", "memory.disk_path=/fast"]).disk_path(), PathBuf::from("/fast"));
    let samples = |format: &str| set(&[&format!("data.format={format}")]).data.has_samples();
    assert_eq!(["text", "chat", "instruction"].map(samples), [false, true, true]);
    let tied = [Architecture::Gemma, Architecture::Gemma2, Architecture::Gemma3, Architecture::Gpt2];
    let ties = Architecture::ALL.iter().copied().filter(|architecture| architecture.ties_embeddings());
    assert_eq!(ties.collect::<Vec<_>>(), tied);
    // A batch of 32 where the learning rate is meant for one of 8.
    let factors = [LearningRateScaling::None, LearningRateScaling::Linear, LearningRateScaling::Sqrt]
        .map(|scaling| [scaling.factor(32, 8), scaling.factor(8, 32)]);
    assert_eq!(factors, [[1.0, 1.0], [4.0, 0.25], [2.0, 0.5]]);
}

#[test]
fn optimizers_run_with_the_numbers_of_those_who_made_them() {
    let adam = |epsilon| AdamSettings { beta1: 0.9, beta2: 0.999, epsilon };
    let (lion, f32) = (LionSettings { beta1: 0.9, beta2: 0.99 }, EightBit { embeddings: false });
    let factored = AdafactorSettings {
        epsilon: 1e-30,
        scale_by_parameter: Some(1e-3),
        clip_threshold: 1.0,
        decay_rate: -0.8,
        beta1: None,
    };
    let low_rank = |rank, scale| LowRankSettings { rank, update_proj_gap: 200, scale, adam: adam(1e-6) };
    let sgd = |momentum, nesterov| SgdSettings { momentum, dampening: 0.0, nesterov };
    for (training, expected) in [
        ("optimizer: adamw", OptimizerKind::AdamW(adam(1e-8))),
        ("optimizer: adamw, adam_epsilon: 1e-5", OptimizerKind::AdamW(adam(1e-5))),
        ("optimizer: adamw_bf16", OptimizerKind::AdamWBf16(adam(1e-8))),
        ("optimizer: adamw_8bit", OptimizerKind::AdamW8bit(adam(1e-8), f32)),
        (
            "optimizer: adamw_8bit, optimizer_options: {embedding_bits: 8}",
            OptimizerKind::AdamW8bit(adam(1e-8), EightBit { embeddings: true }),
        ),
        ("optimizer: adam_mini", OptimizerKind::AdamMini(adam(1e-8))),
        ("optimizer: lion", OptimizerKind::Lion(lion)),
        ("optimizer: lion_8bit", OptimizerKind::Lion8bit(lion, f32)),
        ("optimizer: adafactor", OptimizerKind::Adafactor(factored)),
        (
            "optimizer: adafactor, optimizer_options: {scale_parameter: false, beta1: 0.5, decay_rate: -0.7, clip_threshold: 2}",
            OptimizerKind::Adafactor(AdafactorSettings {
                scale_by_parameter: None,
                beta1: Some(0.5),
                decay_rate: -0.7,
                clip_threshold: 2.0,
                ..factored
            }),
        ),
        ("optimizer: adalomo", OptimizerKind::AdaLomo(factored)),
        ("optimizer: sgd", OptimizerKind::Sgd(sgd(0.0, false))),
        (
            "optimizer: sgd, optimizer_options: {momentum: 0.9, nesterov: true}",
            OptimizerKind::Sgd(sgd(0.9, true)),
        ),
        ("optimizer: galore", OptimizerKind::GaLore(low_rank(128, 0.25))),
        ("optimizer: apollo", OptimizerKind::Apollo(low_rank(256, 1.0), ApolloChannels::Channel)),
        (
            "optimizer: apollo, optimizer_options: {scale_type: tensor}",
            OptimizerKind::Apollo(low_rank(1, 128.0), ApolloChannels::Tensor),
        ),
    ] {
        let config = read(&format!("training: {{{training}}}"));
        let settings = optimizer_settings(&config.training);
        assert_eq!(settings.kind, expected, "{training}");
        assert_eq!((settings.weight_decay, settings.decay_norms_and_biases), (0.01, false));
        assert!(settings.groups.is_empty());
    }
    let config = read(
        "training:
  learning_rate: 5e-4
  weight_decay: 0.1
  decay_norms_and_biases: true
  lora: {loraplus_lr_ratio: 16}
  parameter_groups:
    - {pattern: '*.mlp.*', learning_rate: 1e-3}
    - {pattern: 'lm_head*', learning_rate_scale: 0.5, weight_decay: 0.2}
    - {pattern: 'x'}
",
    );
    let settings = optimizer_settings(&config.training);
    assert_eq!((settings.weight_decay, settings.decay_norms_and_biases), (0.1, true));
    let groups: Vec<_> =
        settings.groups.iter().map(|g| (g.pattern.as_str(), g.lr_scale, g.weight_decay)).collect();
    assert_eq!(
        groups,
        [("*.mlp.*", 2.0, None), ("lm_head*", 0.5, Some(0.2)), ("x", 1.0, None), ("*lora*_B*", 16.0, None)]
    );
}
