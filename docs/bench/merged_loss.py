#!/usr/bin/env python3
"""Makes a PEFT adapter for a model and compares the loss of `plimsoll merge` with that of PEFT.

    docs/bench/merged_loss.py --plimsoll target/release/plimsoll FOLDER TEXT SCRATCH

FOLDER is a model in Hugging Face's format (`plimsoll convert --dtype f32`). Needs torch, transformers and peft. The adapter is
random, its B so small that the model stays one; ranks differ, and the factor is rsLoRA's. The merge goes into a folder and
into a GGUF file, both in f32. Fails where losses differ by more than 1e-3.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from windows_loss import loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("scratch", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    args.scratch.mkdir(parents=True, exist_ok=True)

    def plimsoll(*arguments):
        command = [args.plimsoll, *map(str, arguments), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr}")
        return json.loads(done.stdout)

    torch.manual_seed(7)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules="all-linear",
        use_rslora=True,
        rank_pattern={"down_proj": 4},
        alpha_pattern={"v_proj": 24},
    )
    base = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    adapter = args.scratch / "adapter"
    adapted.save_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    ids = tokenizer(args.text.read_bytes().decode(), add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    windows = [window for window in ids.split(args.sequence_length) if len(window) > 1]
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32), adapter
    ).eval()
    theirs = loss(adapted, windows)

    def evaluated(model):
        length = ["--sequence-length", args.sequence_length]
        return plimsoll("eval", "--model", model, "--data", args.text, *length)["loss"]

    print(f"base {evaluated(args.folder):.6f}, PEFT {theirs:.6f}", flush=True)
    wrong = False
    for name in ["merged", "merged.gguf"]:
        output = args.scratch / name
        plimsoll("merge", "--model", args.folder, "--adapter", adapter, "--output", output, "--dtype", "f32", "--force")
        ours = evaluated(output)
        print(f"{name} {ours:.6f}", flush=True)
        wrong |= abs(ours - theirs) > 1e-3
        shutil.rmtree(output) if output.is_dir() else output.unlink()
    shutil.rmtree(adapter)
    if wrong:
        sys.exit("they differ by more than 1e-3")


main()
