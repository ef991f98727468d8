#!/usr/bin/env python3
"""Writes a GGUF file of a mixture of experts with random weights, in the shape of Qwen3-30B-A3B or any other.

    docs/bench/random_mixture.py OUT.gguf [--layers 48 --experts 128 --chosen 8 --hidden 2048 --inner 768 ...]
    docs/bench/random_mixture.py OUT.gguf --latent v2|v3 [--rank 512 --plain 128 --rotated 64 --value 128 --queries 1536 ...]

With `--latent` it has the latent attention, the shared expert, the dense first layer and the router of DeepSeek-V2 or V3. Matrices are Q4_0,
or F32 with `--f32`; routers and norms are F32. The tokenizer knows single bytes; all other tokens are fillers. Such a file measures memory,
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
U32, FLOAT, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
POOL_BLOCKS = 1 << 21


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    if kind == ARRAY:
        of, items = value
        body = b"".join(text(i) if of == STRING else struct.pack("<i", i) for i in items)
        return text(key) + struct.pack("<IIQ", ARRAY, of, len(items)) + body
    packed = text(value) if kind == STRING else struct.pack({U32: "<I", FLOAT: "<f", BOOL: "<?"}[kind], value)
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


def layer(a, q, kv, matrix):
    h = a.hidden
    return [
        ("attn_norm.weight", [h], F32),
        ("attn_q.weight", [h, q], matrix),
        ("attn_k.weight", [h, kv], matrix),
        ("attn_v.weight", [h, kv], matrix),
        ("attn_q_norm.weight", [a.head_dim], F32),
        ("attn_k_norm.weight", [a.head_dim], F32),
        ("attn_output.weight", [q, h], matrix),
        ("ffn_norm.weight", [h], F32),
        *experts(a, matrix),
    ]


def experts(a, matrix):
    h = a.hidden
    return [
        ("ffn_gate_inp.weight", [h, a.experts], F32),
        ("ffn_gate_exps.weight", [h, a.inner, a.experts], matrix),
        ("ffn_up_exps.weight", [h, a.inner, a.experts], matrix),
        ("ffn_down_exps.weight", [a.inner, h, a.experts], matrix),
    ]


def latent_layer(a, i, matrix):
    h, head = a.hidden, a.plain + a.rotated
    queries = [("attn_q.weight", [h, a.heads * head], matrix)]
    if a.queries:
        queries = [
            ("attn_q_a.weight", [h, a.queries], matrix),
            ("attn_q_a_norm.weight", [a.queries], F32),
            ("attn_q_b.weight", [a.queries, a.heads * head], matrix),
        ]
    feed_forward = [(f"ffn_{part}.weight", shape, matrix) for part, shape in
                    [("gate", [h, a.dense_inner]), ("up", [h, a.dense_inner]), ("down", [a.dense_inner, h])]]
    if i > 0:
        beside = a.shared * a.inner
        feed_forward = experts(a, matrix) + [(f"ffn_{part}_shexp.weight", shape, matrix) for part, shape in
                                             [("gate", [h, beside]), ("up", [h, beside]), ("down", [beside, h])]]
        if a.latent == "v3":
            feed_forward.append(("exp_probs_b.bias", [a.experts], F32))
    return [
        ("attn_norm.weight", [h], F32),
        *queries,
        ("attn_kv_a_mqa.weight", [h, a.rank + a.rotated], matrix),
        ("attn_kv_a_norm.weight", [a.rank], F32),
        ("attn_k_b.weight", [a.plain, a.rank, a.heads], matrix),
        ("attn_v_b.weight", [a.rank, a.value, a.heads], matrix),
        ("attn_output.weight", [a.heads * a.value, h], matrix),
        ("ffn_norm.weight", [h], F32),
        *feed_forward,
    ]


def latent_metadata(a, p):
    yarn = [
        (f"{p}.rope.scaling.type", STRING, "yarn"),
        (f"{p}.rope.scaling.factor", FLOAT, 4.0),
        (f"{p}.rope.scaling.original_context_length", U32, a.context // 4),
        (f"{p}.rope.scaling.yarn_log_multiplier", FLOAT, 0.0707 if a.latent == "v2" else 0.1),
    ]
    return [
        *([(f"{p}.attention.q_lora_rank", U32, a.queries)] if a.queries else []),
        (f"{p}.attention.kv_lora_rank", U32, a.rank),
        (f"{p}.attention.key_length_mla", U32, a.plain + a.rotated),
        (f"{p}.attention.value_length_mla", U32, a.value),
        (f"{p}.rope.dimension_count", U32, a.rotated),
        (f"{p}.leading_dense_block_count", U32, 1),
        (f"{p}.expert_shared_count", U32, a.shared),
        (f"{p}.expert_weights_scale", FLOAT, 1.0 if a.latent == "v2" else 2.5),
        (f"{p}.expert_gating_func", U32, 1 if a.latent == "v2" else 2),
        *([(f"{p}.expert_weights_norm", BOOL, True)] if a.latent == "v3" else []),
        *([(f"{p}.expert_group_count", U32, a.groups), (f"{p}.expert_group_used_count", U32, a.groups // 2)] if a.groups > 1 else []),
        *yarn,
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    for name, value in dict(
        layers=48, experts=128, chosen=8, hidden=2048, inner=768, heads=32, kv_heads=4, head_dim=128, vocab=151936, context=4096
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--latent", choices=["v2", "v3"])
    for name, value in dict(rank=512, plain=128, rotated=64, value=128, queries=0, shared=2, dense_inner=10944, groups=1).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="with --latent")
    parser.add_argument("--f32", action="store_true")
    a = parser.parse_args()
    h, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
    matrix = F32 if a.f32 else Q4_0
    tensors = [("token_embd.weight", [h, a.vocab], matrix)]
    for i in range(a.layers):
        own = latent_layer(a, i, matrix) if a.latent else layer(a, q, kv, matrix)
        tensors += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in own]
    tensors += [("output_norm.weight", [h], F32), ("output.weight", [h, a.vocab], matrix)]
    size = lambda shape, kind: int(np.prod(shape)) * 4 if kind == F32 else int(np.prod(shape)) // 32 * 18
    total = sum(size(shape, kind) for _, shape, kind in tensors)
    parameters = sum(int(np.prod(shape)) for _, shape, _ in tensors)
    free = shutil.disk_usage(a.out.rsplit("/", 1)[0] if "/" in a.out else ".").free
    print(f"{parameters / 1e9:.2f} billion parameters, {total / 2**30:.2f} GiB; {free / 2**30:.1f} GiB are free", file=sys.stderr)
    if total > 0.9 * free:
        sys.exit(f"{a.out}: needs {total} bytes of disk")

    p = "deepseek2" if a.latent else "qwen3moe"
    lengths = [a.rank + a.rotated, a.rank] if a.latent else [a.head_dim, a.head_dim]
    metadata = [
        ("general.architecture", STRING, p),
        ("general.name", STRING, "random-mixture"),
        ("general.alignment", U32, 32),
        (f"{p}.block_count", U32, a.layers),
        (f"{p}.context_length", U32, a.context),
        (f"{p}.embedding_length", U32, h),
        (f"{p}.feed_forward_length", U32, a.dense_inner if a.latent else a.inner),
        (f"{p}.expert_feed_forward_length", U32, a.inner),
        (f"{p}.expert_count", U32, a.experts),
        (f"{p}.expert_used_count", U32, a.chosen),
        (f"{p}.attention.head_count", U32, a.heads),
        (f"{p}.attention.head_count_kv", U32, 1 if a.latent else a.kv_heads),
        (f"{p}.attention.key_length", U32, lengths[0]),
        (f"{p}.attention.value_length", U32, lengths[1]),
        *(latent_metadata(a, p) if a.latent else []),
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
            deviation = 0.1 if a.f32 else 0.02
            values = np.ones(shape[0]) if len(shape) == 1 else deviation * random.standard_normal(np.prod(shape), np.float32)
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
