#!/usr/bin/env python3
"""Makes a tiny model quantised by every scheme that is read, PEFT adapters for it, and what their weights are.

    docs/bench/quantised_models.py crates/model/tests/data/quantised

Needs torch, transformers, bitsandbytes and peft. With `adapters` as a second argument it makes the adapters alone. Writes for each scheme a folder with config.json and model.safetensors as
the quantising libraries write them, and `expected.json`: of every dequantised matrix the FNV-1a hash (64 bits) of its f32
bytes, or, where libraries round in between, some of its values. GPTQ and AWQ are packed here after their format. Adapters
come with the merged weights' values. `crates/model/tests/quantised.rs` compares with these; it needs no Python.
"""

import json
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
import transformers
from safetensors.torch import save_file

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
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    state = transformers.LlamaForCausalLM(config).state_dict()
    state = {k: v.detach().clone() for k, v in state.items() if k != "lm_head.weight"}
    written = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    for scheme, (quantization, pack) in {"base": (None, None), **SCHEMES}.items():
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
        (folder / "config.json").write_text(json.dumps(written | extra, indent=1))
        if expected:
            (folder / "expected.json").write_text(json.dumps(expected))
    adapters(target / "base", target / "adapters")


main()
