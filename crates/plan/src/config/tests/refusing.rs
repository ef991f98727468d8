//! What is refused, and what is said then.

use super::*;

#[test]
fn unknown_keys_are_answered_with_the_nearest() {
    for (written, meant) in [
        ("training: {batchsize: 4}", "training.batch_size"),
        ("training: {BatchSize: 4}", "training.batch_size"),
        ("training: {batch-size: 4}", "training.batch_size"),
        ("training: {btach_size: 4}", "training.batch_size"),
        ("batch_size: 4", "training.batch_size"),
        ("data: {learning_rate: 1}", "training.learning_rate"),
        ("per_device_train_batch_size: 4", "training.batch_size"),
        ("training: {num_train_epochs: 4}", "training.epochs"),
        ("training: {max_seq_length: 4}", "data.sequence_length"),
        ("bf16: true", "training.mixed_precision: bf16"),
        ("training: {lr: 1}", "training.learning_rate"),
        ("training: {lr_scheduler_type: cosine}", "training.lr_schedule"),
        ("trainning: {batch_size: 4}", "training"),
        ("memory: {offlaod: {}}", "memory.offload"),
        ("memory: {offload: {optimiser: device}}", "memory.offload.optimizer"),
        ("model: {from_scratch: {n_embd: 4}}", "model.from_scratch.hidden_size"),
        ("output: {final_modle: true}", "output.final_model"),
        ("training: {seeed: 1}", "training.seed"),
        ("data: {seeed: 1}", "data.seed"),
    ] {
        let message = message(written);
        let tail = format!("; did you mean '{meant}'?");
        assert!(message.lines().next().unwrap().ends_with(&tail), "{written}\n{message}");
    }
    check(
        "model: x\ntraining:\n  batchsize: 4\n",
        "config.yaml:3:3: unknown key 'training.batchsize'; did you mean 'training.batch_size'?\n   |\n 3 |   batchsize: 4\n   |   ^^^^^^^^^",
    );
    check_line(
        "training: {quux_frobnication: 1}",
        "config.yaml:1:12: unknown key 'training.quux_frobnication'",
    );
    check_line("'': 1", "config.yaml:1:1: unknown key ''");
}

#[test]
fn wrong_values_are_answered_with_what_is_expected() {
    check(
        "training: {batch_size: four}",
        "config.yaml:1:24: training.batch_size: expected whole number | auto, got 'four'\n   |\n 1 | training: {batch_size: four}\n   |                        ^^^^",
    );
    for (written, expected) in [
        (
            "training: {batch_size: 2.5}",
            "training.batch_size: expected whole number | auto, got the number 2.5",
        ),
        ("training: {steps: -1}", "training.steps: expected whole number, got the number -1"),
        (
            "training: {steps: 99999999999999999999}",
            "training.steps: expected whole number, got the number 1e20",
        ),
        ("training: {steps: auto}", "training.steps: expected whole number, got 'auto'"),
        ("training: {learning_rate: .nan}", "training.learning_rate: expected number, got the number NaN"),
        ("training: {learning_rate: 1e999}", "training.learning_rate: expected number, got the number inf"),
        ("training: {learning_rate: '5e-5'}", "training.learning_rate: expected number, got '5e-5'"),
        ("data: {packing: yes}", "data.packing: expected true | false, got 'yes'"),
        ("data: {packing: 1}", "data.packing: expected true | false, got the number 1"),
        (
            "memory: {device_budget: 24Gigs}",
            "memory.device_budget: expected size (24GiB, 512MB, or a number of bytes) | auto, got '24Gigs': unknown unit",
        ),
        (
            "memory: {device_budget: 99999999999999GiB}",
            "memory.device_budget: expected size (24GiB, 512MB, or a number of bytes) | auto, got '99999999999999GiB': it is too large",
        ),
        (
            "training: {lr_schedule: cosin}",
            "training.lr_schedule: expected constant | linear | cosine | inverse_sqrt | wsd, got 'cosin'; did you mean 'cosine'?",
        ),
        (
            "data: {train: []}",
            "data.train: expected path, glob or folder, or a list of them, got an empty list",
        ),
        (
            "data: {train: [a, [b]]}",
            "data.train: expected path, glob or folder, or a list of them, got a list of 1",
        ),
        ("output: {dir: ''}", "output.dir: expected path, got an empty text"),
        ("output: {dir: \"a\\0b\"}", "output.dir: expected path, got a text with a NUL character"),
        (
            "output: x",
            "output: expected a mapping of dir, save_steps, save_total_limit, logging_steps, eval_steps, csv, tensorboard, final_model, got 'x'",
        ),
        ("model: [a]", "model: expected a mapping of path, from_scratch, got a list of 1"),
        (
            "- a",
            "the document: expected a mapping of model, data, training, memory, parallel, planning, output, got a list of 1",
        ),
        (
            "text",
            "the document: expected a mapping of model, data, training, memory, parallel, planning, output, got 'text'",
        ),
        (
            "model: \"\\e[31m\"\ndata: {text_field: [\"\\e\"]}",
            "data.text_field: expected text, got a list of 1",
        ),
    ] {
        let message = message(written);
        let first = message.lines().next().unwrap();
        let (_, said) = first.split_once(": ").unwrap();
        assert_eq!(said, expected, "{written}");
    }
}

#[test]
fn texts_that_are_no_configuration_are_refused() {
    for (text, expected) in [
        ("", "config.yaml: the configuration is empty; it needs at least 'model: PATH'"),
        ("# nothing\n", "config.yaml: the configuration is empty; it needs at least 'model: PATH'"),
        ("model: a\nmodel: b", "config.yaml:2:1: 'model' is set a second time; remove one of the two"),
        (
            "training: {seed: 1}\ntraining.seed: 2",
            "config.yaml:2:1: 'training.seed' is set a second time; remove one of the two",
        ),
        (
            "model: a\n---\nmodel: b",
            "config.yaml:3:1: a second document begins here; a configuration is one document",
        ),
        ("model: a: b", "config.yaml:1:9: not valid YAML: mapping values are not allowed in this context"),
        (
            "data: {train: *.txt}",
            "config.yaml:1:15: '*' refers to an anchor that does not exist; put text that starts with '*' in quotes",
        ),
        (
            "model: \"a\\x1\"",
            "config.yaml:1:8: not valid YAML: while parsing a quoted scalar, did not find expected hexadecimal number",
        ),
    ] {
        check_line(text, expected);
    }
}

#[test]
fn hostile_texts_are_bounded() {
    let bomb = (1..12).fold("a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned(), |text, level| {
        let below = format!("*a{}", level - 1);
        format!("{text}a{level}: &a{level} [{}]\n", vec![below; 9].join(", "))
    });
    let deep_blocks = (0..500).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect::<String>();
    for text in [bomb, deep_blocks, "[".repeat(100_000), "- ".repeat(100_000), "a: 1\nb: 1\n".repeat(40_000)]
    {
        let message = message(&text);
        assert!(message.starts_with("config.yaml:") && message.len() < 10_000, "{message}");
    }
    check_line(
        &" ".repeat((1 << 20) + 1),
        "config.yaml: longer than 1048576 bytes; is this a configuration file?",
    );
    let many = (0..1000).map(|n| format!("key{n}: {n}\n")).collect::<String>();
    assert_eq!(message(&many).matches("unknown key").count(), 20);
    let long = message(&format!("training: {{seed: {}}}", "x".repeat(100_000)));
    assert!(long.len() < 1000, "{long}");
}

#[test]
fn bytes_that_are_not_utf8_are_refused_with_their_place() {
    let error = RawConfig::from_slice(b"model: a\ndata: \xff", "config.yaml").unwrap_err();
    assert_eq!(error.to_string(), "config.yaml:2:7: not valid UTF-8; save the file as UTF-8 text");
}

#[test]
fn all_that_is_wrong_is_said_at_once() {
    let message = message("training: {batchsize: 4, steps: x}\nbf16: true\n");
    assert_eq!(message.matches("config.yaml:").count(), 3, "{message}");
}

#[test]
fn what_this_version_does_not_have_is_refused_with_the_nearest() {
    check(
        "model: x\ntraining: {method: ia3}",
        "config.yaml:2:20: training.method: ia3 is not available in this version: adapters are LoRA's; use lora or qlora\n   |\n 2 | training: {method: ia3}\n   |                    ^^^",
    );
    for (written, expected) in [
        (
            "training: {gradient_checkpointing: every}",
            "training.gradient_checkpointing: every is not available in this version: it has an argument; use {every: 4}, {ratio: 0.5} or {selective: [norms, swiglu]}",
        ),
        (
            "training: {gradient_checkpointing: true}",
            "training.gradient_checkpointing: true is not available in this version: the form of checkpointing is given by name; use full",
        ),
        (
            "training: {mixed_precision: e4m3}",
            "training.mixed_precision: e4m3 is not available in this version: both formats are used: E4M3 for weights and activations, E5M2 for gradients; use fp8",
        ),
    ] {
        let message = message(&format!("model: x\n{written}"));
        let (_, said) = message.lines().next().unwrap().split_once(": ").unwrap();
        assert_eq!(said, expected, "{written}");
    }
    for (key, word) in availability::refused_words() {
        let message = RawConfig::from_overrides([format!("{key}={word}").as_str()]).unwrap_err().to_string();
        assert!(message.contains("is not available in this version"), "{message}");
    }
}

/// What does not go with others because it is out of range is one mistake.
#[test]
fn a_batch_out_of_range_is_said_once() {
    for others in [
        &[][..],
        &["training.effective_batch_size=8"],
        &["training.effective_batch_size=8", "training.gradient_accumulation_steps=8"],
        &["training.dynamic_batching.enabled=true"],
    ] {
        let assignments = [&["model.path=m", "training.batch_size=0"][..], others].concat();
        let error = RawConfig::from_overrides(assignments).unwrap().validate().unwrap_err().to_string();
        let said = "--set training.batch_size=0: training.batch_size: must be 1 to 16777216, got 0";
        assert_eq!(error, said, "{others:?}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for (written, expected) in [
        ("training.learning_rate=0", "training.learning_rate: must be above 0, got 0.0"),
        ("training.adam_beta1=1", "training.adam_beta1: must be 0 or more and below 1, got 1.0"),
        ("training.adam_beta2=-0.1", "training.adam_beta2: must be 0 or more and below 1, got -0.1"),
        ("training.weight_decay=-1", "training.weight_decay: must be 0 or more, got -1.0"),
        ("training.min_lr_ratio=1.5", "training.min_lr_ratio: must be 0 to 1, got 1.5"),
        ("training.batch_size=0", "training.batch_size: must be 1 to 16777216, got 0"),
        ("training.epochs=0", "training.epochs: must be above 0, got 0.0"),
        ("data.sequence_length=1", "data.sequence_length: must be 2 to 16777216, got 1"),
        ("memory.warning_threshold=0", "memory.warning_threshold: must be above 0, at most 1, got 0.0"),
    ] {
        let error = RawConfig::from_overrides(["model=x", written]).unwrap().validate().unwrap_err();
        assert_eq!(error.to_string(), format!("--set {written}: {expected}"));
    }
}

#[test]
fn contradictions_are_refused_with_both_places() {
    check(
        "model: x\ntraining:\n  steps: 3\n  epochs: 0.5\n",
        "training.steps and training.epochs exclude each other; remove one of them\n  training.steps: 3  (config.yaml:3:10)\n  training.epochs: 0.5  (config.yaml:4:11)",
    );
    for (written, expected) in [
        (
            "training: {steps: 1}",
            "'model' is not set: name a model (model: PATH) or give the sizes of one (model: {from_scratch: ...})",
        ),
        (
            "model: {path: a, from_scratch: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}",
            "model.path and model.from_scratch exclude each other; remove one of them",
        ),
        (
            "model: {from_scratch: {hidden_size: 8, intermediate_size: 8, num_attention_heads: 1}}",
            "'model.from_scratch.num_hidden_layers' is not set: a model from scratch needs hidden_size, intermediate_size, num_hidden_layers and num_attention_heads",
        ),
        (
            "model: {from_scratch: {hidden_size: 10, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 4}}",
            "hidden_size is not a multiple of num_attention_heads; set hidden_size to 12, or set head_dim",
        ),
        (
            "model: {from_scratch: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 3}}",
            "num_key_value_heads does not divide num_attention_heads; 4 always does, and 1",
        ),
        (
            "model: x\ntraining: {batch_size: 2, gradient_accumulation_steps: 4, effective_batch_size: 9}",
            "batch_size x gradient_accumulation_steps is not effective_batch_size: 2 x 4 is not 9; any two of them give the third: remove one",
        ),
        (
            "model: x\ntraining: {batch_size: 3, effective_batch_size: 8}",
            "effective_batch_size 8 is not a multiple of batch_size 3; the next multiple is 9",
        ),
        (
            "model: x\ntraining: {mixed_precision: f32, master_weights: f32}",
            "f32 weights need no f32 master weights behind them; set training.master_weights to none or auto",
        ),
        (
            "model: x\ntraining: {mixed_precision: f32, gradient_dtype: bf16}",
            "gradients are kept in bf16 only where weights and activations are; set training.gradient_dtype to f32 or auto, or training.mixed_precision to bf16",
        ),
        (
            "model: x\nmemory: {warning_threshold: 0.99}",
            "the thresholds do not rise from warning to critical to emergency; put them in that order",
        ),
        (
            "model: x\ndata: {sequence_length: 500}\ntraining: {attention: {block_sparse: {block: 64, local_blocks: 2}}}",
            "a sequence of 500 tokens is not whole blocks of 64; set data.sequence_length to 512, or the block to 50",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024, batch_size: 2}",
            "sequences in chunks come one at a time; set training.batch_size to 1, and training.gradient_accumulation_steps to as many sequences",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024, gradient_checkpointing: sqrt}",
            "chunks of a sequence keep the inputs of layers alone; set training.gradient_checkpointing to full or auto",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024, attention: standard}",
            "scores of a sequence in chunks are not written out; set training.attention to flash or auto",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024}\nmemory: {offload: {activations: device}}",
            "what chunks of a sequence leave waits below the device; set memory.offload.activations to host, disk or auto",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024, gradient_accumulation_steps: 4, effective_batch_size: 8}",
            "sequences in chunks come one at a time; set training.batch_size to 1, and training.gradient_accumulation_steps to as many sequences",
        ),
        (
            "model: x\ntraining: {optimizer_in_backward: true, max_gradient_norm: 0}\nparallel: {pipeline_parallel: 2}",
            "the stages of a pipeline update when the last micro-batch has come back; set training.optimizer_in_backward to false",
        ),
        (
            "model: x\ntraining: {micro_batches_per_pass: 2}\nparallel: {pipeline_parallel: 2}",
            "micro-batches go through a pipeline one by one; set training.micro_batches_per_pass to 1 or auto",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024}\nparallel: {pipeline_parallel: 2}",
            "sequences in chunks go through no pipeline; leave one of the two away",
        ),
        (
            "model: x\ntraining: {optimizer: adamw_8bit}\nparallel: {tensor_parallel: 2}",
            "ranks that share products have parts of matrices, and states of its kind are of whole ones; set training.optimizer to adamw, adamw_bf16, lion or sgd",
        ),
        (
            "model: x\ndata: {sequence_length: 511}\ntraining: {batch_size: 3}\nparallel: {tensor_parallel: 4, sequence_parallel: true}",
            "4 ranks do not divide the tokens that parallel.sequence_parallel has them share; set data.sequence_length to 512",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024}\nparallel: {tensor_parallel: 2}",
            "sequences in chunks go through products of one rank; leave one of the two away",
        ),
        (
            "model: x\nparallel: {data_parallel: 6, expert_parallel: 4}",
            "6 data parallel ranks fall into no groups of 4; set parallel.data_parallel to a multiple of 4",
        ),
        (
            "model: x\nparallel: {data_parallel: 2, expert_parallel: 2, tensor_parallel: 2}",
            "ranks that share every product divide the experts already; leave parallel.expert_parallel away",
        ),
        (
            "model: x\ntraining: {optimizer: adamw_8bit}\nparallel: {data_parallel: 2, expert_parallel: 2}",
            "each rank has a part of every stack of experts, and states of its kind are of whole ones; set training.optimizer to adamw, adamw_bf16, lion or sgd",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024}\nparallel: {data_parallel: 2, expert_parallel: 2}",
            "sequences in chunks go through experts of one rank; leave one of the two away",
        ),
        (
            "model: x\ntraining: {gradient_accumulation_steps: 1000}\nparallel: {pipeline_parallel: 2, pipeline_schedule: gpipe}",
            "gpipe has every micro-batch of a step under way at once, 256 at most; set parallel.pipeline_schedule to 1f1b",
        ),
        (
            "model: x\ntraining: {gradient_accumulation_steps: 7}\nparallel: {pipeline_parallel: 4, pipeline_schedule: interleaved}",
            "micro-batches go through interleaved stages in groups of 4; set training.gradient_accumulation_steps to 8, or parallel.pipeline_schedule to 1f1b",
        ),
        (
            "model: x\ntraining: {effective_batch_size: 10}\nparallel: {data_parallel: 2, pipeline_parallel: 2, pipeline_schedule: interleaved}",
            "micro-batches go through interleaved stages in groups of 2; set training.effective_batch_size to 12, or parallel.pipeline_schedule to 1f1b",
        ),
        (
            "model: x\ntraining: {gradient_accumulation_steps: 2048}\nparallel: {pipeline_parallel: 2, pipeline_schedule: interleaved}",
            "1024 micro-batches of a step at most go through interleaved stages; set parallel.pipeline_schedule to 1f1b",
        ),
        (
            "model: x\nparallel: {pipeline_parallel: 2, pipeline_schedule: interleaved, virtual_stages: 1}",
            "interleaved stages have two runs of layers or more; set parallel.virtual_stages to 2, or parallel.pipeline_schedule to 1f1b",
        ),
        (
            "model: x\nparallel: {data_parallel: 65536, tensor_parallel: 2}",
            "the ways multiply to 131072 ranks; take 65536 or fewer in all",
        ),
        (
            "model: x\nparallel: {sharding_strategy: hybrid_shard, data_parallel: 4}",
            "weights are shared within a machine, whose number of ranks is not known here; set parallel.shard_size to it",
        ),
        (
            "model: x\nparallel: {data_parallel: 6, shard_size: 3}",
            "groups of ranks share nothing in stage 0; set parallel.zero_stage to 1, 2 or 3, or leave parallel.shard_size out",
        ),
        (
            "model: x\nparallel: {data_parallel: 6, shard_size: 4, zero_stage: 3}",
            "6 ranks hold the same weights, which fall into no groups of 4; set parallel.shard_size to a divisor of 6",
        ),
        (
            "model: x\ndata: {sequence_length: 4094}\nparallel: {context_parallel: 4}",
            "ranks that share sequences have two runs of each, all as long: 8 in all; set data.sequence_length to 4096",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 1024}\nparallel: {context_parallel: 2}",
            "a sequence is in chunks on one rank, or whole on several; leave one of the two away",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {attention: standard}\nparallel: {context_parallel: 2}",
            "scores of sequences that ranks share are not written out; set training.attention to flash or auto",
        ),
        (
            "model: x\ndata: {sequence_length: 4096}\ntraining: {sequence_chunk_tokens: 3}",
            "a sequence has at most 1024 chunks; set training.sequence_chunk_tokens to 4 or more",
        ),
        (
            "model: x\noutput: {eval_steps: 10}",
            "there is nothing to validate on; set data.validation, or remove output.eval_steps",
        ),
    ] {
        check_line(written, expected);
    }
    check("model: x\ntraining: {mixed_precision: bf16, master_weights: f32, gradient_dtype: bf16}", "ok");
}

#[test]
fn optimizers_and_their_options() {
    let training = |text: &str| format!("model: x\ntraining: {{{text}}}");
    for good in [
        "optimizer: adamw_8bit, optimizer_options: {embedding_bits: 8}",
        "optimizer: lion, optimizer_options: {beta1: 0.95, beta2: 0.98}",
        "optimizer: adafactor",
        "optimizer: adafactor, learning_rate: 1e-3, lr_schedule: constant",
        "optimizer: adafactor, optimizer_options: {scale_parameter: false, relative_step: false}",
        "optimizer: sgd, optimizer_options: {momentum: 0.9, nesterov: true}",
        "optimizer: apollo, optimizer_options: {rank: 1, scale_type: tensor}",
        "lr_schedule: wsd, warmup_ratio: 0.1, decay_ratio: 0.2",
        "learning_rate_scaling: sqrt, reference_batch_size: 32",
        "parameter_groups: [{pattern: '*.mlp.*', learning_rate: 1e-4}, {pattern: 'lm_head*', weight_decay: 0}]",
    ] {
        check(&training(good), "ok");
    }
    for (bad, words) in [
        (
            "optimizer: lion, optimizer_options: {rank: 4}",
            "lion has no option rank; remove it; lion knows beta1, beta2",
        ),
        ("optimizer_options: {momentum: 0.9}", "adamw has no option momentum"),
        ("optimizer: adamw_8bit, optimizer_options: {embedding_bits: 16}", "must be 8 or 32, got 16"),
        (
            "optimizer: adafactor, learning_rate: 1e-3, optimizer_options: {relative_step: true}",
            "with relative steps Adafactor has a learning rate of its own",
        ),
        ("optimizer: sgd, optimizer_options: {nesterov: true}", "needs a momentum and no dampening"),
        ("warmup_ratio: 0.1, warmup_steps: 3", "exclude each other"),
        ("learning_rate_scaling: linear", "training.reference_batch_size"),
        ("parameter_groups: [{learning_rate: 1e-4}]", "a group without a pattern"),
        ("parameter_groups: [{pattern: '[', weight_decay: 0}]", "the pattern '['"),
        (
            "parameter_groups: [{pattern: 'x', learning_rate: 1, learning_rate_scale: 2}]",
            "both learning_rate and",
        ),
        ("parameter_groups: [{pattern: 'x', lr: 1}]", "the key 'lr'"),
        ("optimizer: muon", "muon is not available in this version"),
    ] {
        let message = message(&training(bad));
        assert!(message.contains(words), "{bad}: {message}");
    }
}

#[test]
fn adapters_and_quantised_weights_need_their_method() {
    for (written, wrong) in [
        ("training: {lora: {rank: 8}}", "training.lora.rank"),
        ("training: {quantization: nf4}", "training.quantization"),
        ("training: {method: qlora, mixed_precision: fp8, lora: {dropout: 0.1}}", "training.lora.dropout"),
        ("training: {method: lora, lora: {rank: 0}}", "training.lora.rank"),
        ("training: {method: lora, lora: {rank_pattern: {q_proj: 0}}}", "training.lora.rank_pattern"),
        ("training: {method: lora, lora: {dropout: 1}}", "training.lora.dropout"),
        ("training: {method: lora, quantization: nf5}", "training.quantization"),
    ] {
        let message = message(&format!("model: x\n{written}\n"));
        assert!(message.contains(wrong), "{written}: {message}");
    }
    let message = message(
        "training: {method: lora}\nmodel: {from_scratch: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}\n",
    );
    assert!(message.contains("model.path"), "{message}");
}
