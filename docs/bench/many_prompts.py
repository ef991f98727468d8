#!/usr/bin/env python3
"""Tokens a second of several prompts at once beside one, by turns, with the highest resident set held against the line.

    docs/bench/many_prompts.py --plimsoll target/release/plimsoll --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Every round answers one prompt, then all of them with --parallel 1 and with --parallel N. Numbers are medians of the rounds. The tokens
of every prompt must be the same each time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fisherman who",
    "The three laws of thermodynamics say that",
    "A recipe for bread begins with",
    "In the year 1492",
    "def fibonacci(n):",
    "The difference between a mutex and a semaphore is",
    "My favourite season is autumn, because",
]


def run(arguments):
    """The document that a command prints, and its highest resident set in bytes."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(output), usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", help="load line, for example 400MiB")
    parser.add_argument("--quantize-activations", action="store_true", help="inputs of linears in 8-bit integers")
    own = parser.parse_args()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(own.parallel)]
    with tempfile.TemporaryDirectory() as folder:
        all_of_them = os.path.join(folder, "prompts.txt")
        with open(all_of_them, "w") as file:
            file.write("\n".join(prompts) + "\n")
        usual = [own.plimsoll, "generate", "--model", own.model, "--max-tokens", str(own.tokens), "--json"]
        usual += ["--memory", own.memory] if own.memory else []
        usual += ["--quantize-activations"] if own.quantize_activations else []
        ways = {
            "one prompt": ["--prompt", prompts[0]],
            "one after the other": ["--prompts", all_of_them, "--parallel", "1"],
            f"{own.parallel} at once": ["--prompts", all_of_them, "--parallel", str(own.parallel)],
        }
        speeds, peaks, said, line = {way: [] for way in ways}, {}, {}, 0
        for _ in range(own.rounds):
            for way, arguments in ways.items():
                document, peak = run(usual + arguments)
                first = document[0] if isinstance(document, list) else document
                speed = first["batch"]["tokens_per_second"] if "batch" in first else first["tokens_per_second"]
                speeds[way].append(speed)
                peaks[way] = max(peak, peaks.get(way, 0))
                line = first["memory"]["planned_bytes"] if way.endswith("at once") else line
                if isinstance(document, list):
                    tokens = [entry["tokens"] for entry in document]
                    if said.setdefault("many", tokens) != tokens:
                        sys.exit("the tokens differ")
    one = statistics.median(speeds["one prompt"])
    for way, numbers in speeds.items():
        middle = statistics.median(numbers)
        print(f"{way:22} {middle:8.1f} tokens/s ({min(numbers):.1f} to {max(numbers):.1f}), {middle / one:.2f} times one; "
              f"resident {peaks[way] / 2**20:.0f} MiB")
    print(f"planned for {own.parallel} at once: {line / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
