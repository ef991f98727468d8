"""Makes crates/device/tests/fixtures/fp8.json: what PyTorch's 8-bit floats are, and products of them.

    python docs/bench/fp8_fixtures.py > crates/device/tests/fixtures/fp8.json
"""

import json
import math

import numpy as np
import torch

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def short(x):
    """The shortest numbers that are these in f32."""
    return [float(str(value)) for value in x.flatten().numpy().astype(np.float32)]


def hexadecimal(quantised):
    return bytes(quantised.flatten().view(torch.uint8).tolist()).hex()


def codes(x, dtype):
    """The codes of x, saturating."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def scaled(x, dtype):
    """x in 8-bit floats with the largest power of two as its scale that lets it fit; the factor that undoes it."""
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / x.abs().max().item()))
    return codes(x * scale, dtype), 1.0 / scale


def casts():
    """Numbers of all sizes, the formats' own numbers, and the middles between them."""
    torch.manual_seed(1)
    x = [torch.randn(40) * 10.0**exponent for exponent in range(-6, 6)]
    for dtype in FORMATS.values():
        own = torch.arange(256).to(torch.uint8).view(dtype).float()
        own = own[own.isfinite()].sort().values
        x += [own, (own[1:] + own[:-1]) / 2]
    x = torch.cat(x)
    return {"x": short(x), **{name: hexadecimal(codes(x, dtype)) for name, dtype in FORMATS.items()}}


def products():
    """The three products of a linear layer of operands scaled just in time, summed in f64."""
    torch.manual_seed(2)
    tokens, inputs, outputs = 33, 48, 40
    x = torch.randn(tokens, inputs) * 3.7
    weight = torch.randn(outputs, inputs) * 0.021
    dout = torch.randn(tokens, outputs) * 4.3e-5
    out = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
    values = {}
    for name, tensor, format in (("x", x, "e4m3"), ("weight", weight, "e4m3"), ("dout", dout, "e5m2")):
        dtype = FORMATS[format]
        quantised, factor = scaled(tensor, dtype)
        out[name] = {"values": short(tensor), "codes": hexadecimal(quantised), "factor": factor}
        values[name] = quantised.double() * factor
    out["out"] = short(values["x"] @ values["weight"].T)
    out["dx"] = short(values["dout"] @ values["weight"])
    out["dweight"] = short(values["dout"].T @ values["x"])
    return out


print(json.dumps({"casts": casts(), "products": products()}))
