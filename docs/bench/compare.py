#!/usr/bin/env python3
"""Runs PyTorch and Plimsoll in turns on the same task and prints both, their ratio, and the share of the cores' peak.

Started by `compare`, which prepares what it needs. The task is full fine-tuning of SmolLM2-135M, batch 4 x 512 tokens,
AdamW, clipping at 1, in f32 and in bf16 (bf16 weights and gradients without master weights; PyTorch's moments are bf16
then, Plimsoll's f32), without and with gradient checkpointing. Each is the median over the timed steps of all rounds;
memory is the highest resident set of the process. The share of the peak is
6 x parameters x tokens a second / peak, where recomputation does not count as work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH, LENGTH = 4, 512
SETTINGS = {
    "f32": ("f32", False),
    "f32-checkpointing": ("f32", True),
    "bf16": ("bf16", False),
    "bf16-checkpointing": ("bf16", True),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True, help="the binary")
    parser.add_argument("--peak", required=True, help="matmul_peak's binary")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", default="examples/data/shakespeare.txt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="write all measurements to this file too")
    return parser.parse_args()


def run(command):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pytorch(args, dtype, checkpointing):
    command = [sys.executable, Path(__file__).with_name("pytorch_step.py"), "--dtype", dtype]
    command += ["--batch-size", BATCH, "--sequence-length", LENGTH, "--threads", args.threads]
    command += ["--warm-up", args.warm_up, "--steps", args.steps]
    result = json.loads(run(command + ["--checkpointing"] * checkpointing))
    return {
        "tokens_per_second": [BATCH * LENGTH / s for s in result["step_seconds"]],
        "peak_rss_bytes": result["peak_rss_bytes"],
        "parameters": result["parameters"],
    }


def plimsoll(args, dtype, checkpointing):
    keys = {
        "model.path": args.model,
        "data.train": args.data,
        "data.sequence_length": LENGTH,
        "training.steps": args.warm_up + args.steps,
        "training.batch_size": BATCH,
        "training.gradient_accumulation_steps": 1,
        "training.mixed_precision": dtype,
        "training.gradient_checkpointing": "full" if checkpointing else "none",
        "training.learning_rate": 1e-5,
        "training.max_gradient_norm": 1.0,
        "output.save_steps": 0,
        "output.final_model": "false",
    }
    if dtype == "bf16":
        keys |= {"training.master_weights": "none", "training.gradient_dtype": "bf16"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [args.plimsoll, "train", "--json", "--threads", args.threads, "--set", f"output.dir={folder}"]
        for key, value in keys.items():
            command += ["--set", f"{key}={value}"]
        report = json.loads(run(command))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "tokens_per_second": [json.loads(line)["tokens_per_second"] for line in lines][args.warm_up :],
        "peak_rss_bytes": report["measured"]["process_peak_rss_bytes"],
        "planned_bytes": report["planned"]["process_bytes"],
    }


def peak(args):
    return json.loads(run([args.peak, args.threads]))


def main():
    args = arguments()
    measured = {name: {"pytorch": [], "plimsoll": []} for name in args.only}
    peaks = [peak(args)]
    for number in range(1, args.rounds + 1):
        for name in args.only:
            for engine in (pytorch, plimsoll):
                result = engine(args, *SETTINGS[name])
                measured[name][engine.__name__].append(result)
                speed = statistics.median(result["tokens_per_second"])
                print(f"round {number}: {name}: {engine.__name__} {speed:.0f} tokens/s", file=sys.stderr)
        peaks.append(peak(args))
    best = {dtype: max(p[dtype]["gflops"] for p in peaks) for dtype in ("f32", "bf16")}

    print(f"\npeak of {args.threads} threads: {best['f32']:.0f} GFLOP/s in f32, {best['bf16']:.0f} in bf16; ", end="")
    print(f"{args.rounds} rounds of {args.steps} steps\n")
    if not args.rounds:
        return
    print("| setting | PyTorch tokens/s | Plimsoll tokens/s | ratio | PyTorch share of peak | Plimsoll share of peak | PyTorch GiB | Plimsoll GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.only:
        rounds = measured[name]
        speed = {
            engine: statistics.median([t for r in results for t in r["tokens_per_second"]])
            for engine, results in rounds.items()
        }
        memory = {e: max(r["peak_rss_bytes"] for r in results) / 2**30 for e, results in rounds.items()}
        top = best[SETTINGS[name][0]]
        flops = 6 * rounds["pytorch"][0]["parameters"]
        share = {e: f"{100 * flops * s / (top * 1e9):.0f} %" if top else "-" for e, s in speed.items()}
        print(
            f"| {name} | {speed['pytorch']:.0f} | {speed['plimsoll']:.0f} | {speed['plimsoll'] / speed['pytorch']:.2f} "
            f"| {share['pytorch']} | {share['plimsoll']} | {memory['pytorch']:.2f} | {memory['plimsoll']:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"peaks": peaks, "measured": measured}, indent=1))


if __name__ == "__main__":
    main()
