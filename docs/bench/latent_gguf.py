#!/usr/bin/env python3
"""Compares greedy answers of small random models with latent attention with llama.cpp's, from the same GGUF files.

    docs/bench/latent_gguf.py [--plimsoll target/release/plimsoll]

Files are written by random_mixture.py: DeepSeek-V2 and V3 in f32, with and without narrow queries and groups of experts. Needs numpy and
xllamacpp. Every expert is chosen (of V3 with groups half of them), for which of two that are nearly alike comes first is left to rounding. Tokens are ASCII and not the end of
text: llama.cpp's server leaves out those that end within a character. Ends with 1 where a token differs that was likelier than the next
by more than 0.05; with random weights there are nearer ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import xllamacpp

COMMON = "--f32 --experts 4 --chosen 4 --hidden 128 --inner 64 --heads 4 --vocab 300 --context 512".split()
COMMON += "--rank 64 --plain 32 --rotated 32 --value 32 --dense-inner 128 --shared 1".split()
# llama.cpp takes a model of 27 layers for V2-Lite, which has no narrow queries.
MODELS = {
    "V2-Lite": ["--latent", "v2", "--layers", "27"],
    "V2": ["--latent", "v2", "--layers", "3", "--queries", "96"],
    "V3 with groups": ["--latent", "v3", "--layers", "3", "--queries", "96", "--experts", "8", "--chosen", "4", "--groups", "4"],
    "V3": ["--latent", "v3", "--layers", "3", "--queries", "96"],
}
PROMPTS = ["The sea", "A ship is laden with corn and oil", "1 2 3 4 5 6 7", "Call me", "winds blow hard from the north-west tonight, " * 3]
NEAR = 0.05
UNWANTED = [*range(128, 256), 299]


def theirs(path):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_gpu_layers, params.n_parallel, params.warmup, params.verbosity = 512, 0, 1, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    for prompt in PROMPTS:
        request = {"prompt": prompt, "n_predict": 24, "temperature": 0, "cache_prompt": False, "ignore_eos": True, "logprobs": 40}
        request["logit_bias"] = [[token, -1e4] for token in UNWANTED]
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        rows = answer["choices"][0]["logprobs"]["content"]
        yield [(row["id"], margin(row)) for row in rows]


def margin(row):
    """How much likelier a token was than any other that could be chosen."""
    others = [other["logprob"] for other in row["top_logprobs"] if other["id"] != row["id"] and other["id"] not in UNWANTED]
    return row["logprob"] - max(others, default=-100.0)


def ours(plimsoll, path, prompt):
    command = [plimsoll, "generate", "--model", path, "--prompt", prompt, "--max-tokens", "24", "--temperature", "0", "--kv-cache", "f32", "--json"]
    command += [f"--logit-bias={token}=-1e4" for token in UNWANTED]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["tokens"]


def first_difference(wanted, found):
    """The place of the first token that differs, and how much likelier it was than the next."""
    return next(((place, margin) for place, ((token, margin), own) in enumerate(zip(wanted, found)) if token != own), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, own in MODELS.items():
            path = Path(folder, "model.gguf")
            script = Path(__file__).with_name("random_mixture.py")
            subprocess.run([sys.executable, script, path, *COMMON, *own], check=True, stderr=subprocess.DEVNULL)
            for prompt, wanted in zip(PROMPTS, theirs(path)):
                difference = first_difference(wanted, ours(args.plimsoll, path, prompt))
                if difference is None:
                    print(f"{name}: {len(wanted)} tokens are the same")
                    continue
                place, margin = difference
                print(f"{name}: token {place} differs, which was likelier than the next by {margin:.3f}")
                failed |= margin > NEAR
    sys.exit(failed)


if __name__ == "__main__":
    main()
