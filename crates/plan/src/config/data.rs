//! `data`: texts, and how they become batches.

use plimsoll_memory::ByteSize;

use super::section::section;
use super::value::{Auto, Paths, choice};

section! {
    /// Texts, and how they become batches.
    pub struct DataConfig at "data" {
        /// What is trained on: text or JSONL files.
        train: Paths, "none; required to train";
        /// What the validation loss is computed on.
        validation: Paths, "none; no validation";
        /// What the files hold. A text file is one document; a JSONL file has one on each line.
        format: DataFormat = DataFormat::Text;
        /// The field of a JSONL line that holds its text.
        text_field: String = "text".to_owned();
        /// Whether an end-of-text token follows the last document too; between documents there always is one.
        append_eos: bool = false;
        /// Tokens of a training sequence.
        sequence_length: u64 = 512, TWO_TOKENS;
        /// Whether documents are joined and cut into full sequences.
        packing: bool = true;
        /// Whether documents in one sequence are told apart: each has positions of its own and sees nothing of the others.
        document_mask: bool = false;
        /// Whether sequences are drawn in a random order.
        shuffle: bool = true;
        /// Seed of that order.
        seed: u64, "training.seed";
        /// Threads that make batches in the background; 0: the training thread makes them.
        num_workers: Auto<u64> = Auto::Auto, WORKERS;
        /// Batches that are made ahead of their use.
        prefetch_factor: u64 = 2, AT_LEAST_ONE;
        /// Memory between the files and the tokenizer, for files with a document a line; auto: 64KiB.
        buffer_size: Auto<ByteSize> = Auto::Auto, AT_LEAST_ONE;
        /// Whether the worker lives on from one epoch to the next.
        persistent_workers: bool = true;
    }
}

choice! {
    /// What data files hold.
    pub enum DataFormat {
        /// Running text, or JSONL with a field of it.
        Text = "text",
    }
}
