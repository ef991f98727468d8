#!/usr/bin/env python3
"""What PyTorch computes in f32 for a model that Plimsoll reads too: the values of docs/measuring.md to compare with.

MODEL is a .gguf file, whose tensors `transformers` dequantises, or a Hugging Face folder. Prints one JSON document:

- `loss_windows`, `loss_full`: the mean loss of TEXT in windows of --sequence-length tokens, each scored alone, and in
  one window of all its tokens;
- `greedy`: the likeliest 32 tokens after each --prompt;
- with --gradients N: of the first N tokens of TEXT as one sequence, the norm of every parameter's gradient before
  clipping, and the losses of five AdamW steps at a learning rate of 1e-5 (betas 0.9 and 0.999, epsilon 1e-8, weight
  decay 0.01 on every parameter, global norm clipped at 1), each before its update, with the loss after the fifth;
  and the text of those tokens.

usage: pytorch_reference.py MODEL TEXT [--sequence-length 512] [--prompt TEXT]... [--gradients N]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def load(path):
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    else:
        where = {"pretrained_model_name_or_path": str(path)}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def loss(model, ids, length):
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(ids), length):
            window = torch.tensor([ids[begin : begin + length]])
            if window.shape[1] < 2:
                break
            log_p = torch.log_softmax(model(window).logits[0, :-1].double(), dim=-1)
            total -= log_p.gather(1, window[0, 1:, None]).sum().item()
            count += window.shape[1] - 1
    return {"tokens": count, "loss": total / count}


def gradients(model, ids):
    tokens = torch.tensor([ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    result = {"losses": [], "global_norms": []}
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        value = model(input_ids=tokens, labels=tokens).loss
        result["losses"].append(value.item())
        if step == 5:
            break
        value.backward()
        if step == 0:
            result["norms"] = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        result["global_norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--gradients", type=int, metavar="N")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load(args.model)
    ids = tokenizer(args.text.read_bytes().decode(), add_special_tokens=False)["input_ids"]
    result = {
        "loss_windows": loss(model, ids, args.sequence_length),
        "loss_full": loss(model, ids, len(ids)),
        "greedy": [],
    }
    for prompt in args.prompt:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model.generate(tokens, max_new_tokens=32, do_sample=False, eos_token_id=None)
        result["greedy"].append({"prompt": prompt, "tokens": output[0, tokens.shape[1] :].tolist()})
    if args.gradients:
        first = ids[: args.gradients]
        result["gradients"] = {"text": tokenizer.decode(first), **gradients(model, first)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
