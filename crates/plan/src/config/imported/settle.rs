//! Keys that follow from others, and those that exclude each other.

use super::Imported;
use super::leaves::Leaf;
use super::programs::Program;
use super::sixteen_bits::{PRECISION, SixteenBits};
use crate::config::Override;

impl Imported {
    /// What follows from a file and those that it names together.
    pub(super) fn settle(&mut self, program: &Program, leaves: &[Leaf]) {
        if program.is_read_as_ours() {
            self.settle_ava(leaves);
        }
        self.settle_torchtune(leaves);
        self.settle_in_backward(program);
        self.settle_data();
        self.settle_fsdp(program, leaves);
        self.settle_length();
        self.settle_ranks();
        self.settle_twice("training.gradient_checkpointing", |one| one.value == "full");
        self.settle_defaults(program, leaves);
        self.settle_method();
        self.settle_momenta();
    }

    /// What a program does where nothing is said. What is `auto` stays open, and a rank counts where there are adapters.
    fn settle_defaults(&mut self, program: &Program, leaves: &[Leaf]) {
        for (key, value) in program.defaults {
            let is_auto = |leaf: &Leaf| {
                leaf.value == "auto" && program.meanings(&leaf.key).iter().any(|(_, ours, _)| ours == key)
            };
            let is_idle = key.starts_with("training.lora.") && !self.has_adapters();
            if self.value(key).is_none() && !is_idle && !leaves.iter().any(is_auto) {
                self.overrides.push(program.by_itself(key, value));
            }
        }
    }

    fn has_adapters(&self) -> bool {
        matches!(self.value("training.method"), Some("lora" | "qlora"))
    }

    /// Of Ava's, what several keys say together: a pattern of attention, and a section that is off. The width of the feed-forward part
    /// is four times the model's, where it is not said.
    fn settle_ava(&mut self, leaves: &[Leaf]) {
        let leaf = |key: &str| leaves.iter().find(|leaf| leaf.key == key);
        if leaf("training.deepspeed.use_deepspeed").is_some_and(|leaf| leaf.value == "false") {
            let is_off = |one: &Override| one.argument.contains(": training.deepspeed.");
            let off = self.overrides.iter().filter(|one| is_off(one));
            self.left.extend(off.map(|one| format!("{} (use_deepspeed is false)", one.argument)));
            self.overrides.retain(|one| !is_off(one));
        }
        let number = |key: &str, usual: &str| leaf(key).map_or(usual, |leaf| leaf.value.as_str()).to_owned();
        if let Some(kind) = leaf("model.attention_type") {
            let (value, keys): (String, &[&str]) = match kind.value.as_str() {
                "sparse" => {
                    let block = number("model.sparse_block_size", "64");
                    let local = number("model.num_local_blocks", "4");
                    let pattern = format!("{{block_sparse: {{block: {block}, local_blocks: {local}}}}}");
                    (pattern, &["model.sparse_block_size", "model.num_local_blocks"])
                }
                "sliding_window" => {
                    let window = number("model.window_size", "256");
                    (format!("{{sliding_window: {window}}}"), &["model.window_size"])
                }
                _ => return self.settle_width(),
            };
            let argument = kind.argument();
            // What says which kernel computes it says nothing of the pattern.
            self.overrides.retain(|one| one.key != "training.attention");
            let used = keys.iter().filter_map(|key| leaf(key)).map(Leaf::shown).chain([kind.shown()]);
            let used: Vec<String> = used.collect();
            self.left.retain(|left| !used.iter().any(|shown| left.starts_with(shown)));
            self.overrides.push(Override { key: "training.attention".to_owned(), value, argument });
        }
        self.settle_width();
    }

    fn settle_width(&mut self) {
        let (width, inner) = ("model.from_scratch.hidden_size", "model.from_scratch.intermediate_size");
        if let (Some(hidden), None) = (self.number(width), self.value(inner)) {
            let value = hidden.saturating_mul(4).to_string();
            let argument = format!("Ava by itself: {inner}={value}");
            self.overrides.push(Override { key: inner.to_owned(), value, argument });
        }
    }

    /// torchtune's lists are of attention alone; whether the feed-forward part and the head have adapters is said beside them.
    fn settle_torchtune(&mut self, leaves: &[Leaf]) {
        let beside: [(&str, &[&str]); 2] = [
            ("model.apply_lora_to_mlp", &["gate_proj", "up_proj", "down_proj"]),
            ("model.apply_lora_to_output", &["lm_head"]),
        ];
        for (key, modules) in beside {
            let Some(leaf) = leaves.iter().find(|leaf| leaf.key == key) else { continue };
            self.left.retain(|left| *left != leaf.shown());
            let targets = self.overrides.iter_mut().rfind(|one| one.key == "training.lora.target_modules");
            let list = targets.filter(|_| leaf.value.eq_ignore_ascii_case("true"));
            if let Some(one) = list
                && let Some(own) = one.value.strip_suffix(']')
            {
                let more = modules.iter().map(|name| (*name).to_owned());
                let own = own.trim_start_matches('[').trim();
                let all: Vec<String> =
                    (!own.is_empty()).then(|| own.to_owned()).into_iter().chain(more).collect();
                one.value = format!("[{}]", all.join(", "));
            }
        }
    }

    /// torchtune does not clip unless it is told to, and updates in the backward pass have no norm of all gradients.
    fn settle_in_backward(&mut self, program: &Program) {
        let key = "training.max_gradient_norm";
        let is_torchtune = program.name == "torchtune";
        if is_torchtune && self.value("training.optimizer_in_backward").is_some() && self.value(key).is_none()
        {
            self.overrides.push(program.by_itself(key, "0"));
        }
    }

    /// What says when to validate or how samples are put together, where nothing says on which data: they come with the run.
    fn settle_data(&mut self) {
        let known = ["data.validation", "data.train", "data.format"];
        if known.iter().any(|key| self.value(key).is_some()) {
            return;
        }
        let is_idle = |one: &Override| {
            one.key == "output.eval_steps"
                || one.key == "data.packing" && one.value.eq_ignore_ascii_case("false")
        };
        let idle = self.overrides.iter().filter(|one| is_idle(one));
        self.left.extend(idle.map(|one| format!("{} (the data are not named)", one.argument)));
        self.overrides.retain(|one| !is_idle(one));
    }

    /// FSDP shares everything where no strategy is said.
    pub(super) fn settle_fsdp(&mut self, program: &Program, leaves: &[Leaf]) {
        let key = "parallel.zero_stage";
        let is_said = [key, "parallel.sharding_strategy"].iter().any(|key| self.value(key).is_some());
        let Some(leaf) = leaves.iter().find(|leaf| program.has_fsdp(leaf)).filter(|_| !is_said) else {
            return;
        };
        self.left.retain(|left| *left != leaf.shown());
        let argument = leaf.argument();
        self.overrides.push(Override { key: key.to_owned(), value: "3".to_owned(), argument });
    }

    /// What a key is assigned last.
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.overrides.iter().rev().find(|one| one.key == key).map(|one| one.value.as_str())
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.parse().ok()
    }

    fn drop(&mut self, key: &str) {
        self.overrides.retain(|one| one.key != key);
    }

    fn settle_length(&mut self) {
        if self.number("training.steps").is_some() {
            self.drop("training.epochs");
        }
    }

    /// Ranks that share products or sequences are not data parallel, and what batch sizes leave of the whole batch are ranks.
    fn settle_ranks(&mut self) {
        let among = ["parallel.tensor_parallel", "parallel.context_parallel"];
        let others: u64 = among.iter().filter_map(|key| self.number(key)).fold(1, u64::saturating_mul);
        if let Some(data) = self.number("parallel.data_parallel").filter(|_| others > 1)
            && data.is_multiple_of(others)
            && let Some(one) = self.overrides.iter_mut().rev().find(|one| one.key == "parallel.data_parallel")
        {
            one.value = (data / others).to_string();
        }
        let product = self
            .number("training.batch_size")
            .zip(self.number("training.gradient_accumulation_steps"))
            .and_then(|(micro, accumulation)| micro.checked_mul(accumulation))
            .filter(|product| *product > 0);
        let (Some(product), Some(whole)) = (product, self.number("training.effective_batch_size")) else {
            return;
        };
        let batch = self.overrides.iter_mut().find(|one| one.key == "training.effective_batch_size");
        if let Some(one) = batch.filter(|_| whole.is_multiple_of(product)) {
            one.key = "parallel.data_parallel".to_owned();
            one.value = (whole / product).to_string();
        }
    }

    /// Of several words on the same thing that do not agree, the one that counts is kept and the others are listed.
    fn settle_twice(&mut self, key: &str, counts: impl Fn(&Override) -> bool) {
        let own = || self.overrides.iter().filter(|one| one.key == key);
        let Some(chosen) = own().find(|one| counts(one)).or(own().next_back()).cloned() else { return };
        let others = own().filter(|one| one.value != chosen.value);
        let others: Vec<String> =
            others.map(|one| format!("{} ({} counts)", one.argument, chosen.argument)).collect();
        self.left.extend(others);
        self.overrides.retain(|one| one.key != key || *one == chosen);
    }

    /// What a file by itself says of 16 bits, and which kinds are off where switches alone say it: those that are all off leave f32.
    pub(super) fn settle_precision(&mut self, leaves: &[Leaf]) -> Vec<&'static str> {
        self.settle_twice(PRECISION, |one| one.argument.contains("mixed_precision "));
        let off = SixteenBits::switched_off(leaves);
        let Some((_, first)) = off.first().filter(|_| self.value(PRECISION).is_none()) else {
            return Vec::new();
        };
        let (key, value, argument) = (PRECISION.to_owned(), "f32".to_owned(), first.argument());
        self.overrides.push(Override { key, value, argument });
        off.into_iter().map(|(kind, _)| kind).collect()
    }

    /// LoRA beside quantised weights is QLoRA. Of a full fine-tuning, what belongs to adapters and to the weights beside them has no
    /// effect.
    fn settle_method(&mut self) {
        let method = self.value("training.method").map(str::to_owned);
        match method.as_deref() {
            Some("lora") if self.value("training.quantization").is_some() => {
                for one in self.overrides.iter_mut().filter(|one| one.key == "training.method") {
                    one.value = "qlora".to_owned();
                }
            }
            Some("lora" | "qlora") => {}
            _ => {
                let of_adapters = |one: &Override| {
                    one.key.starts_with("training.lora.") || one.key == "training.quantization"
                };
                let without = self.overrides.iter().filter(|one| of_adapters(one));
                self.left.extend(without.map(|one| format!("{} (without adapters)", one.argument)));
                self.overrides.retain(|one| !of_adapters(one));
            }
        }
        // What is trained of adapters is in f32 in any case.
        if self.has_adapters() {
            self.drop("training.master_weights");
        }
    }

    /// Lion has momenta of its own, and some optimizers have none.
    fn settle_momenta(&mut self) {
        let momenta = ["training.adam_beta1", "training.adam_beta2"];
        let (lion, none) = match self.value("training.optimizer") {
            Some("lion" | "lion_8bit") => (true, false),
            Some("sgd" | "adafactor" | "adalomo") => (false, true),
            _ => (false, false),
        };
        for (theirs, ours) in momenta.into_iter().zip(["beta1", "beta2"]) {
            if none {
                self.drop(theirs);
            }
            for one in self.overrides.iter_mut().filter(|one| lion && one.key == theirs) {
                one.key = format!("training.optimizer_options.{ours}");
            }
        }
    }
}
