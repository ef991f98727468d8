#!/usr/bin/env python3
"""What PyTorch computes in f32 for a model that Plimsoll reads too: the values of docs/measuring.md to compare with.

MODEL is a .gguf file, whose tensors `transformers` dequantises, or a Hugging Face folder. Prints one JSON document:

- `text`, `token_ids`: TEXT, or its first --characters, and its tokens;
- `mean_loss_windows_N`, `mean_loss_full`: its mean loss in windows of N = --sequence-length tokens, each scored alone,
  and in one window of all its tokens;
- `greedy`: the likeliest 32 tokens after each --prompt;
- `tokenizer_cases`: the tokens of the texts that another such document, --cases, has cases of;
- with --gradients N: of the first N tokens of TEXT as one sequence, `gradient_norms`, the norm of every parameter's
  gradient before clipping; with --steps also `loss_per_step` and `grad_global_norm_per_step` of five AdamW steps at a
  learning rate of 1e-5 (betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.01 on every parameter, global norm clipped
  at 1), each before its update, with the loss after the fifth.

crates/train/tests/data/real holds such documents, of TEXT the first 3000 characters of examples/data/shakespeare.txt.

usage: pytorch_reference.py MODEL TEXT [--sequence-length 512] [--prompt TEXT]... [--gradients N [--steps]]
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
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
    return total / count


def gradients(model, ids, steps):
    tokens = torch.tensor([ids])
    result = {"step_tokens": len(ids)}
    if not steps:
        model(input_ids=tokens, labels=tokens).loss.backward()
        return result | {"gradient_norms": norms(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, global_norms = [], []
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        value = model(input_ids=tokens, labels=tokens).loss
        losses.append(value.item())
        if step == 5:
            break
        value.backward()
        if step == 0:
            result["gradient_norms"] = norms(model)
        global_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return result | {"loss_per_step": losses, "grad_global_norm_per_step": global_norms}


def norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--gradients", type=int, metavar="N")
    parser.add_argument("--steps", action="store_true")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load(args.model)
    text = args.text.read_bytes().decode()[: args.characters]

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = encode(text)
    result = {
        "note": f"PyTorch {torch.__version__} and transformers {transformers.__version__} in f32 on {args.model.name}",
        "text": text,
        "token_ids": ids,
        f"mean_loss_windows_{args.sequence_length}": loss(model, ids, args.sequence_length),
        "mean_loss_full": loss(model, ids, len(ids)),
        "greedy": [],
        "tokenizer_cases": [],
    }
    for prompt in args.prompt:
        tokens = encode(prompt)
        with torch.no_grad():
            output = model.generate(torch.tensor([tokens]), max_new_tokens=32, do_sample=False, eos_token_id=None)
        output = output[0, len(tokens) :].tolist()
        result["greedy"].append({"prompt": prompt, "prompt_ids": tokens, "output_ids": output})
    if args.cases:
        for case in json.loads(args.cases.read_text())["tokenizer_cases"]:
            result["tokenizer_cases"].append({"text": case["text"], "ids": encode(case["text"])})
    if args.gradients:
        result |= gradients(model, ids[: args.gradients], args.steps)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
