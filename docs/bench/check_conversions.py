#!/usr/bin/env python3
"""Converts a model to every type that `plimsoll convert` writes, and has others read the results.

    docs/bench/check_conversions.py --plimsoll target/release/plimsoll MODEL TEXT SCRATCH

Needs torch, transformers, accelerate, bitsandbytes and gguf; llama.cpp is asked too where xllamacpp is installed. The model
goes to a folder in f32, and from there to each type. Of every output are compared

- the loss of the text as `plimsoll eval` gives it, with the loss that transformers computes in f32 from the same file: GGUF
  through its own reader and the package gguf, 4 and 8 bits through bitsandbytes;
- the loss of `eval --quantize`, with PyTorch's where linears are replaced by what bitsandbytes makes of them and back;
- the greedy continuation of a prompt, with llama.cpp's where it runs the file.

Fails where two losses differ by more than the bound that is printed. Outputs are deleted one by one.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from windows_loss import loss

GGUF = ["f32", "bf16", "f16", "q8_0", "q6_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"]
FOLDERS = ["bf16", "f16", "nf4", "nf4_f32", "fp4", "fp4_f32", "int8"]
PROMPT = "The capital of France is"
failed = []


def load(path):
    """The model of a file or a folder, computed in f32."""
    where = dict(gguf_file=path.name, pretrained_model_name_or_path=path.parent)
    where = where if path.suffix == ".gguf" else dict(pretrained_model_name_or_path=path)
    model, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        failed.append(f"{path} does not match its description: {wrong}")
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # It would compute in bf16 there.
            module.support_avx512bf16_for_cpu = False
    # Of a quantised folder it reads what is not quantised in bf16, whatever it is asked for.
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model.eval()


def in_and_out(weight, kind):
    """What bitsandbytes makes of a matrix, in f32 again."""
    if kind == "int8":
        codes, magnitudes, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        return bnb.int8_vectorwise_dequant(codes, magnitudes)
    name, _, plain = kind.partition("_")
    codes, state = bnb.quantize_4bit(weight, compress_statistics=not plain, quant_type=name)
    return bnb.dequantize_4bit(codes, state)


def llama_cpp(path, tokens):
    try:
        import xllamacpp
    except ImportError:
        return None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = 512, 1, -1
    request = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
    answer = xllamacpp.Server(params).handle_completions(request)
    return answer["content"] if "content" in answer else answer["choices"][0]["text"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--only", nargs="*", help="types, instead of all")
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("scratch", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def plimsoll(*arguments):
        command = [args.plimsoll, *map(str, arguments), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr}")
        return json.loads(done.stdout)

    def evaluated(model, *more):
        length = ["--sequence-length", args.sequence_length]
        return plimsoll("eval", "--model", model, "--data", args.text, *length, *more)["loss"]

    def compare(what, bits, ours, theirs, bound, note=""):
        wrong = abs(ours - theirs) > bound
        print(f"{what:18} {bits:6} {ours:10.6f} {theirs:10.6f} {ours - base:+9.6f} {bound:7.0e} {note}", flush=True)
        if wrong:
            failed.append(f"{what}: {ours} here, {theirs} there")

    args.scratch.mkdir(parents=True, exist_ok=True)
    base = evaluated(args.model)
    plain = args.scratch / "f32"
    plimsoll("convert", "--model", args.model, "--output", plain, "--dtype", "f32", "--force")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    ids = tokenizer(args.text.read_bytes().decode(), add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    windows = [window for window in ids.split(args.sequence_length) if len(window) > 1]

    print(f"{'what':18} {'bits':6} {'plimsoll':>10} {'others':>10} {'to input':>9} {'bound':7}")
    reference = load(plain)
    compare("folder f32", "32", evaluated(plain), loss(reference, windows), 1e-4)
    for kind in ["nf4", "nf4_f32", "fp4", "fp4_f32", "int8"]:
        if args.only and kind not in args.only:
            continue
        model = load(plain)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "_proj.weight" in name:
                    weight.copy_(in_and_out(weight, kind))
        # In int8 it rounds the weights to f16 first.
        bound = 5e-3 if kind == "int8" else 1e-3
        compare(f"--quantize {kind}", "", evaluated(plain, "--quantize", kind), loss(model, windows), bound)
        del model

    for gguf, kind in [(True, kind) for kind in GGUF] + [(False, kind) for kind in FOLDERS]:
        if args.only and kind not in args.only:
            continue
        path = args.scratch / (f"{kind}.gguf" if gguf else kind)
        written = plimsoll("convert", "--model", plain, "--output", path, "--dtype", kind, "--force")
        bits = f"{written['bytes'] * 8 / written['parameters']:.2f}"
        ours = evaluated(path)
        text = plimsoll("generate", "--model", path, "--prompt", PROMPT, "--max-tokens", 12, "--temperature", 0)["text"]
        note = repr(text)
        if gguf and (other := llama_cpp(path, 12)) is not None:
            note += " = llama.cpp's" if other == text else f", llama.cpp {other!r}"
        # Through bitsandbytes, int8 rounds activations too.
        compare(f"{'GGUF' if gguf else 'folder'} {kind}", bits, ours, loss(load(path), windows), 2e-2 if kind == "int8" else 1e-3, note)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(plain)
    if failed:
        sys.exit("\n".join(failed))


main()
