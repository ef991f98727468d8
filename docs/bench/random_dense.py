#!/usr/bin/env python3
"""Writes a GGUF file of a dense model with random weights, in a mix of types as llama.cpp's quantiser chooses it.

    docs/bench/random_dense.py OUT.gguf --mix q4_k_m [--layers 18 --hidden 768 ...]

The default shape has about as many weights as SmolLM2-135M, in matrices that blocks of 256 divide: SmolLM2's do not, so that a Q4_K_M
of it has hardly any Q4_K. Blocks are random, with scales that give weights a deviation of about 0.02. The tokenizer knows single bytes;
all other tokens are fillers. Such a file measures speed, for which values do not matter. Needs numpy.
"""

import argparse
from functools import partial

import numpy as np
from random_mixture import F32, FLOAT, STRING, U32, tokenizer, write

# Number in a GGUF file, elements of a block, its bytes, the places of its f16 numbers, and what they are times 0.02.
TYPES = {
    "q4_0": (2, 32, 18, {0: 1 / 4.6}),
    "q4_1": (3, 32, 20, {0: 1 / 4.6, 2: -7.5 / 4.6}),
    "q5_0": (6, 32, 22, {0: 1 / 9.2}),
    "q8_0": (8, 32, 34, {0: 1 / 74}),
    "q4_k": (12, 256, 144, {0: 1 / 170, 2: 1 / 24}),
    "q5_k": (13, 256, 176, {0: 1 / 340, 2: 1 / 24}),
    "q6_k": (14, 256, 210, {208: 1 / 1370}),
    "iq4_nl": (20, 32, 18, {0: 1 / 73}),
}


def more_bits(layer, layers):
    """Layers whose values and down projections get a wider type in mixes that end with _m."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def kind_of(mix, name, layer, layers):
    if mix.endswith("_m"):
        wide = name in ("attn_v", "ffn_down") and more_bits(layer, layers)
        return "q6_k" if wide or name == "output" else mix[: -len("_m")]
    return "q6_k" if name == "output" and mix in ("q4_0", "q4_1", "iq4_nl") else mix


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--mix", default="q4_k_m", choices=[*TYPES, "q4_k_m", "q5_k_m"])
    for name, value in dict(
        layers=18, hidden=768, inner=2048, heads=12, kv_heads=4, head_dim=64, vocab=49152, context=8192
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    a = parser.parse_args()
    h, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes = [
        ("attn_q", [h, q]),
        ("attn_k", [h, kv]),
        ("attn_v", [h, kv]),
        ("attn_output", [q, h]),
        ("ffn_gate", [h, a.inner]),
        ("ffn_up", [h, a.inner]),
        ("ffn_down", [a.inner, h]),
    ]
    tensors = [("token_embd.weight", [h, a.vocab], kind_of(a.mix, "token_embd", 0, a.layers))]
    for i in range(a.layers):
        tensors += [(f"blk.{i}.{name}.weight", [h], None) for name in ("attn_norm", "ffn_norm")]
        tensors += [(f"blk.{i}.{name}.weight", shape, kind_of(a.mix, name, i, a.layers)) for name, shape in shapes]
    tensors += [("output_norm.weight", [h], None), ("output.weight", [h, a.vocab], kind_of(a.mix, "output", 0, a.layers))]

    random = np.random.default_rng(7)

    def size(shape, kind):
        elements = int(np.prod(shape))
        return 4 * elements if kind is None else elements // TYPES[kind][1] * TYPES[kind][2]

    def pieces(shape, kind):
        if kind is None:
            yield np.ones(shape[0], np.float32).data
            return
        _, _, width, numbers = TYPES[kind]
        data = random.integers(0, 256, (size(shape, kind) // width, width), dtype=np.uint8)
        for place, factor in numbers.items():
            data[:, place : place + 2] = np.frombuffer(np.float16(0.02 * factor).tobytes(), dtype=np.uint8)
        yield data.data

    p = "llama"
    metadata = [
        ("general.architecture", STRING, p),
        ("general.name", STRING, f"random-dense-{a.mix}"),
        ("general.alignment", U32, 32),
        (f"{p}.block_count", U32, a.layers),
        (f"{p}.context_length", U32, a.context),
        (f"{p}.embedding_length", U32, h),
        (f"{p}.feed_forward_length", U32, a.inner),
        (f"{p}.attention.head_count", U32, a.heads),
        (f"{p}.attention.head_count_kv", U32, a.kv_heads),
        (f"{p}.rope.dimension_count", U32, a.head_dim),
        (f"{p}.attention.layer_norm_rms_epsilon", FLOAT, 1e-5),
        (f"{p}.rope.freq_base", FLOAT, 1e4),
        (f"{p}.vocab_size", U32, a.vocab),
        *tokenizer("gpt-2", a.vocab),
    ]
    write(
        a.out,
        metadata,
        [
            (name, shape, F32 if kind is None else TYPES[kind][0], size(shape, kind), partial(pieces, shape, kind))
            for name, shape, kind in tensors
        ],
    )


if __name__ == "__main__":
    main()
