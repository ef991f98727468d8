#!/usr/bin/env python3
"""Makes LoRA adapters of the tiny models with PEFT, and what PyTorch in f32 says of them.

    docs/bench/lora_fixtures.py crates/train/tests/data

Needs torch, transformers and peft, and the models that docs/bench/tiny_models.py made in DATA/families. Writes for each
case a folder DATA/adapters/CASE as PEFT's save_pretrained() makes it, and in it `expected.json`: the mean loss over all
tokens but the first with the adapter, and the norm of the gradient of everything that is trained.
`crates/train/tests/adapters.rs` compares with these; it needs no Python. DATA/tied-embedding is an adapter that trains the
embedding alone of a model whose head is tied to it, which the library unties.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers

CASES = {
    "llama": ("llama", dict(target_modules="all-linear")),
    "llama-names": ("llama-biases", dict(target_modules=["q_proj", "layers.1.mlp.up_proj"], bias="lora_only")),
    "llama-pattern": ("llama", dict(target_modules=r".*layers\.[02]\.self_attn\.(q|v)_proj", use_rslora=True,
                                    rank_pattern={"layers.2.self_attn.v_proj": 2}, alpha_pattern={"q_proj": 7})),
    "llama-embedding": ("llama", dict(target_modules=["embed_tokens", "down_proj"])),
    "llama-head": ("llama-biases", dict(target_modules=["k_proj", "lm_head"], bias="all")),
    "llama-whole": ("llama-biases", dict(target_modules=["o_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"])),
    "gpt2": ("gpt2", dict(target_modules="all-linear", fan_in_fan_out=True)),
    "phi3": ("phi3", dict(target_modules="all-linear")),
    "gemma2": ("gemma2", dict(target_modules="all-linear")),
    "qwen3": ("qwen3", dict(target_modules=["gate_proj", "o_proj", "v_proj"])),
    "llama-dora": ("llama", dict(target_modules="all-linear", use_dora=True)),
    "phi3-dora": ("phi3", dict(target_modules=["qkv_proj", "down_proj"], use_dora=True)),
}


def tied_embedding(data):
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        data / "families" / "llama", dtype=torch.float32, attn_implementation="eager")
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"])).eval()
    tokens = torch.tensor(json.loads((data / "families" / "llama" / "expected.json").read_text())["tokens"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])
    folder = data / "tied-embedding"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "expected.json").write_text(json.dumps({"family": "llama", "loss": float(loss)}, indent=1) + "\n")


def main():
    data = Path(sys.argv[1])
    tied_embedding(data)
    for case, (family, settings) in CASES.items():
        torch.manual_seed(len(case))
        base = transformers.AutoModelForCausalLM.from_pretrained(
            data / "families" / family, dtype=torch.float32, attn_implementation="eager")
        settings = dict(r=4, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(base, peft.LoraConfig(**settings))
        # B is zero at first, which would hide half of the arithmetic; lengths are those of the rows.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.eval()
        tokens = torch.tensor(json.loads((data / "families" / family / "expected.json").read_text())["tokens"])
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])
        loss.backward()
        norms = {name.replace(".default", ""): float(p.grad.double().norm())
                 for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        folder = data / "adapters" / case
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        expected = {
            "note": f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, f32",
            "family": family,
            "loss": float(loss),
            "gradient_norms": norms,
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(case, float(loss), len(norms))


if __name__ == "__main__":
    main()
