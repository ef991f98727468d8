//! What a process does beside its steps: loading its weights through the host, evaluating, saving.

use std::rc::Rc;

use super::Process;
use crate::model::Decoder;
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
            (None, Some(_)) => model.trained().iter().map(crate::eager::Tensor::bytes).sum(),
            (None, None) => all.min(FILE),
        };
        let bytes = on_host.min(i64::MAX as u64).cast_signed();
        self.torch.memory().host(bytes);
        self.end("save");
        self.torch.memory().host(-bytes);
    }
}
