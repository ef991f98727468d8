//! Our programs against PyTorch, transformers, PEFT and bitsandbytes themselves, as `docs/bench/torch_oracle.py` recorded
//! them: the peak of live bytes in a step, and the sizes of the tensors that autograd keeps.

#[path = "../examples/case/mod.rs"]
mod case;

use std::collections::BTreeMap;

use plimsoll_stacks::{Offload, Outputs, Sharding, TorchType, trace};
use serde_json::Value;

const FIXTURE: &str = include_str!("data/torch_oracle.json");

/// Live bytes at the end of loading, and the most in the last step; without what kernels take for themselves.
fn loaded_and_peak(trace: &plimsoll_stacks::Trace) -> (i64, i64) {
    let loaded_at = trace.marks[0].1;
    let ends: Vec<usize> =
        trace.marks.iter().filter(|(phase, _)| *phase == "optimizer").map(|(_, at)| *at).collect();
    let last_begins = ends[ends.len() - 2];
    let (mut live, mut loaded, mut peak) = (0, 0, 0);
    for (place, event) in trace.events.iter().enumerate() {
        live += if event.hidden { 0 } else { event.bytes };
        if place + 1 == loaded_at {
            loaded = live;
        }
        if place >= last_begins {
            peak = peak.max(live);
        }
    }
    (loaded, peak)
}

fn name(dtype: TorchType) -> &'static str {
    match dtype {
        TorchType::F32 => "float32",
        TorchType::Bf16 => "bfloat16",
        TorchType::F16 => "float16",
        TorchType::I64 => "int64",
        TorchType::I32 => "int32",
        TorchType::U8 => "uint8",
        TorchType::I8 => "int8",
        TorchType::Bool => "bool",
    }
}

fn bytes_of(dtype: &str) -> u64 {
    match dtype {
        "float32" | "int32" => 4,
        "bfloat16" | "float16" => 2,
        "int64" | "uint64" => 8,
        _ => 1,
    }
}

/// How many tensors of each size in bytes; tensors of a few numbers, such as states of random generators, are left out.
fn sizes<'a>(saved: impl Iterator<Item = (u64, &'a str, u64)>) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for (elements, dtype, count) in saved.filter(|(elements, ..)| *elements > 2) {
        *sizes.entry(elements * bytes_of(dtype)).or_default() += count;
    }
    sizes
}

#[test]
fn peaks_and_saved_tensors_are_those_of_pytorch() {
    let fixture: Value = serde_json::from_str(FIXTURE).expect("the fixture is JSON");
    let cases = fixture["cases"].as_object().expect("the fixture has cases");
    let mut problems = Vec::new();
    let mut worst = 0.0_f64;
    for (case, expected) in cases {
        let run = case::run_of(&fixture, case).expect("a case of the oracle");
        let trace = trace(&run).expect("a program for each case");
        let (_, peak) = loaded_and_peak(&trace);
        let expected_peak = expected["peak"].as_i64().expect("a peak");
        let error = (peak as f64 / expected_peak as f64 - 1.0) * 100.0;
        worst = worst.max(error.abs());
        if error.abs() > 0.1 {
            problems.push(format!("{case}: peak {peak}, PyTorch's {expected_peak} ({error:+.2} %)"));
        }
        let counts = expected["saved"].as_object().expect("saved tensors");
        if counts.is_empty() {
            continue;
        }
        let theirs = sizes(counts.iter().map(|(key, count)| {
            let (shape, dtype) = key.split_once(' ').expect("a shape and a type");
            let elements = shape.split('x').map(|size| size.parse::<u64>().unwrap_or(1)).product();
            (elements, dtype, count.as_u64().expect("a count"))
        }));
        let ours = sizes(trace.saved.iter().map(|(shape, dtype)| (shape.iter().product(), name(*dtype), 1)));
        if theirs != ours {
            let more: Vec<_> = ours.iter().filter(|(size, count)| theirs.get(size) != Some(count)).collect();
            let less: Vec<_> = theirs.iter().filter(|(size, count)| ours.get(size) != Some(count)).collect();
            problems.push(format!("{case}: saves {more:?} (bytes, times), PyTorch {less:?}"));
        }
    }
    assert!(
        problems.is_empty(),
        "{} problems of {} cases:\n{}",
        problems.len(),
        cases.len(),
        problems.join("\n")
    );
    println!("{} cases, worst peak {worst:.3} %", cases.len());
}

/// A rank of FSDP and of DeepSpeed against those libraries themselves on two CPUs (`docs/bench/sharded_oracle.py`): what it holds after
/// loading, and of FSDP the most that lives in a step. DeepSpeed makes its optimizer's states while it loads, ours in the first step.
#[test]
fn a_rank_has_what_fsdp_and_deepspeed_give_it() {
    let fixture: Value = serde_json::from_str(include_str!("data/sharded_oracle.json")).expect("JSON");
    let of_torch: Value = serde_json::from_str(FIXTURE).expect("JSON");
    for (case, expected) in fixture["cases"].as_object().expect("cases") {
        let mut run = case::run_of(&of_torch, "llama-f32-full-eager-off").expect("a case of the oracle");
        run.devices = fixture["ranks"].as_u64().expect("ranks");
        run.shard_devices = run.devices;
        run.outputs = Outputs::Dropped;
        let offload = Offload::default();
        run.sharding = match case.as_str() {
            "fsdp1" => Sharding::Fsdp1 { keep_gathered: false, offload },
            "fsdp2" => Sharding::Fsdp2 { keep_gathered: false, offload },
            zero => Sharding::Zero { stage: zero[4..].parse().expect("a stage"), offload },
        };
        let (mut loaded, peak) = loaded_and_peak(&trace(&run).expect("a program"));
        let [their_loaded, their_peak] = ["loaded", "peak"].map(|key| expected[key].as_i64().expect(key));
        if let Sharding::Zero { .. } = run.sharding {
            let share = 4 * run.model.parameter_count() / run.devices;
            loaded += 2 * share.cast_signed();
        } else {
            assert!(
                peak.abs_diff(their_peak) < their_peak.unsigned_abs() / 1000,
                "{case}: {peak}, {their_peak}"
            );
        }
        // Small tensors are rounded up one by one where they are shared one by one.
        let off = loaded.abs_diff(their_loaded);
        assert!(off < their_loaded.unsigned_abs() / 1000, "{case}: {loaded}, {their_loaded}");
    }
}
