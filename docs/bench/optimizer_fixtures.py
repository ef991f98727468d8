#!/usr/bin/env python3
"""Five steps of every optimizer, computed independently: crates/step/tests/fixtures/optimizers.json.

    python docs/bench/optimizer_fixtures.py crates/step/tests/fixtures/optimizers.json [dynamic_maps.txt]

AdamW and SGD are PyTorch's, Adafactor transformers', Lion lion-pytorch's, Adam-mini adam-mini's, GaLore galore-torch's,
APOLLO apollo-torch's (with our random projection in place of its own). The 8-bit optimizers and AdaLomo are written out
from their definitions, the 8-bit ones in f32 operation by operation, and compared with bitsandbytes' own codes on the
way. Weights and gradients come from a hash that the Rust test has too. Needs torch, transformers, bitsandbytes,
lion-pytorch, galore-torch, apollo-torch and adam-mini.
"""
import json
import math
import sys

import numpy as np
import torch

F = np.float32
STEPS, LR, DECAY, RANK, GAP, SEED = 5, 1e-2, 0.1, 48, 3, 3
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
# Name, shape, block number and role number as the optimizer counts them, heads.
PARAMETERS = [
    ("model.embed_tokens.weight", (80, 64), 0, 0),
    ("model.layers.0.input_layernorm.weight", (64,), 2, 2),
    ("model.layers.0.self_attn.q_proj.weight", (64, 64), 2, 4),
    ("model.layers.0.self_attn.k_proj.weight", (32, 64), 2, 5),
    ("model.layers.0.mlp.gate_proj.weight", (96, 64), 2, 17),
    ("model.layers.0.mlp.down_proj.weight", (64, 96), 2, 19),
]


def hash32(x):
    x = x.astype(np.uint64)
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x7FEB352D) & np.uint64(M32)
    x ^= x >> np.uint64(15)
    x = x * np.uint64(0x846CA68B) & np.uint64(M32)
    return x ^ (x >> np.uint64(16))


def noise(seed, n):
    i = np.arange(n, dtype=np.uint64)
    h = hash32((i + np.uint64(seed * 0x9E3779B9 & M32)) & np.uint64(M32))
    size = F(0.02) * (1 + i % np.uint64(7)).astype(F)
    return ((h >> np.uint64(8)).astype(F) / F(1 << 24) - F(0.5)) * size


def start(p):
    return noise(p, math.prod(PARAMETERS[p][1])).reshape(PARAMETERS[p][1])


def gradient(p, step):
    return noise(1000 * step + p, math.prod(PARAMETERS[p][1])).reshape(PARAMETERS[p][1])


def decay_of(p):
    return DECAY if len(PARAMETERS[p][1]) > 1 else 0.0


def torch_steps(make):
    """Steps of a PyTorch optimizer; `make` gets the parameters in groups."""
    tensors = [torch.nn.Parameter(torch.tensor(start(p))) for p in range(len(PARAMETERS))]
    optimizer = make(tensors)
    for step in range(1, STEPS + 1):
        for p, tensor in enumerate(tensors):
            tensor.grad = torch.tensor(gradient(p, step))
        optimizer.step()
    return [t.detach().numpy() for t in tensors]


def groups(tensors, **extra):
    return [{"params": [t], "weight_decay": decay_of(p), **extra} for p, t in enumerate(tensors)]


def low_rank_groups(tensors, **extra):
    out = []
    for p, t in enumerate(tensors):
        name, shape = PARAMETERS[p][0], PARAMETERS[p][1]
        projected = "proj.weight" in name and RANK < min(shape)
        out.append({"params": [t], "weight_decay": decay_of(p), **(extra if projected else {})})
    return out


def maps(path):
    lines = open(path).read().split("\n")
    return [np.array([int(x, 16) for x in line.split()], dtype=np.uint32).view(F) for line in lines[:2]]


def nearest(codes, x):
    """bitsandbytes' binary search, for all of x at once; NaN goes down."""
    pivot = np.full(x.shape, 127)
    lower, upper = np.zeros(x.shape, int), np.full(x.shape, 255)
    for step in (64, 32, 16, 8, 4, 2, 1):
        up = x > codes[pivot]
        lower, upper = np.where(up, pivot, lower), np.where(up, upper, pivot)
        pivot = np.where(up, pivot + step, pivot - step)
    value = codes[pivot]
    up = x > value
    over = (codes[upper] + value) * F(0.5)
    under = (codes[lower] + value) * F(0.5)
    return np.where(up, np.where(x > over, upper, pivot), np.where(x < under, lower, pivot))


class Codes:
    def __init__(self, n, table, signed):
        self.codes, self.absmax = np.zeros(n, int), np.zeros(-(-n // 256), F)
        self.table, self.signed, self.n = table, signed, n

    def blocks(self, per_block):
        return np.repeat(per_block, 256)[: self.n]

    def values(self):
        return self.table[self.codes] * self.blocks(self.absmax)

    def store(self, s):
        padded = np.zeros(len(self.absmax) * 256, F)
        padded[: self.n] = np.abs(s)
        self.absmax = padded.reshape(-1, 256).max(1)
        with np.errstate(invalid="ignore"):
            self.codes = nearest(self.table, s / self.blocks(self.absmax))
        if self.signed:
            wrong = np.signbit(self.table[self.codes]) != np.signbit(s)
            self.codes = np.where(wrong, np.where(s > 0, self.codes + 1, self.codes - 1), self.codes) % 256

    def hashes(self):
        return [fnv(self.codes.astype(np.uint8).tobytes()), fnv(self.absmax.tobytes())]


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & M64
    return f"{h:016x}"


def eight_bit(path, embeddings):
    """AdamW and Lion in 8 bits: parameters and hashes of the states."""
    signed, unsigned = maps(path)
    adamw, lion = {}, {}
    for p, (name, shape, _, _) in enumerate(PARAMETERS):
        n = math.prod(shape)
        if n < 4096 or ("embed" in name and not embeddings):
            continue
        lr, wd = F(LR), F(decay_of(p))
        w, m, v = start(p).ravel(), Codes(n, signed, True), Codes(n, unsigned, False)
        b1, b2 = F(0.9), F(0.999)
        for step in range(1, STEPS + 1):
            g = gradient(p, step).ravel()
            c1, c2 = F(1 - 0.9**step), F(math.sqrt(1 - 0.999**step))
            s2 = v.values() * b2 + (F(1) - b2) * g * g
            s1 = m.values() * b1 + (F(1) - b1) * g
            w = (w + (-lr * c2 / c1) * (s1 / (np.sqrt(s2) + c2 * F(1e-8)))) * (F(1) - lr * wd)
            m.store(s1)
            v.store(s2)
        adamw[name] = {"values": sample(w), "hashes": m.hashes() + v.hashes()}
        w, m = start(p).ravel(), Codes(n, signed, True)
        b1, b2 = F(0.9), F(0.99)
        for step in range(1, STEPS + 1):
            g = gradient(p, step).ravel()
            s = m.values()
            w = w * (F(1) - lr * wd) - lr * np.sign(s * b1 + (F(1) - b1) * g)
            m.store(s * b2 + (F(1) - b2) * g)
        lion[name] = {"values": sample(w), "hashes": m.hashes()}
    return adamw, lion


def compare_with_bitsandbytes(path):
    import bitsandbytes

    signed, unsigned = maps(path)
    w = torch.nn.Parameter(torch.tensor(start(4)))
    optimizer = bitsandbytes.optim.AdamW8bit([w], lr=LR, weight_decay=DECAY)
    m, v = Codes(w.numel(), signed, True), Codes(w.numel(), unsigned, False)
    for step in range(1, STEPS + 1):
        g = gradient(4, step)
        w.grad = torch.tensor(g)
        optimizer.step()
        g = g.ravel()
        v.store(v.values() * F(0.999) + (F(1) - F(0.999)) * g * g)
        m.store(m.values() * F(0.9) + (F(1) - F(0.9)) * g)
        state = optimizer.state[w]
        apart = [
            int((state[k].numpy().ravel() != c.codes).sum()) for k, c in (("state1", m), ("state2", v))
        ]
        print(f"bitsandbytes, step {step}: {apart} of {m.n} codes differ", file=sys.stderr)


def adafactor_by_hand(p):
    """AdaLomo: Adafactor's second moment, clipped, scaled by the parameter, without momentum; f64."""
    w, shape = start(p).astype(float), PARAMETERS[p][1]
    row, column, full = 0.0, 0.0, 0.0
    for step in range(1, STEPS + 1):
        g = gradient(p, step).astype(float)
        beta2 = 1 - step**-0.8
        square = g * g + 1e-30
        if len(shape) == 2:
            row = beta2 * row + (1 - beta2) * square.mean(1)
            column = beta2 * column + (1 - beta2) * square.mean(0)
            u = g / np.sqrt(row / row.mean())[:, None] / np.sqrt(column)
        else:
            full = beta2 * full + (1 - beta2) * square
            u = g / np.sqrt(full)
        u /= max(1.0, math.sqrt((u * u).mean()))
        lr = LR * max(1e-3, math.sqrt((w * w).mean()))
        w = w * (1 - lr * decay_of(p)) - lr * u
    return w


def mix64(a, b):
    z = (a + (b + 1) * 0x9E3779B97F4A7C15) & M64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def words(seed, n):
    z = mix64(seed, 0)
    keys = [z & M32, z >> 32]
    i = np.arange(n, dtype=np.uint64)
    return hash32((hash32(i ^ np.uint64(keys[0])) + np.uint64(keys[1])) & np.uint64(M32))


def random_normal(shape, std, seed):
    n = math.prod(shape)
    share = ((words(seed, n) >> np.uint64(8)).astype(float) + 1) / (1 << 24)
    turn = (words(seed ^ M64, n) >> np.uint64(8)).astype(float) / (1 << 24) - 0.5
    return (std * np.sqrt(-2 * np.log(share)) * np.cos(2 * math.pi * turn)).reshape(shape)


def apollo(rank, scale, scale_type):
    from apollo_torch import APOLLOAdamW

    def make(tensors):
        extra = dict(rank=rank, proj="random", scale_type=scale_type, scale=scale, update_proj_gap=GAP, proj_type="std")
        out = []
        for p, t in enumerate(tensors):
            name, shape = PARAMETERS[p][0], PARAMETERS[p][1]
            projected = "proj.weight" in name and rank < min(shape)
            out.append({"params": [t], "weight_decay": decay_of(p), **(extra if projected else {})})
        optimizer = APOLLOAdamW(out, lr=LR, betas=(0.9, 0.999), eps=1e-6)

        class Projector:
            """Our projection matrix in the place of the package's own."""

            def __init__(self, p):
                self.p = p

            def project(self, grad, step):
                _, (rows, columns), block, role = PARAMETERS[self.p]
                tall = rows >= columns
                seed = mix64(mix64(SEED, (block << 8) + role), step // GAP)
                shape = (rank, columns) if tall else (rows, rank)
                matrix = torch.tensor(random_normal(shape, rank**-0.5, seed).astype(F))
                return grad @ matrix.T if tall else matrix.T @ grad

        for p, group in enumerate(optimizer.param_groups):
            if "rank" in group:
                optimizer.state[group["params"][0]]["projector"] = Projector(p)
        return optimizer

    return make


def adam_mini(tensors):
    from adam_mini import Adam_mini

    named = [(PARAMETERS[p][0], t) for p, t in enumerate(tensors)]
    return Adam_mini(named, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY, dim=64, n_heads=4, n_kv_heads=2)


def sample(w):
    return [float(x) for x in np.asarray(w, dtype=F).ravel()[::97]]


def main():
    import lion_pytorch
    import transformers.optimization
    from galore_torch import GaLoreAdamW

    out_path = sys.argv[1]
    maps_path = sys.argv[2] if len(sys.argv) > 2 else "crates/device/tests/fixtures/dynamic_maps.txt"
    adam = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8)
    # One projection for all steps: the signs of the next one would be the decomposition's choice.
    galore = dict(rank=RANK, update_proj_gap=200, scale=0.25, proj_type="std")
    factored = dict(scale_parameter=True, relative_step=False, warmup_init=False, lr=LR)
    makers = {
        "adamw": lambda t: torch.optim.AdamW(groups(t), **adam),
        "adam_mini": adam_mini,
        "lion": lambda t: lion_pytorch.Lion(groups(t), lr=LR, betas=(0.9, 0.99)),
        "sgd": lambda t: torch.optim.SGD(groups(t), lr=LR),
        "sgd_momentum": lambda t: torch.optim.SGD(groups(t), lr=LR, momentum=0.9),
        "sgd_nesterov": lambda t: torch.optim.SGD(groups(t), lr=LR, momentum=0.9, nesterov=True),
        "adafactor": lambda t: transformers.optimization.Adafactor(groups(t), **factored),
        "adafactor_momentum": lambda t: transformers.optimization.Adafactor(groups(t), beta1=0.9, **factored),
        "galore": lambda t: GaLoreAdamW(low_rank_groups(t, **galore), lr=LR, betas=(0.9, 0.999), eps=1e-6),
        "apollo": apollo(16, 1.0, "channel"),
        "apollo_mini": apollo(1, 128.0, "tensor"),
    }
    result = {}
    for name, make in makers.items():
        weights = torch_steps(make)
        result[name] = {PARAMETERS[p][0]: {"values": sample(w)} for p, w in enumerate(weights)}
    result["adalomo"] = {
        PARAMETERS[p][0]: {"values": sample(adafactor_by_hand(p))} for p in range(len(PARAMETERS))
    }
    result["adamw_8bit"], result["lion_8bit"] = eight_bit(maps_path, embeddings=True)
    compare_with_bitsandbytes(maps_path)
    with open(out_path, "w") as f:
        json.dump(result, f, separators=(",", ":"))
        f.write("\n")


main()
