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
        /// Whether sequences are drawn in a random order.
        shuffle: bool = true;
        /// Seed of that order.
        seed: u64, "training.seed";
        /// Background threads that read and tokenise; 0: the training thread does it.
        num_workers: Auto<u64> = Auto::Auto, WORKERS;
        /// Batches that each worker prepares ahead.
        prefetch_factor: u64 = 2, AT_LEAST_ONE;
        /// Memory for text that was read and not yet tokenised.
        buffer_size: Auto<ByteSize> = Auto::Auto, AT_LEAST_ONE;
        /// Whether workers live on from one epoch to the next.
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
