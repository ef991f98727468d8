#!/usr/bin/env python3
"""Steps of a small mixture of experts beside those of a dense model with as many active parameters, and of transformers, by turns.

    docs/bench/mixture_speed.py --plimsoll target/release/plimsoll [--python PYTHON_WITH_TORCH_AND_TRANSFORMERS] [--rounds 3]

14 layers of width 512, 8 experts of width 448 of which a token goes to 2; the dense model's width is 896. Batch 4 x 512, f32, AdamW,
nothing recomputed. Prints tokens/s of every round (the median of its steps but the first) and the ratios of their medians.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

TEXT = Path(__file__).resolve().parents[2] / "examples/data/shakespeare.txt"
FAMILIES = {
    "mixture": "architecture: mixtral, num_experts: 8, num_experts_per_token: 2, intermediate_size: 448",
    "dense": "architecture: llama, intermediate_size: 896",
}
REFERENCE = """
import json, time, torch, transformers
torch.set_num_threads({threads})
config = transformers.MixtralConfig(
    vocab_size=257, hidden_size=512, intermediate_size=448, num_hidden_layers=14, num_attention_heads=8, num_key_value_heads=4,
    num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True, output_router_logits=True)
best = 0
for how in ("eager", "grouped_mm"):
    model = transformers.MixtralForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation=how).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randint(0, 257, (4, 512))
    speeds = []
    for _ in range(4):
        begun = time.time()
        model(x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(2048 / (time.time() - begun))
    best = max(best, sorted(speeds[1:])[1])
print(json.dumps(best))
"""


def plimsoll(binary, family, folder):
    config = folder / f"{family}.yaml"
    config.write_text(
        f"model: {{from_scratch: {{{FAMILIES[family]}, hidden_size: 512, num_hidden_layers: 14, num_attention_heads: 8, "
        f"num_key_value_heads: 4, tie_word_embeddings: true}}}}\n"
        f"data: {{train: '{TEXT}', sequence_length: 512}}\n"
        "training: {steps: 4, batch_size: 4, gradient_accumulation_steps: 1, mixed_precision: f32, gradient_checkpointing: none}\n"
        f"memory: {{device_budget: 10GiB}}\noutput: {{dir: '{folder / family}'}}\n"
    )
    subprocess.run([binary, "train", config], check=True, capture_output=True)
    lines = (folder / family / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    parser.add_argument("--python", help="an interpreter with torch and transformers; without it they are left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    speeds = {}
    for _ in range(args.rounds):
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                speeds.setdefault(family, []).append(plimsoll(args.plimsoll, family, Path(folder)))
        if args.python:
            script = REFERENCE.format(threads=args.threads)
            out = subprocess.run([args.python, "-c", script], check=True, capture_output=True, text=True).stdout
            speeds.setdefault("transformers", []).append(json.loads(out))
    for name, found in speeds.items():
        print(f"{name:13}" + "".join(f"{speed:8.0f}" for speed in found) + f"   median {statistics.median(found):.0f} tokens/s")
    middle = {name: statistics.median(found) for name, found in speeds.items()}
    print(f"mixture / dense {middle['mixture'] / middle['dense']:.2f}")
    if "transformers" in middle:
        print(f"mixture / transformers {middle['mixture'] / middle['transformers']:.2f}")


if __name__ == "__main__":
    main()
