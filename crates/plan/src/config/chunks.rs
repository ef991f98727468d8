//! Sequences that are visited in chunks: what that decides of what is left open, and what it rules out. Batches are of one
//! sequence then: [`batches`](crate::resolve) leaves out the others.

use std::borrow::Cow;

use plimsoll_step::{AttentionKind, Checkpointing, Compression, MOST_CHUNKS};

use super::error::conflicts;
use super::{Auto, ConfigError, GradientCheckpointing, OffloadTarget, RawConfig};

impl RawConfig {
    /// Tokens of a chunk, where a sequence is longer.
    pub fn sequence_chunk(&self) -> Option<u64> {
        self.training.sequence_chunk_tokens.filter(|chunk| *chunk < self.data.sequence_length())
    }

    /// The same with what follows from chunks: one sequence at a time, of which the inputs of layers wait below the device.
    pub(crate) fn for_chunks(&self) -> Cow<'_, RawConfig> {
        if self.sequence_chunk().is_none() {
            return Cow::Borrowed(self);
        }
        let mut own = self.clone();
        let training = &mut own.training;
        training.micro_batches_per_pass = Some(Auto::Set(1));
        training.gradient_checkpointing = Some(Auto::Set(GradientCheckpointing::Form(Checkpointing::Full)));
        let memory = &mut own.memory;
        if memory.offload.activations() == Auto::Auto {
            memory.offload.activations = Some(Auto::Set(OffloadTarget::Disk));
        }
        memory.kept_layers.activations = Some(Auto::Set(0));
        Cow::Owned(own)
    }

    pub(super) fn check_chunks(&self, errors: &mut Vec<ConfigError>) {
        let Some(chunk) = self.sequence_chunk() else { return };
        let training = &self.training;
        let own = self.conflicting("training.sequence_chunk_tokens", chunk);
        let mut conflict = conflicts(own, errors);
        let length = self.data.sequence_length();
        if length.div_ceil(chunk.max(1)) > MOST_CHUNKS {
            let key = self.conflicting("data.sequence_length", length);
            let remedy =
                format!("set training.sequence_chunk_tokens to {} or more", length.div_ceil(MOST_CHUNKS));
            conflict(key, &format!("a sequence has at most {MOST_CHUNKS} chunks"), &remedy);
        }
        let alone = "sequences in chunks come one at a time";
        let batch = self.batch_settings().ok().and_then(|batch| batch.batch_size);
        if let Some(batch) = batch.filter(|batch| *batch != 1) {
            let key = self.conflicting("training.batch_size", batch);
            let remedy =
                "set training.batch_size to 1, and training.gradient_accumulation_steps to as many sequences";
            conflict(key, alone, remedy);
        }
        if let Some(batch) = training.eval_batch_size().set().filter(|batch| *batch != 1) {
            let key = self.conflicting("training.eval_batch_size", batch);
            conflict(key, alone, "set training.eval_batch_size to 1 or auto");
        }
        if let Some(together) = training.micro_batches_per_pass().set().filter(|together| *together != 1) {
            let key = self.conflicting("training.micro_batches_per_pass", together);
            conflict(key, alone, "set training.micro_batches_per_pass to 1 or auto");
        }
        let full = GradientCheckpointing::Form(Checkpointing::Full);
        if let Some(form) = training.gradient_checkpointing().set().filter(|form| *form != full) {
            let key = self.conflicting("training.gradient_checkpointing", form);
            let reason = "chunks of a sequence keep the inputs of layers alone";
            conflict(key, reason, "set training.gradient_checkpointing to full or auto");
        }
        let compression = training.activation_compression();
        if compression.0 != Compression::None {
            let key = self.conflicting("training.activation_compression", compression);
            let reason = "what chunks of a sequence leave is kept as it is";
            conflict(key, reason, "set training.activation_compression to none");
        }
        if let Auto::Set(attention) = training.attention()
            && attention.0 == AttentionKind::Standard
        {
            let key = self.conflicting("training.attention", attention);
            let reason = "scores of a sequence in chunks are not written out";
            conflict(key, reason, "set training.attention to flash or auto");
        }
        let below = "what chunks of a sequence leave waits below the device";
        if self.memory.offload.activations() == Auto::Set(OffloadTarget::Device) {
            let key = self.conflicting("memory.offload.activations", OffloadTarget::Device);
            conflict(key, below, "set memory.offload.activations to host, disk or auto");
        }
        if let Some(layers) = self.memory.kept_layers.activations().set().filter(|layers| *layers > 0) {
            let key = self.conflicting("memory.kept_layers.activations", layers);
            conflict(key, below, "set memory.kept_layers.activations to 0 or auto");
        }
    }
}
