#!/usr/bin/env python3
"""Converts a random model with the dimensions of Llama 2 7B and prints the most memory that was resident meanwhile.

    docs/bench/convert_memory.py --plimsoll target/release/plimsoll SCRATCH [--layers 32] [--types nf4 q4_k ...]

Needs no packages, and on disk 13 GB for 32 layers in bf16 beside one output at a time; all of it is deleted at the end. Fails
where more than --limit MiB were resident.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, INNER, HEADS, VOCAB = 4096, 11008, 32, 32000
# Bytes of bf16 numbers of both signs between 0.008 and 0.03.
HIGH = bytes(0x3C | b & 0x80 for b in range(256))
GGUF = ["f32", "f16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q4_k", "q6_k"]


def layer(i):
    square, wide = [HIDDEN, HIDDEN], [INNER, HIDDEN]
    shapes = {f"self_attn.{name}_proj": square for name in "qkvo"}
    shapes |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    shapes |= {"input_layernorm": [HIDDEN], "post_attention_layernorm": [HIDDEN]}
    return {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}


def write(path, shapes, noise):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            # Never twice at one place of a matrix.
            start = 2 * int.from_bytes(os.urandom(3), "little") % (len(noise) // 2)
            at -= file.write(memoryview(noise)[start : start + min(at, len(noise) - start)])


def make(model, layers):
    model.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS, vocab_size=VOCAB,
        max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )
    (model / "config.json").write_text(json.dumps(config))
    noise = bytearray(2 << 25)
    noise[0::2] = os.urandom(1 << 25)
    noise[1::2] = os.urandom(1 << 25).translate(HIGH)
    shards = [{"model.embed_tokens.weight": [VOCAB, HIDDEN]}]
    shards += [layer(i) for i in range(layers)]
    shards += [{"model.norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}]
    # Five gigabytes a file, as transformers cuts them.
    files = [{}]
    for shard in shards:
        if len(files[-1]) > 100:
            files.append({})
        files[-1] |= shard
    weight_map = {}
    for i, shapes in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        write(model / name, shapes, noise)
        weight_map |= dict.fromkeys(shapes, name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--types", nargs="*", default=["nf4", "int8", "bf16", "q8_0", "q4_k"])
    parser.add_argument("--limit", type=float, default=600, help="MiB")
    parser.add_argument("scratch", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        # In a process of its own: the highest resident set is handed on to children.
        if not (maker := os.fork()):
            make(Path(scratch) / "model", args.layers)
            os._exit(0)
        if os.waitpid(maker, 0)[1]:
            sys.exit("the model could not be made")
        convert(args, Path(scratch))


def convert(args, scratch):
    over = False
    print(f"{'type':8} {'GiB':>7} {'bits':>6} {'seconds':>8} {'resident MiB':>13}")
    for kind in args.types:
        output = scratch / (f"{kind}.gguf" if kind in GGUF else kind)
        command = [args.plimsoll, "convert", "--model", scratch / "model", "--output", output, "--dtype", kind, "--json"]
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"{kind}: failed")
        seconds, written = time.monotonic() - start, json.loads(printed)
        bits = written["bytes"] * 8 / written["parameters"]
        peak = usage.ru_maxrss / 1024
        over |= peak > args.limit
        print(f"{kind:8} {written['bytes'] / 2**30:7.2f} {bits:6.2f} {seconds:8.0f} {peak:13.0f}", flush=True)
        shutil.rmtree(output) if output.is_dir() else output.unlink()
    if over:
        sys.exit(f"more than {args.limit:.0f} MiB were resident")


if __name__ == "__main__":
    main()
