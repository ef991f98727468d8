//! Runs on several ranks, here threads of one process: they leave what a run on one leaves, and go on from each other's checkpoints.

use std::path::Path;

use plimsoll_parallel::{Communicator, Wired, thread_ranks};
use plimsoll_plan::ModelOrigin;
use plimsoll_plan::config::{RawConfig, Started};
use plimsoll_train::{
    MemoryReading, Observer, Prepared, Report, RunEvent, StopFlag, Surroundings, TrainError,
};

use crate::common::{cpu, machine};

/// Micro-batches of a step, of all ranks.
const MICRO_BATCHES: u32 = 4;

fn config(folder: &Path, out: &str, set: &[&str]) -> RawConfig {
    let words: String = (0..400).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let text = format!(
        "
model:
  from_scratch: {{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 2}}
data: {{train: '{0}', validation: '{0}', sequence_length: 16}}
training: {{steps: 6, batch_size: 2, learning_rate: 1e-2, mixed_precision: bf16}}
memory: {{device_budget: 4GiB, ladder: false}}
parallel: {{reproducible: true}}
output: {{dir: '{1}', save_steps: 2, eval_steps: 3}}
",
        folder.join("text.txt").display(),
        folder.join(out).display()
    );
    let mut config = RawConfig::from_str(&text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

/// Raises a flag behind a step.
struct StopsAt<'f>(Option<u64>, &'f StopFlag);

impl Observer for StopsAt<'_> {
    fn event(&mut self, event: RunEvent<'_>) {
        if let RunEvent::Step(metrics) = event
            && Some(metrics.step) == self.0
        {
            self.1.raise();
        }
    }
}

/// Trains on so many ranks; `stop_at`: the last of them is asked to stop behind this step.
fn run(config: &RawConfig, ranks: u32, resume: bool, stop_at: Option<u64>) -> Result<Report, TrainError> {
    run_each(&vec![config.clone(); ranks as usize], resume, stop_at).swap_remove(0)
}

/// The same with a configuration for each rank, as on machines of their own, and what comes of each.
fn run_each(configs: &[RawConfig], resume: bool, stop_at: Option<u64>) -> Vec<Result<Report, TrainError>> {
    let one = |ranks: &dyn Communicator| {
        let started = Started { ranks: ranks.size(), of_each_machine: None };
        let mut config = configs[ranks.rank() as usize].on_ranks(started).unwrap();
        config.rank = ranks.rank();
        let accumulation = u64::from(MICRO_BATCHES) / config.parallel.data_parallel();
        config.apply_set(&format!("training.gradient_accumulation_steps={accumulation}")).unwrap();
        let origin = ModelOrigin::find(&config).unwrap();
        let prepared = Prepared::of_rank(config, origin, resume, ranks)?;
        let plan = prepared.plan(&machine())?;
        let stop = StopFlag::new();
        let is_last = ranks.rank() + 1 == ranks.size();
        let surroundings = Surroundings {
            device: &mut cpu,
            memory: &mut MemoryReading::default,
            observer: &mut StopsAt(stop_at.filter(|_| is_last), &stop),
            stop: stop.clone(),
            ranks,
        };
        let report = prepared.run(std::slice::from_ref(&plan), surroundings)?.report;
        assert_eq!(report.measured.device_peak_bytes, plan.peak_bytes(), "rank {}", ranks.rank());
        Ok(report)
    };
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || one(&Wired::new(rank).unwrap()));
        let threads: Vec<_> = thread_ranks(configs.len() as u32).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What the second of two ranks says that is not alike. The first one ends with it, and nobody leaves anything behind.
fn unlike(configs: &[RawConfig; 2], resume: bool) -> TrainError {
    let mut ended = run_each(configs, resume, None);
    let (second, first) = (ended.remove(1).unwrap_err(), ended.remove(0).unwrap_err());
    assert!(matches!(first, TrainError::OfOtherRank { rank: 1 }), "{first}");
    for config in configs {
        let folder = config.output.dir();
        assert!(!folder.exists() || names(&folder).iter().all(|name| !name.starts_with('.')), "{second}");
    }
    second
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &to) } else { std::fs::copy(&path, to).map(|_| ()).unwrap() }
    }
}

/// Changes a byte in the middle of a file.
fn damage(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).unwrap();
}

/// What the files that matter hold.
fn left(folder: &Path) -> Vec<Vec<u8>> {
    let files = ["model.safetensors", "checkpoint-6/optimizer.safetensors", "checkpoint-6/model.safetensors"];
    files.iter().map(|file| std::fs::read(folder.join(file)).unwrap()).collect()
}

fn metrics(folder: &Path) -> Vec<serde_json::Value> {
    let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn many_ranks_leave_what_one_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let one = run(&config(folder.path(), "one", &[]), 1, false, None).unwrap();
    assert!(one.ranks.is_empty());
    let in_one_run = [(2, 0, 1), (2, 1, 1), (4, 2, 1), (2, 3, 1), (2, 0, 2), (4, 0, 2), (4, 2, 2), (4, 3, 2)];
    let in_one_run = in_one_run.map(|(ranks, stage, stages)| (ranks, stage, stages, 1));
    // Runs of layers of all stages, and of each.
    let in_two = [(2, 0, 4, 2), (4, 2, 4, 2), (4, 3, 4, 2)];
    for (ranks, stage, stages, rounds) in in_one_run.into_iter().chain(in_two) {
        let out = format!("out-{ranks}-{stage}-{stages}-{rounds}");
        let set = [
            format!("parallel.zero_stage={stage}"),
            format!("parallel.pipeline_parallel={}", stages / rounds),
            format!("parallel.pipeline_schedule={}", if rounds > 1 { "interleaved" } else { "1f1b" }),
        ];
        let set = set.each_ref().map(String::as_str);
        let report = run(&config(folder.path(), &out, &set), ranks, false, None).unwrap();
        let [one, many] = ["one", &out].map(|out| folder.path().join(out));
        assert!(left(&many) == left(&one), "{out}");
        assert_eq!(names(&many), names(&one));
        for (many, one) in metrics(&many).iter().zip(metrics(&one)) {
            for same in ["step", "lr", "tokens", "batch_size", "grad_norm"] {
                assert_eq!(many[same], one[same], "{same}");
            }
            for near in ["loss", "validation_loss"] {
                let [many, one] = [&many[near], &one[near]].map(|loss| loss.as_f64().unwrap_or(0.0));
                assert!((many - one).abs() <= 1e-9 * one.abs(), "{near}: {many} {one}");
            }
        }
        assert_eq!(report.ranks.len(), ranks as usize);
        for (rank, of_rank) in report.ranks.iter().enumerate() {
            assert_eq!(of_rank.rank as usize, rank);
            assert_eq!(of_rank.measured.device_peak_bytes, of_rank.planned.device_peak_bytes);
        }
    }
}

/// Any rank may be asked to stop, and the run goes on with other ranks and another stage.
#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    run(&config(folder.path(), "unbroken", &[]), 1, false, None).unwrap();
    let of = |stage: u64| config(folder.path(), "out", &[&format!("parallel.zero_stage={stage}")]);
    let stopped = run(&of(3), 4, false, Some(1)).unwrap();
    assert_eq!((stopped.steps, stopped.finished), (1, false));
    let stopped = run(&of(1), 2, true, Some(3)).unwrap();
    assert_eq!((stopped.steps, stopped.finished), (3, false));
    // Another way of dividing the work is no other run.
    let stages =
        ["parallel.zero_stage=2", "parallel.pipeline_parallel=2", "parallel.pipeline_schedule=interleaved"];
    let stopped = run(&config(folder.path(), "out", &stages), 4, true, Some(4)).unwrap();
    assert_eq!((stopped.steps, stopped.finished), (4, false));
    let finished = run(&of(0), 1, true, None).unwrap();
    assert_eq!((finished.steps, finished.finished), (6, true));
    assert!(left(&folder.path().join("out")) == left(&folder.path().join("unbroken")));
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    let folder = tempfile::tempdir().unwrap();
    run(&config(folder.path(), "out", &[]), 1, false, None).unwrap();
    // The first rank refuses the folder.
    let error = run(&config(folder.path(), "out", &[]), 2, false, None).unwrap_err();
    assert!(matches!(error, TrainError::OutputInUse { .. }), "{error}");
    assert!(names(&folder.path().join("out")).iter().all(|name| !name.starts_with(".rank")));
}

/// Sums of products and of sequences are made in another order. What they leave goes on as any other run.
#[test]
fn ranks_that_share_products_or_sequences_come_near_one() {
    let folder = tempfile::tempdir().unwrap();
    let base = ["training.mixed_precision=f32"];
    let one = run(&config(folder.path(), "one", &base), 1, false, None).unwrap();
    for (ranks, ways) in [
        (2, &["parallel.tensor_parallel=2"][..]),
        (2, &["parallel.context_parallel=2"]),
        (4, &["parallel.tensor_parallel=2", "parallel.pipeline_parallel=2"]),
        (4, &["parallel.tensor_parallel=2", "parallel.zero_stage=3"]),
    ] {
        let out = ways.join("-");
        let set = [&base[..], ways].concat();
        let stopped = run(&config(folder.path(), &out, &set), ranks, false, Some(3)).unwrap();
        assert_eq!((stopped.steps, stopped.finished), (3, false));
        // The rest on one rank.
        let many = run(&config(folder.path(), &out, &base), 1, true, None).unwrap();
        for (many, one) in [(many.last_loss, one.last_loss), (many.validation_loss, one.validation_loss)] {
            let (many, one) = (many.unwrap(), one.unwrap());
            assert!((many - one).abs() < 2e-5 * one, "{out}: {many} {one}");
        }
        assert_eq!(names(&folder.path().join(&out)), names(&folder.path().join("one")));
    }
}

/// Rank 0 alone writes to its folder, and tells the others its tokenizer. To go on they have to see its checkpoints, wherever they are.
#[test]
fn ranks_need_no_common_folder_but_to_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let trained = ["model.from_scratch.tokenizer={train: bpe, vocab_size: 280}"];
    let of = |out: &str| config(folder.path(), out, &trained);
    let place = |name: &str| folder.path().join(name);
    run(&of("one"), 2, false, None).unwrap();
    let two = [of("first"), of("far/away/second")];
    let stopped = run_each(&two, false, Some(3)).swap_remove(0).unwrap();
    assert_eq!((stopped.steps, stopped.finished), (3, false));
    assert_eq!(stopped.ranks.len(), 2);
    assert!(!place("far").exists(), "what was made for a rank is gone");
    // A damaged copy is told from what rank 0 has.
    copy(&place("first/checkpoint-3"), &place("far/away/second/checkpoint-3"));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let copied = place("far/away/second/checkpoint-3").join(file);
        damage(&copied);
        let said = unlike(&two, true);
        assert!(matches!(said, TrainError::OtherFiles { .. }), "{said}");
        assert!(said.to_string().contains(&format!("checkpoint-3: {file} has other contents")), "{said}");
        damage(&copied);
    }
    std::fs::remove_file(place("far/away/second/checkpoint-3/optimizer.safetensors")).unwrap();
    let said = unlike(&two, true).to_string();
    assert!(said.contains("optimizer.safetensors is not there; all ranks go on from the same"), "{said}");
    std::fs::remove_file(place("far/away/second/checkpoint-3/trainer_state.json")).unwrap();
    let said = run_each(&two, true, None).remove(1).unwrap_err();
    assert!(matches!(said, TrainError::UnseenCheckpoint { .. }), "{said}");
    let said = said.to_string();
    assert!(
        said.contains("Rank 0 goes on from this checkpoint") && !said.contains("Put the file back"),
        "{said}"
    );
    // A whole copy will do.
    copy(&place("first/checkpoint-3"), &place("far/away/second/checkpoint-3"));
    let finished = run_each(&two, true, None).swap_remove(0).unwrap();
    assert_eq!((finished.steps, finished.finished), (6, true));
    assert!(left(&place("first")) == left(&place("one")));
}

/// The same files will do wherever they are, and whatever a rank reads of them.
#[test]
fn another_model_is_told_from_that_of_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    run(&config(folder.path(), "made", &["training.steps=2"]), 1, false, None).unwrap();
    let made = folder.path().join("made/checkpoint-2");
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    copy(&made, &one);
    copy(&made, &two);
    let of = |out: &str, model: &Path, stage: u32| {
        let stage = format!("parallel.zero_stage={stage}");
        let mut config = config(folder.path(), out, &["training.steps=2", &stage]);
        config.model = Default::default();
        config.apply_set(&format!("model.path={}", model.display())).unwrap();
        config
    };
    for stage in [0, 3] {
        let out = format!("out-{stage}");
        let ranks = [of(&out, &one, stage), of(&out, &two, stage)];
        run_each(&ranks, false, None).swap_remove(0).unwrap();
        damage(&two.join("model.safetensors"));
        let ranks = [of("refused", &one, stage), of("refused", &two, stage)];
        let said = unlike(&ranks, false).to_string();
        assert!(
            said.contains("the model's model.safetensors has other contents here than on rank 0"),
            "{said}"
        );
        assert!(!folder.path().join("refused").exists());
        damage(&two.join("model.safetensors"));
    }
    let json = std::fs::read_to_string(two.join("config.json")).unwrap();
    let other = json.replace("\"rms_norm_eps\": ", "\"rms_norm_eps\": 1");
    assert_ne!(other, json);
    std::fs::write(two.join("config.json"), other).unwrap();
    let said = unlike(&[of("refused", &one, 0), of("refused", &two, 0)], false).to_string();
    assert!(said.contains("the model has another shape here"), "{said}");
}

#[test]
fn other_configurations_and_data_are_told_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let of = |set: &[&str]| config(folder.path(), "out", set);
    for (set, key) in [
        ("training.seed=7", "training.seed is 7 here and"),
        ("data.sequence_length=8", "data.sequence_length is 8 here and 16 on rank 0"),
        ("model.from_scratch.hidden_size=48", "model.from_scratch.hidden_size is 48 here and 32 on rank 0"),
    ] {
        let said = unlike(&[of(&[]), of(&[set])], false);
        assert!(matches!(said, TrainError::OtherConfiguration { .. }), "{said}");
        assert!(said.to_string().contains(key), "{said}");
    }
    let text = std::fs::read_to_string(folder.path().join("text.txt")).unwrap();
    for (file, text) in [("same.txt", text.clone()), ("other.txt", text.replace("word7", "word8"))] {
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let reads = |key: &str, file: &str| format!("{key}={}", folder.path().join(file).display());
    for key in ["data.train", "data.validation"] {
        let said = unlike(&[of(&[]), of(&[&reads(key, "other.txt")])], false).to_string();
        assert!(said.starts_with(&format!("{key} is other data here than on rank 0")), "{said}");
    }
    // Rank 0 decides the rest, and the same data may be elsewhere.
    let ranks =
        [of(&[]), of(&[&reads("data.train", "same.txt"), "training.learning_rate=1", "data.num_workers=1"])];
    let report = run_each(&ranks, false, None).swap_remove(0).unwrap();
    assert!(report.finished);
    if cfg!(target_os = "linux") {
        assert!(report.ranks.iter().all(|rank| rank.host.is_some()) && !report.has_several_hosts());
    }
}
