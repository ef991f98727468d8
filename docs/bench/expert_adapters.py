#!/usr/bin/env python3
"""Makes adapters on experts of a tiny mixture with PEFT, and the experts that PEFT merges.

    docs/bench/expert_adapters.py crates/train/tests/data/experts crates/model/tests/data/experts

Needs torch, transformers 5 and peft. Writes `stacked`, an adapter of a layer's stacks as PEFT saves it, and `single`, one with a
tensor for each matrix of each expert as PEFT saved it with transformers 4. Both have `merged.safetensors`, the layer's experts with the
adapter in them. `crates/model/tests/adapters.rs` compares with these.
"""

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

FAMILY, LAYER, RANK = "qwen3-moe", 1, 2


def base(models):
    return transformers.AutoModelForCausalLM.from_pretrained(models / FAMILY, dtype=torch.float32)


def write_merged(model, folder):
    with tempfile.TemporaryDirectory() as place:
        model.merge_and_unload().save_pretrained(place)
        tensors = load_file(Path(place) / "model.safetensors")
    of_layer = {k: v for k, v in tensors.items() if k.startswith(f"model.layers.{LAYER}.mlp.experts.")}
    save_file(of_layer, folder / "merged.safetensors")


def stacked(models, folder):
    at = f"model.layers.{LAYER}.mlp.experts"
    targets = [f"{at}.gate_up_proj", f"{at}.down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=3, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(base(models), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    write_merged(model, folder)


def single(models, folder):
    config = json.loads((models / FAMILY / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    tensors = {}
    for expert in range(config["num_local_experts"]):
        for part, out, inp in [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]:
            at = f"base_model.model.model.layers.{LAYER}.mlp.experts.{expert}.{part}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, inp) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, RANK) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = ["gate_proj", "up_proj", "down_proj"]
    adapter = peft.LoraConfig(r=RANK, lora_alpha=3, target_modules=names, task_type="CAUSAL_LM", inference_mode=True)
    adapter.save_pretrained(folder)
    write_merged(peft.PeftModel.from_pretrained(base(models), folder), folder)


def main():
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    for kind in [stacked, single]:
        torch.manual_seed(3)
        kind(models, out / kind.__name__)
        (out / kind.__name__ / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
