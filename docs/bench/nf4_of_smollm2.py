#!/usr/bin/env python3
"""Hashes of what bitsandbytes makes of SmolLM2's linears in NF4 with double quantisation.

    plimsoll convert --model models/SmolLM2-135M-Instruct.Q4_1.gguf --output FOLDER --dtype f32
    docs/bench/nf4_of_smollm2.py FOLDER crates/model/tests/data/quantised/smollm2_nf4.json

For each matrix the FNV-1a hashes (64 bits) of codes, codes of scales, factors and offset, as the checkpoint has them.
`crates/model/tests/nf4_of_smollm2.rs` compares with these; it needs no Python.
"""

import json
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
from safetensors import safe_open


def fnv(tensor):
    value = 0xCBF29CE484222325
    for byte in tensor.contiguous().cpu().numpy().tobytes():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def main():
    hashes = {}
    with safe_open(Path(sys.argv[1]) / "model.safetensors", "pt") as weights:
        for name in sorted(name for name in weights.keys() if name.endswith("_proj.weight")):
            weight = weights.get_tensor(name)
            codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
            parts = [codes, state.absmax, state.state2.absmax, state.offset]
            hashes[name] = [fnv(part) for part in parts]
    Path(sys.argv[2]).write_text(json.dumps(hashes, indent=0) + "\n")


main()
