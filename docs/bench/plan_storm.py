#!/usr/bin/env python3
"""Asks the planner random questions and holds it to its answers.

    docs/bench/plan_storm.py [--plimsoll target/release/plimsoll] [--questions 500] [--seed 1] [--only N] [--no-runs]

A question is a model, a machine or a budget, data, a goal, and some keys that are fixed. Of each answer is checked:
- A plan that fits keeps to its line on every tier.
- Every change that a refusal says would fit is applied as it is written, and the plan with it fits. The changes that are offered beside
  a plan that fits likewise, to that plan's own configuration, with the peak that was named.
- The same question has the same answer.
- Plans for this machine of models that are small enough are trained for two steps: planned and measured peak are equal, and the
  resident set stays under the line.
A question that contradicts itself has to be refused with a message and exit code 2. Prints a line for each question that is not kept
to, with the command, and the counts at the end, or when it is interrupted; ends with 1 if there is one. Needs no packages and no
network.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30

LARGE = ["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "qwen2.5-0.5b", "qwen2.5-7b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b",
         "llama-2-7b", "llama-2-13b", "mistral-7b-v0.1", "gemma-2-2b", "gemma-3-1b", "phi-3-mini-4k", "gpt2", "gpt2-xl", "qwen3-0.6b", "qwen3-8b"]
DEVICES = ["rtx-3060", "rtx-3090", "rtx-4090", "laptop-4060", "t4", "a10g", "a100-40", "h100", "2x3090", "4xa100-80", "8xh100"]
# Of models from scratch: layers, width, heads, key and value heads, feed-forward width, vocabulary.
SMALL = [(2, 64, 4, 2, 160, 300), (4, 96, 6, 6, 256, 512), (6, 128, 8, 2, 352, 1024), (3, 192, 3, 1, 512, 259)]
KEYS = {
    "training.mixed_precision": ["f32", "bf16", "bf16"],
    "training.optimizer": ["adamw", "adamw_8bit", "lion", "adafactor", "sgd", "adam_mini"],
    "training.gradient_checkpointing": ["none", "full", "sqrt", "{selective: [norms, mlp]}", "{selective: [attention]}"],
    "training.activation_compression": ["int8"],
    "training.optimizer_in_backward": ["true", "false"],
    "training.max_gradient_norm": ["0", "1.0"],
    "training.attention": ["flash", "standard"],
    "training.gradient_accumulation_steps": ["1", "2", "5"],
    "training.batch_size": ["1", "2", "3", "8"],
    "training.effective_batch_size": ["4", "16"],
    "training.master_weights": ["none", "f32"],
    "training.loss_chunk_tokens": ["64", "100"],
    "memory.offload.optimizer": ["device", "host", "disk"],
    "memory.offload.parameters": ["device", "host", "disk"],
    "memory.offload.gradients": ["device", "disk"],
    "memory.offload.activations": ["device", "host"],
    "memory.disk_budget": ["0", "2GiB", "40GiB"],
    "memory.host_budget": ["256MiB", "16GiB"],
}
TEXT = "The load line is a mark on the hull of a ship.\n" * 400
GOALS = [None, None, None, None, "fastest", "least_memory", "largest_batch", "longest_sequence"]


class Question:
    """A command line of `plan`, and whether its answer can be run here."""

    def __init__(self, number, seed):
        draw = random.Random(f"{seed}/{number}")
        self.is_small = draw.random() < 0.4
        # What is free on this disk changes from one question to the next.
        self.set, self.machine, self.flags = {"memory.disk_budget": "64GiB"}, [], []
        if self.is_small:
            layers, width, heads, kv, inner, vocab = draw.choice(SMALL)
            self.set["model"] = (f"{{from_scratch: {{architecture: llama, num_hidden_layers: {layers}, hidden_size: {width}, "
                                 f"num_attention_heads: {heads}, num_key_value_heads: {kv}, intermediate_size: {inner}, "
                                 f"vocab_size: {vocab}}}}}")
            self.set["data.sequence_length"] = draw.choice([16, 33, 64, 128])
            self.set["memory.device_budget"] = f"{draw.choice([40, 48, 64, 96, 160, 400])}MiB"
            self.set["training.steps"] = 2
        else:
            self.flags += ["--model", draw.choice(LARGE)]
            self.set["data.sequence_length"] = draw.choice([128, 512, 1000, 2048, 4096, 8192])
            if draw.random() < 0.7:
                self.machine += ["--hardware", draw.choice(DEVICES)]
                if draw.random() < 0.3:
                    self.machine += ["--host-memory", draw.choice(["8GiB", "32GiB", "256GiB"])]
            else:
                self.machine += ["--elsewhere", "--memory", f"{draw.choice([1, 2, 4, 8, 16, 30])}GiB"]
            self.set["training.method"] = draw.choice(["full", "full", "lora", "qlora"])
        for key in draw.sample(sorted(KEYS), draw.choice([0, 0, 1, 2, 3, 5])):
            self.set[key] = draw.choice(KEYS[key])
        if self.set.get("training.optimizer_in_backward") == "true" and self.set.get("training.max_gradient_norm") != "0":
            self.set["training.in_backward_clipping"] = draw.choice(["previous_norm", "second_backward"])
        goal = draw.choice(GOALS)
        if goal:
            self.flags += ["--goal", goal, "--quality", draw.choice(["lossless", "proven", "anything"])]

    def arguments(self, configuration, changes=()):
        sets = [f"{key}={value}" for key, value in self.set.items() if not key.startswith("model")]
        return [str(configuration), *self.machine, *self.flags, *setting([*sets, *changes])]


def setting(changes):
    return [word for change in changes for word in ("--set", change)]


def ask(plimsoll, arguments):
    done = subprocess.run([plimsoll, "plan", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode not in (0, 3) or not done.stdout:
        return done.returncode, done.stderr.strip()
    return done.returncode, json.loads(done.stdout)


def within(plan):
    """Tiers on which a plan that fits is over its line."""
    for tier, memory in plan["memory"].items():
        if not memory or memory.get("budget_bytes") is None:
            continue
        taken = memory["peak_bytes"] + memory.get("overhead_bytes", 0)
        if taken > memory["budget_bytes"]:
            yield f"{tier} takes {taken} of {memory['budget_bytes']}"


def essence(plan):
    """What of an answer is the planner's: not how long it took, nor what this process takes beside an arena."""
    peaks = {tier: memory["peak_bytes"] for tier, memory in plan["memory"].items() if memory}
    return json.dumps([plan["fits"], plan["config"], peaks], sort_keys=True)


def check_changes(plimsoll, question, configuration, plan, counts):
    own = configuration.with_name("plan.yaml")
    own.write_text(json.dumps(plan["config"]))
    for other in plan.get("alternatives") or []:
        if not other["fits"]:
            continue
        arguments = question.arguments(configuration, other["change"])
        if plan["fits"]:
            arguments = [str(own), *question.machine, *setting(other["change"])]
        code, answer = ask(plimsoll, arguments)
        counts["changes applied"] += 1
        what = f"{other['what']} {other['change']}"
        if isinstance(answer, str):
            yield f"{what}: exit code {code}, {answer}"
        elif not answer["fits"]:
            yield f"{what}: does not fit: {answer['shortages']}"
        # Where nothing fitted, the change leaves the rest open, and the planner fills the room.
        elif plan["fits"] and answer["memory"]["device"]["peak_bytes"] != other["peak_bytes"]:
            yield f"{what}: named {other['peak_bytes']}, planned {answer['memory']['device']['peak_bytes']}"


def check_run(plimsoll, configuration, plan, folder, counts):
    # The longest sequence that fits a machine may be longer than the text.
    if plan["config"]["data"]["sequence_length"] >= len(TEXT):
        counts["plans of sequences longer than the text"] += 1
        return
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    # The plan as a configuration: what a search has found is not searched again.
    own = configuration.with_name("plan.yaml")
    own.write_text(json.dumps(plan["config"]))
    command = [plimsoll, "train", own, *setting([f"output.dir={output}", "output.save_steps=0", "output.final_model=false"])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield f"train: exit code {done.returncode}, {done.stderr.strip()[:600]}"
        return
    counts["plans trained"] += 1
    report = json.loads((output / "report.json").read_text())
    planned, measured = report["planned"], report["measured"]
    for key in ("device_peak_bytes", "host_peak_bytes", "disk_peak_bytes"):
        if planned.get(key) != measured.get(key):
            yield f"train: {key} planned {planned.get(key)}, measured {measured.get(key)}"
    if plan["memory"]["device"]["peak_bytes"] != planned["device_peak_bytes"]:
        yield f"train planned {planned['device_peak_bytes']}, plan {plan['memory']['device']['peak_bytes']}"
    line = plan["memory"]["device"]["budget_bytes"]
    if measured["process_peak_rss_bytes"] > line:
        yield f"train: {measured['process_peak_rss_bytes']} resident of {line}"


def check(plimsoll, question, number, folder, args, counts):
    """What is wrong with the answer to a question, and how it was asked."""
    configuration = folder / "run.yaml"
    model = question.set.get("model")
    data = f"data: {{train: {folder / 'data.txt'}}}\noutput: {{dir: {folder / 'run'}}}\n"
    configuration.write_text((f"model: {model}\n" if model else "") + data)
    arguments = question.arguments(configuration)
    code, plan = ask(plimsoll, arguments)
    problems = []
    if isinstance(plan, str):
        counts["refused as contradictory"] += 1
        # The longest of what nobody can hold is none.
        nothing = code == 3 and "nothing fits for the goal" in plan
        if (code != 2 or not plan.startswith("error:")) and not nothing:
            problems.append(f"exit code {code}: {plan}")
        if args.only is not None:
            print(plan)
        return problems, arguments
    counts["fit" if plan["fits"] else "do not fit"] += 1
    if plan["fits"] != (code == 0):
        problems.append(f"fits {plan['fits']} with exit code {code}")
    if plan["fits"]:
        problems += within(plan)
    problems += check_changes(plimsoll, question, configuration, plan, counts)
    if number % 10 == 0 and essence(ask(plimsoll, arguments)[1]) != essence(plan):
        problems.append("another answer to the same question")
    if plan["fits"] and question.is_small and not args.no_runs:
        problems += check_run(plimsoll, configuration, plan, folder, counts)
    return problems, arguments


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=REPOSITORY / "target/release/plimsoll")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this question alone")
    parser.add_argument("--no-runs", action="store_true", help="plan, and train nothing")
    args = parser.parse_args()
    plimsoll = str(args.plimsoll)
    counts, wrong = Counter(), 0
    numbers = range(args.questions) if args.only is None else [args.only]
    # A long storm that is stopped says what it has found.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.txt").write_text(TEXT)
        try:
            for number in numbers:
                problems, arguments = check(plimsoll, Question(number, args.seed), number, folder, args, counts)
                counts["asked"] += 1
                for problem in problems:
                    print(f"{number}: {problem}\n    plimsoll plan {' '.join(arguments)}", flush=True)
                wrong += bool(problems)
        except KeyboardInterrupt:
            print(f"stopped before question {number}")
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{said}; {wrong} wrong of {counts['asked']}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
