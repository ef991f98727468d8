//! What must hold of every estimate, whatever the run: kinds add up, phases are there, and what saves memory saves it.

#[path = "../examples/case/mod.rs"]
mod case;

use plimsoll_stacks::{
    Attention, Checkpointing, Estimate, Kind, Loss, Optimizer, Phase, Quantization, Run, Stack, TorchType,
    estimate, trace,
};
use serde_json::Value;

fn run(case: &str) -> Run {
    let fixture: Value =
        serde_json::from_str(include_str!("data/torch_oracle.json")).expect("the fixture is JSON");
    case::run_of(&fixture, case).expect("a case of the oracle")
}

fn checked(run: &Run) -> Estimate {
    let estimate = estimate(run).expect("a program");
    let sum: u64 = estimate.peak.at_peak.values().sum();
    assert_eq!(sum, estimate.allocated_peak_bytes, "kinds add up to the peak: {:?}", estimate.peak);
    assert!(estimate.reserved_peak_bytes >= estimate.allocated_peak_bytes);
    assert!(estimate.device_used_bytes > estimate.reserved_peak_bytes);
    assert!(!estimate.peak.moment.is_empty());
    estimate
}

fn peak(run: &Run) -> u64 {
    checked(run).allocated_peak_bytes
}

fn phase(estimate: &Estimate, name: &str) -> u64 {
    let phase = estimate.phases.iter().find(|phase| phase.phase == name);
    phase.unwrap_or_else(|| panic!("no phase {name}")).allocated_bytes
}

fn host_of(estimate: &Estimate, name: &str) -> u64 {
    estimate.phases.iter().find(|phase| phase.phase == name).map_or(0, |phase| phase.host_bytes)
}

#[test]
fn every_phase_has_its_host_memory() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let weights = 2 * run.model.parameter_count();
    let estimate = checked(&run);
    assert_eq!((host_of(&estimate, "load"), host_of(&estimate, "forward")), (weights, 0));
    assert_eq!(host_of(&estimate, "save"), weights);
    assert!(estimate.phases.iter().all(|phase| phase.phase != "evaluate"));
    run.eval_batch = Some(16 * run.batch);
    run.model.vocab_size = 32_000;
    let evaluates = checked(&run);
    assert_eq!(evaluates.peak.phase, "evaluate");
    assert!(phase(&evaluates, "evaluate") > phase(&evaluates, "backward"));
    let adapters = checked(&self::run("llama-bf16-lora-sdpa-off"));
    assert!(host_of(&adapters, "save") < weights);
}

/// A checkpoint's states are on the host and on the device; behind them the first step has what every later one has.
#[test]
fn a_resumed_run_has_its_states_before_the_first_step() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let fresh = checked(&run);
    run.resume = true;
    let resumed = checked(&run);
    let weights = 2 * run.model.parameter_count();
    let (on_host, on_device) = (host_of(&resumed, "resume"), phase(&resumed, "resume"));
    assert!(on_host.abs_diff(2 * weights) < weights / 20, "{on_host}, two states of {weights}");
    assert!(on_device.abs_diff(3 * weights) < weights / 20, "{on_device}");
    assert_eq!(resumed.allocated_peak_bytes, fresh.allocated_peak_bytes);
    assert_eq!(host_of(&resumed, "forward"), 0);
}

/// An adapter is merged as a matrix of its linear's size, beside its product; a quantised weight is there in full as well.
#[test]
fn merging_takes_matrices_of_the_largest_linear() {
    for (case, matrices) in [("llama-bf16-lora-sdpa-off", 2), ("llama-bf16-qlora-sdpa-off", 4)] {
        let mut run = run(case);
        run.merge = true;
        let merged = checked(&run);
        let largest = (4 * run.model.hidden_size * run.model.mlp.intermediate_size).cast_signed();
        let trace = trace(&run).unwrap();
        let end = |name: &str| trace.marks.iter().find(|(phase, _)| *phase == name).unwrap().1;
        let live = |until: usize| trace.events[..until].iter().map(|event| event.bytes).sum::<i64>();
        let before = live(end("save"));
        let peak = (end("save")..=end("merge")).map(live).max().unwrap();
        assert_eq!(live(end("merge")), before, "{case}: nothing of a merge is left");
        let more = peak - before;
        assert!((largest..=matrices * largest).contains(&more), "{case}: {more}, a matrix has {largest}");
        assert!(host_of(&merged, "merge") >= 2 * run.model.parameter_count());
    }
}

/// Two batches for each worker, three tensors each, in blocks of a power of two.
#[test]
fn workers_keep_batches_on_the_host() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.data_workers = 4;
    let tensor = (run.batch * run.sequence * 8).next_power_of_two();
    assert_eq!(host_of(&checked(&run), "forward"), 4 * 2 * 3 * tensor);
}

#[test]
fn every_optimizer_has_states_of_its_size() {
    let mut run = run("llama-f32-full-sdpa-nonreentrant");
    let elements = run.model.parameter_count();
    for (optimizer, least, most) in [
        (Optimizer::AdamWForLoop, 8.0, 8.1),
        (Optimizer::AdamWForeach, 8.0, 8.1),
        (Optimizer::AdamWFused, 8.0, 8.1),
        (Optimizer::AdamW8bit { paged: false }, 2.0, 2.1),
        // A fifth of this small model is in matrices below the 100 000 elements from which states are paged.
        (Optimizer::AdamW8bit { paged: true }, 0.3, 0.5),
        (Optimizer::PagedAdamW32bit, 1.4, 1.7),
        (Optimizer::TorchaoAdamW8bit, 2.0, 2.2),
        (Optimizer::Sgd { momentum: true }, 4.0, 4.1),
        (Optimizer::Lion { eight_bit: true, paged: false }, 1.0, 1.1),
        (Optimizer::Lion { eight_bit: false, paged: false }, 4.0, 4.1),
        (Optimizer::Adafactor, 0.0, 0.1),
    ] {
        run.optimizer = optimizer;
        // Its peak is in the first step, where a state is made only before its parameter's update.
        run.resume = optimizer == Optimizer::TorchaoAdamW8bit;
        let states = checked(&run).peak.at_peak.get(&Kind::OptimizerStates).copied().unwrap_or(0);
        let each = states as f64 / elements as f64;
        assert!((least..=most).contains(&each), "{optimizer:?}: {each} bytes for each parameter");
    }
    run.resume = false;
    run.optimizer = Optimizer::Sgd { momentum: false };
    assert!(!checked(&run).peak.at_peak.contains_key(&Kind::OptimizerStates));
}

#[test]
fn fused_losses_keep_no_logits() {
    let mut run = run("llama-bf16-full-sdpa-off");
    // A vocabulary that makes logits the largest of all.
    run.model.vocab_size = 64_000;
    let early = {
        run.loss = Loss::UpcastShiftedEarly;
        peak(&run)
    };
    let shifted = {
        run.loss = Loss::UpcastShifted;
        peak(&run)
    };
    let upcast = {
        run.loss = Loss::Upcast;
        peak(&run)
    };
    let chunked = {
        run.loss = Loss::Chunked { chunks: 8, compiled: false };
        peak(&run)
    };
    let liger = {
        run.loss = Loss::Liger;
        peak(&run)
    };
    let cce = {
        run.loss = Loss::Cce;
        peak(&run)
    };
    assert!(upcast < shifted && upcast < early, "{early} {shifted} {upcast}");
    assert!(chunked < upcast, "{chunked} {upcast}");
    assert!(liger < chunked && cce < chunked, "{liger} {cce} {chunked}");
}

#[test]
fn what_saves_activations_saves_them() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.sequence = 2048;
    let plain = peak(&run);
    run.liger_layers = true;
    assert!(peak(&run) < plain);
    run.liger_layers = false;
    run.attention = Attention::Flash2;
    assert!(peak(&run) <= plain);
    run.attention = Attention::Sdpa;
    run.checkpointing = Checkpointing::Reentrant;
    let reentrant = checked(&run);
    assert!(reentrant.allocated_peak_bytes < plain);
    run.checkpointing = Checkpointing::Offloaded;
    let offloaded = checked(&run);
    assert!(offloaded.allocated_peak_bytes <= reentrant.allocated_peak_bytes);
    let layer_inputs = u64::from(run.model.num_layers) * run.batch * run.sequence * run.model.hidden_size * 2;
    let in_backward = |estimate: &Estimate| host_of(estimate, "forward");
    assert_eq!((in_backward(&reentrant), in_backward(&offloaded)), (0, layer_inputs));
}

#[test]
fn an_optimizer_in_the_backward_pass_keeps_no_gradients() {
    let mut run = run("llama-bf16-full-sdpa-nonreentrant");
    run.optimizer = Optimizer::AdamWFused;
    let behind = checked(&run);
    run.optimizer_in_backward = true;
    let within = checked(&run);
    assert!(within.allocated_peak_bytes < behind.allocated_peak_bytes);
    assert_eq!(phase(&within, "optimizer"), phase(&within, "optimizer").min(phase(&within, "backward")));
}

#[test]
fn gradients_that_accumulate_stay() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let once = phase(&checked(&run), "forward");
    run.accumulation = 4;
    let often = phase(&checked(&run), "forward");
    let gradients = 2 * run.model.parameter_count();
    assert!(often >= once + gradients, "{often} {once} {gradients}");
}

#[test]
fn trainer_copies_logits_to_f32_under_autocast() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.model.vocab_size = 64_000;
    run.autocast = Some(plimsoll_stacks::Autocast { to: TorchType::Bf16, scaler: false });
    run.stack = Stack::Transformers;
    let logits = run.batch * run.sequence * run.model.vocab_size;
    let forward = phase(&checked(&run), "forward");
    run.autocast = None;
    let without = phase(&checked(&run), "forward");
    // The f32 logits of the loss have gone when the copy is made: the copy fills their place.
    assert!(forward >= without && forward <= without + 4 * logits, "{forward} {without}");
}

#[test]
fn generation_keeps_keys_and_values() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.phase = Phase::Infer { generated: 16 };
    let estimate = checked(&run);
    assert!(phase(&estimate, "prefill") > 0 && phase(&estimate, "decode") > 0);
    let weights = estimate.peak.at_peak[&Kind::Weights];
    assert!(weights >= 2 * run.model.parameter_count());
    assert!(estimate.peak.at_peak.contains_key(&Kind::KvCache), "{:?}", estimate.peak);
    assert!(!estimate.peak.at_peak.contains_key(&Kind::Gradients));
}

#[test]
fn a_long_answer_grows_the_cache_by_each_of_its_tokens() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.batch = 64;
    let cache = |run: &Run| checked(run).peak.at_peak[&Kind::KvCache];
    run.phase = Phase::Infer { generated: 4033 };
    let short = cache(&run);
    run.phase = Phase::Infer { generated: 8033 };
    let long = cache(&run);
    let attention = &run.model.attention;
    let token = 2 * 2 * attention.kv_heads * attention.head_dim * u64::from(run.model.num_layers) * run.batch;
    // A layer's cache exists twice while a token is added to it.
    let layers = f64::from(run.model.num_layers);
    let each = (long - short) as f64 / (4000 * token) as f64;
    assert!((1.0..=1.0 + 1.0 / layers).contains(&each), "{each} of {token} bytes");
}

#[test]
fn what_has_no_tokens_or_too_many_is_refused() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.sequence = 0;
    assert!(estimate(&run).is_err());
    run.sequence = u64::MAX;
    assert!(estimate(&run).is_err());
    run.sequence = 1 << 30;
    assert!(estimate(&run).is_err());
}

#[test]
fn what_is_too_large_is_named() {
    let error = |change: fn(&mut Run)| {
        let mut run = run("llama-bf16-full-sdpa-off");
        change(&mut run);
        estimate(&run).unwrap_err().to_string()
    };
    for (change, words) in [
        (
            (|run| run.sequence = 1 << 30) as fn(&mut Run),
            "sequences of 1073741824 tokens are beyond any card",
        ),
        (|run| run.phase = Phase::Infer { generated: 1 << 24 }, "16777216 generated tokens of each of"),
        (|run| run.eval_batch = Some(1 << 40), "1099511627776 sequences of"),
    ] {
        let shown = error(change);
        assert!(shown.contains(words), "{shown}");
    }
}

/// Experts of kinds that no library has, or that are computed in another way than those that were recorded.
#[test]
fn experts_without_a_program_are_refused() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.model = plimsoll_model::catalogue::find("gpt-oss-20b").unwrap();
    let error = estimate(&run).unwrap_err().to_string();
    assert!(error.contains("gpt_oss"), "{error}");
}

#[test]
fn eight_bit_weights_take_a_byte_each() {
    let mut run = run("llama-bf16-qlora-sdpa-off");
    let four = phase(&checked(&run), "load");
    run.quantization = Some(Quantization::Int8);
    let eight = phase(&checked(&run), "load");
    assert!(four < eight, "{four} {eight}");
}

#[test]
fn tables_that_peft_trains_whole_exist_twice() {
    let mut run = run("llama-bf16-lora-sdpa-reentrant");
    let table = 2 * run.model.vocab_size * run.model.hidden_size;
    let before = checked(&run);
    let adapter = run.adapter.as_mut().expect("an adapter");
    adapter.trained_whole = vec!["embed_tokens".to_owned(), "lm_head".to_owned()];
    let after = checked(&run);
    let more = |kind: Kind| {
        let of = |estimate: &Estimate| estimate.peak.at_peak.get(&kind).copied().unwrap_or(0);
        of(&after) - of(&before)
    };
    assert_eq!(more(Kind::Weights), 2 * table);
    // Both tables are trained: none of the two is cut off from the graph. Adam has two states of their type.
    assert_eq!(more(Kind::OptimizerStates), 4 * table);
}

#[test]
fn adamw_over_lists_of_torch_2_0_has_a_second_list_for_a_while() {
    let mut run = run("llama-f32-full-sdpa-reentrant");
    let now = phase(&checked(&run), "optimizer");
    run.versions.torch = (2, 0);
    let then = phase(&checked(&run), "optimizer");
    let parameters = 4 * run.model.parameter_count();
    assert!(then >= now + parameters, "{then} {now} {parameters}");
}

#[test]
fn bitsandbytes_before_0_44_keeps_the_inputs_of_its_products() {
    let mut run = run("llama-bf16-qlora-sdpa-off");
    let now = checked(&run);
    run.versions.bitsandbytes = (0, 43);
    let then = checked(&run);
    assert!(then.allocated_peak_bytes > now.allocated_peak_bytes);
}

#[test]
fn wrapping_by_fsdp_reserves_a_unit_twice() {
    let mut run = run("llama-bf16-lora-sdpa-reentrant");
    run.model.hidden_size = 2048;
    run.model.mlp.intermediate_size = 8192;
    run.devices = 2;
    run.adapter.as_mut().expect("an adapter").dtype = TorchType::Bf16;
    let offload = plimsoll_stacks::Offload::default();
    run.sharding = plimsoll_stacks::Sharding::Fsdp1 { keep_gathered: false, offload };
    let load = &checked(&run).phases[0];
    let layer = 2 * 3 * run.model.hidden_size * run.model.mlp.intermediate_size;
    let shares = run.model.parameter_count();
    assert!(load.reserved_bytes > shares + 2 * layer, "{} {shares} {layer}", load.reserved_bytes);
}

#[test]
fn a_run_that_does_not_fit_is_answered_as_on_a_larger_card() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let fits = checked(&run);
    run.card.memory = 1 << 20;
    assert_eq!(checked(&run).allocated_peak_bytes, fits.allocated_peak_bytes);
}

/// The tensors that the last forward pass keeps.
fn kept(run: &Run) -> Vec<Vec<u64>> {
    trace(run).expect("a program").saved.into_iter().map(|(shape, _)| shape).collect()
}

/// `_update_causal_mask` of transformers 4.38 and 4.39 made a mask for Llama where nothing was padded, and PyTorch's flash kernel takes none.
#[test]
fn llama_had_a_mask_for_every_batch_in_transformers_4_39() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let mask = vec![run.batch, 1, run.sequence, run.sequence];
    let masks = |run: &Run| kept(run).iter().filter(|shape| **shape == mask).count();
    for (transformers, expected) in [((4, 37), 0), ((4, 38), 3), ((4, 39), 3), ((4, 40), 0), ((5, 23), 0)] {
        run.versions.transformers = transformers;
        assert_eq!(masks(&run), expected, "{transformers:?}, three layers");
    }
    // Mistral's model asked whether there is anything to mask.
    let mut run = self::run("mistral-bf16-full-sdpa-off");
    run.versions.transformers = (4, 39);
    assert_eq!(masks(&run), 0);
}

/// `sdpa_attention_forward` of 4.48 to 4.55 made queries contiguous, so that the kernel's output has heads before tokens: its transpose is
/// copied, and both are kept.
#[test]
fn contiguous_queries_cost_a_copy_of_each_layers_attention() {
    let mut run = run("llama-bf16-full-sdpa-off");
    let mut at = |transformers| {
        run.versions.transformers = transformers;
        phase(&checked(&run), "forward")
    };
    let (before, with, after) = (at((4, 56)), at((4, 55)), at((5, 23)));
    assert_eq!(before, after);
    let copies = 3 * run.batch * run.sequence * run.model.q_size() * 2;
    assert!(with >= before + copies, "{with} against {before} and {copies}");
    assert!(with < before + 2 * copies, "{with} against {before} and {copies}");
}

/// A mixture of the catalogue, with few layers.
fn mixture(name: &str, transformers: (u32, u32)) -> Run {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.model = plimsoll_model::catalogue::find(name).expect("a model of the catalogue").of_layers(&[2, 3]);
    run.versions.transformers = transformers;
    run
}

/// Modules of a loop up to transformers 4, two tensors from 5 on: the weights are those of all experts either way.
#[test]
fn all_experts_of_a_mixture_are_loaded() {
    for name in ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "olmoe-1b-7b", "glm-4.5-air"] {
        for transformers in [(4, 57), (5, 23)] {
            let run = mixture(name, transformers);
            let loaded = phase(&checked(&run), "load");
            let weights = 2 * run.model.parameter_count();
            // Of a matrix of 11 MiB the allocator hands out a segment of 12.
            assert!(
                loaded >= weights && loaded < weights / 10 * 11,
                "{name} {transformers:?}: {loaded}, {weights}"
            );
            // Each parameter has a gradient and two states, and in a step over lists a root.
            let peak = peak(&run);
            assert!(
                peak > 5 * weights && 10 * peak < 55 * weights,
                "{name} {transformers:?}: {peak}, {weights}"
            );
        }
    }
}

#[test]
fn a_token_takes_what_its_experts_keep_of_it() {
    for transformers in [(4, 57), (5, 23)] {
        let mut run = mixture("qwen3-30b-a3b", transformers);
        (run.batch, run.sequence) = (4, 2048);
        let few = phase(&checked(&run), "forward");
        let experts = run.model.experts.as_mut().expect("a mixture");
        experts.per_token *= 2;
        let (inner, hidden, count) =
            (experts.intermediate_size, run.model.hidden_size, experts.per_token / 2);
        let more = phase(&checked(&run), "forward") - few;
        // Of each expert more: its input, two halves, the active one, their product, and its output, in two layers.
        let rows = 2 * run.batch * run.sequence * count;
        let least = rows * (2 * hidden + 4 * inner) * 2;
        assert!(more >= least && more < 2 * least, "{transformers:?}: {more}, at least {least}");
    }
}

/// bitsandbytes quantises modules: from transformers 5 on experts are tensors, which stay as they are.
#[test]
fn experts_that_are_tensors_are_not_quantised() {
    let loaded = |transformers| {
        let mut run = run("llama-bf16-qlora-sdpa-off");
        run.model = mixture("mixtral-8x7b", transformers).model;
        run.versions.transformers = transformers;
        let seen = checked(&run);
        (phase(&seen, "load"), run.model.parameter_count())
    };
    let (modules, parameters) = loaded((4, 57));
    assert!(modules < parameters, "{modules} bytes of {parameters} parameters");
    let (tensors, _) = loaded((5, 23));
    assert!(tensors > 3 * parameters, "{tensors} bytes of {parameters} parameters");
}

#[test]
fn a_mixture_in_a_stack_whose_experts_are_not_known_is_refused() {
    let mut run = mixture("mixtral-8x7b", (5, 23));
    run.stack = Stack::Torchtune;
    assert!(estimate(&run).unwrap_err().to_string().contains("experts"));
}

/// FSDP1 with an adapter, whose matrices are units of their own: their shares, gradients and states are blocks of the small pool, which reserves
/// segments of its own. `max_memory_reserved` of two ranks, from fsdp_qlora's benchmarks of 2024-03.
#[test]
fn published_runs_of_fsdp_with_adapters_reserve_what_was_measured() {
    for (quantisation, length, gib) in [
        (r#"{}"#, 512, 10.24),
        (r#"{}"#, 2048, 10.22),
        (r#"{"quantization": "nf4", "double_quantization": true}"#, 512, 4.98),
        (r#"{"quantization": "nf4", "double_quantization": true}"#, 2048, 5.21),
    ] {
        let mut request = serde_json::json!({
            "stack": "peft", "model": "llama-2-7b", "batch_size": 1, "sequence_length": length, "precision": "bf16", "devices": 2,
            "fsdp": "full_shard", "gradient_checkpointing": true, "use_reentrant": true, "attention": "sdpa",
            "outputs": "until_step", "hardware": "rtx-3090", "versions": {"date": "2024-03"},
            "lora": {"rank": 64, "dropout": 0.1,
                "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]},
        });
        let changes: Value = serde_json::from_str(quantisation).expect("JSON");
        for (key, value) in changes.as_object().expect("an object") {
            request[key] = value.clone();
        }
        let request: plimsoll_stacks::Request = serde_json::from_value(request).expect("a request");
        let estimate = request.answer().expect("an answer").estimate;
        let found = estimate.reserved_peak_bytes as f64 / f64::from(1 << 30);
        assert!(
            (found / gib - 1.0).abs() < 0.03,
            "{quantisation}, {length} tokens: {found} GiB, measured {gib}"
        );
    }
}

/// torchao's update is compiled: an f32 buffer of the parameter's size, and while the first call is measured its inputs and outputs twice.
#[test]
fn an_update_of_torchao_is_measured_at_its_first_call() {
    let mut run = run("llama-bf16-full-sdpa-off");
    run.model.vocab_size = 1 << 20;
    run.batch = 1;
    run.sequence = 8;
    let table = run.model.vocab_size * run.model.hidden_size;
    let mut peak_of = |optimizer| {
        run.optimizer = optimizer;
        phase(&checked(&run), "optimizer")
    };
    let [torchao, bitsandbytes] =
        [Optimizer::TorchaoAdamW8bit, Optimizer::AdamW8bit { paged: false }].map(&mut peak_of);
    // Of four bytes for the buffer and eight for the clones some lie where states will be that were not made yet.
    let more = torchao - bitsandbytes;
    assert!((4 * table..13 * table + 256_000_000).contains(&more), "{more} bytes for a table of {table}");
}
