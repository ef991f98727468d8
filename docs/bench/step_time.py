#!/usr/bin/env python3
"""Compares the time that a plan names for a step with the time that the step takes, over settings in memory and on a disk.

    docs/bench/step_time.py [--plimsoll target/release/plimsoll] [--steps 5] [--rounds 1] [--json FILE] [SETTING ...]

SETTING: a name of the list below; all without one. Each is a model from scratch of about 60 M parameters, trained for some
steps; the time is the median over them (the first step, which also fills caches, is one of them). Prints planned, measured
and their ratio, and the medians and extremes of the ratios. The machine's speeds are measured anew first (`plimsoll doctor
--measure`). Needs no packages, an idle machine, and room for 2 GiB in the folder of temporary files.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DISK = "{parameters: disk, gradients: disk, optimizer: disk, activations: disk}"
FULL = ["training.gradient_checkpointing=full"]
BF16 = ["training.mixed_precision=bf16"]
# Name, whether it is all on a disk, settings.
SETTINGS = [
    ("f32", False, ["training.mixed_precision=f32"]),
    ("f32-checkpointing", False, ["training.mixed_precision=f32", *FULL]),
    ("bf16", False, BF16),
    ("bf16-checkpointing", False, [*BF16, *FULL]),
    ("bf16-long", False, [*BF16, "data.sequence_length=1024", "training.batch_size=1"]),
    ("bf16-accumulated", False, [*BF16, "training.gradient_accumulation_steps=4"]),
    ("adamw-8bit", False, [*BF16, "training.optimizer=adamw_8bit"]),
    ("lion", False, [*BF16, "training.optimizer=lion"]),
    ("in-backward", False, [*BF16, "training.optimizer_in_backward=true", "training.max_gradient_norm=0",
                            "training.master_weights=none", "training.optimizer=adafactor"]),
    ("optimizer-on-disk", True, [*BF16, "memory.offload={optimizer: disk}"]),
    ("parameters-on-disk", True, [*BF16, *FULL, "memory.offload={parameters: disk}"]),
    ("all-on-disk", True, [*BF16, *FULL, f"memory.offload={DISK}"]),
    ("all-on-disk-together", True, [*BF16, *FULL, f"memory.offload={DISK}", "training.gradient_accumulation_steps=4",
                                    "training.micro_batches_per_pass=4"]),
    ("all-on-host", True, [*BF16, *FULL, "memory.offload={parameters: host, gradients: host, optimizer: host}"]),
]
CONFIG = """\
model:
  from_scratch: {{architecture: llama, hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 16,
                  num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 8192}}
data:
  train: {data}
  sequence_length: 256
training:
  method: full
  batch_size: 2
  gradient_accumulation_steps: 1
memory:
  disk_path: {folder}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(REPOSITORY / "target/release/plimsoll"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    unknown = set(options.settings) - {name for name, *_ in SETTINGS}
    if unknown:
        parser.error(f"unknown settings: {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        subprocess.run([options.plimsoll, "doctor", "--measure"], check=True, capture_output=True)
        data = folder / "text.txt"
        data.write_text("The line says how deep a ship may lie in the water with all that is in her.\n" * 4000)
        (folder / "config.yaml").write_text(CONFIG.format(data=data, folder=folder))
        for name, on_disk, settings in SETTINGS:
            if options.settings and name not in options.settings:
                continue
            ratios, last = [], None
            for _ in range(options.rounds):
                last = measure(options, folder, name, settings)
                ratios.append(last["measured"] / last["planned"])
            rows.append({"setting": name, "on_disk": on_disk, **last, "ratio": statistics.median(ratios)})
            row = rows[-1]
            print(f"{name:24} planned {row['planned']:8.3f} s   measured {row['measured']:8.3f} s   x {row['ratio']:.2f}",
                  flush=True)
    for words, on_disk in (("in memory", False), ("below the device", True)):
        ratios = [row["ratio"] for row in rows if row["on_disk"] == on_disk]
        if ratios:
            print(f"{words}: median x {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(options, folder, name, settings):
    out = folder / f"run-{name}"
    command = [options.plimsoll, "train", folder / "config.yaml", "--set", f"output.dir={out}",
               "--set", f"training.steps={options.steps}", "--set", "output.save_steps=0",
               *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    report = json.loads((out / "report.json").read_text())
    subprocess.run(["rm", "-rf", out], check=True)
    return {"planned": report["planned"]["step_seconds"], "measured": report["measured"]["step_seconds_median"]}


if __name__ == "__main__":
    main()
