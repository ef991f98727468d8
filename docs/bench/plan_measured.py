#!/usr/bin/env python3
"""Trains what the planner's search names, and holds the search to it.

    docs/bench/plan_measured.py drawn [--plans 40]                     # plans drawn at random from the search's space
    docs/bench/plan_measured.py best [--configurations 200] [--pairs 9]  # the chosen plan beside random legal configurations
    both: [--plimsoll target/release/plimsoll] [--seed 1] [--steps 6] [--base FILE.gguf]

`drawn` asks for the Pareto front of tiny models and, with --base, of adapters on a model's files; draws points of it, and trains each: it
has to keep to its budget, planned and measured peaks have to be equal on every tier, and the resident set under the line. The ratio of
measured to planned time is printed; it means something on cores that do nothing else.

`best` asks for the fastest step of three models under three budgets, trains it, and trains as many random configurations that keep to the
budget. A step's time is the median of its steps, the chosen plan is trained again after every tenth of the others, and the medians are
compared. Prints how many were faster than the chosen plan, and by how much.

Run `plimsoll calibrate` before, so that times are planned with rates that were measured at length. Needs no packages and no network.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from plan_storm import KEYS, MIB, SMALL, setting

REPOSITORY = Path(__file__).resolve().parents[2]
# Of keys that are drawn for configurations beside the chosen plan: what a search at home may choose as well.
FREE = ["training.gradient_checkpointing", "training.attention", "training.loss_chunk_tokens", "memory.offload.optimizer",
        "memory.offload.parameters", "memory.offload.gradients", "memory.offload.activations"]
SPLITS = [(1, 8), (2, 4), (4, 2), (8, 1)]


def scratch(layers, width, heads, kv, inner, vocab):
    return (f"{{from_scratch: {{architecture: llama, num_hidden_layers: {layers}, hidden_size: {width}, num_attention_heads: {heads}, "
            f"num_key_value_heads: {kv}, intermediate_size: {inner}, vocab_size: {vocab}}}}}")


class Bench:
    def __init__(self, args, folder):
        self.plimsoll, self.steps, self.folder = str(args.plimsoll), args.steps, folder
        (folder / "data.txt").write_text("The load line is a mark on the hull of a ship.\n" * 2000)

    def configuration(self, model):
        path = self.folder / "run.yaml"
        path.write_text(f"model: {model}\ndata: {{train: {self.folder / 'data.txt'}}}\noutput: {{dir: {self.folder / 'run'}}}\n")
        return path

    def plan(self, *arguments):
        done = subprocess.run([self.plimsoll, "plan", *map(str, arguments), "--json"], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode in (0, 3) and done.stdout else None

    def train(self, config):
        """What the run of a configuration has measured; why it did not run, if it did not."""
        own, output = self.folder / "own.yaml", self.folder / "run"
        own.write_text(json.dumps(config))
        shutil.rmtree(output, ignore_errors=True)
        sets = [f"output.dir={output}", f"training.steps={self.steps}", "output.save_steps=0", "output.final_model=false"]
        done = subprocess.run([self.plimsoll, "train", str(own), *setting(sets)], capture_output=True, text=True)
        if done.returncode:
            return f"exit code {done.returncode}, {done.stderr.strip()[-400:]}"
        return json.loads((output / "report.json").read_text())


def drawn(args, bench):
    draw, wrong, ratios = random.Random(f"drawn/{args.seed}"), 0, []
    done = 0
    while done < args.plans:
        if args.base and draw.random() < 0.2:
            model, budget = f"{{path: {Path(args.base).resolve()}}}", draw.choice([220, 260, 400])
            fixed = [f"training.method={draw.choice(['lora', 'qlora'])}", f"data.sequence_length={draw.choice([64, 128])}"]
        else:
            model, budget = scratch(*draw.choice(SMALL)), draw.choice([42, 48, 64, 128])
            fixed = [f"data.sequence_length={draw.choice([32, 64, 128, 256])}"]
        configuration = bench.configuration(model)
        goal = ["--goal", draw.choice(["fastest", "least_memory"]), "--quality", "anything"]
        plan = bench.plan(configuration, *setting([*fixed, f"memory.device_budget={budget}MiB"]), *goal)
        points = (plan or {}).get("pareto") or []
        for point in draw.sample(points, min(4, len(points), args.plans - done)):
            done += 1
            report = bench.train(point["config"])
            what = f"{fixed} in {budget} MiB, {point['config']['training'].get('optimizer')}"
            if isinstance(report, str):
                wrong += 1
                print(f"{what}: {report}\n    {json.dumps(point['config'])}", flush=True)
                continue
            planned, measured = report["planned"], report["measured"]
            problems = [f"{key} planned {planned[key]}, measured {measured[key]}"
                        for key in ("device_peak_bytes", "host_peak_bytes", "disk_bytes") if planned[key] != measured[key]]
            if planned["device_peak_bytes"] != point["device_peak_bytes"]:
                problems.append(f"the front has {point['device_peak_bytes']}, train planned {planned['device_peak_bytes']}")
            if measured["process_peak_rss_bytes"] > budget * MIB:
                problems.append(f"{measured['process_peak_rss_bytes']} resident")
            ratios.append(measured["step_seconds_median"] / planned["step_seconds"])
            wrong += bool(problems)
            for problem in problems:
                print(f"{what}: {problem}\n    {json.dumps(point['config'])}", flush=True)
    near = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
    print(f"{done} plans, {wrong} wrong; measured over planned time: median {statistics.median(ratios):.2f}, "
          f"{min(ratios):.2f} to {max(ratios):.2f}, {near} within 20 %")
    return wrong


def rate(report, sequences):
    return report["measured"]["step_seconds_median"] / sequences


def best(args, bench):
    draw, slower = random.Random(f"best/{args.seed}"), 0
    models = [(6, 256, 4, 2, 704, 1024), (3, 384, 6, 6, 1024, 512), (8, 192, 3, 1, 512, 2048)]
    # Under the largest budget all stays in memory, under the least one next to nothing does.
    pairs = [(model, budget) for model in models for budget in (56, 80, 400)][:args.pairs]
    for model, budget in pairs:
        configuration = bench.configuration(scratch(*model))
        fixed = ["data.sequence_length=128", "training.effective_batch_size=8", "training.mixed_precision=f32",
                 f"memory.device_budget={budget}MiB"]
        plan = bench.plan(configuration, *setting(fixed), "--goal", "fastest")
        if not plan or not plan["fits"]:
            print(f"{model} in {budget} MiB: nothing fits")
            continue
        chosen, others, tries = [], [], 0
        first = bench.train(plan["config"])
        if isinstance(first, str):
            print(f"{model} in {budget} MiB: {first}")
            slower += 1
            continue
        while len(others) < args.configurations and tries < 4 * args.configurations:
            if len(others) * 10 >= len(chosen) * args.configurations:
                chosen.append(rate(bench.train(plan["config"]), 8))
            tries += 1
            size, steps = draw.choice(SPLITS)
            sets = [f"training.batch_size={size}", f"training.gradient_accumulation_steps={steps}"]
            sets += [f"{key}={draw.choice(KEYS[key])}" for key in draw.sample(FREE, draw.choice([1, 2, 3, 4]))]
            other = bench.plan(configuration, *setting([*fixed, *sets]))
            if not other or not other["fits"]:
                continue
            report = bench.train(other["config"])
            if isinstance(report, str):
                print(f"{sets}: {report}")
                slower += 1
                continue
            others.append((rate(report, 8), sets))
        own = statistics.median(chosen)
        faster = sorted((seconds, sets) for seconds, sets in others if seconds < own / 1.05)
        slower += bool(faster)
        line = f"{model} in {budget} MiB: chosen {1000 * own:.2f} ms a sequence ({min(chosen) * 1000:.2f} to {max(chosen) * 1000:.2f})"
        if others:
            line += f", best of {len(others)} others {1000 * min(others)[0]:.2f}, {len(faster)} faster by more than 5 %"
        print(line, flush=True)
        for seconds, sets in faster[:3]:
            print(f"    {1000 * seconds:.2f} ms: {sets}", flush=True)
    return slower


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["drawn", "best"])
    parser.add_argument("--plimsoll", default=REPOSITORY / "target/release/plimsoll")
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9, help="of a model and a budget, so many")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base", help="a model's file that adapters are trained on")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args, Path(name))
        sys.exit(1 if (drawn if args.what == "drawn" else best)(args, bench) else 0)


if __name__ == "__main__":
    main()
