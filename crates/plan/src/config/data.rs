//! `data`: texts and samples, and how they become batches.

use plimsoll_memory::ByteSize;

use super::section::section;
use super::value::{Auto, Paths, choice};

section! {
    /// Texts, and how they become batches.
    pub struct DataConfig at "data" {
        /// What is trained on: files of text or of records.
        train: Paths, "none; required to train";
        /// What the validation loss is computed on.
        validation: Paths, "none; no validation";
        /// What the files hold: running text, chats, or instructions with their answers. A text file is one document; every record of a JSONL, JSON or Parquet file is one, or a sample.
        format: DataFormat = DataFormat::Text;
        /// The field of a record that holds its text.
        text_field: String = "text".to_owned();
        /// The share of records that may be something else (not JSON, not UTF-8, without the fields) and are left out, counted and reported; more of them end the run.
        max_invalid_share: f64 = 0.2, FRACTION;
        /// Whether an end-of-text token follows the last document too; between documents there always is one.
        append_eos: bool = false;
        /// The template of chats and instructions: a Jinja file, or alpaca for plain text with headings.
        chat_template: String, "the model's own; without one, chats are refused and instructions are alpaca";
        /// Which tokens of a sample count in the loss: what the assistant says, or all.
        train_on: TrainOn = TrainOn::Assistant;
        /// What happens to a sample that is longer than a sequence: cut off on the right or on the left, dropped and counted, or an error.
        truncation: Truncation = Truncation::Right;
        /// Tokens of a training sequence.
        sequence_length: u64 = 512, TWO_TOKENS;
        /// Whether documents are joined and cut into full sequences, and samples share sequences; false: a sequence is one sample, filled up.
        packing: bool = true;
        /// Whether documents in one sequence are told apart: each has positions of its own and sees nothing of the others.
        document_mask: bool = false;
        /// Whether sequences are drawn in a random order.
        shuffle: bool = true;
        /// Seed of that order.
        seed: u64, "training.seed";
        /// Threads that make batches in the background, in one order; 0: the training thread makes them; auto: 1.
        num_workers: Auto<u64> = Auto::Auto, WORKERS;
        /// Batches that each of them makes ahead of their use.
        prefetch_factor: u64 = 2, AT_LEAST_ONE;
        /// Memory between the files and the tokenizer, for texts and files with a document a line; auto: 64KiB.
        buffer_size: Auto<ByteSize> = Auto::Auto, AT_LEAST_ONE;
        /// Whether these threads live on from one epoch to the next; false: they and their batches make room in between.
        persistent_workers: bool = true;
    }
    sections {
        /// The columns of samples where they are not called as usual.
        columns: ColumnsConfig;
    }
}

impl DataConfig {
    /// Threads that make batches in the background.
    pub fn workers(&self) -> u64 {
        self.num_workers().set().unwrap_or(1)
    }

    /// Batches that are made before they are asked for.
    pub fn batches_ahead(&self) -> u64 {
        self.workers().saturating_mul(self.prefetch_factor())
    }

    /// Host memory that the data pipeline holds for each token of a micro-batch, in bytes.
    pub fn host_bytes_per_token(&self) -> u64 {
        // A batch holds a token and a target of 4 bytes each, of samples a weight as well, and where these share sequences, a beginning.
        // There are as many as the pipeline makes ahead, and the step has its own.
        let bytes: u64 = match (self.has_samples(), self.packing()) {
            (false, _) => 8,
            (true, false) => 12,
            (true, true) => 16,
        };
        bytes.saturating_mul(self.batches_ahead().saturating_add(1))
    }

    /// Whether the files hold samples, chats or instructions, and not running text.
    pub fn has_samples(&self) -> bool {
        self.format() != DataFormat::Text
    }
}

section! {
    /// The columns of samples where they are not called as usual.
    pub struct ColumnsConfig at "data.columns" {
        /// The list of a chat's turns.
        messages: String, "messages, conversations or conversation";
        /// Who speaks in a turn.
        role: String, "role or from";
        /// What is said in a turn.
        content: String, "content or value";
        /// The question of an instruction.
        instruction: String, "instruction";
        /// What an instruction is about.
        input: String, "input";
        /// The answer to an instruction.
        output: String, "output";
        /// What the system says.
        system: String, "system";
        /// Earlier instructions with their answers, a list of pairs.
        history: String, "history";
        /// What comes before a completion.
        prompt: String, "prompt";
        /// What is trained after a prompt.
        completion: String, "completion";
        /// The tools that the assistant may call.
        tools: String, "tools";
    }
}

choice! {
    /// What data files hold.
    pub enum DataFormat {
        /// Running text, or JSONL with a field of it.
        Text = "text",
        /// Chats: lists of messages, ShareGPT's conversations, or what instructions may be.
        Chat = "chat",
        /// Instructions and answers: Alpaca's fields, prompts and completions, or what chats may be.
        Instruction = "instruction",
    }
}

choice! {
    /// Which tokens of a sample count in the loss.
    pub enum TrainOn {
        /// What the assistant says.
        Assistant = "assistant",
        /// All of them.
        All = "all",
    }
}

choice! {
    /// What happens to a sample that is longer than a sequence.
    pub enum Truncation {
        /// Its end is cut off.
        Right = "right",
        /// Its beginning is cut off.
        Left = "left",
        /// It is left out, and counted.
        Drop = "drop",
        /// It ends the run.
        Error = "error",
    }
}
