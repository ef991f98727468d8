#!/usr/bin/env python3
"""Writes a GGUF file of a mixture of experts with random weights, in the shape of Qwen3-30B-A3B or any other.

    docs/bench/random_mixture.py OUT.gguf [--layers 48 --experts 128 --chosen 8 --hidden 2048 --inner 768 ...]

Matrices are Q4_0, routers and norms F32. The tokenizer knows single bytes; all other tokens are fillers. Such a file measures memory,
reads and speed, for which values do not matter; its router sends tokens about evenly to all experts, which is the worst for a cache of
experts. Needs numpy, and as much disk as the file takes: it says how much first and refuses where that is not there.
"""

import argparse
import shutil
import struct
import sys
from functools import partial

import numpy as np

F32, Q4_0 = 0, 2
U32, FLOAT, STRING, ARRAY = 4, 6, 8, 9
POOL_BLOCKS = 1 << 21


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    if kind == ARRAY:
        of, items = value
        body = b"".join(text(i) if of == STRING else struct.pack("<i", i) for i in items)
        return text(key) + struct.pack("<IIQ", ARRAY, of, len(items)) + body
    packed = text(value) if kind == STRING else struct.pack("<I" if kind == U32 else "<f", value)
    return text(key) + struct.pack("<I", kind) + packed


def byte_tokens():
    """GPT-2's characters for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    names = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [names[b] for b in range(256)]


def tokenizer(pre, vocab):
    """Metadata of a tokenizer of single bytes."""
    return [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, pre),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, byte_tokens() + [f"<filler{i}>" for i in range(vocab - 256)])),
        ("tokenizer.ggml.token_type", ARRAY, (5, [1] * vocab)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [])),
        ("tokenizer.ggml.eos_token_id", U32, vocab - 1),
    ]


def write(path, metadata, tensors):
    """A whole file. Of each tensor: name, shape, number of its type, bytes, and a function that gives them piece by piece."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(entry(*m) for m in metadata)
    offset = 0
    for name, shape, kind, size, _ in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        head += struct.pack("<IQ", kind, offset)
        offset += (size + 31) // 32 * 32
    with open(path, "wb") as out:
        out.write(head + b"\0" * (-len(head) % 32))
        for *_, size, pieces in tensors:
            for piece in pieces():
                out.write(piece)
            out.write(b"\0" * (-size % 32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    for name, value in dict(
        layers=48, experts=128, chosen=8, hidden=2048, inner=768, heads=32, kv_heads=4, head_dim=128, vocab=151936, context=4096
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    a = parser.parse_args()
    h, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
    tensors = [("token_embd.weight", [h, a.vocab], Q4_0)]
    for i in range(a.layers):
        tensors += [
            (f"blk.{i}.{name}.weight", shape, kind)
            for name, shape, kind in [
                ("attn_norm", [h], F32),
                ("attn_q", [h, q], Q4_0),
                ("attn_k", [h, kv], Q4_0),
                ("attn_v", [h, kv], Q4_0),
                ("attn_q_norm", [a.head_dim], F32),
                ("attn_k_norm", [a.head_dim], F32),
                ("attn_output", [q, h], Q4_0),
                ("ffn_norm", [h], F32),
                ("ffn_gate_inp", [h, a.experts], F32),
                ("ffn_gate_exps", [h, a.inner, a.experts], Q4_0),
                ("ffn_up_exps", [h, a.inner, a.experts], Q4_0),
                ("ffn_down_exps", [a.inner, h, a.experts], Q4_0),
            ]
        ]
    tensors += [("output_norm.weight", [h], F32), ("output.weight", [h, a.vocab], Q4_0)]
    size = lambda shape, kind: int(np.prod(shape)) * 4 if kind == F32 else int(np.prod(shape)) // 32 * 18
    total = sum(size(shape, kind) for _, shape, kind in tensors)
    parameters = sum(int(np.prod(shape)) for _, shape, _ in tensors)
    free = shutil.disk_usage(a.out.rsplit("/", 1)[0] if "/" in a.out else ".").free
    print(f"{parameters / 1e9:.2f} billion parameters, {total / 2**30:.2f} GiB; {free / 2**30:.1f} GiB are free", file=sys.stderr)
    if total > 0.9 * free:
        sys.exit(f"{a.out}: needs {total} bytes of disk")

    p = "qwen3moe"
    metadata = [
        ("general.architecture", STRING, p),
        ("general.name", STRING, "random-mixture"),
        ("general.alignment", U32, 32),
        (f"{p}.block_count", U32, a.layers),
        (f"{p}.context_length", U32, a.context),
        (f"{p}.embedding_length", U32, h),
        (f"{p}.feed_forward_length", U32, a.inner),
        (f"{p}.expert_feed_forward_length", U32, a.inner),
        (f"{p}.expert_count", U32, a.experts),
        (f"{p}.expert_used_count", U32, a.chosen),
        (f"{p}.attention.head_count", U32, a.heads),
        (f"{p}.attention.head_count_kv", U32, a.kv_heads),
        (f"{p}.attention.key_length", U32, a.head_dim),
        (f"{p}.attention.value_length", U32, a.head_dim),
        (f"{p}.attention.layer_norm_rms_epsilon", FLOAT, 1e-6),
        (f"{p}.rope.freq_base", FLOAT, 1e6),
        *tokenizer("qwen2", a.vocab),
    ]
    random = np.random.default_rng(7)
    # Values from -7 to 7, without the -8 that would give all weights a mean, and all tokens the same experts. With this scale weights
    # have a deviation of about 0.02.
    pool = random.integers(1, 16, (POOL_BLOCKS, 18), dtype=np.uint8) + 16 * random.integers(1, 16, (POOL_BLOCKS, 18), dtype=np.uint8)
    pool[:, :2] = np.frombuffer(np.float16(0.0043).tobytes(), dtype=np.uint8)

    def pieces(shape, kind):
        if kind == F32:
            values = np.ones(shape[0], np.float32) if len(shape) == 1 else 0.02 * random.standard_normal(np.prod(shape), np.float32)
            yield values.astype(np.float32).data
            return
        left = size(shape, kind) // 18
        while left > 0:
            start = int(random.integers(0, POOL_BLOCKS // 2))
            part = pool[start : start + min(left, POOL_BLOCKS - start)]
            yield part.data
            left -= len(part)

    write(a.out, metadata, [(name, shape, kind, size(shape, kind), partial(pieces, shape, kind)) for name, shape, kind in tensors])


if __name__ == "__main__":
    main()
