#!/usr/bin/env python3
"""Runs llama.cpp and Plimsoll in turns on the same GGUF file and prompt, greedily, and prints the speed of both.

llama.cpp comes from the Python package registry, as the wheel of xllamacpp, whose build chooses its instructions at run
time. Each number is the median over the rounds; ratios are Plimsoll's over llama.cpp's. Decoding begins after a short
prompt; the speed of a prompt is that of a long one, whose first new token is counted in on both sides. Memory is the
highest resident set of each process, mapped pages of the model's file included.

usage: python3 -m venv VENV && VENV/bin/pip install --no-deps xllamacpp
       cargo build --release && VENV/bin/python docs/bench/compare_llamacpp.py [--rounds N] [--threads N]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

SHORT = "The history of the sea is the history of people who"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    parser.add_argument("--plimsoll", default=f"{target}/release/plimsoll", help="the binary")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", default="examples/data/shakespeare.txt", help="what the long prompt is taken from")
    parser.add_argument("--characters", type=int, default=4500, help="of the long prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to decode")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="f32", help="Plimsoll's activations: f32 or bf16")
    parser.add_argument("--quantize-activations", action="store_true", help="Plimsoll's few rows in 8-bit integers")
    parser.add_argument("--llamacpp", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompts(args):
    return [SHORT, Path(args.text).read_text(encoding="utf-8")[: args.characters]]


def llamacpp(args):
    """One process's work: both prompts, in llama.cpp. Prints a JSON document."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_ctx, params.n_gpu_layers, params.n_parallel, params.warmup = args.context, 0, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    results = []
    for prompt, tokens in zip(prompts(args), [args.tokens, 1]):
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        results.append(answer["timings"])
    decoding, prompt = results
    print(
        "RESULT",
        json.dumps(
            {
                "decoding": decoding["predicted_per_second"],
                "prompt": prompt["prompt_n"] / (prompt["prompt_ms"] + prompt["predicted_ms"]) * 1e3,
                "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        ),
    )


def measured(command):
    """Standard output of a process, and its highest resident set."""
    process = subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(map(str, command))}\nended with {status}:\n{errors.decode()}")
    return output.decode(), usage.ru_maxrss * 1024


def plimsoll(args):
    short, long = prompts(args)
    common = [args.plimsoll, "generate", "--model", args.model, "--threads", args.threads, "--json"]
    common += ["--temperature", 0, "--context", args.context, "--dtype", args.dtype]
    common += ["--quantize-activations"] if args.quantize_activations else []
    output, rss = measured([*common, "--max-tokens", args.tokens, "--prompt", short])
    decoding = json.loads(output)
    output, rss_of_prompt = measured([*common, "--max-tokens", 1, "--prompt", long])
    prompt = json.loads(output)
    return {
        "decoding": decoding["tokens_per_second"],
        "prompt": len(prompt["prompt_tokens"]) / prompt["prompt_seconds"],
        "rss": max(rss, rss_of_prompt),
    }


def main():
    args = arguments()
    if args.llamacpp:
        return llamacpp(args)
    rounds = {"llama.cpp": [], "Plimsoll": []}
    again = [sys.executable, __file__, *sys.argv[1:], "--llamacpp"]
    for number in range(args.rounds):
        output, _ = measured(again)
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        rounds["llama.cpp"].append(json.loads(line.removeprefix("RESULT ")))
        rounds["Plimsoll"].append(plimsoll(args))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(f"{Path(args.model).name}, {args.threads} threads, medians of {args.rounds} rounds")
    print("| | llama.cpp | Plimsoll | ratio | Plimsoll, lowest to highest |")
    print("|---|---:|---:|---:|---:|")
    for key, what, unit in [
        ("decoding", "decoding, tokens/s", 1),
        ("prompt", "prompt, tokens/s", 1),
        ("rss", "resident set, MiB", 1 << 20),
    ]:
        theirs, ours = ([one[key] / unit for one in rounds[who]] for who in rounds)
        a, b = statistics.median(theirs), statistics.median(ours)
        print(f"| {what} | {a:.0f} | {b:.0f} | {b / a:.2f} | {min(ours):.0f} to {max(ours):.0f} |")


if __name__ == "__main__":
    main()
