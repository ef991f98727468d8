//! Configurations of other programs in our keys: files of DeepSpeed, transformers, axolotl, LLaMA-Factory, torchtune, accelerate, PEFT and
//! Ava, and the command line of a training script. Each key that is understood becomes an assignment, which is read and checked as one of the
//! command line is. The rest is listed.

mod accelerate;
mod ava;
mod axolotl;
mod deepspeed;
mod leaves;
mod llama_factory;
mod peft;
mod programs;
mod script;
mod settle;
mod sixteen_bits;
mod torchtune;
mod trainer;
mod words;

use std::path::Path;

use super::document::{Input, Yaml, shortened};
use super::load::{Document, NodeKind, read_file};
use super::place::Place;
use super::{ConfigError, Override, RawConfig};
use leaves::{Leaf, flatten};
use programs::Program;
use sixteen_bits::PRECISION;
use words::Entry;

pub use leaves::Leaf as ForeignKey;
pub use programs::{ACCELERATE, DEEPSPEED};
pub use sixteen_bits::SixteenBits;

/// What a file of another program says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Ours, to be applied before the command line's own.
    pub overrides: Vec<Override>,
    /// What is not understood, or says nothing of a step here: its place, key and value.
    pub left: Vec<String>,
}

/// How often files that are named by others are followed: a script names accelerate's, and that DeepSpeed's.
pub const NAMED_FILES: u32 = 2;

/// A file by itself, before what follows from it and from those that it names together.
struct Read {
    imported: Imported,
    program: &'static Program,
    leaves: Vec<Leaf>,
    /// The kinds of 16 bits that are switched off, where nothing else says the precision.
    off: Vec<&'static str>,
    /// Whether it is that of a launcher, whose command goes over it.
    is_launchers: bool,
}

/// What says nothing when it is off.
const OFF: [&str; 4] = ["false", "none", "0", "-1"];

/// Values that say nothing.
const EMPTY: [&str; 3] = ["", "[]", "{}"];

/// What DeepSpeed's own file decides, whatever the file that names it says: a launcher's ranks may be those of one machine.
const OF_DEEPSPEED: [&str; 3] = ["training.optimizer", "training.lr_schedule", "parallel.data_parallel"];

impl Imported {
    /// Reads a file of another program, which is known by its keys. A DeepSpeed file that it names is read too, from its folder on.
    /// Keys that `flags` set count, whatever the files say of them.
    ///
    /// # Errors
    /// As [`RawConfig::from_file`](super::RawConfig::from_file), where a file is none; two of the files do not say the same.
    pub fn from_file(path: &Path, flags: &RawConfig) -> Result<Imported, ConfigError> {
        let (text, origin) = read_file(path)?;
        Imported::from_text(&text, &origin, path.parent(), flags)
    }

    /// The same of a file of Ava's, which every command reads that reads ours; `None` where a file is none of these, or cannot be read. Our
    /// keys may stand in it too.
    ///
    /// # Errors
    /// As [`Imported::from_file`].
    pub fn read_as_ours(path: &Path) -> Result<Option<Imported>, ConfigError> {
        let Ok((text, origin)) = read_file(path) else { return Ok(None) };
        Imported::text_as_ours(&text, &origin)
    }

    /// The same of a text; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`Imported::from_file`].
    pub fn text_as_ours(text: &str, origin: &str) -> Result<Option<Imported>, ConfigError> {
        match read(text, origin) {
            Ok((_, program)) if program.is_read_as_ours() => {
                Imported::from_text(text, origin, None, &RawConfig::default()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The same of a text; files that it names are looked for in `folder`, if there is one.
    fn from_text(
        text: &str,
        origin: &str,
        folder: Option<&Path>,
        flags: &RawConfig,
    ) -> Result<Imported, ConfigError> {
        let mut named = Vec::new();
        let mut read = Read::new(text, origin, (folder, NAMED_FILES), &mut named)?;
        let mut decided = Vec::new();
        flags.visit(&mut |entry| decided.extend(entry.value.map(|_| entry.path)));
        // DeepSpeed's has to agree with all others.
        named.sort_by_key(|one| one.program.name == DEEPSPEED);
        for one in named {
            read.join(one, &decided)?;
        }
        let Read { mut imported, program, leaves, .. } = read;
        imported.settle(program, &leaves);
        Ok(imported)
    }

    /// Takes a key for what it means to a program.
    fn take(
        &mut self,
        leaf: &Leaf,
        program: &Program,
        (folder, further): (Option<&Path>, u32),
        named: &mut Vec<Read>,
    ) -> Result<(), ConfigError> {
        if program.holds_deepspeed && leaf.names_a_file() {
            let file = folder.filter(|_| further > 0).and_then(|folder| leaf.named_file(folder));
            let Some(file) = file else {
                self.left.push(leaf.shown());
                return Ok(());
            };
            let (text, origin) = read_file(&file)?;
            let mut inner = Read::new(&text, &origin, (folder, further - 1), named)?;
            inner.is_launchers = leaf.names_its_launchers();
            // Ranks of a launcher are shared out with what its command says.
            match inner.is_launchers {
                true => inner.imported.settle_fsdp(inner.program, &inner.leaves),
                false => inner.imported.settle(inner.program, &inner.leaves),
            }
            named.push(inner);
            return Ok(());
        }
        let inner = leaf.key.strip_prefix("deepspeed.").filter(|_| program.holds_deepspeed);
        let entries = match (inner, leaf.key.strip_prefix("fsdp_config.")) {
            (Some(inner), _) => Program::of(["zero_optimization"].into_iter()).meanings(inner),
            (None, Some(of_fsdp)) => {
                let name = of_fsdp.strip_prefix("fsdp_").unwrap_or(of_fsdp);
                program.meanings(&format!("fsdp_config.fsdp_{name}"))
            }
            (None, None) => program.meanings(&leaf.key),
        };
        let is_ours = || RawConfig::default().check_key(&leaf.key, &leaf.place).is_ok();
        if entries.is_empty() && program.is_read_as_ours() && program.answer(&leaf.key).is_none() && is_ours()
        {
            let (key, value) = (leaf.key.clone(), leaf.value.clone());
            self.overrides.push(Override { key, value, argument: leaf.argument() });
            return Ok(());
        }
        self.assign(leaf, &entries, program);
        Ok(())
    }

    fn assign(&mut self, leaf: &Leaf, entries: &[Entry], program: &Program) {
        if leaf.value == "auto" {
            return;
        }
        if let Some(why) = program.answer(&leaf.key).filter(|_| entries.is_empty()) {
            self.left.push(format!("{}: {why}", leaf.shown()));
            return;
        }
        let meant: Vec<(&str, String)> =
            entries.iter().filter_map(|(_, ours, meaning)| Some((*ours, meaning(&leaf.value)?))).collect();
        let value = leaf.value.trim().to_ascii_lowercase();
        let is_off = OFF.contains(&value.as_str()) || EMPTY.contains(&value.as_str());
        if meant.is_empty() && (!is_off || entries.is_empty()) {
            let counts = |ours: &str| ours == "training.optimizer" || ours.starts_with("memory.offload.");
            // What a key means first is what was meant by it.
            let first = entries.first().filter(|_| entries.iter().any(|(_, ours, _)| counts(ours)));
            self.left.push(match first {
                Some((_, ours, _)) => format!(
                    "{}: this value of {ours} is not known, and the plan is without it: it may need more memory, or less",
                    leaf.shown()
                ),
                None => leaf.shown(),
            });
        }
        for (ours, value) in meant {
            if !self.overrides.iter().any(|one| one.key == ours && one.value == value) {
                self.overrides.push(Override { key: ours.to_owned(), value, argument: leaf.argument() });
            }
        }
    }
}

impl Read {
    /// Reads a text. Files that it names, and those that they name, so many times, go to `named`.
    fn new(
        text: &str,
        origin: &str,
        (folder, further): (Option<&Path>, u32),
        named: &mut Vec<Read>,
    ) -> Result<Read, ConfigError> {
        let (leaves, program) = read(text, origin)?;
        let mut imported = Imported::default();
        let known = named.len();
        for leaf in &leaves {
            imported.take(leaf, program, (folder, further), named)?;
        }
        let off = imported.settle_precision(&leaves);
        if imported.overrides.is_empty() && named.len() == known {
            let reason = format!("no key of {} or of a training script is in it", Program::names());
            return Err(ConfigError::Syntax { place: Place::argument(&format!("{origin}:1:1")), reason });
        }
        Ok(Read { imported, program, leaves, off, is_launchers: false })
    }

    /// Takes what a file says that this one names, where the two agree.
    fn join(&mut self, inner: Read, decided: &[&str]) -> Result<(), ConfigError> {
        let of_deepspeed = inner.program.name == DEEPSPEED;
        let goes_over = inner.is_launchers;
        let said = self.imported.overrides.clone();
        self.imported.left.extend(inner.imported.left);
        for one in inner.imported.overrides {
            let is_by_itself = Program::is_by_itself(&one);
            let Some(own) = said.iter().rfind(|own| own.key == one.key) else {
                if one.key == PRECISION {
                    self.off.clone_from(&inner.off);
                }
                // A script may do more than its arguments say.
                if !is_by_itself || of_deepspeed && !self.program.is_script() {
                    self.imported.overrides.push(one);
                }
                continue;
            };
            let is_taken = match one.key.as_str() {
                key if is_by_itself || decided.contains(&key) => continue,
                PRECISION => {
                    let off = std::mem::take(&mut self.off);
                    let mut bits = SixteenBits { precision: own.value.clone(), off };
                    let other = SixteenBits { precision: one.value.clone(), off: inner.off.clone() };
                    let is_taken = bits.join(&other, goes_over);
                    self.off = bits.off;
                    is_taken
                }
                _ if same_value(own, &one) => continue,
                // Each switch turns it on.
                "training.gradient_checkpointing" if goes_over => Some(one.value == "full"),
                key if of_deepspeed && OF_DEEPSPEED.contains(&key) => Some(true),
                _ => goes_over.then_some(false),
            };
            let is_taken =
                is_taken.ok_or_else(|| ConfigError::of_two_files(&one.key, &one.argument, &own.argument))?;
            let (counts, other) = if is_taken { (&one, own) } else { (own, &one) };
            if !same_value(own, &one) {
                self.imported.left.push(format!("{} ({} counts)", other.argument, counts.argument));
            }
            if is_taken {
                self.imported.overrides.retain(|own| own.key != one.key);
                self.imported.overrides.push(one);
            }
        }
        Ok(())
    }
}

/// Whether two files say the same of a key.
fn same_value(own: &Override, other: &Override) -> bool {
    let number = |one: &Override| one.value.parse::<f64>().ok();
    own.value.eq_ignore_ascii_case(&other.value) || number(own).is_some_and(|own| number(other) == Some(own))
}

/// The keys of a text and the program that has such keys.
fn read(text: &str, origin: &str) -> Result<(Vec<Leaf>, &'static Program), ConfigError> {
    if origin.ends_with(".toml") {
        let reason = format!("a TOML file, and of none of {}; TorchTitan's are not read", Program::names());
        return Err(ConfigError::Syntax { place: Place::argument(origin), reason });
    }
    let document = Document { text, kind: NodeKind::File(origin) };
    let node = document.parse();
    let is_map = node.as_ref().is_ok_and(|node| matches!(node.value, Yaml::Map(_)));
    let script = || script::leaves(text, origin).filter(|_| !is_map);
    let (leaves, program) = match (script(), node) {
        (Some(leaves), _) => {
            let wrong = |reason| ConfigError::Syntax { place: Place::argument(origin), reason };
            let leaves = leaves.map_err(wrong)?;
            let program = Program::of_script(leaves.iter().map(|leaf| leaf.key.as_str()));
            (leaves, program)
        }
        (None, Ok(node)) if is_map => {
            let mut leaves = Vec::new();
            flatten(String::new(), Input { node: &node, source: text }, &document, &mut leaves);
            let program = Program::of(leaves.iter().map(|leaf| leaf.key.as_str()));
            (leaves, program)
        }
        (None, Ok(_)) => return Err(ConfigError::Empty { origin: origin.to_owned() }),
        (None, Err(error)) => return Err(error),
    };
    if leaves.is_empty() {
        return Err(ConfigError::Empty { origin: origin.to_owned() });
    }
    for (whose, key, known, words) in KINDS {
        let other = |leaf: &&Leaf| {
            program.name == whose
                && leaf.key == key
                && !known.iter().any(|one| one.eq_ignore_ascii_case(&leaf.value))
        };
        if let Some(kind) = leaves.iter().find(other) {
            let reason = format!("{key} {} is another kind of run: {words}", shortened(&kind.value));
            return Err(ConfigError::Syntax { place: Place::argument(&kind.place), reason });
        }
    }
    Ok((leaves, program))
}

/// Whose keys say what kind of run it is, the kinds that are known here, and these in words.
const KINDS: [(&str, &str, &[&str], &str); 4] = [
    (
        "PEFT's adapter_config",
        "peft_type",
        &["lora"],
        "of PEFT's adapters LoRA is known (with DoRA, rsLoRA and PiSSA)",
    ),
    ("LLaMA-Factory", "finetuning_type", &["full", "lora"], "full and lora are known"),
    ("LLaMA-Factory", "stage", &["pt", "sft"], "pt and sft are known, and no preferences or rewards"),
    ("axolotl", "rl", &["false"], "training on preferences is not known"),
];

/// A file of another program in that program's own keys, for whoever needs its words and not ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignFile {
    /// The program that has such keys: `TrainingArguments` where no other is known by its own.
    pub program: &'static str,
    /// What it says, in the order of the file.
    pub keys: Vec<ForeignKey>,
    /// Whether it turns FSDP on.
    pub has_fsdp: bool,
}

impl ForeignFile {
    /// Reads the files that [`Imported::from_file`] reads.
    ///
    /// # Errors
    /// It cannot be read, is no YAML or JSON and no script, or says nothing.
    pub fn read(path: &Path) -> Result<ForeignFile, ConfigError> {
        let (text, origin) = read_file(path)?;
        let (keys, program) = read(&text, &origin)?;
        let has_fsdp = keys.iter().any(|key| program.has_fsdp(key));
        Ok(ForeignFile { program: program.name, keys, has_fsdp })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Auto, MixedPrecision, Paths};

    fn read(text: &str) -> Result<Imported, ConfigError> {
        Imported::from_text(text, "theirs", None, &RawConfig::default())
    }

    fn read_file(path: &Path) -> Result<Imported, String> {
        Imported::from_file(path, &RawConfig::default()).map_err(|error| error.to_string())
    }

    /// What is configured by what was read.
    fn applied(imported: &Imported) -> RawConfig {
        let mut config = RawConfig::default();
        for Override { key, value, argument } in &imported.overrides {
            config.apply_override(key, value, argument).unwrap();
        }
        config
    }

    fn config(text: &str) -> (RawConfig, Imported) {
        let imported = read(text).unwrap();
        let config = applied(&imported);
        let mut whole = config.clone();
        whole.model.path.get_or_insert_with(|| "m".to_owned());
        whole.validate().unwrap();
        (config, imported)
    }

    #[track_caller]
    fn check(text: &str, settings: &[&str], left: &[&str]) {
        let (found, imported) = config(text);
        let wanted = RawConfig::from_overrides(settings.iter().copied()).unwrap();
        assert_eq!(found, wanted, "{imported:#?}");
        assert_eq!(imported.left, left);
    }

    #[test]
    fn deepspeed_is_understood_and_auto_stays_open() {
        let text = r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "gradient_clipping": "auto", "bf16": {"enabled": true}, "fp16": {"enabled": false},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}, "offload_param": {"device": "none"}},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}"#;
        let settings = [
            "training.batch_size=2",
            "training.gradient_accumulation_steps=4",
            "parallel.data_parallel=8",
            "training.mixed_precision=bf16",
            "parallel.zero_stage=3",
            "memory.offload={optimizer: disk, gradients: disk, parameters: device}",
            "memory.disk_path=/fast",
            "training.optimizer=adamw",
            "training.learning_rate=1e-4",
            "training.adam_beta1=0.9",
            "training.adam_beta2=0.95",
            "training.lr_schedule=cosine",
            "training.warmup_steps=10",
            "training.steps=100",
        ];
        check(text, &settings, &["theirs:3:59: zero_optimization.reduce_bucket_size (5e8)"]);
    }

    #[test]
    fn arguments_of_the_trainer_are_understood() {
        let text = r#"{"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0.03,
  "optim": "lion_8bit", "adam_beta2": 0.95, "fp16": true, "gradient_checkpointing": true, "report_to": ["wandb"]}"#;
        let settings = [
            "training.batch_size=4",
            "training.epochs=3",
            "training.warmup_ratio=0.03",
            "training.optimizer=lion_8bit",
            "training.optimizer_options.beta2=0.95",
            "training.mixed_precision=fp16",
            "training.gradient_checkpointing=full",
        ];
        check(text, &settings, &["theirs:2:104: report_to ([\"wandb\"])"]);
    }

    #[test]
    fn axolotl_is_understood_with_deepspeed_inside() {
        let text = "base_model: org/m\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\npeft_use_dora: false\nactivation_offloading: true\nlora_target_modules: [q_proj, v_proj]\n\
                    sequence_len: 1024\nmicro_batch_size: 2\noptimizer: adamw_bnb_8bit\nlearning_rate: 2e-4\n\
                    deepspeed: {zero_optimization: {stage: 2}}\nwandb_project: x\n";
        let settings = [
            "model.path=org/m",
            "training.method=qlora",
            "training.quantization=nf4",
            "training.lora.rank=8",
            "training.lora.target_modules=[q_proj, v_proj]",
            "data.sequence_length=1024",
            "training.batch_size=2",
            "training.optimizer=adamw_8bit",
            "training.learning_rate=2e-4",
            "parallel.zero_stage=2",
            "memory.offload.activations=host",
        ];
        check(text, &settings, &["theirs:13:16: wandb_project (x)"]);
    }

    #[test]
    fn llama_factory_is_understood() {
        let text = "model_name_or_path: org/m\nstage: sft\nfinetuning_type: lora\nlora_target: q_proj,v_proj\nlora_rank: 8\n\
                    quantization_bit: 4\ncutoff_len: 2048\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n\
                    flash_attn: fa2\nbf16: true\n";
        let settings = [
            "model.path=org/m",
            "training.method=qlora",
            "training.quantization=nf4",
            "training.lora.rank=8",
            "training.lora.target_modules=[q_proj, v_proj]",
            "data.sequence_length=2048",
            "training.batch_size=1",
            "training.gradient_accumulation_steps=8",
            "training.attention=flash",
            "training.mixed_precision=bf16",
            "training.gradient_checkpointing=full",
        ];
        check(text, &settings, &["theirs:2:8: stage (sft)"]);
    }

    #[test]
    fn torchtune_is_understood() {
        let text = "model:\n  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b\n  lora_attn_modules: [q_proj, output_proj]\n  \
                    lora_rank: 8\n  quantize_base: true\ncheckpointer: {checkpoint_dir: m}\noptimizer: {_component_: \
                    bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5, betas: [0.9, 0.95]}\nbatch_size: 2\ndtype: bf16\n\
                    enable_activation_checkpointing: True\nenable_activation_offloading: False\ncompile: False\n";
        let settings = [
            "model.path=m",
            "training.method=qlora",
            "training.quantization=nf4",
            "training.lora.rank=8",
            "training.lora.target_modules=[q_proj, o_proj]",
            "training.optimizer=adamw_8bit",
            "training.learning_rate=2e-5",
            "training.adam_beta1=0.9",
            "training.adam_beta2=0.95",
            "training.batch_size=2",
            "training.mixed_precision=bf16",
            "training.gradient_checkpointing=full",
        ];
        check(text, &settings, &["theirs:12:10: compile (False)"]);
    }

    #[test]
    fn accelerate_is_understood() {
        let text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n\
                    fsdp_config: {fsdp_reshard_after_forward: true, fsdp_offload_params: true}\n\
                    parallelism_config: {parallelism_config_tp_size: 2}\n";
        let settings = [
            "training.mixed_precision=bf16",
            "parallel.data_parallel=4",
            "parallel.tensor_parallel=2",
            "parallel.zero_stage=3",
            "memory.offload={parameters: host, gradients: host, optimizer: host}",
        ];
        let left =
            ["theirs:1:22: compute_environment (LOCAL_MACHINE)", "theirs:2:19: distributed_type (FSDP)"];
        check(text, &settings, &left);
    }

    /// Any of three places turns checkpointing on; of two precisions that do not agree, `mixed_precision` counts.
    #[test]
    fn ava_is_understood() {
        let text = "model: {hidden_size: 512, num_layers: 14, num_attention_heads: 8, num_experts: 8, use_flash_attention: true}\n\
                    training:\n  batch_size: 12\n  bf16: true\n  mixed_precision: fp16\n  gradient_checkpointing: false\n  \
                    deepspeed: {use_deepspeed: true, zero_stage: 2, cpu_offload: true}\n  memory: {target_utilization: 0.9}\n\
                    data: {max_length: 256, num_workers: 8}\noutput: {gradient_checkpointing: true}\n";
        let settings = [
            "model.from_scratch.hidden_size=512",
            "model.from_scratch.num_hidden_layers=14",
            "model.from_scratch.num_attention_heads=8",
            "model.from_scratch.num_experts=8",
            "model.from_scratch.architecture=mixtral",
            "training.attention=flash",
            "training.batch_size=12",
            "training.mixed_precision=fp16",
            "training.gradient_checkpointing=full",
            "parallel.zero_stage=2",
            "memory.offload.optimizer=host",
            "memory.target_utilization=0.9",
            "data.sequence_length=256",
            "data.num_workers=8",
            "model.from_scratch.intermediate_size=2048",
        ];
        let imported = read(text).unwrap();
        let found = applied(&imported);
        assert_eq!(found, RawConfig::from_overrides(settings.iter().copied()).unwrap(), "{imported:#?}");
        let left = imported.left.join("\n");
        for words in ["training.bf16 true (theirs:5", "training.gradient_checkpointing false (theirs:10"] {
            assert!(left.contains(words), "{words}: {left}");
        }
    }

    /// A value that decides what a step takes, and is none of ours, is said to be missing from the plan.
    #[test]
    fn an_optimizer_that_is_not_known_is_said_to_count() {
        let text = r#"{"per_device_train_batch_size": 1, "optim": "rmsprop", "report_to": "wandb"}"#;
        let left = read(text).unwrap().left;
        let of = |key: &str| left.iter().find(|one| one.contains(key)).unwrap();
        assert!(of("rmsprop").contains("this value of training.optimizer is not known"), "{left:?}");
        assert!(!of("wandb").contains("not known"), "{left:?}");
    }

    /// Switches that are off say f32; those that are left away say nothing.
    #[test]
    fn sixteen_bits_that_are_off_are_32() {
        let precision = |text: &str| config(text).0.training.mixed_precision().set();
        for text in [
            r#"{"learning_rate": 1e-4, "bf16": false, "fp16": false}"#,
            r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": false}}"#,
            "base_model: m\nadapter: lora\nmicro_batch_size: 1\nfloat32: true\n",
        ] {
            assert_eq!(precision(text), Some(MixedPrecision::F32), "{text}");
        }
        assert_eq!(
            precision(r#"{"learning_rate": 1e-4, "fp16": false, "bf16": true}"#),
            Some(MixedPrecision::Bf16)
        );
        assert_eq!(precision(r#"{"learning_rate": 1e-4}"#), None);
    }

    /// Every key of Ava's table has a meaning or an answer, and the whole is a configuration. Ours may stand among them.
    #[test]
    fn all_of_ava_is_carried_over_or_answered() {
        let text = include_str!("imported/ava_example.yaml");
        let imported = Imported::text_as_ours(text, "base.yaml").unwrap().unwrap();
        let found = applied(&imported);
        found.validate().unwrap();
        assert_eq!(found.data.train, Some(Paths::one("corpus.txt")));
        assert_eq!(found.model.from_scratch.num_experts, Some(8));
        let training = &found.training;
        assert_eq!(training.mixed_precision().set(), Some(MixedPrecision::Fp16));
        assert_eq!(training.dynamic_batching.max_batch_size, Some(16));
        let Auto::Set(attention) = training.attention() else { panic!("{:?}", training.attention()) };
        let words = "{block_sparse: {block: 64, local_blocks: 4, global_blocks: 0}}";
        assert_eq!(attention.to_string(), words);
        let left = imported.left.join("\n");
        for words in [
            "training.clear_cache_frequency (50): there is no cache to clear",
            "training.memory.pool_size_gb (24): the arena has just the size",
            "data.buffer_size (30000): ",
            "performance.torch_compile.mode (max-autotune): there is no PyTorch",
            "performance.float32_matmul_precision (high): ",
            "training.bf16 true (base.yaml:",
        ] {
            assert!(left.contains(words), "{words}: {left}");
        }
        for one in &imported.left {
            let answered = one.contains("): ") || one.contains(" counts)");
            assert!(answered, "{one}");
        }
    }

    /// DeepSpeed's keys count where it is used, and files of ours are left to us.
    #[test]
    fn what_ava_turns_off_is_off() {
        let text = "model: {num_layers: 2}\ntraining: {deepspeed: {use_deepspeed: false, zero_stage: 3, cpu_offload: true}}\n";
        let imported = Imported::text_as_ours(text, "a.yaml").unwrap().unwrap();
        let keys: Vec<&str> = imported.overrides.iter().map(|one| one.key.as_str()).collect();
        assert_eq!(keys, ["model.from_scratch.num_hidden_layers"]);
        assert!(imported.left.iter().any(|one| one.contains("zero_stage 3 (use_deepspeed is false)")));
        for ours in ["model: m\ntraining: {dynamic_batching: {enabled: true}}\n", "", "[", "training: 3"] {
            assert_eq!(Imported::text_as_ours(ours, "ours.yaml").unwrap(), None, "{ours}");
        }
    }

    #[test]
    fn the_command_line_of_a_script_is_understood_with_the_file_that_it_names() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ds.json"), r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
        let text = "#!/bin/bash\n# --bf16 False\nexport OMP_NUM_THREADS=8\n\
                    torchrun --nproc_per_node 8 train.py \\\n  --model_name_or_path 'org/my model' --bf16 True \\\n  \
                    --per-device-train-batch-size=2 --gradient_checkpointing --deepspeed ds.json \\\n  --report_to wandb # later\n";
        let file = folder.path().join("run.sh");
        std::fs::write(&file, text).unwrap();
        let imported = read_file(&file).unwrap();
        let found = applied(&imported);
        let settings = [
            "parallel.data_parallel=8",
            "model.path=org/my model",
            "training.mixed_precision=bf16",
            "training.batch_size=2",
            "training.gradient_checkpointing=full",
            "parallel.zero_stage=2",
        ];
        assert_eq!(found, RawConfig::from_overrides(settings.iter().copied()).unwrap(), "{imported:#?}");
        assert_eq!(imported.left, [format!("{}:7: report_to (wandb)", file.display())]);
        let text_of_open = "torchrun train.py --bf16 True \\\n --x 'open\n";
        let open = Imported::from_text(text_of_open, "run.sh", None, &RawConfig::default()).unwrap_err();
        assert!(open.to_string().contains("run.sh:2: a quote is not closed"), "{open}");
        let missing = text.replace("ds.json", "no.json");
        std::fs::write(&file, missing).unwrap();
        assert!(read_file(&file).unwrap_err().contains("no.json"));
    }

    #[test]
    fn a_script_of_llama_factory_has_its_defaults() {
        let text = "llamafactory-cli train --model_name_or_path m --finetuning_type lora --cutoff_len 64\n";
        let settings = [
            "model.path=m",
            "training.method=lora",
            "data.sequence_length=64",
            "training.gradient_checkpointing=full",
        ];
        check(text, &settings, &[]);
    }

    /// What is not said is LLaMA-Factory's own: adapters of rank 8. Of a full fine-tuning there is no rank.
    #[test]
    fn a_file_of_llama_factory_has_its_defaults() {
        let adapted = [
            "model.path=m",
            "training.method=lora",
            "data.sequence_length=64",
            "training.lora.rank=8",
            "training.gradient_checkpointing=full",
        ];
        check("model_name_or_path: m\nfinetuning_type: lora\ncutoff_len: 64\n", &adapted, &[]);
        check("model_name_or_path: m\ncutoff_len: 64\n", &adapted, &[]);
        let quantised = [&adapted[..], &["training.method=qlora", "training.quantization=nf4"]].concat();
        check("model_name_or_path: m\ncutoff_len: 64\nquantization_bit: 4\n", &quantised, &[]);
        let full = ["model.path=m", "training.method=full", "training.gradient_checkpointing=full"];
        check("model_name_or_path: m\nfinetuning_type: full\n", &full, &[]);
        let (script, _) = config("llamafactory-cli train --model_name_or_path m --cutoff_len 64\n");
        assert_eq!(script.training.method.map(|method| method.to_string()).as_deref(), Some("lora"));
    }

    /// Updates in the backward pass have no norm to clip by, and torchtune does not clip unless it is told to.
    #[test]
    fn torchtune_clips_where_it_says_so() {
        let norm = |more: &str| {
            let text = format!("checkpointer: {{checkpoint_dir: m}}\nbatch_size: 1\n{more}");
            config(&text).0.training.max_gradient_norm
        };
        assert_eq!(norm("optimizer_in_bwd: true\n"), Some(0.0));
        assert_eq!(norm("clip_grad_norm: null\n"), Some(0.0));
        assert_eq!(norm("clip_grad_norm: 0.5\n"), Some(0.5));
    }

    /// DeepSpeed's Adam is AdamW, and it clips where it says so.
    #[test]
    fn deepspeed_has_its_defaults() {
        let text = |more: &str| {
            format!(r#"{{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "Adam"}}{more}}}"#)
        };
        let settings = ["training.batch_size=1", "training.optimizer=adamw"];
        check(&text(""), &[&settings[..], &["training.max_gradient_norm=0"]].concat(), &[]);
        check(&text(r#", "gradient_clipping": "auto""#), &settings, &[]);
        let clipped = [&settings[..], &["training.max_gradient_norm=0.5"]].concat();
        check(&text(r#", "gradient_clipping": 0.5"#), &clipped, &[]);
    }

    /// Arguments of the trainer that name DeepSpeed's file.
    fn with_deepspeed(arguments: &str, deepspeed: &str) -> Result<(RawConfig, Vec<String>), String> {
        with_deepspeed_under(&RawConfig::default(), arguments, deepspeed)
    }

    fn with_deepspeed_under(
        flags: &RawConfig,
        arguments: &str,
        deepspeed: &str,
    ) -> Result<(RawConfig, Vec<String>), String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ds.json"), deepspeed).unwrap();
        let file = folder.path().join("arguments.json");
        std::fs::write(&file, format!(r#"{{"deepspeed": "ds.json", {arguments}}}"#)).unwrap();
        let imported = Imported::from_file(&file, flags).map_err(|error| error.to_string())?;
        Ok((applied(&imported), imported.left))
    }

    #[test]
    fn a_file_and_the_one_that_it_names_agree_or_are_refused() {
        let arguments =
            r#""per_device_train_batch_size": 4, "learning_rate": 1e-4, "optim": "adamw_8bit", "bf16": true"#;
        let refused = with_deepspeed(
            arguments,
            r#"{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}"#,
        );
        let refused = refused.unwrap_err();
        for words in [
            "ds.json:1:36: train_micro_batch_size_per_gpu 2",
            "both are training.batch_size",
            "arguments.json:1:57: per_device_train_batch_size 4",
        ] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        // The optimizer that DeepSpeed's file names is the one that is made; numbers may be written in two ways.
        let same = r#"{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "fp16": {"enabled": false},
            "optimizer": {"type": "Adam", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 2}}"#;
        let (found, left) = with_deepspeed(arguments, same).unwrap();
        let settings = [
            "training.batch_size=4",
            "training.learning_rate=1e-4",
            "training.optimizer=adamw",
            "training.mixed_precision=bf16",
            "parallel.zero_stage=2",
        ];
        assert_eq!(found, RawConfig::from_overrides(settings).unwrap(), "{left:?}");
        for words in ["optim adamw_8bit (", "fp16.enabled false ("] {
            assert!(left.iter().any(|left| left.contains(words) && left.ends_with(" counts)")), "{left:?}");
        }
        // What one file says twice is no matter of two.
        let folders = r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "nvme", "nvme_path": "/b"}}}"#;
        assert!(with_deepspeed(arguments, folders).is_ok());
    }

    /// Switches of 16 bits of the same kind have to agree; those that are off say nothing of the other kind.
    #[test]
    fn two_files_agree_about_16_bits_or_are_refused() {
        for (arguments, deepspeed) in [
            (r#""bf16": true"#, r#""bf16": {"enabled": false}"#),
            (r#""bf16": true"#, r#""fp16": {"enabled": true}"#),
            (r#""bf16": false, "fp16": false"#, r#""bf16": {"enabled": true}"#),
        ] {
            let [arguments, deepspeed] = [
                format!(r#""learning_rate": 1e-4, {arguments}"#),
                format!(r#"{{"zero_optimization": {{"stage": 2}}, {deepspeed}}}"#),
            ];
            let error = with_deepspeed(&arguments, &deepspeed).unwrap_err();
            for words in
                ["ds.json:1:", " does not go with ", "arguments.json:1:", "both are training.mixed_precision"]
            {
                assert!(error.contains(words), "{words}: {error}");
            }
            // A flag goes over both, whatever it says.
            for flag in ["training.mixed_precision=fp16", "training.mixed_precision=auto"] {
                let flags = RawConfig::from_overrides([flag]).unwrap();
                assert!(with_deepspeed_under(&flags, &arguments, &deepspeed).is_ok(), "{flag}");
            }
            let others = RawConfig::from_overrides(["training.batch_size=3"]).unwrap();
            assert!(with_deepspeed_under(&others, &arguments, &deepspeed).is_err());
        }
        let precision = |arguments: &str, deepspeed: &str| {
            let deepspeed = format!(r#"{{"zero_optimization": {{"stage": 2}}, {deepspeed}}}"#);
            with_deepspeed(arguments, &deepspeed).unwrap().0.training.mixed_precision().set()
        };
        let on = r#""bf16": {"enabled": true}"#;
        assert_eq!(precision(r#""fp16": false"#, on), Some(MixedPrecision::Bf16));
        assert_eq!(precision(r#""bf16": "auto", "fp16": false"#, on), Some(MixedPrecision::Bf16));
        let off = r#""fp16": {"enabled": false}"#;
        assert_eq!(precision(r#""bf16": false"#, off), Some(MixedPrecision::F32));
        assert_eq!(precision(r#""bf16": "auto", "fp16": false"#, r#""wall_clock_breakdown": true"#), None);
    }

    /// A command goes over the file of its launcher, wherever it names that. Ranks are shared out once.
    #[test]
    fn the_file_of_a_launcher_yields() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp16\ngradient_accumulation_steps: 2\n\
                        parallelism_config: {parallelism_config_tp_size: 2}\n";
        std::fs::write(folder.path().join("a.yaml"), launcher).unwrap();
        let file = folder.path().join("run.sh");
        for (text, settings) in [
            (
                "accelerate launch --config_file a.yaml train.py --bf16 true --gradient_accumulation_steps 4",
                [
                    "parallel.data_parallel=4",
                    "training.mixed_precision=bf16",
                    "training.gradient_accumulation_steps=4",
                ],
            ),
            (
                "accelerate launch --num_processes 4 --config_file a.yaml train.py --bf16 false",
                [
                    "parallel.data_parallel=2",
                    "training.mixed_precision=fp16",
                    "training.gradient_accumulation_steps=2",
                ],
            ),
        ] {
            std::fs::write(&file, text).unwrap();
            let imported = read_file(&file).unwrap();
            let common = ["parallel.zero_stage=3", "parallel.tensor_parallel=2"];
            let wanted = RawConfig::from_overrides(settings.into_iter().chain(common)).unwrap();
            assert_eq!(applied(&imported), wanted, "{imported:#?}");
        }
    }

    /// Where neither file says it, DeepSpeed does not clip.
    #[test]
    fn the_norm_is_that_of_the_trainer_where_deepspeeds_file_has_none() {
        let norm = |arguments: &str| {
            let (config, _) = with_deepspeed(arguments, r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
            config.training.max_gradient_norm
        };
        assert_eq!(norm(r#""learning_rate": 1e-4"#), Some(0.0));
        assert_eq!(norm(r#""max_grad_norm": 0.7"#), Some(0.7));
    }

    /// Values that say nothing are no loss, and what is not known is said of the key that was meant.
    #[test]
    fn empty_values_say_nothing_and_unknown_ones_name_their_key() {
        for empty in ["[]", "{}", "\"\""] {
            let text = format!(r#"{{"per_device_train_batch_size": 4, "fsdp": {empty}}}"#);
            check(&text, &["training.batch_size=4"], &[]);
        }
        let text = r#"{"per_device_train_batch_size": 4, "gradient_checkpointing": "yes"}"#;
        let left = read(text).unwrap().left;
        assert_eq!(left.len(), 1);
        assert!(left[0].contains("this value of training.gradient_checkpointing is not known"), "{left:?}");
    }

    #[test]
    fn a_script_says_how_its_launcher_starts_it() {
        let folder = tempfile::tempdir().unwrap();
        let accelerate = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n";
        std::fs::write(folder.path().join("fsdp.yaml"), accelerate).unwrap();
        std::fs::write(folder.path().join("ds.json"), r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
        for (text, settings) in [
            (
                "accelerate launch --config_file fsdp.yaml train.py --model_max_length 512",
                [
                    "data.sequence_length=512",
                    "parallel.data_parallel=8",
                    "training.mixed_precision=bf16",
                    "parallel.zero_stage=3",
                ],
            ),
            (
                "deepspeed --include localhost:0,1,2,3 train.py --deepspeed_config ds.json --bf16 --learning_rate 1e-4",
                [
                    "parallel.data_parallel=4",
                    "training.mixed_precision=bf16",
                    "training.learning_rate=1e-4",
                    "parallel.zero_stage=2",
                ],
            ),
        ] {
            let file = folder.path().join("run.sh");
            std::fs::write(&file, text).unwrap();
            let imported = read_file(&file).unwrap();
            let found = applied(&imported);
            assert_eq!(found, RawConfig::from_overrides(settings.iter().copied()).unwrap(), "{imported:#?}");
        }
    }

    #[test]
    fn axolotl_and_the_trainer_may_hold_settings_of_fsdp() {
        let axolotl = "base_model: org/m\nsequence_len: 1024\nmicro_batch_size: 2\nbf16: true\nfsdp: [full_shard, auto_wrap]\n\
                       fsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}\n";
        let settings = [
            "model.path=org/m",
            "data.sequence_length=1024",
            "training.batch_size=2",
            "training.mixed_precision=bf16",
            "parallel.sharding_strategy=full_shard",
            "memory.offload={parameters: host, gradients: host, optimizer: host}",
        ];
        check(axolotl, &settings, &["theirs:6:64: fsdp_config.fsdp_state_dict_type (FULL_STATE_DICT)"]);
        let second = "base_model: org/m\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: false}\n";
        check(second, &["model.path=org/m", "parallel.zero_stage=2"], &["theirs:2:15: fsdp_version (2)"]);
        let trainer = r#"{"per_device_train_batch_size": 4, "fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"activation_checkpointing": true}}"#;
        let settings = [
            "training.batch_size=4",
            "parallel.sharding_strategy=shard_grad_op",
            "training.gradient_checkpointing=full",
        ];
        check(trainer, &settings, &[]);
        // The trainer writes the section whether FSDP is on or not.
        let off = r#"{"per_device_train_batch_size": 4, "fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": false}}"#;
        let imported = read(off).unwrap();
        assert_eq!(imported.overrides.len(), 1, "{imported:?}");
    }

    #[test]
    fn an_adapter_of_peft_is_lora_or_refused() {
        let text = r#"{"peft_type": "LORA", "base_model_name_or_path": "org/m", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
  "target_modules": ["q_proj", "v_proj"], "use_dora": true, "bias": "none"}"#;
        let settings = [
            "training.method=lora",
            "model.path=org/m",
            "training.lora.rank=16",
            "training.lora.alpha=32",
            "training.lora.dropout=0.05",
            "training.lora.target_modules=[q_proj, v_proj]",
            "training.lora.use_dora=true",
        ];
        check(text, &settings, &["theirs:2:69: bias (none)"]);
        let other = text.replace("LORA", "IA3");
        let error = read(&other).unwrap_err().to_string();
        assert!(error.starts_with("theirs:1:15: peft_type IA3 is another kind of run"), "{error}");
        for text in
            ["finetuning_type: freeze\n", "finetuning_type: lora\nstage: dpo\n", "base_model: m\nrl: dpo\n"]
        {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("another kind of run"), "{error}");
        }
    }

    #[test]
    fn torchtune_adapts_beside_attention_what_it_says() {
        let text = "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], apply_lora_to_mlp: true,\n  \
                    apply_lora_to_output: false}\nlr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup}\n";
        let settings = [
            "training.method=lora",
            "training.lora.target_modules=[q_proj, v_proj, gate_proj, up_proj, down_proj]",
            "training.lr_schedule=cosine",
        ];
        check(text, &settings, &[]);
    }

    /// When to validate and how samples are put together says nothing without data.
    #[test]
    fn what_is_about_data_is_listed_where_none_are_named() {
        let text = r#"{"per_device_train_batch_size": 4, "eval_steps": 100, "packing": false}"#;
        let left = [
            "theirs:1:50: eval_steps 100 (the data are not named)",
            "theirs:1:66: packing false (the data are not named)",
        ];
        check(text, &["training.batch_size=4"], &left);
    }

    #[test]
    fn adapters_without_adapters_are_listed() {
        check("base_model: m\nlora_r: 8\n", &["model.path=m"], &["theirs:2:9: lora_r 8 (without adapters)"]);
    }

    #[test]
    fn files_of_strangers_are_refused_with_their_place() {
        let error = |text: &str| read(text).unwrap_err().to_string();
        for text in [
            "{\"zero_optimization\": {\"stage\": 3, ",
            &"[".repeat(100_000),
            &format!("{}1{}", "{\"a\": ".repeat(500), "}".repeat(500)),
            "{\"a\": 1, \"a\": 2}",
            "{\"some\": {\"thing\": \"else\"}}",
        ] {
            assert!(error(text).starts_with("theirs:"), "{}", error(text));
        }
        for text in ["", "[]", "3", "null"] {
            assert!(error(text).starts_with("theirs"), "{}", error(text));
        }
        let wrong = read(r#"{"zero_optimization": {"stage": 9}}"#).unwrap();
        let Override { key, value, argument } = &wrong.overrides[0];
        let mut config = RawConfig::default();
        let refused = config.apply_override(key, value, argument).and_then(|()| config.validate());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("theirs:1:33: zero_optimization.stage 9"), "{refused}");
    }
}
