#!/usr/bin/env python3
"""Trains SmolLM2-135M on two ranks in turns: with Plimsoll in stage 3 of ZeRO over MPI, and with PyTorch's FSDP over gloo.

usage: compare_fsdp.py [--plimsoll PROGRAM] [--python PYTHON] [--rounds N]

PYTHON needs torch and transformers; PROGRAM is built with the feature mpi. Both train in f32 with AdamW and clipping, one thread a
rank, two micro-batches of one sequence of 256 tokens a rank and step, nothing checkpointed. Weights are random for FSDP, which
changes neither memory nor speed. Prints the tokens a second of both together (the median step) and the peak resident set of the
rank that takes most.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS, MICRO_BATCHES, STEPS = 256, 2, 6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default="plimsoll")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found = {"plimsoll": [], "fsdp": []}
    for number in range(options.rounds):
        for name, run in (("plimsoll", plimsoll), ("fsdp", fsdp)):
            speed, bytes = run(options)
            found[name].append((speed, bytes))
            print(f"round {number + 1}: {name:8} {speed:6.1f} tokens/s  {bytes / 2**20:6.0f} MiB a rank", flush=True)
    for name, rounds in found.items():
        speed, bytes = (statistics.median(values) for values in zip(*rounds))
        print(f"median:  {name:8} {speed:6.1f} tokens/s  {bytes / 2**20:6.0f} MiB a rank")


def plimsoll(options):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        sets = [
            "training.mixed_precision=f32", "training.gradient_checkpointing=none", "training.batch_size=1",
            f"training.effective_batch_size={2 * MICRO_BATCHES}", f"data.sequence_length={TOKENS}", f"training.steps={STEPS}",
            "training.warmup_steps=0", "parallel.zero_stage=3", "output.final_model=false", f"output.dir={out}",
        ]
        command = [options.plimsoll, "train", "examples/finetune-smollm2.yaml", "--ranks", "2", "--memory", "8GiB"]
        command += [part for pair in sets for part in ("--set", pair)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report = json.loads(Path(out, "report.json").read_text())
        most = max(rank["measured"]["process_bytes"] for rank in report["ranks"])
        return report["tokens_per_second_median"], most


def fsdp(options):
    command = [options.python, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "--rank"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # Both may write into the same line.
    ranks = [json.loads(found) for found in re.findall(r"\{[^{}]*\}", done.stdout)]
    return min(rank["speed"] for rank in ranks), max(rank["bytes"] for rank in ranks)


def rank():
    import resource
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    seconds = []
    for _ in range(STEPS):
        begun = time.monotonic()
        for micro_batch in range(MICRO_BATCHES):
            tokens = torch.randint(0, config.vocab_size, (1, TOKENS))
            (model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.monotonic() - begun)
    speed = dist.get_world_size() * MICRO_BATCHES * TOKENS / statistics.median(seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"speed": speed, "bytes": peak}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
