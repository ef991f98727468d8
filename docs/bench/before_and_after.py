#!/usr/bin/env python3
"""Compares two builds of Plimsoll in turns on the rows of the README: tokens/s, and the highest resident set.

    docs/bench/before_and_after.py BEFORE AFTER [--rounds 3] [--steps 3] [--json FILE] [ROW ...]

BEFORE and AFTER are programs; ROW is a name of the list below, all without one. Prints the median of each build over the
rounds, and AFTER's over BEFORE's. What a round does begins with the one build or the other by turns. Wants the machine for itself.
The model is fetched first by `examples/get-smollm2`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
FINE_TUNING = {
    "model.path": MODEL,
    "data.train": "examples/data/shakespeare.txt",
    "data.sequence_length": "512",
    "data.shuffle": "false",
    "training.batch_size": "4",
    "training.gradient_accumulation_steps": "1",
    "training.method": "full",
    "training.gradient_checkpointing": "none",
    "memory.device_budget": "8GiB",
}
BF16 = {"training.mixed_precision": "bf16"}
F32 = {"training.mixed_precision": "f32"}
FULL = {"training.gradient_checkpointing": "full"}
PURE = {**BF16, "training.master_weights": "none"}
LIGHT = {
    "training.max_gradient_norm": "0",
    "training.gradient_checkpointing": "sqrt",
    "training.loss_chunk_tokens": "64",
    "training.optimizer_in_backward": "true",
}
LORA = {**FULL, "training.batch_size": "1", "training.method": "lora"}
TRAINING = {
    "f32": F32,
    "f32-checkpointing": {**F32, **FULL},
    "bf16": BF16,
    "bf16-checkpointing": {**BF16, **FULL},
    "pure-bf16-checkpointing": {**PURE, **FULL},
    "light-f32": {**F32, **LIGHT},
    "light-bf16": {
        **PURE,
        **LIGHT,
        "training.gradient_dtype": "bf16",
        "training.optimizer": "adamw_8bit",
        "training.optimizer_options.embedding_bits": "8",
        "training.activation_compression": "int8",
    },
    "lora-q4_1": {**BF16, **LORA, "training.method": "qlora", "training.quantization": "stored"},
    "qlora-nf4": {**BF16, **LORA, "training.method": "qlora", "training.quantization": "nf4"},
}
SHORT = "The history of the sea is the history of people who"
GENERATING = {"decoding": (SHORT, 200), "prompt": (None, 1)}
# Of the text that is the long prompt.
CHARACTERS = 4500


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    rows = options.rows or [*TRAINING, *GENERATING]
    unknown = set(rows) - {*TRAINING, *GENERATING}
    if unknown:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    programs = {"before": options.before.resolve(), "after": options.after.resolve()}
    found = []
    print(f"{'':24} {'tokens/s':>9} {'':>9} {'ratio':>7}   {'RSS, MiB':>9} {'':>9} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            measured = {"before": [], "after": []}
            for number in range(options.rounds):
                for name in sorted(programs, reverse=number % 2 == 0):
                    measure = train if row in TRAINING else generate
                    measured[name].append(measure(programs[name], row, options.steps, Path(folder)))
            speed, memory = ({name: statistics.median(one[i] for one in measured[name]) for name in measured} for i in (0, 1))
            found.append({"row": row, "tokens_per_second": speed, "resident_bytes": memory, "runs": measured})
            mib = {name: memory[name] / 2**20 for name in memory}
            print(
                f"{row:24} {speed['before']:9.1f} {speed['after']:9.1f} {speed['after'] / speed['before']:7.3f}"
                f"   {mib['before']:9.1f} {mib['after']:9.1f} {mib['after'] / mib['before']:7.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def train(program, row, steps, folder):
    settings = {**FINE_TUNING, **TRAINING[row], "training.steps": steps, "output.dir": folder / "run", "output.save_steps": "0"}
    _, memory = run([program, "train", *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))])
    report = json.loads((folder / "run/report.json").read_text())
    tokens = int(settings["training.batch_size"]) * int(settings["data.sequence_length"])
    subprocess.run(["rm", "-rf", folder / "run"], check=True)
    return tokens / report["measured"]["step_seconds_median"], memory


def generate(program, row, _steps, _folder):
    prompt, tokens = GENERATING[row]
    prompt = prompt or (REPOSITORY / "examples/data/shakespeare.txt").read_text(encoding="utf-8")[:CHARACTERS]
    output, memory = run([program, "generate", "--model", MODEL, "--prompt", prompt, "--max-tokens", tokens, "--temperature", "0",
                          "--context", "2048", "--json"])
    document = json.loads(output)
    if row == "decoding":
        return document["tokens_per_second"], memory
    return len(document["prompt_tokens"]) / document["prompt_seconds"], memory


def run(command):
    """Standard output of a process, and its highest resident set."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=errors, cwd=REPOSITORY)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            errors.seek(0)
            sys.exit(f"{command}: exit code {process.returncode}\n{errors.read().decode()[-2000:]}")
    return output, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
