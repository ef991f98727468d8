#!/usr/bin/env python3
"""Makes PiSSA adapters of the tiny models with PEFT, and what PyTorch in f32 says of them and of their training.

    docs/bench/pissa_fixtures.py crates/train/tests/data
    docs/bench/pissa_fixtures.py --check BASE ADAPTER TOKENS

Needs torch, transformers and peft, and the models that docs/bench/tiny_models.py made in DATA/families. Writes for each
case DATA/pissa/CASE.json (the settings, the loss of the plain base, the losses of some steps of AdamW, and those of the
adapter that PEFT converts for the plain base) and DATA/pissa/CASE.safetensors (s B A of every adapted weight, and what
is left of the weight). `crates/train/tests/pissa.rs` compares with these; it needs no Python.

With --check it prints the mean loss over all tokens but the first that PEFT finds for an adapter folder on its original
base; TOKENS is a JSON list of ids, or an object that has one as `tokens`.
"""

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

CASES = {
    "llama": ("llama", dict(target_modules="all-linear")),
    "llama-patterns": ("llama", dict(target_modules=["q_proj", "down_proj"], rank_pattern={"layers.1.mlp.down_proj": 2},
                                     alpha_pattern={"q_proj": 7})),
    "llama-rslora": ("llama", dict(target_modules="all-linear", use_rslora=True)),
    "gpt2": ("gpt2", dict(target_modules="all-linear", fan_in_fan_out=True)),
    "phi3": ("phi3", dict(target_modules="all-linear")),
}
STEPS, LR = 5, 1e-2


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")


def loss_of(model, tokens):
    logits = model(tokens[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])


def check(base, adapter, tokens):
    ids = json.loads(Path(tokens).read_text())
    model = peft.PeftModel.from_pretrained(load(base), adapter).eval()
    with torch.no_grad():
        print(float(loss_of(model, torch.tensor(ids["tokens"] if isinstance(ids, dict) else ids))))


def main():
    if sys.argv[1] == "--check":
        return check(*sys.argv[2:])
    data = Path(sys.argv[1])
    (data / "pissa").mkdir(exist_ok=True)
    for case, (family, settings) in CASES.items():
        folder = data / "families" / family
        tokens = torch.tensor(json.loads((folder / "expected.json").read_text())["tokens"])
        with torch.no_grad():
            plain = float(loss_of(load(folder).eval(), tokens))
        config = dict(r=4, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(load(folder), peft.LoraConfig(init_lora_weights="pissa", **config)).eval()
        tensors = {}
        for name, module in model.base_model.model.named_modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                tensors[f"{name}.product"] = module.get_delta_weight("default").detach().contiguous()
                tensors[f"{name}.residual"] = module.get_base_layer().weight.detach().contiguous()
        save_file(tensors, data / "pissa" / f"{case}.safetensors")
        with tempfile.TemporaryDirectory() as place:
            start = Path(place) / "start"
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(start)
            optimizer = torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
            losses = []
            for _ in range(STEPS):
                loss = loss_of(model, tokens)
                losses.append(float(loss))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            trained = float(loss_of(model, tokens))
            model.save_pretrained(Path(place) / "converted", path_initial_model_for_weight_conversion=str(start))
            again = peft.PeftModel.from_pretrained(load(folder), Path(place) / "converted").eval()
            with torch.no_grad():
                converted = float(loss_of(again, tokens))
        expected = {
            "note": f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, f32",
            "family": family,
            "settings": {key: value for key, value in config.items() if key not in ("task_type", "lora_dropout")},
            "plain_loss": plain,
            "learning_rate": LR,
            "losses": losses,
            "trained_loss": trained,
            "converted_loss": converted,
        }
        (data / "pissa" / f"{case}.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(case, plain, losses, trained, converted, len(tensors))


if __name__ == "__main__":
    main()
