#!/usr/bin/env python3
"""Asks for plans and prints how long each takes, and its processor time: user and system, of all threads.

    docs/bench/plan_times.py [--plimsoll target/release/plimsoll] [--searches] [--words] [--before OTHER_PLIMSOLL]

Without further words the default plan of every model of the catalogue for a machine of 80 GiB, and Llama 3.1 405B with everything on the
disk. With `--searches` the searches that docs/planning.md has in a table instead. With `--words` plans are asked for in words, as people
ask, and not as JSON, which says what would take less memory too. With `--before` another build of the program is asked
the same, and every answer that differs is named: but for how long a search took and the last digits of seconds, which depend on the order of
a sum, documents have to be equal. Ends with 1 if one is not.
Needs no packages and no network.
"""

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BEST = ["--goal", "fastest", "--quality", "proven"]
ON_4090 = ["--model", "llama-2-7b", "--hardware", "rtx-4090", "--sequence-length", "2048", *BEST]
ON_128 = ["--model", "llama-3.1-405b", "--hardware", "16x8xh100", "--sequence-length", "4096"]


def sets(**keys):
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def defaults():
    text = (REPOSITORY / "crates/model/src/catalogue.rs").read_text()
    names = sorted(set(re.findall(r'entry\("([^"]*)"', text)) | set(re.findall(r'name: "([a-z][^"]*/[^"]*)"', text)))
    for name in names:
        yield name, ["--model", name, "--elsewhere", "--memory", "80GiB"]
    disk = sets(memory__offload__parameters="disk", memory__offload__gradients="disk", memory__offload__optimizer="disk",
                training__gradient_accumulation_steps=32)
    yield "llama-3.1-405b on disk", ["--model", "llama-3.1-405b", "--elsewhere", "--memory", "80GiB", "--sequence-length", "2048", *disk]


def searches():
    yield "SmolLM2-135M, 2 GiB", ["--model", "smollm2-135m", "--elsewhere", "--memory", "2GiB", "--goal", "fastest"]
    yield "Llama 2 7B, rtx-4090", ON_4090
    yield "Llama 2 7B, rtx-4090, LoRA", [*ON_4090, *sets(training__method="lora")]
    yield "Llama 2 7B, least memory", ["--model", "llama-2-7b", "--hardware", "rtx-4090", "--goal", "least_memory", "--quality", "anything"]
    fixed = sets(parallel__tensor_parallel=8, parallel__pipeline_parallel=4, parallel__zero_stage=1)
    yield "405B, 16x8xh100", [*ON_128, *fixed, "--goal", "fastest", "--quality", "anything"]
    ways = sets(parallel__data_parallel="auto", parallel__tensor_parallel="auto", parallel__pipeline_parallel="auto",
                parallel__zero_stage="auto")
    yield "405B, 16x8xh100, every way", [*ON_128, *ways, "--goal", "fastest"]


def same(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def ask(program, arguments, words=False):
    """The document of a plan, how long it took, and the processor time that it took."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    form = [] if words else ["--json"]
    done = subprocess.run([program, "plan", *arguments, *form], capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    # 3 says that nothing fits.
    if words and done.returncode in (0, 3):
        return {}, seconds, took
    try:
        document = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"plan {' '.join(arguments)}: {done.stderr or done.stdout}")
    if "seconds" in document.get("search", {}):
        document["search"]["seconds"] = 0
    return document, seconds, took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(REPOSITORY / "target/release/plimsoll"))
    parser.add_argument("--before")
    parser.add_argument("--searches", action="store_true")
    parser.add_argument("--words", action="store_true")
    args = parser.parse_args()
    times, different = [], 0
    for name, arguments in searches() if args.searches else defaults():
        document, seconds, took = ask(args.plimsoll, arguments, args.words)
        line = f"{seconds:8.3f} s {took:8.3f} s of processors  {name}"
        if args.before:
            other, _, before = ask(args.before, arguments, args.words)
            line = f"{line}, before {before:.3f} s"
            if not same(other, document):
                different += 1
                line += "  ANSWERS DIFFER"
        print(line, flush=True)
        times.append((seconds, took))
    for what, all_times in zip(("in all", "of processors"), map(sorted, zip(*times))):
        over = sum(seconds > 0.1 for seconds in all_times)
        middle, most = all_times[len(all_times) // 2], all_times[-1]
        print(f"{len(all_times)} plans, {what}: median {middle:.3f} s, most {most:.3f} s, {over} above 0.1 s")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
