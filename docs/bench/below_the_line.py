#!/usr/bin/env python3
"""Trains models larger than the memory that they are given, and prints what was planned and what was measured.

    docs/bench/below_the_line.py --plimsoll target/release/plimsoll SCRATCH [135m 256k 1.7b 1.7b-by-turns 7b 7b-qlora ...]

`135m` needs the model of examples/get-smollm2 (--model says where it is): it is trained in memory and on disk, and the two
must agree to the bit. The others are random: two layers under a vocabulary of 256k, 1.7B of SmolLM2's shape, 7B of Llama
2's. `1.7b-by-turns` takes steps of 8 x 1 x 512 tokens in memory, which takes 12 GiB, and inside 512 MiB, where the planner says what
is where. 7b needs 27 GB on the disk of SCRATCH, 7b-qlora 18 GB; all of it is deleted at the end. Needs no packages.
Fails where more was resident than the limit.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import convert_memory

AWAY = "{parameters: disk, gradients: disk, optimizer: disk, activations: disk}"

SHAPES = {
    "256k": dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
                 num_key_value_heads=8, vocab_size=262144, tie_word_embeddings=True),
    "1.7b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
                 num_key_value_heads=32, vocab_size=49152, tie_word_embeddings=True),
    "7b": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=32, vocab_size=32000, tie_word_embeddings=False),
}
LIMITS = {"135m": 320, "256k": 320, "1.7b": 1024, "1.7b-by-turns": 512, "7b": 2048, "7b-qlora": 1024}

LEAN = """mixed_precision: bf16, master_weights: none, optimizer: adamw_8bit, optimizer_in_backward: true,
  max_gradient_norm: 0, gradient_checkpointing: full"""


def config(model, training, memory, data, steps, accumulation):
    return f"""model: {json.dumps(model)}
data: {{train: {data}, sequence_length: 512, shuffle: false}}
training: {{steps: {steps}, batch_size: 1, gradient_accumulation_steps: {accumulation}, learning_rate: 2e-5,
  {training}}}
memory: {memory}
output: {{logging_steps: 1, save_steps: 0, final_model: false}}
"""


def run(args, folder, name, text, output):
    file = folder / f"{name}.yaml"
    file.write_text(text)
    shutil.rmtree(output, ignore_errors=True)
    command = [args.plimsoll, "train", file, "--set", f"output.dir={output}", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, error = child.communicate()
    if child.returncode:
        sys.exit(f"{name}: {error.decode()}")
    return json.loads((output / "report.json").read_text())


def show(name, report):
    planned, measured, io = report["planned"], report["measured"], report.get("io") or {}
    mib = lambda n: f"{n / 2**20:.0f}"
    hidden = io.get("hidden_share")
    row = [name, mib(planned["process_bytes"]), mib(measured["process_peak_rss_bytes"]),
           mib(planned["disk_bytes"]), mib(measured["disk_bytes"]), f"{measured['step_seconds_median']:.1f}",
           f"{report['tokens_per_second_median']:.1f}", "-" if hidden is None else f"{hidden:.0%}"]
    print("".join(f"{cell:>16}" for cell in row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True, type=lambda p: Path(p).resolve())
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", default="examples/data/shakespeare.txt", type=lambda p: Path(p).resolve())
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of runs by turns")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("runs", nargs="*", default=["135m", "1.7b"])
    args = parser.parse_args()
    heads = ["", "planned MiB", "resident MiB", "planned disk", "disk MiB", "s a step", "tokens/s", "I/O hidden"]
    print("".join(f"{head:>16}" for head in heads), flush=True)
    over = False
    for name in args.runs:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            report = one(args, name, Path(scratch))
        over |= report["measured"]["process_peak_rss_bytes"] > LIMITS[name] * 2**20
    sys.exit("more was resident than the limit" if over else 0)


def by_turns(args, name, scratch):
    """Steps in memory and inside the limit, in turns."""
    model, speeds = {"from_scratch": SHAPES["1.7b"]}, {}
    for _ in range(args.rounds):
        for place, memory in [("in memory", "{device_budget: 16GiB}"), ("inside", f"{{device_budget: {LIMITS[name]}MiB}}")]:
            text = config(model, LEAN + ", micro_batches_per_pass: 8", memory, args.data, args.steps, 8)
            report = run(args, scratch, name, text, scratch / "out")
            show(f"1.7b {place}", report)
            speeds.setdefault(place, []).append(report["tokens_per_second_median"])
    steps = [json.loads(line) for line in (scratch / "out/metrics.jsonl").read_text().splitlines()]
    moved = steps[-1]["io"]
    planned = subprocess.run([args.plimsoll, "plan", scratch / f"{name}.yaml", "--json"], check=True, capture_output=True)
    planned = json.loads(planned.stdout)["io"]
    # The embedding's rows of the tokens, whole pages of each, are in no plan.
    rows = moved["bytes_read"] - planned["bytes_read"]
    if not 0 <= rows <= 8 * 512 * 3 * 4096 or moved["bytes_written"] != planned["bytes_written"]:
        sys.exit(f"planned for a step: {planned}, counted: {moved}")
    print(f"a step reads {planned['bytes_read'] / 1e9:.2f} GB and writes {planned['bytes_written'] / 1e9:.2f} GB, as planned, "
          f"and {rows / 1e6:.1f} MB of rows that tokens are looked up in")
    ratio = statistics.median(speeds["inside"]) / statistics.median(speeds["in memory"])
    print(f"{ratio:.0%} of the tokens/s")
    return report


def one(args, name, scratch):
    limit = f"{{device_budget: {LIMITS[name]}MiB, offload: {AWAY}}}"
    output = scratch / "out"
    if name == "135m":
        model = str(Path(args.model).resolve())
        training = "mixed_precision: f32, gradient_checkpointing: full"
        text = lambda memory: config(model, training, memory, args.data, args.steps, 8).replace(
            "final_model: false", "final_model: true")
        none = AWAY.replace("disk", "device")
        plain = run(args, scratch, name, text(f"{{device_budget: 4GiB, offload: {none}}}"), scratch / "memory")
        show("135m in memory", plain)
        report = run(args, scratch, name, text(limit), output)
        for file in ["model.safetensors"]:
            if (scratch / "memory" / file).read_bytes() != (output / file).read_bytes():
                sys.exit(f"{file} differs")
        ratio = report["tokens_per_second_median"] / plain["tokens_per_second_median"]
        show("on disk", report)
        print(f"the same bits; {ratio:.0%} of the tokens/s")
        return report
    if name == "1.7b-by-turns":
        return by_turns(args, name, scratch)
    if name == "7b-qlora":
        # The tokenizer of a tiny model from scratch: one token a byte.
        tiny = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
        text = config({"from_scratch": tiny}, "mixed_precision: f32", "{device_budget: 512MiB}", args.data, 1, 1)
        run(args, scratch, "tiny", text.replace("final_model: false", "final_model: true"), scratch / "tiny")
        if not (maker := os.fork()):
            convert_memory.make(scratch / "model", 32)
            os._exit(0)
        if os.waitpid(maker, 0)[1]:
            sys.exit("the model could not be made")
        for file in (scratch / "tiny").glob("tokenizer*"):
            shutil.copy(file, scratch / "model")
        training = "method: qlora, mixed_precision: bf16, gradient_checkpointing: full, lora: {rank: 16}"
        text = config(str(scratch / "model"), training, limit, args.data, 1, 1)
    else:
        training = "mixed_precision: f32, gradient_checkpointing: full" if name == "256k" else LEAN
        text = config({"from_scratch": SHAPES[name]}, training, limit, args.data, 1 if name == "7b" else 2, 1)
    report = run(args, scratch, name, text, output)
    show(name, report)
    return report


if __name__ == "__main__":
    main()
