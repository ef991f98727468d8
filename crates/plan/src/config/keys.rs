//! The listing of keys, and what a user probably meant by one that is not in it.

use super::section::KeyDoc;
use super::{Entry, RawConfig};

/// Every key of the document in order, with type, default and help.
pub fn keys() -> Vec<KeyDoc> {
    let mut keys = Vec::new();
    RawConfig::default().visit(&mut |entry: Entry| {
        let values = match entry.bounds {
            Some(bounds) => format!("{}, {}", (entry.values)(), bounds.words),
            None => (entry.values)(),
        };
        keys.push(KeyDoc {
            path: entry.path,
            values,
            default: (entry.default)(),
            help: entry.help.trim().to_owned(),
        });
    });
    keys
}

/// Paths of all keys.
fn paths() -> Vec<&'static str> {
    let mut paths = Vec::new();
    RawConfig::default().visit(&mut |entry: Entry| paths.push(entry.path));
    paths
}

/// The names of the keys and sections directly in a section (in the document, if it is empty); none if there is
/// no such section.
pub(super) fn members(section: &str) -> Vec<&'static str> {
    let mut members: Vec<&'static str> = Vec::new();
    for path in paths() {
        let inner = if section.is_empty() {
            Some(path)
        } else {
            path.strip_prefix(section).and_then(|rest| rest.strip_prefix('.'))
        };
        if let Some(name) = inner.and_then(|inner| inner.split('.').next())
            && !members.contains(&name)
        {
            members.push(name);
        }
    }
    members
}

/// What other trainers call our keys. A name is compared without case and underscores, and without its section.
const FOREIGN: &[(&str, &str)] = &[
    ("model_name_or_path", "model.path"),
    ("model_name", "model.path"),
    ("pretrained_model_name_or_path", "model.path"),
    ("base_model", "model.path"),
    ("model_type", "model.from_scratch.architecture"),
    ("n_layer", "model.from_scratch.num_hidden_layers"),
    ("n_layers", "model.from_scratch.num_hidden_layers"),
    ("num_layers", "model.from_scratch.num_hidden_layers"),
    ("n_head", "model.from_scratch.num_attention_heads"),
    ("n_heads", "model.from_scratch.num_attention_heads"),
    ("num_heads", "model.from_scratch.num_attention_heads"),
    ("n_kv_heads", "model.from_scratch.num_key_value_heads"),
    ("n_embd", "model.from_scratch.hidden_size"),
    ("d_model", "model.from_scratch.hidden_size"),
    ("dim", "model.from_scratch.hidden_size"),
    ("ffn_hidden_size", "model.from_scratch.intermediate_size"),
    ("norm_eps", "model.from_scratch.rms_norm_eps"),
    ("n_positions", "model.from_scratch.max_position_embeddings"),
    ("dataset", "data.train"),
    ("dataset_name", "data.train"),
    ("dataset_path", "data.train"),
    ("train_file", "data.train"),
    ("train_files", "data.train"),
    ("train_data", "data.train"),
    ("train_dataset", "data.train"),
    ("validation_file", "data.validation"),
    ("eval_dataset", "data.validation"),
    ("valid_data", "data.validation"),
    ("val", "data.validation"),
    ("eval", "data.validation"),
    ("dataset_text_field", "data.text_field"),
    ("text_column", "data.text_field"),
    ("text_column_name", "data.text_field"),
    ("max_seq_length", "data.sequence_length"),
    ("max_seq_len", "data.sequence_length"),
    ("max_length", "data.sequence_length"),
    ("model_max_length", "data.sequence_length"),
    ("seq_length", "data.sequence_length"),
    ("seq_len", "data.sequence_length"),
    ("block_size", "data.sequence_length"),
    ("cutoff_len", "data.sequence_length"),
    ("context_length", "data.sequence_length"),
    ("sample_packing", "data.packing"),
    ("train_on_inputs", "data.train_on"),
    ("train_on_prompt", "data.train_on: all"),
    ("assistant_only_loss", "data.train_on: assistant"),
    ("completion_only_loss", "data.train_on: assistant"),
    ("train_on_responses_only", "data.train_on: assistant"),
    ("truncation_mode", "data.truncation"),
    ("truncation_side", "data.truncation"),
    ("excess_length_strategy", "data.truncation"),
    ("chat_template_path", "data.chat_template"),
    ("chat_template_jinja", "data.chat_template"),
    ("field_messages", "data.columns.messages"),
    ("field_instruction", "data.columns.instruction"),
    ("field_input", "data.columns.input"),
    ("field_output", "data.columns.output"),
    ("field_system", "data.columns.system"),
    ("message_field_role", "data.columns.role"),
    ("message_field_content", "data.columns.content"),
    ("data_seed", "data.seed"),
    ("dataloader_num_workers", "data.num_workers"),
    ("dataloader_prefetch_factor", "data.prefetch_factor"),
    ("dataloader_persistent_workers", "data.persistent_workers"),
    ("finetuning_type", "training.method"),
    ("use_lora", "training.method"),
    ("lora_r", "training.lora.rank"),
    ("lora_rank", "training.lora.rank"),
    ("r", "training.lora.rank"),
    ("lora_alpha", "training.lora.alpha"),
    ("lora_dropout", "training.lora.dropout"),
    ("lora_target_modules", "training.lora.target_modules"),
    ("lora_target", "training.lora.target_modules"),
    ("lora_modules_to_save", "training.lora.modules_to_save"),
    ("additional_target", "training.lora.modules_to_save"),
    ("peft_use_rslora", "training.lora.use_rslora"),
    ("load_in_4bit", "training.quantization"),
    ("load_in_8bit", "training.quantization"),
    ("bnb_4bit_quant_type", "training.quantization"),
    ("quantization_bit", "training.quantization"),
    ("max_steps", "training.steps"),
    ("num_steps", "training.steps"),
    ("train_steps", "training.steps"),
    ("max_iters", "training.steps"),
    ("iters", "training.steps"),
    ("num_train_epochs", "training.epochs"),
    ("num_epochs", "training.epochs"),
    ("max_epochs", "training.epochs"),
    ("per_device_train_batch_size", "training.batch_size"),
    ("per_device_eval_batch_size", "training.eval_batch_size"),
    ("per_device_batch_size", "training.batch_size"),
    ("per_gpu_train_batch_size", "training.batch_size"),
    ("train_batch_size", "training.batch_size"),
    ("micro_batch_size", "training.batch_size"),
    ("train_micro_batch_size_per_gpu", "training.batch_size"),
    ("global_batch_size", "training.effective_batch_size"),
    ("total_batch_size", "training.effective_batch_size"),
    ("gradient_accumulation", "training.gradient_accumulation_steps"),
    ("grad_accum", "training.gradient_accumulation_steps"),
    ("grad_accum_steps", "training.gradient_accumulation_steps"),
    ("accumulate_grad_batches", "training.gradient_accumulation_steps"),
    ("precision", "training.mixed_precision"),
    ("dtype", "training.mixed_precision"),
    ("torch_dtype", "training.mixed_precision"),
    ("bf16", "training.mixed_precision: bf16"),
    ("pure_bf16", "training.master_weights: none"),
    ("fp16", "training.mixed_precision: fp16"),
    ("fp32", "training.mixed_precision: f32"),
    ("optim", "training.optimizer"),
    ("lr", "training.learning_rate"),
    ("max_lr", "training.learning_rate"),
    ("min_lr", "training.min_lr_ratio"),
    ("beta1", "training.adam_beta1"),
    ("beta2", "training.adam_beta2"),
    ("betas", "training.adam_beta1"),
    ("eps", "training.adam_epsilon"),
    ("adam_eps", "training.adam_epsilon"),
    ("wd", "training.weight_decay"),
    ("lr_scheduler_type", "training.lr_schedule"),
    ("lr_scheduler", "training.lr_schedule"),
    ("scheduler", "training.lr_schedule"),
    ("warmup_iters", "training.warmup_steps"),
    ("warmup", "training.warmup_steps"),
    ("max_grad_norm", "training.max_gradient_norm"),
    ("grad_clip", "training.max_gradient_norm"),
    ("clip_grad", "training.max_gradient_norm"),
    ("gradient_clipping", "training.max_gradient_norm"),
    ("activation_checkpointing", "training.gradient_checkpointing"),
    ("recompute_granularity", "training.gradient_checkpointing"),
    ("attn_implementation", "training.attention"),
    ("flash_attention", "training.attention: flash"),
    ("flash_attn", "training.attention: flash"),
    ("max_memory", "memory.device_budget"),
    ("memory_budget", "memory.device_budget"),
    ("budget", "memory.device_budget"),
    ("offload_optimizer", "memory.offload.optimizer"),
    ("optimizer_offload", "memory.offload.optimizer"),
    ("offload_param", "memory.offload.parameters"),
    ("param_offload", "memory.offload.parameters"),
    ("cpu_offload", "memory.offload.parameters"),
    ("offload_folder", "memory.disk_path"),
    ("nvme_path", "memory.disk_path"),
    ("deepspeed", "parallel.zero_stage"),
    ("stage", "parallel.zero_stage"),
    ("fsdp", "parallel.sharding_strategy"),
    ("overlap_comm", "parallel.overlap_communication"),
    ("overlap_grad_reduce", "parallel.overlap_communication"),
    ("overlap_param_gather", "parallel.overlap_communication"),
    ("tensor_parallel_size", "parallel.tensor_parallel"),
    ("tensor_model_parallel_size", "parallel.tensor_parallel"),
    ("ep_size", "parallel.expert_parallel"),
    ("expert_parallel_size", "parallel.expert_parallel"),
    ("expert_model_parallel_size", "parallel.expert_parallel"),
    ("pipeline_parallel_size", "parallel.pipeline_parallel"),
    ("pipeline_model_parallel_size", "parallel.pipeline_parallel"),
    ("virtual_pipeline_parallel_size", "parallel.virtual_stages"),
    ("virtual_pipeline_model_parallel_size", "parallel.virtual_stages"),
    ("output_dir", "output.dir"),
    ("out_dir", "output.dir"),
    ("save_dir", "output.dir"),
    ("save_interval", "output.save_steps"),
    ("max_checkpoints", "output.save_total_limit"),
    ("log_interval", "output.logging_steps"),
    ("eval_interval", "output.eval_steps"),
];

/// Longer words, in bytes, are not compared with ours.
const LONGEST_WORD: usize = 64;

/// What was probably meant by a key that does not exist.
pub(super) fn suggest(unknown: &str) -> Option<String> {
    let keys = paths();
    let (parent, leaf) = split(unknown);
    if leaf.len() > LONGEST_WORD {
        return None;
    }
    let squashed = squash(leaf);
    let same_spelling = |key: &&str| squash(split(key).1) == squashed;

    if let Some(key) = keys.iter().find(|key| split(key).0 == parent && same_spelling(key)) {
        return Some((*key).to_owned());
    }
    if let Some((_, ours)) = FOREIGN.iter().find(|(name, _)| squash(name) == squashed) {
        return Some((*ours).to_owned());
    }
    let elsewhere = keys.iter().filter(|key| same_spelling(key));
    if let Some(key) = elsewhere.min_by_key(|key| strsim::damerau_levenshtein(key, unknown)) {
        return Some((*key).to_owned());
    }

    let join = |name: &str| if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
    let siblings =
        members(parent).into_iter().map(|name| (strsim::damerau_levenshtein(name, leaf), join(name)));
    let others =
        keys.iter().map(|key| (1 + strsim::damerau_levenshtein(split(key).1, leaf), (*key).to_owned()));
    let (distance, nearest) = siblings.chain(others).min_by_key(|(distance, _)| *distance)?;
    (distance <= tolerance(leaf)).then_some(nearest)
}

/// The word of a choice that was probably meant; `choices` are separated by bars.
pub(super) fn suggest_word(choices: &str, unknown: &str) -> Option<String> {
    if unknown.len() > LONGEST_WORD {
        return None;
    }
    let unknown = unknown.to_lowercase();
    let words = choices.split(" | ").filter(|word| !word.contains(' '));
    let (distance, nearest) =
        words.map(|word| (strsim::damerau_levenshtein(word, &unknown), word)).min_by_key(|(d, _)| *d)?;
    (distance <= tolerance(&unknown)).then(|| nearest.to_owned())
}

/// How many letters may be wrong in a word that is still recognised.
fn tolerance(word: &str) -> usize {
    (word.chars().count() / 3).max(1)
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

fn squash(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '_' | '-' | ' ')).flat_map(char::to_lowercase).collect()
}

/// Keys that the table of foreign names leads to.
#[cfg(test)]
pub(super) fn foreign_targets() -> impl Iterator<Item = &'static str> {
    FOREIGN.iter().map(|(_, ours)| ours.split(':').next().unwrap_or(ours))
}
