//! What requests mean, as tables.

use super::*;
use crate::request::Lora;
use crate::run::{Offload, Sharding};

fn request() -> Request {
    Request {
        stack: "hf".to_owned(),
        model: "llama-3.2-1b".to_owned(),
        batch_size: 2,
        sequence_length: 1024,
        precision: "bf16".to_owned(),
        hardware: Some("a100-80".to_owned()),
        ..Request::default()
    }
}

/// A request with keys changed, as JSON has them.
fn with(changes: &str) -> Request {
    let mut all = serde_json::to_value(request()).unwrap();
    let changes: serde_json::Value = serde_json::from_str(changes).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        all[key] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

#[track_caller]
fn run(changes: &str) -> Run {
    with(changes).resolve().unwrap_or_else(|error| panic!("{changes}: {error}")).run
}

#[test]
fn losses_follow_the_version_of_transformers_and_the_stack() {
    for (changes, loss) in [
        (r#"{"versions": {"transformers": "4.44"}}"#, Loss::UpcastShiftedEarly),
        (r#"{"versions": {"transformers": "4.45"}}"#, Loss::UpcastShifted),
        (r#"{"versions": {"transformers": "4.48.3"}}"#, Loss::UpcastShifted),
        (r#"{"versions": {"transformers": "4.49"}}"#, Loss::Upcast),
        ("{}", Loss::Upcast),
        (r#"{"loss": "liger"}"#, Loss::Liger),
        (r#"{"stack": "torchtune"}"#, Loss::Chunked { chunks: 8, compiled: false }),
        (r#"{"stack": "torchtune", "loss": "full"}"#, Loss::Upcast),
        (
            r#"{"stack": "torchtune", "compile": true, "gradient_checkpointing": true}"#,
            Loss::Chunked { chunks: 8, compiled: true },
        ),
        (r#"{"stack": "litgpt"}"#, Loss::WholeKept { rows: 128 }),
        (r#"{"stack": "litgpt", "lora": {"rank": 8}}"#, Loss::ChunkedKept { tokens: 128 }),
        (r#"{"model": "qwen-7b"}"#, Loss::Shifted),
        (r#"{"stack": "torchtune", "loss": "full", "versions": {"date": "2024-03"}}"#, Loss::Upcast),
    ] {
        assert_eq!(run(changes).loss, loss, "{changes}");
    }
}

#[test]
fn outputs_live_as_long_as_the_loop_keeps_them() {
    for (changes, outputs) in [
        ("{}", Outputs::Dropped),
        (r#"{"stack": "torchtune"}"#, Outputs::Dropped),
        (r#"{"stack": "peft"}"#, Outputs::UntilNextForward),
        (r#"{"stack": "litgpt"}"#, Outputs::UntilNextForward),
        (r#"{"stack": "peft", "outputs": "until_step"}"#, Outputs::UntilStep),
    ] {
        assert_eq!(run(changes).outputs, outputs, "{changes}");
    }
}

#[test]
fn lengths_make_micro_batches_and_evaluation_has_its_own() {
    let found = run(r#"{"lengths": [10, 900, 30, 5000], "eval_batch_size": 16}"#);
    assert_eq!((found.sequence, found.eval_batch, found.padded), (1024, Some(16), true));
    assert_eq!(found.lengths.last(), Some(&1024));
    assert_eq!(run(r#"{"lengths": [10, 300]}"#).sequence, 300);
    // One sample without tokens is no reason to refuse the others.
    assert_eq!(run(r#"{"lengths": [0, 300]}"#).sequence, 300);
    assert!(with(r#"{"eval_batch_size": 0}"#).resolve().is_err());
}

#[test]
fn fsdp_without_shards_is_no_ddp() {
    let whole = run(r#"{"stack": "peft", "devices": 2, "fsdp": "no_shard", "lora": {"rank": 8}}"#);
    assert_eq!(whole.sharding, Sharding::FsdpWhole);
    // A flat parameter has one type.
    assert_eq!(whole.adapter.map(|adapter| adapter.dtype), Some(TorchType::Bf16));
    let ddp = run(r#"{"stack": "peft", "devices": 2, "lora": {"rank": 8}}"#);
    assert_eq!(ddp.sharding, Sharding::None);
    assert_eq!(ddp.adapter.map(|adapter| adapter.dtype), Some(TorchType::F32));
}

#[test]
fn optimizers_follow_versions_and_names() {
    for (changes, optimizer) in [
        ("{}", Optimizer::AdamWFused),
        (r#"{"versions": {"torch": "2.7"}}"#, Optimizer::AdamWForeach),
        (r#"{"versions": {"torch": "2.8", "transformers": "4.50"}}"#, Optimizer::AdamWForeach),
        (r#"{"stack": "peft"}"#, Optimizer::AdamWForeach),
        (r#"{"optimizer": "AdamW", "versions": {"torch": "1.13"}}"#, Optimizer::AdamWForLoop),
        (r#"{"optimizer": "adamw_bnb_8bit"}"#, Optimizer::AdamW8bit { paged: false }),
        (r#"{"optimizer": "bitsandbytes.optim.PagedAdamW8bit"}"#, Optimizer::AdamW8bit { paged: true }),
        (r#"{"optimizer": "paged_adamw_32bit"}"#, Optimizer::PagedAdamW32bit),
        (r#"{"optimizer": "lion_8bit"}"#, Optimizer::Lion { eight_bit: true, paged: false }),
        (r#"{"optimizer": "sgd"}"#, Optimizer::Sgd { momentum: false }),
    ] {
        assert_eq!(run(changes).optimizer, optimizer, "{changes}");
    }
}

#[test]
fn precisions_say_weights_and_autocast() {
    for (changes, weights, autocast) in [
        (r#"{"precision": "f32"}"#, TorchType::F32, None),
        (r#"{"precision": "bf16"}"#, TorchType::Bf16, None),
        (r#"{"precision": "bf16-amp"}"#, TorchType::F32, Some((TorchType::Bf16, false))),
        (r#"{"precision": "fp16-amp"}"#, TorchType::F32, Some((TorchType::F16, true))),
        (r#"{"precision": "bf16-amp", "dtype": "bf16"}"#, TorchType::Bf16, Some((TorchType::Bf16, false))),
    ] {
        let run = run(changes);
        let autocast = autocast.map(|(to, scaler)| Autocast { to, scaler });
        assert_eq!((run.weights, run.autocast), (weights, autocast), "{changes}");
    }
}

#[test]
fn checkpointing_and_the_cache_follow_versions() {
    let on = r#"{"gradient_checkpointing": true, "versions": {"transformers": "VERSION"}}"#;
    for (version, form) in [("4.57", Checkpointing::Reentrant), ("5.1", Checkpointing::NonReentrant)] {
        let run = run(&on.replace("VERSION", version));
        assert_eq!((run.checkpointing, run.use_cache), (form, false), "{version}");
    }
    for (changes, use_cache) in [
        ("{}", false),
        (r#"{"versions": {"transformers": "4.57"}}"#, true),
        (r#"{"stack": "peft"}"#, true),
        (r#"{"stack": "peft", "use_cache": false}"#, false),
        (r#"{"stack": "litgpt"}"#, false),
    ] {
        assert_eq!(run(changes).use_cache, use_cache, "{changes}");
    }
}

#[test]
fn attention_follows_versions_and_cards() {
    for (changes, attention) in [
        ("{}", Attention::Sdpa),
        (r#"{"versions": {"transformers": "4.35"}}"#, Attention::Eager),
        (r#"{"attention": "flash_attention_2"}"#, Attention::Flash2),
        (r#"{"attention": "eager"}"#, Attention::Eager),
    ] {
        assert_eq!(run(changes).attention, attention, "{changes}");
    }
}

#[test]
fn ranks_share_as_the_words_say() {
    let offload = Offload { optimizer: true, parameters: true };
    let none = Offload::default();
    for (changes, sharding) in [
        (r#"{"devices": 8}"#, Sharding::None),
        (r#"{"devices": 8, "zero_stage": 2}"#, Sharding::Zero { stage: 2, offload: none }),
        (r#"{"devices": 8, "zero_stage": 3, "offload": "all"}"#, Sharding::Zero { stage: 3, offload }),
        (r#"{"devices": 8, "stack": "fsdp"}"#, Sharding::Fsdp1 { keep_gathered: false, offload: none }),
        (
            r#"{"devices": 8, "fsdp": "shard_grad_op"}"#,
            Sharding::Fsdp1 { keep_gathered: true, offload: none },
        ),
        (
            r#"{"devices": 8, "fsdp": "full_shard", "fsdp_version": 2, "offload": "cpu"}"#,
            Sharding::Fsdp2 { keep_gathered: false, offload },
        ),
    ] {
        let run = run(changes);
        assert_eq!((run.sharding, run.devices), (sharding, 8), "{changes}");
    }
    assert_eq!(run(r#"{"hardware": "8xh100"}"#).devices, 8);
}

#[test]
fn quantised_weights_have_their_types() {
    let qlora =
        r#"{"quantization": "nf4", "double_quantization": true, "lora": {"rank": 8, "target_modules": []}}"#;
    let run = run(qlora);
    let quantization = Quantization::FourBit { double: true, compute: TorchType::Bf16 };
    assert_eq!(run.quantization, Some(quantization));
    assert_eq!(run.adapter.unwrap().dtype, TorchType::F32);
}

/// FSDP's flat parameters have one type.
#[test]
fn adapters_beside_flat_parameters_have_the_type_of_the_weights() {
    let lora = r#"{"lora": {"rank": 8}, "devices": 2, "fsdp": "full_shard"}"#;
    assert_eq!(run(lora).adapter.unwrap().dtype, TorchType::Bf16);
}

/// Every refusal names the key and what to do.
#[test]
fn what_cannot_be_is_refused_in_words() {
    for (changes, words) in [
        (r#"{"stack": "keras"}"#, "stack: keras is not known; it can be hf, peft, torchtune"),
        (r#"{"precision": "fp8"}"#, "precision: fp8 is not known; it can be f32, bf16, fp16, bf16-amp"),
        (r#"{"optimizer": "muon"}"#, "optimizer: muon is not known; it can be adamw_torch"),
        (r#"{"model": "llama-3.2-2b"}"#, "describes any other; did you mean llama-3.2-1b"),
        (r#"{"model": "no/such/config.json"}"#, "no/such/config.json"),
        (r#"{"hardware": "rtx-9999"}"#, "hardware: rtx-9999 is not known"),
        (r#"{"quantization": "nf4"}"#, "add lora"),
        (r#"{"double_quantization": true}"#, "double_quantization is of quantization"),
        (r#"{"attention": "flash_attention_2", "hardware": "t4"}"#, "needs compute capability 8.0"),
        (r#"{"attention": "flash_attention_2", "precision": "f32"}"#, "bf16 and fp16 alone"),
        (r#"{"zero_stage": 4}"#, "zero_stage: 4 is not known"),
        (r#"{"zero_stage": 2, "fsdp": "full_shard"}"#, "exclude each other"),
        (r#"{"offload": "optimizer"}"#, "say which shards"),
        (r#"{"zero_stage": 2, "offload": "all"}"#, "stage 3 alone"),
        (r#"{"devices": 4, "hardware": "8xh100"}"#, "say one of the two"),
        (r#"{"batch_size": 0}"#, "batch_size: 0"),
        (r#"{"sequence_length": 18446744073709551615}"#, "sequence_length"),
        (r#"{"sequence_length": 16777216, "batch_size": 16777216}"#, "beyond any device"),
        (r#"{"phase": "inference", "generated_tokens": 18446744073709551615}"#, "generated_tokens"),
        (r#"{"devices": 18446744073709551615}"#, "devices"),
        (r#"{"lora": {"rank": 18446744073709551615}}"#, "lora.rank"),
        (r#"{"compile": true}"#, "compile"),
        (r#"{"allocator": "max_split_size_mb:1"}"#, "allocator"),
        (r#"{"versions": {"jax": "1"}}"#, "versions: jax is not known"),
        (r#"{"versions": {"date": "2024-13"}}"#, "a month such as 2024-03"),
        (r#"{"lora": {"rank": 8, "dropout": 1.5}}"#, "lora.dropout: 1.5 is not known; it can be 0 to 1"),
        (r#"{"lora": {"rank": 8, "dropout": -0.1}}"#, "lora.dropout: -0.1"),
        (r#"{"lengths": [0]}"#, "lengths: 0 is not known; it can be 1 or more"),
        (r#"{"loss_chunks": 0}"#, "loss_chunks: 0"),
        (r#"{"reduce_bucket_size": 0}"#, "reduce_bucket_size: 0"),
        (r#"{"gradient_accumulation_steps": 0}"#, "gradient_accumulation_steps: 0"),
    ] {
        let error = with(changes).resolve().unwrap_err().to_string();
        assert!(error.contains(words), "{changes}: {error}");
    }
}

#[test]
fn what_was_decided_is_said_with_its_rule() {
    let resolved = with(r#"{"hardware": null, "gradient_checkpointing": true}"#).resolve().unwrap();
    let keys: Vec<&str> = resolved.decided.iter().map(|decision| decision.key).collect();
    assert_eq!(keys, ["hardware", "attention", "use_reentrant", "optimizer"]);
    assert!(resolved.decided.iter().all(|decision| !decision.rule.is_empty()));
}

#[test]
fn a_request_of_the_contract_is_read_with_its_nulls() {
    let text = r#"{"stack": "peft", "versions": {"transformers": "4.44"}, "model": "llama-3.1-8b", "batch_size": 1,
        "sequence_length": 2048, "gradient_accumulation_steps": 4, "precision": "bf16", "optimizer": "paged_adamw_8bit",
        "gradient_checkpointing": true, "attention": "sdpa", "lora": {"rank": 16, "target_modules": ["q_proj", "v_proj"]},
        "quantization": null, "double_quantization": null, "devices": null, "zero_stage": null, "fsdp": null, "offload": null,
        "hardware": "rtx-4090", "phase": "train"}"#;
    let request = Request::parse(std::path::Path::new("r.json"), text).unwrap();
    assert_eq!(
        request.lora,
        Some(Lora { rank: 16, target_modules: vec!["q_proj".into(), "v_proj".into()], ..Lora::default() })
    );
    assert_eq!(request.resolve().unwrap().run.accumulation, 4);
    let error =
        Request::parse(std::path::Path::new("r.json"), r#"{"stack": "hf", "sequence": 1}"#).unwrap_err();
    assert!(error.to_string().starts_with("r.json: unknown field `sequence`"), "{error}");
}

/// A folder and a file of a model that the catalogue does not have.
#[test]
fn a_model_can_be_its_config_json() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 100}"#;
    let file = folder.path().join("config.json");
    std::fs::write(&file, config).unwrap();
    for path in [folder.path(), &file] {
        let request = Request { model: path.display().to_string(), ..request() };
        assert_eq!(request.resolve().unwrap().run.model.num_layers, 3);
    }
}

proptest::proptest! {
    /// Whatever numbers a request has, it is resolved or refused.
    #[test]
    fn no_number_is_too_large(batch in 0u64.., sequence in 0u64.., rank in 0u64.., devices in 0u64.., steps in 0u64..) {
        let request = Request {
            batch_size: batch,
            sequence_length: sequence,
            gradient_accumulation_steps: Some(steps),
            lora: Some(Lora { rank, ..Lora::default() }),
            devices: Some(devices),
            ..request()
        };
        let _ = request.resolve();
    }

    /// Whatever text stands for a request, it is read or refused.
    #[test]
    fn no_text_is_too_odd(text in ".{0,200}") {
        let _ = Request::parse(std::path::Path::new("r.json"), &text);
        let _ = Request { model: text.clone(), hardware: Some(text), ..request() }.resolve();
    }
}
