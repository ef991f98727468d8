//! The command line over the file.

use super::*;

#[test]
fn assignments_go_over_the_file() {
    let check = |file: &str, assignments: &[&str], expected: &str| {
        let mut config = read(file);
        for assignment in assignments {
            config.apply_set(assignment).unwrap_or_else(|e| panic!("{e}"));
        }
        assert_eq!(config, read(expected), "{file} {assignments:?}");
    };
    check("model: x", &["training.batch_size=4"], "model: x\ntraining: {batch_size: 4}");
    check("training: {seed: 1}", &["training.seed=2", "training.seed=3"], "training: {seed: 3}");
    check("model: x\ntraining: {seed: 1}", &["training.seed="], "model: x");
    check("model: x\ntraining: {seed: 1}", &["training.seed=null"], "model: x");
    check(
        "model: x",
        &["memory={device_budget: 1GiB, offload: {optimizer: device}}"],
        "model: x\nmemory: {device_budget: 1GiB, offload.optimizer: device}",
    );
    check("model: x", &[" data.train = [a.txt, b.txt]"], "model: x\ndata: {train: [a.txt, b.txt]}");
    check("model: x", &["data.train=*.txt"], "model: x\ndata: {train: '*.txt'}");
    check("model: x", &["output.dir=a=b"], "model: x\noutput: {dir: a=b}");
    check("model: x", &["model=y"], "model: y");
    check("model: x\ntraining: {epochs: 3}", &["training.steps=5"], "model: x\ntraining: {steps: 5}");
    check("model: x\ntraining: {epochs: 3}", &["training.steps=null"], "model: x\ntraining: {epochs: 3}");
    check("model: {from_scratch: {hidden_size: 8, head_dim: 2}}", &["model=y"], "model: y");
    check("model: x", &["model.from_scratch={hidden_size: 8}"], "model: {from_scratch: {hidden_size: 8}}");

    let mut both = read("model: x");
    both.apply_set("training.steps=5").unwrap();
    both.apply_set("training.epochs=1").unwrap();
    assert_eq!(
        both.validate().unwrap_err().to_string(),
        "training.steps and training.epochs exclude each other; remove one of them\n  training.steps: 5  (--set training.steps=5)\n  training.epochs: 1  (--set training.epochs=1)"
    );
}

#[test]
fn assignments_mend_wrong_values_of_the_file() {
    let with = |file: &str, assignments: &[&str]| {
        let overrides: Vec<Override> = assignments.iter().map(|a| Override::set(a).unwrap()).collect();
        RawConfig::from_str_with(file, "run.yaml", &overrides).map_err(|e| e.to_string())
    };
    let file = "model: x\ntraining:\n  batch_size: four\n  optimizer: adamx\n";
    let mended = with(file, &["training.batch_size=4", "training.optimizer=adamw"]).unwrap();
    assert_eq!(mended, read("model: x\ntraining: {batch_size: 4, optimizer: adamw}"));
    let unset = with(file, &["training.batch_size=", "training={optimizer: adamw}"]).unwrap();
    assert_eq!(unset, read("model: x\ntraining: {optimizer: adamw}"));
    let rival = with("model: x\ntraining: {epochs: many}", &["training.steps=5"]).unwrap();
    assert_eq!(rival, read("model: x\ntraining: {steps: 5}"));
    let other = with("model: [1, 2]", &["model.from_scratch.hidden_size=8"]);
    assert!(other.is_err());

    // What is left wrong is named where it stands; so is what the command line says wrong.
    let left = with(file, &["training.batch_size=4"]).unwrap_err();
    assert!(left.starts_with("run.yaml:4:14: training.optimizer: expected"), "{left}");
    let again = with(file, &["training.batch_size=five", "training.optimizer=adamw"]).unwrap_err();
    assert!(again.starts_with("--set training.batch_size=five: training.batch_size: expected"), "{again}");
    let unknown = with("model: x\nbatch: 4", &["training.batch_size=4"]).unwrap_err();
    assert!(unknown.starts_with("run.yaml:2:1: unknown key 'batch'"), "{unknown}");
}

#[test]
fn bad_assignments_are_named_and_change_nothing() {
    for (assignment, expected) in [
        (
            "training.batch_size",
            "--set training.batch_size: there is no '=' in it; write KEY=VALUE, for example --set training.batch_size=4",
        ),
        (
            "=4",
            "--set =4: there is no key before the '='; write KEY=VALUE, for example --set training.batch_size=4",
        ),
        ("batch_size=4", "--set batch_size=4: unknown key 'batch_size'; did you mean 'training.batch_size'?"),
        (
            "training.batch_size=four",
            "--set training.batch_size=four: training.batch_size: expected whole number | auto, got 'four'",
        ),
        ("training.batch_size=[", "--set training.batch_size=[: not valid YAML: unclosed bracket '['"),
        (
            "parallel=4",
            "--set parallel=4: parallel: expected a mapping of data_parallel, context_parallel, zero_stage, sharding_strategy, shard_size, reproducible, overlap_communication, tensor_parallel, sequence_parallel, expert_parallel, pipeline_parallel, pipeline_schedule, virtual_stages, got the number 4",
        ),
        (
            "memory={device_budget: 1GiB, host_bugdet: 1}",
            "--set memory={device_budget: 1GiB, host_bugdet: 1}: unknown key 'memory.host_bugdet'; did you mean 'memory.host_budget'?",
        ),
    ] {
        let mut config = read("model: x");
        assert_eq!(config.apply_set(assignment).unwrap_err().to_string(), expected);
        assert_eq!(config, read("model: x"), "{assignment}");
    }
    let mut config = read("model: x");
    let error = config.apply_override("training.batch_size", "four", "--batch-size four").unwrap_err();
    assert!(error.to_string().starts_with("--batch-size four: training.batch_size: expected"), "{error}");
}
