//! The programs whose files are read, and how each is known by its keys.

use super::leaves::Leaf;
use super::words::{Answer, Entry};
use super::{Override, accelerate, ava, axolotl, deepspeed, llama_factory, peft, script, torchtune, trainer};

/// What DeepSpeed's file is called.
pub const DEEPSPEED: &str = "DeepSpeed's JSON";

/// What the file of accelerate's launcher is called.
pub const ACCELERATE: &str = "accelerate";

/// A program, or a library with a file of its own.
pub struct Program {
    /// What it is called.
    pub name: &'static str,
    /// Beginnings of keys that no program before it in the list has.
    marks: &'static [&'static str],
    /// Its keys; where one is in several tables, the first counts.
    tables: &'static [&'static [Entry]],
    /// Whether DeepSpeed's JSON may be in it, under `deepspeed`.
    pub holds_deepspeed: bool,
    /// Its keys that have no meaning here; where several begin alike, the first counts.
    pub answers: &'static [Answer],
    /// What it does where nothing is said.
    pub defaults: &'static [(&'static str, &'static str)],
}

/// transformers' trainer: a file without marks is one of its.
const TRAINER: Program = Program {
    name: "TrainingArguments",
    marks: &["per_device_train_batch_size", "num_train_epochs", "output_dir"],
    tables: &[&trainer::ENTRIES, &accelerate::FSDP],
    holds_deepspeed: true,
    answers: &[],
    defaults: &[],
};

const PROGRAMS: [Program; 8] = [
    Program {
        name: "torchtune",
        marks: &["checkpointer.", "model._component_", "optimizer._component_"],
        tables: &[&torchtune::ENTRIES, &torchtune::OFFLOADED],
        holds_deepspeed: false,
        answers: &[],
        defaults: &[],
    },
    Program {
        name: "Ava",
        marks: &ava::MARKS,
        tables: &[&ava::ENTRIES],
        holds_deepspeed: false,
        answers: &ava::ANSWERS,
        defaults: &[],
    },
    Program {
        name: "PEFT's adapter_config",
        marks: &["peft_type"],
        tables: &[&peft::ENTRIES],
        holds_deepspeed: false,
        answers: &[],
        defaults: &[],
    },
    Program {
        name: "LLaMA-Factory",
        marks: &OF_LLAMA_FACTORY,
        tables: &[&llama_factory::ENTRIES, &trainer::ENTRIES, &accelerate::FSDP],
        holds_deepspeed: true,
        answers: &[],
        defaults: &BY_LLAMA_FACTORY,
    },
    Program {
        name: "axolotl",
        marks: &["base_model", "micro_batch_size"],
        tables: &[&axolotl::ENTRIES, &trainer::ENTRIES, &accelerate::FSDP],
        holds_deepspeed: true,
        answers: &[],
        defaults: &[],
    },
    TRAINER,
    Program {
        name: ACCELERATE,
        marks: &["compute_environment", "distributed_type", "fsdp_config.", "deepspeed_config."],
        tables: &[&accelerate::ENTRIES, &accelerate::FSDP],
        holds_deepspeed: true,
        answers: &[],
        defaults: &[],
    },
    Program {
        name: DEEPSPEED,
        marks: &["zero_optimization", "train_micro_batch_size_per_gpu"],
        tables: &[&deepspeed::ENTRIES],
        holds_deepspeed: false,
        answers: &[],
        defaults: &BY_DEEPSPEED,
    },
];

const OF_LLAMA_FACTORY: [&str; 2] = ["finetuning_type", "cutoff_len"];

/// It adapts, and turns checkpointing on, by itself.
const BY_LLAMA_FACTORY: [(&str, &str); 3] =
    [("training.method", "lora"), ("training.lora.rank", "8"), ("training.gradient_checkpointing", "full")];

/// The same in a script, where the rank stays open.
const BY_SCRIPT_OF_LLAMA_FACTORY: [(&str, &str); 2] =
    [("training.method", "lora"), ("training.gradient_checkpointing", "full")];

/// It clips where it is told to.
const BY_DEEPSPEED: [(&str, &str); 1] = [("training.max_gradient_norm", "0")];

/// The arguments of a training script: those of launchers, of the trainer, of TRL and of LLaMA-Factory.
const SCRIPT: Program = Program {
    name: "a training script",
    marks: &[],
    tables: &[&script::ENTRIES, &llama_factory::ENTRIES, &trainer::ENTRIES, &accelerate::FSDP],
    holds_deepspeed: true,
    answers: &[],
    defaults: &[],
};

/// The same of LLaMA-Factory's own.
const SCRIPT_OF_LLAMA_FACTORY: Program =
    Program { name: "LLaMA-Factory", defaults: &BY_SCRIPT_OF_LLAMA_FACTORY, ..SCRIPT };

impl Program {
    /// The program that has such keys.
    pub fn of<'k>(keys: impl Iterator<Item = &'k str> + Clone) -> &'static Program {
        let known = PROGRAMS.iter().find(|program| {
            let begins = |key: &str| program.marks.iter().any(|mark| key.starts_with(mark));
            keys.clone().any(begins)
        });
        known.unwrap_or(&TRAINER)
    }

    /// Whose script has such arguments: LLaMA-Factory's commands and modules take its own.
    pub fn of_script<'k>(mut keys: impl Iterator<Item = &'k str>) -> &'static Program {
        match keys.any(|key| OF_LLAMA_FACTORY.contains(&key)) {
            true => &SCRIPT_OF_LLAMA_FACTORY,
            false => &SCRIPT,
        }
    }

    /// Whether a key turns FSDP on. The trainer writes a section for it whether it is on or not.
    pub fn has_fsdp(&self, leaf: &Leaf) -> bool {
        let by_section = ["axolotl", ACCELERATE].contains(&self.name);
        by_section && leaf.key.starts_with("fsdp_config.")
            || leaf.key == "fsdp" && !["", "[]", "false", "False"].contains(&leaf.value.as_str())
            || leaf.key == "distributed_type" && leaf.value == "FSDP"
    }

    /// Whether it is a script, which may do more than its arguments say; its keys are not how it is known.
    pub fn is_script(&self) -> bool {
        self.marks.is_empty()
    }

    /// What it does where nothing is said of a key.
    pub fn by_itself(&self, key: &str, value: &str) -> Override {
        let argument = format!("{} by itself: {key}={value}", self.name);
        Override { key: key.to_owned(), value: value.to_owned(), argument }
    }

    /// Whether it is what some program does where nothing is said.
    pub fn is_by_itself(one: &Override) -> bool {
        PROGRAMS.iter().any(|program| {
            one.argument.strip_prefix(program.name).is_some_and(|rest| rest.starts_with(" by itself: "))
        })
    }

    /// Their names, for an error.
    pub fn names() -> String {
        PROGRAMS.map(|program| program.name).join(", ")
    }

    /// Whether it is the one whose files are read where ours are.
    pub fn is_read_as_ours(&self) -> bool {
        self.name == "Ava"
    }

    /// Why a key has no meaning here.
    pub fn answer(&self, key: &str) -> Option<&'static str> {
        self.answers.iter().find(|(begin, _)| key.starts_with(begin)).map(|(_, why)| *why)
    }

    /// What a key stands for.
    pub fn meanings(&self, key: &str) -> Vec<Entry> {
        let of = |table: &&[Entry]| -> Vec<Entry> {
            table.iter().filter(|(theirs, ..)| *theirs == key).copied().collect()
        };
        self.tables.iter().map(of).find(|found| !found.is_empty()).unwrap_or_default()
    }
}
