#!/usr/bin/env python3
"""Reads the event files of a run with TensorBoard's own loader.

    docs/bench/tensorboard_check.py [--plimsoll target/release/plimsoll]

Trains a tiny model for 12 steps, stops, continues, and compares every scalar that TensorBoard shows with `metrics.jsonl`: the same
steps, once each, and the same values in f32. The columns of `metrics.csv` likewise. Wants the package tensorboard.
"""

import argparse
import csv
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = """
model:
  from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
data: {train: text.txt, validation: text.txt, sequence_length: 64}
training: {steps: 12, batch_size: 2, gradient_accumulation_steps: 1, learning_rate: 3e-3}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 5, eval_steps: 4, tensorboard: true, csv: true, final_model: false}
"""
KEYS = {"train/loss": ("loss",), "train/grad_norm": ("grad_norm",), "train/learning_rate": ("lr",), "train/tokens": ("tokens",),
        "eval/loss": ("validation_loss",), "memory/device_peak_bytes": ("memory", "device_peak_bytes"),
        "memory/process_rss_bytes": ("memory", "process_rss_bytes")}


def f32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def at(step, path):
    for key in path:
        step = step.get(key) if step else None
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=REPOSITORY / "target/release/plimsoll")
    plimsoll = str(parser.parse_args().plimsoll)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("The load line is a mark on the hull of a ship.\n" * 200)
        (folder / "run.yaml").write_text(RUN)
        train = [plimsoll, "train", "run.yaml"]
        subprocess.run(train, cwd=folder, check=True, capture_output=True)
        # The run goes on behind step 10, and takes 11 and 12 anew.
        subprocess.run([*train, "--resume", "--set", "training.steps=16"], cwd=folder, check=True, capture_output=True)
        steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
        events = EventAccumulator(str(folder / "out/tensorboard"), purge_orphaned_data=True)
        events.Reload()
        for tag, path in KEYS.items():
            wanted = [(step["step"], f32(at(step, path))) for step in steps if at(step, path) is not None]
            found = [(event.step, event.value) for event in events.Scalars(tag)]
            if found != wanted:
                sys.exit(f"{tag}: TensorBoard shows {found}, metrics.jsonl has {wanted}")
            print(f"{tag}: {len(found)} values")
        rows = list(csv.DictReader((folder / "out/metrics.csv").open()))
        if [float(row["loss"]) for row in rows] != [step["loss"] for step in steps]:
            sys.exit("metrics.csv has other losses")
        print(f"metrics.csv: {len(rows)} rows")


if __name__ == "__main__":
    main()
