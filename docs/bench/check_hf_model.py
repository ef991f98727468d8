#!/usr/bin/env python3
"""Loads a folder that Plimsoll has written with `transformers`, as it is, and measures the loss of a text.

Fails if a tensor is missing, left over or of another shape. The loss is what `plimsoll eval` reports: the text is
tokenised whole and cut into windows of --sequence-length tokens, each scored alone, the first token of each being
context. Computed in f32 whatever the folder holds.

usage: check_hf_model.py FOLDER TEXT_FILE [--sequence-length 512] [--prompt TEXT]
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--prompt", help="continue this text too, greedily, by 32 tokens")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    model, info = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if wrong:
        sys.exit(f"{args.folder} does not match its config.json: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model.eval()

    text = args.text.read_bytes().decode()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        sys.exit("the tokenizer does not give back the text that it was given")
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(ids), args.sequence_length):
            window = torch.tensor([ids[begin : begin + args.sequence_length]])
            if window.shape[1] < 2:
                break
            log_p = torch.log_softmax(model(window).logits[0, :-1].double(), dim=-1)
            total -= log_p.gather(1, window[0, 1:, None]).sum().item()
            count += window.shape[1] - 1
        loss = total / count
        result = {
            "architecture": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": count,
            "loss": loss,
            "perplexity": math.exp(loss),
        }
        if args.prompt:
            prompt = tokenizer(args.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            output = model.generate(prompt, max_new_tokens=32, do_sample=False)
            result["tokens_after_prompt"] = output[0, prompt.shape[1] :].tolist()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
