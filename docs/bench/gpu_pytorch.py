#!/usr/bin/env python3
"""Steps of the models of docs/bench/gpu in PyTorch, on the first card: a line of JSON with tokens a second and memory.

    python3 docs/bench/gpu_pytorch.py 1B [--weights f32] [--eager] [--checkpoint] [--batch 1] [--tokens 2048] [--steps 8]

`transformers` makes the model, attention is PyTorch's own (FlashAttention-2), AdamW is the fused one. `--weights f32`: weights, gradients and
states in f32, products in bf16 (autocast), as mixed precision is usually trained; `bf16`: all of them in bf16.
"""

import argparse
import json
import statistics
import time

import torch
import transformers

SHAPES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "vocab_size": 49152, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256, "tie_word_embeddings": True},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--weights", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    dtype = torch.float32 if given.weights == "f32" else torch.bfloat16
    config = transformers.LlamaConfig(**SHAPES[given.shape], max_position_embeddings=given.tokens, attn_implementation="sdpa", use_cache=False)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    if given.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    ids = torch.randint(0, config.vocab_size, (given.batch, given.tokens), device="cuda")

    def loss_of(ids):
        with torch.autocast("cuda", torch.bfloat16, enabled=given.weights == "f32"):
            return model(input_ids=ids, labels=ids).loss

    step = loss_of if given.eager else torch.compile(loss_of)
    times = []
    for number in range(given.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = step(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        # The first steps compile and warm up.
        if number >= 3:
            times.append(time.perf_counter() - begun)
    seconds = statistics.median(times)
    print(json.dumps({
        "shape": given.shape, "weights": given.weights, "eager": given.eager, "checkpoint": given.checkpoint, "torch": torch.__version__,
        "seconds": seconds, "tokens_per_second": given.batch * given.tokens / seconds,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(), "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }))


if __name__ == "__main__":
    main()
