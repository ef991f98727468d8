#!/usr/bin/env python3
"""What FSDP and DeepSpeed allocate on each rank, on CPUs and without a GPU: two processes that talk by gloo.

The real libraries shard a small Llama in f32 and train it for three steps. A dispatch mode records the birth and the death of every
storage, and storages that are resized, as FSDP does with what it gathers. `sharded_oracle.py --write FILE` writes for each form of
sharding what rank 0 holds after loading and the most that lives in the last step, for the test `crates/stacks/tests/oracle.rs`.

Needs: torch, transformers, deepspeed. What is missing is said, and its cases are skipped. See docs/oracle.md.
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import socket
import weakref

CASES = ("fsdp1", "fsdp2", "zero1", "zero2", "zero3")
NEEDS = {"fsdp1": ("torch", "transformers"), "fsdp2": ("torch", "transformers")}
RANKS, STEPS, BATCH, SEQUENCE = 2, 3, 2, 192
SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)


def recorder():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        """Bytes of living storages, each rounded up to 512."""

        def __init__(self):
            super().__init__()
            self.known, self.live, self.peak, self.peak_at = {}, 0, 0, ""
            resize = torch.UntypedStorage.resize_

            def resized(storage, size):
                out = resize(storage, size)
                self.see(storage, "resize_")
                return out

            torch.UntypedStorage.resize_ = resized

        def see(self, storage, operation):
            size = (storage.nbytes() + 511) // 512 * 512
            key = storage._cdata
            entry = self.known.get(key)
            if entry is None:
                entry = self.known[key] = [0, weakref.ref(storage, lambda _, key=key: self.death(key))]
            self.live += size - entry[0]
            entry[0] = size
            if self.live > self.peak:
                self.peak, self.peak_at = self.live, operation

        def death(self, key):
            self.live -= self.known.pop(key)[0]

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            name = function.__name__.split(".")[0]
            for tensor in torch.utils._pytree.tree_leaves((out, args, kwargs)):
                # A DTensor's own part; what its operations make of it comes out of them.
                tensor = getattr(tensor, "_local_tensor", tensor)
                if isinstance(tensor, torch.Tensor):
                    self.see(tensor.untyped_storage(), name)
            return out

    return Recorder()


def sharded(case, model, optimizer_of):
    """The wrapped model, and an optimizer of a rank's part."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if case == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        return model, optimizer_of(model.parameters())
    if case == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, optimizer_of(model.parameters())
    import deepspeed

    optimizer = optimizer_of(model.parameters())
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1,
              "zero_optimization": {"stage": int(case[-1]), "reduce_bucket_size": 1 << 20, "overlap_comm": False},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def rank(number, case, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), LOCAL_RANK=str(number),
                      WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    config = transformers.LlamaConfig(**SHAPE)
    config._attn_implementation, config.use_cache = "eager", False
    recording = recorder()
    gc.disable()
    with recording:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        optimizer_of = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
        model, optimizer = sharded(case, model, optimizer_of)
        model.train()
        gc.collect()
        loaded = recording.live
        for step in range(STEPS):
            gc.collect()
            recording.peak = recording.live
            tokens, labels = (torch.ones(BATCH, SEQUENCE, dtype=torch.int64) for _ in range(2))
            loss = model(input_ids=tokens, labels=labels).loss
            if case.startswith("zero"):
                model.backward(loss)
                model.step()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss, tokens, labels
    if number == 0:
        queue.put({"loaded": loaded, "peak": recording.peak, "peak_at": recording.peak_at, "after": recording.live})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(case):
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = processes.get_context("spawn").SimpleQueue()
    processes.spawn(rank, args=(case, port, queue), nprocs=RANKS)
    return queue.get()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=", ".join(CASES))
    parser.add_argument("--write", metavar="FILE", help="write the fixture")
    arguments = parser.parse_args()
    found = {}
    for case in arguments.case or CASES:
        needed = NEEDS.get(case, ("torch", "transformers", "deepspeed"))
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            print(f"{case}: skipped, {' and '.join(missing)} cannot be imported")
            continue
        found[case] = run(case)
        print(case, found[case])
    if arguments.write and found:
        from importlib.metadata import version

        versions = {name: version(name) for name in ("torch", "transformers", "deepspeed") if importlib.util.find_spec(name)}
        with open(arguments.write, "w") as file:
            json.dump({"versions": versions, "batch": BATCH, "sequence": SEQUENCE, "ranks": RANKS,
                       "config": {**SHAPE, "model_type": "llama"}, "cases": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
