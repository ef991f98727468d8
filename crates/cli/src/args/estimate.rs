//! What `estimate` is asked: a run of another stack, in that stack's words.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Default, Args)]
pub struct EstimateArgs {
    /// Files of that stack, each known by its keys: TrainingArguments, accelerate, DeepSpeed, axolotl, LLaMA-Factory, torchtune,
    /// adapter_config.json, BitsAndBytesConfig, a shell script, or a model's config.json
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// A request as JSON; flags go over it
    #[arg(long, value_name = "FILE", conflicts_with = "files")]
    pub request: Option<PathBuf>,
    /// hf (the Trainer), peft (a loop of one's own), torchtune, litgpt, deepspeed, fsdp or unsloth
    #[arg(long, value_name = "STACK")]
    pub stack: Option<String>,
    /// Model: a name such as llama-3.1-8b, a folder, or a config.json
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Sequences of a micro-batch on each device
    #[arg(long, value_name = "N")]
    pub batch_size: Option<u64>,
    /// Tokens of each sequence; of the prompt in inference
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<u64>,
    /// The samples that are trained on (.jsonl, .json or .parquet): their lengths, the longest batch included. Without input_ids or a
    /// length in them, the model must be a folder with its tokenizer
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Sequences of a batch in evaluation; without it the run does not evaluate
    #[arg(long, value_name = "N")]
    pub eval_batch_size: Option<u64>,
    /// The run goes on from a checkpoint, with its optimizer's states
    #[arg(long)]
    pub resume: bool,
    /// Adapters are merged into the weights at the end
    #[arg(long)]
    pub merge: bool,
    /// Processes of the data loader (dataloader_num_workers)
    #[arg(long, value_name = "N")]
    pub data_workers: Option<u64>,
    /// f32, bf16 or fp16 for everything, bf16-amp or fp16-amp for autocast
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<String>,
    /// As optim of the Trainer has it: adamw_torch, adamw_torch_fused, paged_adamw_8bit
    #[arg(long, value_name = "NAME")]
    pub optimizer: Option<String>,
    /// Compute layers again in the backward pass
    #[arg(long)]
    pub gradient_checkpointing: bool,
    /// Micro-batches of a step
    #[arg(long, value_name = "N")]
    pub gradient_accumulation_steps: Option<u64>,
    /// eager, sdpa or flash_attention_2
    #[arg(long, value_name = "NAME")]
    pub attention: Option<String>,
    /// Rank of LoRA adapters; without it all weights are trained
    #[arg(long, value_name = "R")]
    pub lora_rank: Option<u64>,
    /// Layers with adapters: q_proj,v_proj or all-linear
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora_rank")]
    pub lora_targets: Vec<String>,
    /// nf4, fp4 or int8, as bitsandbytes has them
    #[arg(long, value_name = "TYPE")]
    pub quantization: Option<String>,
    /// Quantise the scales too
    #[arg(long)]
    pub double_quantization: bool,
    /// default, liger, cce or chunked
    #[arg(long, value_name = "NAME")]
    pub loss: Option<String>,
    /// Devices of the run
    #[arg(long, value_name = "N")]
    pub devices: Option<u64>,
    /// DeepSpeed's stage: 1, 2 or 3
    #[arg(long, value_name = "N")]
    pub zero_stage: Option<u8>,
    /// full_shard, shard_grad_op or no_shard
    #[arg(long, value_name = "NAME")]
    pub fsdp: Option<String>,
    /// optimizer, parameters or all: what is in host memory
    #[arg(long, value_name = "WHAT")]
    pub offload: Option<String>,
    /// The card: rtx-4090, 8xh100, "NVIDIA A100-SXM4-80GB", or a .yaml file
    #[arg(long, value_name = "NAME|FILE")]
    pub hardware: Option<String>,
    /// train, inference or load
    #[arg(long, value_name = "PHASE")]
    pub phase: Option<String>,
    /// Tokens behind the prompt, in inference
    #[arg(long, value_name = "N")]
    pub generated_tokens: Option<u64>,
    /// PYTORCH_CUDA_ALLOC_CONF, for example expandable_segments:True
    #[arg(long, value_name = "OPTIONS")]
    pub allocator: Option<String>,
    /// Version of transformers, where it matters; the newest by default
    #[arg(long, value_name = "VERSION")]
    pub transformers: Option<String>,
    /// Version of PyTorch; by default that of the time of the others
    #[arg(long, value_name = "VERSION")]
    pub torch: Option<String>,
    /// Version of PEFT
    #[arg(long, value_name = "VERSION")]
    pub peft: Option<String>,
    /// Version of bitsandbytes
    #[arg(long, value_name = "VERSION")]
    pub bitsandbytes: Option<String>,
    /// Version of DeepSpeed
    #[arg(long, value_name = "VERSION")]
    pub deepspeed: Option<String>,
    /// The answer alone, without what would make it smaller and what Plimsoll would need
    #[arg(long)]
    pub brief: bool,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}
