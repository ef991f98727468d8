#!/usr/bin/env python3
"""Makes a tiny model quantised by every scheme that is read, PEFT adapters for it, and what their weights are.

    docs/bench/quantised_models.py crates/model/tests/data/quantised

Needs torch, transformers, bitsandbytes, compressed-tensors and peft. With `adapters` as a second argument it makes the adapters alone, with
`scaled` the schemes of 8-bit floats, compressed-tensors and Model Optimizer (without bitsandbytes and peft). Writes for each scheme a folder with config.json and model.safetensors as
the quantising libraries write them, and `expected.json`: of every dequantised matrix the FNV-1a hash (64 bits) of its f32
bytes, or, where libraries round in between, some of its values. GPTQ and AWQ are packed here after their format. Adapters
come with the merged weights' values. `crates/model/tests/quantised.rs` compares with these; it needs no Python.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

try:
    import bitsandbytes.functional as bnb
except ImportError:
    bnb = None  # What is made without it does without.

SIZES = dict(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.2,
    tie_word_embeddings=True,
)


def fnv(tensor):
    value = 0xCBF29CE484222325
    for byte in tensor.contiguous().to(torch.float32).numpy().tobytes():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def linears(state):
    return [name for name in state if "proj" in name]


def dequantised(codes, state, shape):
    """What dequantize_4bit() gives; its kernel for CPUs is wrong where rows are not whole blocks."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    places = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten().long()
    values = (state.code[places] * absmax.repeat_interleave(state.blocksize)[: places.numel()]).reshape(shape)
    if shape[1] % state.blocksize == 0:
        assert torch.equal(values, bnb.dequantize_4bit(codes, state))
    return values


def four_bit(kind, doubly, blocksize=64):
    def pack(name, weight, state, expected):
        codes, quant_state = bnb.quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=doubly, quant_type=kind
        )
        state[name] = codes
        for key, value in quant_state.as_dict(packed=True).items():
            state[f"{name}.{key}"] = value
        expected[name] = {"hash": fnv(dequantised(codes, quant_state, weight.shape))}

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": doubly,
    }
    return config, pack


def int8():
    def pack(name, weight, state, expected):
        codes, magnitudes, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        state[name] = codes
        state[name.replace(".weight", ".SCB")] = magnitudes
        state[name.replace(".weight", ".weight_format")] = torch.tensor(0, dtype=torch.uint8)
        values = bnb.int8_vectorwise_dequant(codes, magnitudes)
        expected[name] = {"values": values.flatten()[:40].tolist()}

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, pack


def grouped(weight, bits, group):
    """Codes `[out, in]`, zero points and scales `[out, groups]`."""
    out, inputs = weight.shape
    parts = weight.reshape(out, inputs // group, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1).to(torch.int64)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.reshape(out, inputs).to(torch.int64), zeros, scales


def words(values, bits, order=None):
    """Values `[.., n]` as 32-bit words `[.., n * bits / 32]`."""
    per = 32 // bits
    order = order or range(per)
    values = values.reshape(*values.shape[:-1], -1, per)
    packed = sum(values[..., column] << (bits * place) for place, column in enumerate(order))
    return packed.to(torch.uint32).view(torch.int32)


def gptq(bits, version, shuffled):
    def pack(name, weight, state, expected):
        base, group = name.removesuffix(".weight"), 16
        inputs = weight.shape[1]
        order = torch.randperm(inputs) if shuffled else torch.arange(inputs)
        codes, zeros, scales = grouped(weight[:, order], bits, group)
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[order] = (torch.arange(inputs) // group).to(torch.int32)
        back = torch.empty_like(codes)
        back[:, order] = codes
        stored = zeros if version == "gptq_v2" else zeros - 1
        state[f"{base}.qweight"] = words(back, bits).T.contiguous()
        state[f"{base}.qzeros"] = words(stored.T.contiguous(), bits).contiguous()
        state[f"{base}.scales"] = scales.T.contiguous()
        state[f"{base}.g_idx"] = groups
        of = groups.long()
        values = (back - zeros[:, of]).float() * scales.float()[:, of]
        expected[name] = {"hash": fnv(values)}

    return {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": version}, pack


def awq(name, weight, state, expected):
    base, order = name.removesuffix(".weight"), [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros, scales = grouped(weight, 4, 16)
    state[f"{base}.qweight"] = words(codes.T.contiguous(), 4, order).contiguous()
    state[f"{base}.qzeros"] = words(zeros.T.contiguous(), 4, order).contiguous()
    state[f"{base}.scales"] = scales.T.contiguous()
    of = torch.arange(weight.shape[1]) // 16
    expected[name] = {"hash": fnv((codes - zeros[:, of]).float() * scales.float()[:, of])}


def fp8_of(weight, block):
    """Codes of 8-bit floats and the factors of blocks, whose last ones may be smaller."""
    rows, columns = (-(-size // own) for size, own in zip(weight.shape, block))
    spread = lambda scale: scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    scale = torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = part.abs().max() / 448
    codes = (weight / spread(scale)).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * spread(scale)


def fp8(block):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def pack(name, weight, state, expected):
        own = block or list(weight.shape)
        codes, scale, values = fp8_of(weight, own)
        if all(size % part == 0 for size, part in zip(weight.shape, own)):
            theirs = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
            assert torch.equal(theirs, values)
        state[name] = codes
        state[f"{name}_scale_inv"] = scale if block else scale.reshape(())
        state[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
        expected[name] = {"hash": fnv(values)}

    return {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}, pack


def fbgemm(name, weight, state, expected):
    codes, scale, values = fp8_of(weight, [1, weight.shape[1]])
    state[name], state[f"{name}_scale"] = codes, scale
    expected[name] = {"hash": fnv(values)}


def compressed(form, factors=torch.float32, **weights):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)

    def pack(name, weight, state, expected):
        rows, columns = weight.shape
        group = args.group_size or columns
        if args.strategy == "tensor":
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        elif args.strategy == "block":
            m, n = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % n, 0, -rows % m))
            parts = padded.reshape(padded.shape[0] // m, m, padded.shape[1] // n, n)
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        else:
            parts = weight.reshape(rows, columns // group, group)
            low, high = parts.amin(-1), parts.amax(-1)
        own = {"weight": weight}
        if args.strategy == "tensor_group":
            own["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1)
        scale, zero = calculate_qparams(low, high, args, own.get("weight_global_scale"))
        own |= {"weight_scale": scale.to(factors), "weight_zero_point": zero}
        stored = library.compress(dict(own), scheme)
        values = library.decompress(dict(stored), scheme)["weight"]
        for key, value in stored.items():
            state[name.replace("weight", key)] = value
        if values.dtype == torch.float32:
            expected[name] = {"hash": fnv(values)}
        else:
            assert values.dtype == torch.bfloat16
            expected[name] = {"rounded": fnv(values)}

    groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return config | {"quantization_status": "compressed", "ignore": ["lm_head"]}, pack


def ordered(name, weight, state, expected):
    """Words whose groups are of inputs that do not lie beside each other, as versions up to 0.13 wrote them."""
    base, inputs = name.removesuffix(".weight"), weight.shape[1]
    order = torch.randperm(inputs)
    codes, zeros, scales = grouped(weight[:, order], 4, 16)
    groups, back = torch.empty(inputs, dtype=torch.int32), torch.empty_like(codes)
    groups[order], back[:, order] = (torch.arange(inputs) // 16).to(torch.int32), codes
    state[f"{base}.weight_packed"] = words(back, 4)
    state[f"{base}.weight_shape"] = torch.tensor(weight.shape)
    state[f"{base}.weight_scale"] = scales
    state[f"{base}.weight_zero_point"] = words(zeros.T.contiguous(), 4).T.contiguous()
    state[f"{base}.weight_g_idx"] = groups
    of = groups.long()
    expected[name] = {"hash": fnv((back - zeros[:, of]).float() * scales.float()[:, of])}


def nvfp4_of_modelopt(name, weight, state, expected):
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = weight.reshape(weight.shape[0], -1, 16)
    whole = parts.abs().max() / (448 * 6)
    scale = (parts.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factors = (scale.float() * whole)[..., None]
    places = ((parts.abs() / factors)[..., None] - codes).abs().argmin(-1)
    negative = parts < 0
    values = torch.where(negative, -codes[places], codes[places]) * factors
    bits = (places + 8 * negative).reshape(weight.shape[0], -1, 2)
    state[name] = (bits[..., 0] | bits[..., 1] << 4).to(torch.uint8)
    state[f"{name}_scale"], state[f"{name}_scale_2"] = scale, whole
    state[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    expected[name] = {"hash": fnv(values)}


def scaled():
    eight = dict(num_bits=8, symmetric=True)
    floats, integers = dict(type="float"), dict(type="int")
    four = dict(num_bits=4, symmetric=True)
    return {
        "fp8": fp8([16, 32]),
        "fp8_tensor": fp8(None),
        "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm),
        "ct_fp8_rows": compressed("float-quantized", torch.bfloat16, strategy="channel", **eight, **floats),
        "ct_fp8_blocks": compressed("float-quantized", strategy="block", block_structure=[16, 32], **eight, **floats),
        "ct_int8_rows": compressed("int-quantized", strategy="channel", num_bits=8, symmetric=False, **integers),
        "ct_int8": compressed("int-quantized", strategy="tensor", **eight, **integers),
        "ct_int4": compressed("pack-quantized", strategy="group", group_size=16, num_bits=4, symmetric=False, **integers),
        "ct_ordered": (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "group"}}
                },
            },
            ordered,
        ),
        "ct_words8": compressed("pack-quantized", strategy="channel", **eight, **integers),
        "ct_nvfp4": compressed(
            "nvfp4-pack-quantized",
            strategy="tensor_group",
            group_size=16,
            scale_dtype=torch.float8_e4m3fn,
            **four,
            **floats,
        ),
        "ct_mxfp4": compressed("mxfp4-pack-quantized", strategy="group", group_size=16, **four, **floats),
        "modelopt_nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_of_modelopt),
    }


SCHEMES = {
    "nf4": four_bit("nf4", False),
    "nf4_double": four_bit("nf4", True),
    "nf4_128": four_bit("nf4", False, 128),
    "fp4_double": four_bit("fp4", True),
    "int8": int8(),
    "gptq": gptq(4, "gptq", True),
    "gptq_8_v2": gptq(8, "gptq_v2", False),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
}


GPT2 = dict(
    vocab_size=24,
    n_embd=16,
    n_layer=1,
    n_head=2,
    n_positions=16,
    n_inner=20,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
)


def adapters(base, target):
    from peft import LoraConfig, get_peft_model

    llama, gpt2 = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel
    attention = dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"])
    kinds = {
        "lora": (llama, dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])),
        "patterns": (
            llama,
            dict(
                r=2,
                lora_alpha=4,
                target_modules="all-linear",
                use_rslora=True,
                rank_pattern={"o_proj": 3},
                alpha_pattern={"v_proj": 6},
            ),
        ),
        "dora": (llama, dict(r=2, lora_alpha=2, target_modules=["v_proj", "up_proj"], use_dora=True)),
        "embedding": (llama, dict(r=2, lora_alpha=4, target_modules=["embed_tokens", "k_proj"])),
        "saved_norms": (llama, dict(modules_to_save=["input_layernorm", "norm"], **attention)),
        "expression": (llama, dict(r=2, lora_alpha=3, target_modules=r".*\.0\.(self_attn|mlp)\.(v|gate)_proj")),
        "gpt2": (gpt2, dict(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, bias="all")),
        "gpt2_dora": (
            gpt2,
            dict(r=2, lora_alpha=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=True),
        ),
    }
    for name, (family, kind) in kinds.items():
        model = base if family is llama else target / "gpt2_base"
        if not model.exists():
            torch.manual_seed(3)
            gpt2(transformers.GPT2Config(**GPT2)).save_pretrained(model)
        torch.manual_seed(len(name))
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **kind)
        adapted = get_peft_model(family.from_pretrained(model), config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if parameter.requires_grad and "lora_" not in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(target / name, safe_serialization=True)
        (target / name / "README.md").unlink(missing_ok=True)
        merged = adapted.merge_and_unload().state_dict()
        values = {key: merged[key].flatten()[:40].tolist() for key in merged}
        (target / name / "expected.json").write_text(json.dumps(values))


def main():
    target = Path(sys.argv[1])
    if sys.argv[2:] == ["adapters"]:
        return adapters(target / "base", target / "adapters")
    if sys.argv[2:] == ["scaled"]:
        state = load_file(target / "base" / "model.safetensors")
        torch.manual_seed(1)
        return write(target, json.loads((target / "base" / "config.json").read_text()), state, scaled())
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    state = transformers.LlamaForCausalLM(config).state_dict()
    state = {k: v.detach().clone() for k, v in state.items() if k != "lm_head.weight"}
    written = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    write(target, written, state, {"base": (None, None), **SCHEMES, **scaled()})
    adapters(target / "base", target / "adapters")


def write(target, config, state, schemes):
    for scheme, (quantization, pack) in schemes.items():
        folder = target / scheme
        folder.mkdir(parents=True, exist_ok=True)
        stored, expected = {}, {}
        for name, value in state.items():
            if pack and "proj" in name:
                pack(name, value, stored, expected)
            else:
                stored[name] = value
        save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", {"format": "pt"})
        extra = {"quantization_config": quantization} if quantization else {}
        (folder / "config.json").write_text(json.dumps(config | extra, indent=1))
        if expected:
            (folder / "expected.json").write_text(json.dumps(expected))


main()
