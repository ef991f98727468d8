//! What a process does beside its steps: loading its weights through the host, going on from a checkpoint, evaluating, saving, merging.

use std::rc::Rc;

use super::Process;
use crate::eager::Tensor;
use crate::model::Decoder;
use crate::optimizer::States;
use crate::run::{Quantization, Run, Sharding, Stack};
use crate::sharded::{self, Shards};

/// Bytes of a file of weights at most: `save_pretrained` makes the next one then (`max_shard_size`, 5 GB up to transformers 4).
const FILE: u64 = 5_000_000_000;

impl Process<'_> {
    /// Host memory of a process while its weights come: as they were stored, until they are on the device.
    pub(super) fn host_while_loading(run: &Run) -> u64 {
        let all = run.model.parameter_count().saturating_mul(run.weights.bytes());
        match (run.stack, run.quantization, run.sharding) {
            // Mapped from the file, a tensor at a time: `lazy_load`, or bitsandbytes with a `device_map`.
            (Stack::Litgpt, ..)
            | (_, Some(Quantization::FourBit { .. } | Quantization::Int8), Sharding::None) => 0,
            // `zero.Init` shares parameters as they are made; a file of the checkpoint is in memory beside them.
            (_, _, Sharding::Zero { stage: 3, .. }) => all.min(FILE),
            _ => all,
        }
    }

    /// Batches that workers have made ahead, two for each (`prefetch_factor`): token ids, labels and a mask in pinned memory, each rounded
    /// up to a power of two. What a worker's own process takes is not in here.
    pub(super) fn batches_on_host(run: &Run) -> i64 {
        let tensor = run.batch.saturating_mul(run.sequence).saturating_mul(8).next_power_of_two();
        let ahead = run.data_workers.saturating_mul(2).saturating_mul(3);
        ahead.saturating_mul(tensor).min(i64::MAX as u64).cast_signed()
    }

    /// Going on from a checkpoint: its weights are read on the host and copied over those that are there, a file after the other; the
    /// optimizer's file is on the host as a whole while its states are made on the device (`_load_optimizer_and_scheduler`).
    pub(super) fn resume(&mut self, states: &mut States, parameters: &[Tensor]) {
        let weights: u64 = parameters.iter().map(Tensor::bytes).sum();
        let host = |bytes: u64| bytes.min(i64::MAX as u64).cast_signed();
        let file = host(weights.min(FILE));
        self.torch.memory().host(file);
        self.torch.memory().host(-file);
        states.restore(&self.torch, parameters);
        let read = host(states.bytes());
        self.torch.memory().host(read);
        self.end("resume");
        self.torch.memory().host(-read);
        self.torch.memory().reset_peaks();
    }

    /// `merge_and_unload`, an adapter after the other, then the merged weights are written, a file after the other.
    pub(super) fn merge(&mut self, model: &Decoder) {
        let torch = &self.torch;
        torch.no_grad(|| model.merge(torch));
        let all = self.run.model.parameter_count().saturating_mul(self.run.weights.bytes());
        let file = all.min(FILE).cast_signed();
        torch.memory().host(file);
        self.end("merge");
        self.torch.memory().host(-file);
        self.torch.memory().reset_peaks();
    }

    /// The trainer's evaluation: a forward pass without gradients, whose loss alone is kept (`prediction_loss_only`).
    pub(super) fn evaluate(&mut self, model: &Rc<Decoder>, shards: Option<&Shards>) {
        let Some(batch) = self.run.eval_batch else { return };
        let run = Run { batch, ..sharded::inner(self.run) };
        let [tokens, labels] = [0, 1].map(|_| self.tokens_of(batch, run.sequence));
        if let Some(shards) = shards {
            shards.begin(&self.torch);
        }
        let out = self.torch.no_grad(|| self.forward(model, &run, &tokens, &labels));
        drop(out);
        if let Some(shards) = shards {
            shards.finish(&self.torch);
        }
        self.end("evaluate");
    }

    /// Saving: what is shared is gathered, a unit after the other, and waits on the host of the first rank; else a file of weights, or the
    /// adapters.
    pub(super) fn save(&mut self, model: &Decoder, shards: Option<&Shards>) {
        let run = self.run;
        let all = run.model.parameter_count().saturating_mul(run.weights.bytes());
        let on_host = match (shards, &run.adapter) {
            (Some(shards), _) => {
                shards.gather_each(&self.torch);
                all
            }
            (None, Some(_)) => model.trained().iter().map(Tensor::bytes).sum(),
            (None, None) => all.min(FILE),
        };
        let bytes = on_host.min(i64::MAX as u64).cast_signed();
        self.torch.memory().host(bytes);
        self.end("save");
        self.torch.memory().host(-bytes);
        self.torch.memory().reset_peaks();
    }
}
