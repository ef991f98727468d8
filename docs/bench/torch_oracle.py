#!/usr/bin/env python3
"""What PyTorch, transformers, PEFT and bitsandbytes allocate in a training step, without a GPU.

The real libraries run on fake CUDA tensors. A dispatch mode records the birth and the death of every storage, a
hook every tensor that autograd saves. `torch_oracle.py --write FILE` runs every case and writes their peaks and
saved tensors as JSON, for the test `crates/stacks/tests/oracle.rs`; `torch_oracle.py CASE --log` prints one case's log.
A case is FAMILY-PRECISION-METHOD-ATTENTION-CHECKPOINTING, such as `llama-bf16-full-sdpa-off`.

Needs: torch (a CUDA build), transformers, peft, bitsandbytes. See docs/oracle.md.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import re
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = "cuda:0"


def without_primary_context():
    """The engine asks whether the device has a CUDA context, which needs a driver. Here it has none: the function in
    the table of `CUDAHooks` is replaced by one that says so. Its place is counted in the header that torch ships."""
    root = os.path.dirname(torch.__file__)
    with open(os.path.join(root, "include/ATen/detail/AcceleratorHooksInterface.h")) as file:
        header = file.read()
    virtuals = re.findall(r"virtual\s+([^;{]*)", header[: header.index("hasPrimaryContext(")])
    place = len(virtuals) - 1 + sum("~" in function for function in virtuals)
    library = ctypes.CDLL(os.path.join(root, "lib/libtorch_cpu.so"))
    hooks = library._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    table = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))[0]
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda hooks, device: False)
    page = (table + 8 * place) & ~0xFFF
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(0x2000), 3) != 0:
        sys.exit("cannot change the table of CUDAHooks")
    ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[place] = ctypes.cast(answer, ctypes.c_void_p).value
    return answer


class Recorder(TorchDispatchMode):
    """The births and deaths of CUDA storages, in order: (operation, number, bytes rounded up to 512, or minus them)."""

    def __init__(self):
        super().__init__()
        self.log, self.known, self.live, self.peak, self.peak_at = [], {}, 0, 0, 0
        self.marks = []

    def birth(self, storage, operation):
        size = storage.nbytes()
        if size == 0 or id(storage) in self.known:
            return
        size = (size + 511) // 512 * 512
        number = len(self.log)
        key = id(storage)

        def death(_, self=self):
            self.known.pop(key, None)
            self.live -= size
            self.log.append(("", number, -size))

        self.known[key] = weakref.ref(storage, death)
        self.live += size
        self.log.append((operation, number, size))
        if self.live > self.peak:
            self.peak, self.peak_at = self.live, len(self.log)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self.birth(tensor.untyped_storage(), name)
        return out

    def mark(self, what):
        self.marks.append((what, len(self.log), self.live))


def attention_of_the_card(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The back end that PyTorch takes on an Ampere or Ada card. The choice itself asks the driver."""
    autocast = torch.is_autocast_enabled("cuda")
    if autocast:
        value, key, query = (x.to(torch.get_autocast_dtype("cuda")) for x in (value, key, query))
    half = query.dtype in (torch.bfloat16, torch.float16)
    aten = torch.ops.aten
    if half and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        return ORIGINAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], -1, -1)
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]


ORIGINAL = torch.nn.functional.scaled_dot_product_attention

SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXTURES = ["mixtral", "qwen2moe", "qwen3moe", "glm4moe"]
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 320}),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "glm4moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {
        "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1}),
}
BATCH, SEQUENCE = 2, 192
PRECISIONS, METHODS = ("f32", "bf16", "autocast"), ("full", "lora", "qlora", "dora")
ATTENTIONS, CHECKPOINTINGS = ("eager", "sdpa"), ("off", "nonreentrant", "reentrant")


ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"],
           **dict.fromkeys(MIXTURES, ATTENTION_TARGETS)}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8


def quantise(model):
    """The blocks' linears as transformers' `replace_with_bnb_linear` and its loading make them: NF4, double
    quantisation, bf16 products."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() != 2 or "embed" in name or "lm_head" in name or "wte" in name or "wpe" in name:
            continue
        inner, outer = module.in_features, module.out_features
        packed, state = bnb.functional.quantize_4bit(weight.data, quant_type="nf4", compress_statistics=True)
        # `Params4bit` is a subclass of its own and cannot be a fake tensor: a parameter with its attributes stands for it.
        new = bnb.nn.Linear4bit.__new__(bnb.nn.Linear4bit)
        torch.nn.Module.__init__(new)
        new.compute_dtype, new.compute_type_is_set, new.quant_storage = torch.bfloat16, True, torch.uint8
        new.support_avx512bf16_for_cpu = False
        new.weight = torch.nn.Parameter(packed, requires_grad=False)
        new.weight.quant_state, new.weight.compress_statistics, new.weight.quant_type = state, True, "nf4"
        new.in_features, new.out_features, new.bias, new.quant_state = inner, outer, module.bias, state
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    model.is_loaded_in_4bit = True


def adapt(model, family, method, checkpointing):
    import peft

    if method == "qlora":
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpointing != "off",
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        if checkpointing == "nonreentrant":
            model.enable_input_require_grads()
    targets = TARGETS.get(family, LLAMA_TARGETS)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM",
                                                      use_dora=method == "dora"))


def apply_plainly(module, function, recurse=True):
    """`nn.Module._apply` without its exchange of tensors, which fake ones refuse."""
    for child in module.children() if recurse else ():
        apply_plainly(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            new = function(parameter.data)
            if new.dtype != parameter.dtype or new.device != parameter.device:
                module._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def config_of(family, attention):
    import transformers

    config, model, extra = FAMILIES[family]
    if family == "gpt2":
        shape = dict(vocab_size=1000, n_embd=256, n_inner=1024, n_layer=3, n_head=8, n_positions=512,
                     bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        shape = {**SHAPE, **extra}
    config = getattr(transformers, config)(**shape)
    config._attn_implementation = attention
    config.use_cache = False
    return config, getattr(transformers, model)


def run(case, steps=2, log=False):
    family, precision, method, attention, checkpointing = case.split("-")
    config, model_class = config_of(family, attention)
    import transformers.masking_utils as masks

    torch.nn.Module._apply = apply_plainly
    # Autocast turns itself off where there is no CUDA.
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 9)
    torch.nn.functional.scaled_dot_product_attention = attention_of_the_card
    # Looks at the numbers of the positions; of positions in a row it finds nothing packed.
    masks.find_packed_sequence_indices = lambda position_ids: None
    import bitsandbytes.functional as bnb_functional

    # bitsandbytes' table of codes is computed from numbers, which fake tensors do not have: before the mode begins.
    bnb_functional.name2qmap.setdefault("dynamic", bnb_functional.create_dynamic_map())
    recorder, saved = Recorder(), []
    weights = torch.float32 if precision == "f32" or (precision == "autocast" and method != "qlora") else torch.bfloat16
    gc.collect()
    gc.disable()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        torch.set_default_dtype(weights)
        with torch.device(DEVICE):
            model = model_class(config)
        torch.set_default_dtype(torch.float32)
        gc.collect()
        if method == "qlora":
            quantise(model)
        if method != "full":
            model = adapt(model, family, method, checkpointing)
        if checkpointing != "off" and method != "qlora":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            if method != "full":
                model.enable_input_require_grads()
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        gc.collect()
        recorder.mark("loaded")
        for step in range(steps):
            def pack(tensor):
                if step == steps - 1:
                    saved.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
                return tensor

            recorder.peak = recorder.live
            tokens, labels = (torch.ones(BATCH, SEQUENCE, dtype=torch.int64, device=DEVICE) for _ in range(2))
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            autocast = torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "autocast")
            with hooks if checkpointing == "off" else contextlib.nullcontext(), autocast:
                outputs = model(input_ids=tokens, labels=labels)
            loss = outputs.loss
            recorder.mark("forward")
            loss.backward()
            recorder.mark("backward")
            optimizer.step()
            recorder.mark("optimizer")
            optimizer.zero_grad()
            del loss, tokens, labels
            recorder.mark("zero_grad")
    gc.enable()
    torch.nn.functional.scaled_dot_product_attention = ORIGINAL
    return recorder, saved


def all_cases():
    cases = itertools.product(FAMILIES, PRECISIONS, METHODS, ATTENTIONS, CHECKPOINTINGS)
    # QLoRA has weights in bf16; GPT-2's Conv1D has no 4-bit form in bitsandbytes' own modules. DoRA is the same in every family.
    # Experts are the same with either attention, and are not quantised.
    skipped = lambda case: (case[2] == "qlora" and (case[1] == "f32" or case[0] == "gpt2")
                            or case[2] == "dora" and case[0] not in ("llama", "qwen2")
                            or case[0] in MIXTURES and (case[2] in ("qlora", "dora") or case[3] == "eager"))
    return ["-".join(case) for case in cases if not skipped(case)]


def write(path, cases):
    """Adds the results of cases to a file of the same versions, one line each."""
    import accelerate, bitsandbytes, peft, transformers

    modules = (torch, transformers, peft, bitsandbytes, accelerate)
    fixture = {"versions": {module.__name__: module.__version__ for module in modules},
               "batch": BATCH, "sequence": SEQUENCE, "rank": RANK, "configs": {}, "cases": {}}
    for family in FAMILIES:
        config = config_of(family, "sdpa")[0].to_diff_dict()
        fixture["configs"][family] = {key: value for key, value in config.items() if key != "dtype"}
    if os.path.exists(path):
        with open(path) as file:
            before = json.load(file)
        if before["versions"] == fixture["versions"]:
            fixture["cases"] = before["cases"]
    for case in cases:
        try:
            recorder, saved = run(case)
        except Exception as error:
            print(case, "failed:", str(error).splitlines()[0] if str(error) else repr(error), file=sys.stderr)
            continue
        counts = {}
        for shape, dtype in saved:
            key = f"{'x'.join(map(str, shape))} {dtype}"
            counts[key] = counts.get(key, 0) + 1
        loaded = next(live for what, _, live in recorder.marks if what == "loaded")
        fixture["cases"][case] = {"loaded": loaded, "peak": recorder.peak, "saved": counts}
        with open(path, "w") as file:
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fixture["cases"].items())
            head = json.dumps({key: value for key, value in fixture.items() if key != "cases"})
            file.write(head[:-1] + ', "cases": {\n' + lines + "\n}}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--log", action="store_true", help="print every birth and death")
    parser.add_argument("--write", metavar="FILE", help="write the fixture: all cases, or those named")
    arguments = parser.parse_args()
    keep = without_primary_context()
    if arguments.write:
        write(arguments.write, arguments.case or all_cases())
        return
    for case in arguments.case:
        recorder, saved = run(case)
        print(case, recorder.peak, recorder.marks)
        if arguments.log:
            live = 0
            for place, (operation, number, size) in enumerate(recorder.log):
                live += size
                for what, at, _ in recorder.marks:
                    if at == place:
                        print("---", what)
                print(f"{operation or 'free':40} {number:6} {size:12} {live:12}")
            for shape, dtype in saved:
                print("saved", shape, dtype)
    del keep


if __name__ == "__main__":
    main()
