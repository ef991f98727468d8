#!/usr/bin/env python3
"""Full fine-tuning with PyTorch, timed: the peer that `compare` holds Plimsoll against.

An eager loop as its users write it: a `transformers` model, `torch.optim.AdamW` as it comes, the global gradient norm
clipped at 1, gradients set to none. In bf16 the weights, the gradients and both moments are bf16.

Without --model it is SmolLM2-135M's architecture with random weights, which takes the same time. Tokens are random.
Prints one JSON document: the median over the steps after the warm-up, and the process's peak resident set.
"""

import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SMOLLM2_135M = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, block by block")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def load(args):
    dtype = DTYPES[args.dtype]
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(dtype)


def main():
    args = arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load(args)
    model.train()
    model.config.use_cache = False
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds, losses = [], []
    for _ in range(args.warm_up + args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (args.batch_size, args.sequence_length))
        begun = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begun)
    timed = seconds[args.warm_up :]
    step_tokens = args.batch_size * args.sequence_length
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "dtype": args.dtype,
                "checkpointing": args.checkpointing,
                "parameters": sum(p.numel() for p in model.parameters()),
                "step_seconds": timed,
                "tokens_per_second": step_tokens / statistics.median(timed),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "last_loss": losses[-1],
            }
        )
    )


if __name__ == "__main__":
    main()
