#!/usr/bin/env python3
"""Scores `plimsoll estimate` on published measurements of other stacks.

    score_estimates.py --plimsoll BIN FILE.csv              a line for every row
    score_estimates.py --plimsoll BIN FILE.csv --json       the errors of grade A, and of A and B, in per cent
    score_estimates.py --plimsoll BIN FILE.csv --markdown   docs/estimates.md

The file has the columns source, model, batch, seq, precision, optimizer, checkpointing, parallelism, lora, gpu, measured_gib,
kind_of_measure, phase, grade and notes. Each row becomes a request by the rules of `RULES`, which are the same for all rows: what a row
does not say is guessed as they say, and never from the number that was measured. A row that says something that no request can say is
not asked, and the table says why.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist

RULES = """\
1. **Stack**: the program that the source is about, or whose script it ran (the table of tools below). Any other source: `peft` where
   an adapter is trained (a loop of one's own), `hf` (the Trainer) where all weights are, `deepspeed` and `fsdp` by the parallelism.
2. **Versions**: those that the row names; else those that another row of the same source names; else those of the date in the
   source's name, a month standing for its middle; else the newest. Libraries that are not named beside one that is are of its time,
   and not older than the model.
3. **Precision**: `fp32`, `bf16` and `fp16` stand for everything in that type, with `AMP`, `mixed` or `autocast` for autocast over f32
   weights. `nf4` and "4-bit" are bitsandbytes' four bits, with `dq` quantised twice; computation is in the type beside it. GPTQ, AWQ,
   GGUF and 8-bit floats are not asked.
4. **Length and batch**: as written. A short prompt has 16 tokens, and a prompt that is not mentioned has one. Lengths that vary are
   not asked unless a longest one is given that is reached; then every sequence has that length, and batches of several are padded.
   Where a source gives the mean and the deviation of its lengths, they are those of a log-normal distribution, cut at the longest.
5. **Optimizer**: a bare Adam or AdamW is the stack's own default; others by name. Where nothing is said, the stack's default too.
   torchtune's documentation names torchao's AdamW8bit and bitsandbytes' PagedAdamW8bit.
6. **Checkpointing**: `full` is every layer, in the form that the stack's version takes unless "reentrant" is named. Selective forms
   are not asked.
7. **Adapters**: rank and layers as written; a rank that is not written is that of another row of the same source, else the tool's, else 8.
   Layers that are not written are the tool's, else the stack's default. Methods other than LoRA are not asked.
8. **Attention**: as the notes have it (`FA2`, `attn=eager`); "flash" on a card below compute capability 8.0, which flash-attn does not
   run on, is PyTorch's own (`sdpa`). Where nothing is said, the stack's default.
9. **Devices**: the number in the parallelism, else before the card's name. A sum over devices is divided by their number. Tensor,
   pipeline, expert and context parallelism are not asked.
10. **torch.compile** without checkpointing is not asked: what a compiled step keeps is not known. Rows that say they are cumulative
   have what the rows above them have.
11. **Counter**: what the row says it is: `allocated` and `active` are compared with our `max_memory_allocated`, `reserved` with
   `max_memory_reserved`, `nvidia-smi` and "driver" with what the device shows. A counter that is not named is the one that the tool
   prints; what no script prints was read off the device.
12. **Contradictions**: weights, gradients and optimizer states alone can be more than the card that the row names has. Then something
   else ran, and the row is not asked.
"""

# A word of a source: the stack; the counter that its scripts print, where that is known; the adapter that they make where a row does not
# say; other keys of a request that they decide; and how that is known.
TOOLS = [
    ("torchtune", "torchtune", "allocated", {}, {"versions": {"date": "2024-11"}},
     "its metric logger's peak_memory_active; its recipes' adapters; the README's tables are of 2024-11"),
    ("pytorch/ao", "torchtune", "allocated", {}, {}, "measured with torchtune's recipe, as its notes say"),
    ("litgpt config_hub", "litgpt", "allocated", {"dropout": 0.05},
     {"versions": {"date": "2024-04"}, "gradient_accumulation_steps": 4},
     "finetune/lora.py prints torch.cuda.max_memory_allocated; rank, layers and dropout are those of the model's file in config_hub, "
     "whose global batches are several micro-batches; the table was made in 2024-04 and later"),
    ("litgpt", "litgpt", "allocated", {"target_modules": ["q", "v"], "dropout": 0.05}, {},
     "its scripts print torch.cuda.max_memory_allocated; defaults of finetune/lora.py"),
    ("unsloth", "unsloth", None, {}, {}, "its own loader"),
    ("Qwen2.5", "hf", "allocated", {}, {}, "speed_benchmark_transformers.py prints torch.cuda.max_memory_allocated"),
    ("fitcheck", "peft", None, {}, {}, "scripts/measure.py: a loop of its own over a PEFT model"),
    ("fsdp_qlora", "peft", None,
     {"rank": 64, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], "dropout": 0.1},
     {"outputs": "until_step", "attention": "sdpa", "double_quantization": True},
     "train.py: a loop of its own over a PEFT model, which drops the output behind the step; its defaults; DDP is FSDP's NO_SHARD there; "
     "its Linear4bit has bitsandbytes' default of compress_statistics, which is double quantisation"),
    ("huggingface/peft docs", "hf", None, {"dropout": 0.1}, {}, "examples/sft: the Trainer; its configurations' dropout"),
    ("huggingface/peft", "peft", None, {}, {}, "method_comparison: a loop of its own"),
    ("ms-swift", "hf", "reserved", {"dropout": 0.05, "dtype": "f32"},
     {"mixed": True, "attention": "flash_attention_2", "gradient_accumulation_steps": 16, "lengths": (3234.4, 2547.5, 91, 19548)},
     "trainers.py prints torch.cuda.max_memory_reserved; defaults of SftArguments (lora_dtype fp32, lora_dropout_p 0.05, bf16=True), "
     "use_flash_attn, 16 micro-batches and the lengths as Benchmark.md says"),
    ("QwenLM/Qwen README.md (inference", "hf", "allocated", {}, {"versions": {"date": "2023-09"}},
     "profile.py prints torch.cuda.max_memory_allocated; requirements.txt has transformers 4.32"),
    ("QwenLM/Qwen README.md (KV-cache", "hf", "allocated", {}, {"versions": {"date": "2023-09"}}, "the same script"),
    ("QwenLM/Qwen", "hf", None, {"rank": 64, "target_modules": ["c_attn", "c_proj", "w1", "w2"], "dropout": 0.05}, {"mixed": True},
     "finetune.py: the Trainer with --bf16; its LoraArguments; full fine-tuning is finetune_ds.sh, with ds_config_zero3.json"),
    ("huggingface/transformers", "hf", None, {}, {}, "the Trainer"),
]

# Ranks of torchtune's recipes (recipes/configs), by a pattern of the model's name.
RECIPE_RANKS = [(r"llama-?3\.2-[13]b|gemma-2b|mistral", 64), (r"70b|405b", 16), (r"", 8)]

# litgpt's config_hub/finetune: of a model's LoRA and QLoRA files rank, layers (query, key, value, projection, MLP, head), and dropout.
ALL_OF_LITGPT = ["q", "k", "v", "lora_projection", "lora_mlp", "lora_head"]
CONFIG_HUB = [
    # A pattern of a model's name, of a method, and what its file says.
    (r"gemma-?2?-2b", "^lora", 8, ALL_OF_LITGPT, 0.1),
    (r"gemma", "", 16, ALL_OF_LITGPT, 0.1),
    (r"phi-?[23]", "", 8, ALL_OF_LITGPT, 0.05),
    (r"tiny-?llama", "", 32, ALL_OF_LITGPT, 0.05),
    (r"", "", 32, ["q", "v"], 0.05),
]

# What no request can say: words of a column, and the reason.
NOT_ASKED = [
    ("precision", r"gptq|awq|gguf", "weights in a format that bitsandbytes does not have"),
    ("precision", r"float8|fp8|nvfp4|mxfp", "8-bit or smaller floats in products"),
    ("precision", r"experts", "experts that are quantised apart"),
    ("precision", r"int8 kv", "a quantised key-value cache"),
    ("precision", r"bf16 master", "master weights of another type"),
    ("parallelism", r"\b(tp|pp|ep|cp)(?!1\b)\d", "tensor, pipeline, expert or context parallelism"),
    ("parallelism", r"infinity", "ZeRO-Infinity"),
    ("parallelism", r"expert offload", "experts on the host"),
    ("checkpointing", r"selective|see source", "checkpointing of some layers or operations"),
    ("optimizer", r"galore|4bit|cpuoffload|zero-offload|no offload", "an optimizer that no request names"),
    ("lora", r"^(?!lora|qlora|r\s*=|\[|$)", "an adapter that is not LoRA"),
    ("notes", r"bdlora|mica", "a variant of LoRA"),
    ("notes", r"unpacked", "lengths that vary, below the one that is written"),
]

TRAINED_WHOLE = re.compile(r"emb/lm_head|embeddings? (and|\+) (lm_)?head", re.I)


# The first months in whose middle models were public: no measurement of one is older, whatever else is known of its versions.
PUBLISHED = [
    (r"qwen-?(1\.8|7|14|72)b", "2023-08"), (r"llama-?2", "2023-08"), (r"mistral-7b", "2023-10"), (r"qwen1\.5", "2024-02"),
    (r"gemma-(2|7)b", "2024-03"), (r"llama-?3-", "2024-05"), (r"phi-3", "2024-05"), (r"qwen2-", "2024-06"),
    (r"gemma-2-", "2024-07"), (r"llama-?3\.1", "2024-08"), (r"qwen2\.5", "2024-10"), (r"llama-?3\.2", "2024-10"),
    (r"smollm2", "2024-11"), (r"gemma-3", "2025-03"), (r"qwen3", "2025-05"),
]


class NotAsked(Exception):
    """A row that no request can say."""


class Context:
    """What other rows of the same source say."""

    def __init__(self, rows):
        self.versions, self.ranks, self.steps = {}, {}, {}
        for row in rows:
            named = versions_in(row["notes"])
            self.versions.setdefault(row["source"], {}).update(named)
            rank = rank_in(row["lora"])
            if rank:
                self.ranks.setdefault((row["source"], row["model"]), rank)
            if "cumulative" in row["notes"]:
                before = self.steps.setdefault(row["source"], [])
                before.append(row["notes"])
                row["so_far"] = list(before)


def versions_in(text):
    found = {}
    for name in ("torch", "transformers", "peft", "bnb", "bitsandbytes", "deepspeed"):
        match = re.search(rf"\b{name} ?v?(\d+\.\d+)", text, re.I)
        if match:
            found["bitsandbytes" if name == "bnb" else name] = match.group(1)
    return found


def date_in(text):
    for pattern, form in [
        (r"(20\d\d)-(\d\d)-\d\d", "{0}-{1}"),
        (r"(20\d\d)(0[1-9]|1[0-2])\d\d", "{0}-{1}"),
        (r"(?<!\d)(20\d\d)(0[1-9]|1[0-2])(?!\d)", "{0}-{1}"),
        (r"(0[1-9]|1[0-2])_(20\d\d)", "{1}-{0}"),
    ]:
        match = re.search(pattern, text)
        if match:
            return form.format(*match.groups())
    return None


def rank_in(text):
    match = re.search(r"\br\s*=?\s*(\d+)", text)
    return int(match.group(1)) if match else None


def tool_of(row):
    return next((tool for tool in TOOLS if tool[0].lower() in row["source"].lower()), None)


def request_of(row, context):
    for column, pattern, reason in NOT_ASKED:
        if re.search(pattern, row[column].strip(), re.I):
            raise NotAsked(reason)
    phase = {"train": "train", "infer": "inference", "load": "load"}.get(row["phase"])
    if phase is None:
        raise NotAsked("a single operation")
    request = {"model": row["model"].strip(), "phase": phase}
    lora = lora_of(row, context)
    request.update(precision_of(row, lora))
    if lora:
        request["lora"] = lora
    request.update(shape_of(row, phase))
    request.update(ranks_of(row))
    request.update(training_of(row) if phase == "train" else {})
    request.update(versions_of(row, context))
    attention = attention_of(row["notes"])
    if attention:
        request["attention"] = attention
    gpu = row["gpu"].strip()
    if gpu and gpu != "see source" and not re.fullmatch(r"\d+ GPUs?", gpu):
        request["hardware"] = re.sub(r"^\d+x ", "", gpu) if request.get("devices") else gpu
    tool = tool_of(row)
    if tool:
        request["stack"] = tool[1]
        request.update(decided_by(tool, row, request))
    elif request.get("zero_stage"):
        request["stack"] = "deepspeed"
    else:
        request["stack"] = "peft" if lora else "hf"
    if request["stack"] == "torchtune" and phase == "train":
        request.update(cumulative(row))
    return request


def lengths_of(mean, deviation, least, most):
    """A hundred lengths in the middle of equal shares of a log-normal distribution with this mean and deviation."""
    spread = math.log(1 + (deviation / mean) ** 2) ** 0.5
    middle = math.log(mean) - spread**2 / 2
    share = NormalDist(middle, spread)
    return [min(max(round(math.exp(share.inv_cdf((n + 0.5) / 100))), least), most) for n in range(100)]


def decided_by(tool, row, request):
    """What a tool's script decides, where the row says nothing else."""
    keys = dict(tool[4])
    keys.pop("versions", None)
    if request["phase"] != "train":
        return {}
    # A trainer with bf16=True or fp16=True runs autocast over weights of the type that they were loaded in.
    if keys.pop("mixed", False) and request["precision"] in ("bf16", "fp16"):
        keys["dtype"] = request["precision"]
        keys["precision"] = request["precision"] + "-amp"
    if "lengths" in keys:
        keys["lengths"] = lengths_of(*keys["lengths"])
    if "quantization" not in request:
        keys.pop("double_quantization", None)
    if tool[0] == "fsdp_qlora" and "DDP" in row["parallelism"]:
        keys["fsdp"] = "no_shard"
    if tool[0] == "QwenLM/Qwen" and not request.get("lora"):
        # DeepSpeed has types of its own.
        keys.update(zero_stage=3, devices=request.get("devices", 1), precision="bf16")
        keys.pop("dtype", None)
    return {key: value for key, value in keys.items() if key not in request or key in ("precision", "zero_stage")}


def precision_of(row, lora):
    text = row["precision"].lower()
    if not text:
        raise NotAsked("no precision")
    half = "bf16" if "bf16" in text else "fp16" if "fp16" in text else None
    found = {}
    if re.search(r"nf4|4-?bit|\bint4\b", text):
        found["quantization"] = "nf4"
        if re.search(r"\bdq\b|-dq", text):
            found["double_quantization"] = True
    elif re.search(r"int8|8-?bit", text):
        found["quantization"] = "int8"
    mixed = bool(re.search(r"amp|mixed|autocast", text))
    if half is None and "quantization" in found:
        half = "bf16"
    if half is None and not re.search(r"fp32|f32", text):
        raise NotAsked(f"precision {row['precision']}")
    found["precision"] = (half or "f32") + ("-amp" if mixed and half else "")
    return found


def lora_of(row, context):
    text = row["lora"].strip()
    if not text:
        return None
    tool = tool_of(row)
    usual = dict(tool[3]) if tool else {}
    if tool and tool[0] == "litgpt config_hub":
        usual["rank"], usual["target_modules"], usual["dropout"] = next(
            tuple(said) for model, method, *said in CONFIG_HUB
            if re.search(model, row["model"], re.I) and re.search(method, text, re.I)
        )
    if tool and tool[1] == "torchtune":
        usual["rank"] = next(rank for model, rank in RECIPE_RANKS if re.search(model, row["model"], re.I))
    rank = rank_in(text) or context.ranks.get((row["source"], row["model"])) or usual.get("rank", 8)
    lora = {**usual, "rank": rank, "target_modules": list(usual.get("target_modules", []))}
    listed = re.search(r"[\[(]([a-z_0-9', ]+)[\])]", text)
    if "all-linear" in text:
        lora["target_modules"] = ["all-linear"]
    elif "qkv only" in text:
        lora["target_modules"] = ["q", "k", "v"]
    elif listed and "trainable" not in listed.group(1):
        names = [name.strip(" '\"") for name in listed.group(1).split(",")]
        lora["target_modules"] = [name for name in names if name]
    if re.search(r"dora", row["notes"], re.I):
        lora["use_dora"] = True
    if TRAINED_WHOLE.search(text):
        lora["modules_to_save"] = ["embed_tokens", "lm_head"]
    return lora


def shape_of(row, phase):
    if phase == "load":
        return {"batch_size": 0, "sequence_length": 0}
    batch, text = row["batch"].strip(), row["seq"].strip()
    if not re.fullmatch(r"\d+", batch):
        raise NotAsked("no batch size")
    shape = {"batch_size": int(batch)}
    both = re.fullmatch(r"(\d+) prompt \+ (\d+) generated", text)
    generated = re.fullmatch(r"(\d+) generated", text)
    short = re.search(r"short prompt, (\d+) new", text)
    if both:
        shape.update(sequence_length=int(both.group(1)), generated_tokens=int(both.group(2)))
    elif generated:
        shape.update(sequence_length=1, generated_tokens=int(generated.group(1)))
    elif short:
        shape.update(sequence_length=16, generated_tokens=int(short.group(1)))
    elif re.fullmatch(r"\d+", text):
        shape["sequence_length"] = int(text)
    else:
        raise NotAsked("no length" if not text else f"a length that is {text}")
    if "variable" in row["notes"] and int(batch) > 1:
        shape["padded"] = True
    return shape


def ranks_of(row):
    text = row["parallelism"].strip()
    if not text or re.match(r"single|TP1$", text, re.I):
        return {}
    of_gpu = re.match(r"(\d+)x ", row["gpu"])
    in_words = re.search(r"\((\d+) GPUs\)|sum of (\d+)", text)
    behind = re.search(r"(?:FSDP|DDP|x ?)(\d+)\b", text)
    numbers = [found for found in (in_words, behind, of_gpu) if found]
    if not numbers:
        raise NotAsked("no number of devices")
    ranks = {"devices": int(next(group for group in numbers[0].groups() if group))}
    stage = re.search(r"ZeRO-?([123])", text, re.I)
    if stage:
        ranks["zero_stage"] = int(stage.group(1))
    elif "FSDP" in text:
        ranks["fsdp"] = "full_shard"
    elif "DDP" not in text:
        raise NotAsked(f"parallelism {text}")
    if re.search(r"cpu offload", text, re.I):
        ranks["offload"] = "all"
    return ranks


def training_of(row):
    found = {"gradient_checkpointing": row["checkpointing"].startswith("full")}
    if "reentrant" in row["checkpointing"]:
        found["use_reentrant"] = True
    if "act offload" in row["checkpointing"]:
        found["activation_offloading"] = True
    text = row["optimizer"].lower().replace(" ", "")
    if "in-bwd" in text:
        found["optimizer_in_backward"] = True
    tool = tool_of(row)
    if "torchaoadamw8bit" in text or text == "adamw8bit" and tool and tool[1] == "torchtune":
        found["optimizer"] = "adamw_torch_8bit"
    elif "paged" in text:
        found["optimizer"] = "paged_adamw_8bit"
    elif re.search(r"8-?bit", text):
        found["optimizer"] = "adamw_bnb_8bit"
    elif "adafactor" in text:
        found["optimizer"] = "adafactor"
    elif "fused" in text:
        found["optimizer"] = "adamw_torch_fused"
    elif "lion" in text:
        found["optimizer"] = "lion"
    elif "sgd" in text:
        found["optimizer"] = "sgd"
    elif text and not re.match(r"adamw?", text):
        raise NotAsked(f"optimizer {row['optimizer']}")
    steps = re.search(r"\bGA ?(\d+)", row["notes"])
    if steps:
        found["gradient_accumulation_steps"] = int(steps.group(1))
    if re.search(r"compile", row["parallelism"] + row["source"]) or re.search(r"\+ torch.compile", row["notes"]):
        found["compile"] = True
    return found


def cumulative(row):
    """What rows above this one have, where they say that they are cumulative; the loss is whole until one says otherwise."""
    if "so_far" not in row:
        return {}
    said = " ".join(row["so_far"])
    found = {"loss": "default" if "chunked cross entropy" in said else "full"}
    if "torch.compile" in said:
        found["compile"] = True
    # "LoRA and QLoRA, which do not use optimizer_in_bwd or AdamW8bit", the README says; its command has torch.optim.AdamW, fused in the recipe.
    if row["lora"]:
        found["optimizer"] = "adamw_torch_fused"
    elif "optimizer step into backward" in said:
        found["optimizer_in_backward"] = True
    return found


def versions_of(row, context):
    named = versions_in(row["notes"]) or context.versions.get(row["source"])
    tool = tool_of(row)
    date = date_in(row["source"]) or (tool[4].get("versions", {}).get("date") if tool else None)
    published = [month for pattern, month in PUBLISHED if re.search(pattern, row["model"], re.I)]
    if named:
        return {"versions": {**named, **({"date": max(published)} if published else {})}}
    return {"versions": {"date": max([date, *published])}} if date else {}


def attention_of(notes):
    named = re.search(r"attn=(\w+)", notes)
    if named:
        return "eager" if named.group(1) == "eager" else "flash_attention_2" if named.group(1) == "flash" else named.group(1)
    return "flash_attention_2" if re.search(r"\bFA2\b", notes) else None


def counter_of(row):
    text = row["kind_of_measure"].lower()
    for words, counter in [
        (r"nvidia-smi|driver", "device"),
        (r"reserved", "reserved"),
        (r"allocated|active", "allocated"),
    ]:
        if re.search(words, text):
            return counter
    tool = tool_of(row)
    return tool[2] if tool and tool[2] else "device"


KEYS = {"allocated": "allocated_peak_bytes", "reserved": "reserved_peak_bytes", "device": "device_used_bytes"}


def ask(plimsoll, request):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(request, file)
        file.flush()
        command = [plimsoll, "estimate", "--request", file.name, "--brief", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # 3: it does not fit, and is answered all the same.
    if done.returncode not in (0, 3):
        reason = done.stderr.strip().splitlines()
        raise NotAsked(re.sub(r"^error: ", "", reason[-1]) if reason else f"exit code {done.returncode}")
    return json.loads(done.stdout)


def check_card(answer):
    """Refuses a row that cannot have run as it is written."""
    held = sum(answer["peak"]["at_peak"].get(kind, 0) for kind in ("weights", "adapters", "gradients", "optimizer_states"))
    if held > answer["hardware"]["memory_bytes"]:
        raise NotAsked("weights, gradients and states alone are more than the card has")


def score(plimsoll, row, context):
    try:
        request = request_of(row, context)
        try:
            answer = ask(plimsoll, request)
        except NotAsked as reason:
            if "compute capability" not in str(reason):
                raise
            request["attention"] = "sdpa"
            answer = ask(plimsoll, request)
        check_card(answer)
    except NotAsked as reason:
        return {"row": row, "reason": str(reason)}
    counter = counter_of(row)
    measured = float(row["measured_gib"])
    if re.search(r"sum (over|of)", row["notes"] + row["parallelism"], re.I):
        measured /= request.get("devices", 1)
    ours = answer[KEYS[counter]] / 2**30
    found = {
        "row": row, "request": request, "counter": counter, "measured": measured, "ours": ours,
        "error": 100 * (ours / measured - 1), "beside": {},
    }
    for name, key in [("reserved", "reserved"), ("process", "device")]:
        beside = re.search(rf"\b{name} ([\d.]+) MiB", row["notes"])
        if beside and counter != key:
            other = answer[KEYS[key]] / 2**20
            found["beside"][key] = 100 * (other / float(beside.group(1)) - 1)
    return found


def summary(scored):
    errors = [one["error"] for one in scored if "error" in one]
    result = {"rows": len(errors), "of": len(scored)}
    if errors:
        result.update(
            mape=round(sum(map(abs, errors)) / len(errors), 2),
            worst=round(max(errors, key=abs), 2),
            under=round(100 * sum(error < -2 for error in errors) / len(errors), 1),
            bias=round(sum(errors) / len(errors), 2),
        )
    else:
        result.update(mape=None, worst=None, under=None, bias=None)
    return result


def groups(scored):
    """Rows of operations are no runs, and are left out."""
    runs = [one for one in scored if one["row"]["phase"] in ("train", "infer", "load")]
    of = lambda grades: [one for one in runs if one["row"]["grade"] in grades]
    training = [
        one for one in of("AB")
        if one["row"]["phase"] == "train" and one["row"]["parallelism"].strip().lower().startswith("single")
    ]
    return {"A": summary(of("A")), "AB": summary(of("AB")), "AB_training_on_one_device": summary(training)}


def cells(one):
    row = one["row"]
    said = [row["model"].split("/")[-1], f"{row['batch']} x {row['seq']}", row["precision"], row["optimizer"],
            row["checkpointing"], row["parallelism"], row["lora"], row["gpu"]]
    what = ", ".join(text.strip() for text in said if text.strip())
    if "error" not in one:
        return [row["grade"], row["phase"], what, "", f"{float(row['measured_gib']):.2f}", "", "", one["reason"]]
    beside = "; ".join(f"{key} {error:+.1f} %" for key, error in one["beside"].items())
    return [row["grade"], row["phase"], what, one["counter"], f"{one['measured']:.2f}", f"{one['ours']:.2f}",
            f"{one['error']:+.1f} %", beside]


HEAD = ["grade", "phase", "what", "counter", "measured GiB", "estimated GiB", "error", "beside it, or why it was not asked"]


def source_of(row):
    return row["source"].split("#")[0]


def print_table(scored):
    for grade in sorted({one["row"]["grade"] for one in scored}):
        for one in scored:
            if one["row"]["grade"] == grade:
                print(" | ".join([source_of(one["row"])[:40], *cells(one)]))
    for name, result in groups(scored).items():
        print(name, result)


def print_markdown(scored, file):
    clean = lambda text: text.replace("|", "/").replace("\n", " ")
    print("# Estimates of other stacks, row by row\n")
    print(f"Made by `docs/bench/score_estimates.py --plimsoll BIN {file} --markdown`. Do not edit.\n")
    print("Published measurements of training and inference with other stacks, and what `plimsoll estimate` says of the same runs.")
    print("Grade A: shape and counter are known exactly; B: one of them is ambiguous; C: a sanity check. Errors are of the measured")
    print("number: `+` is too much, `-` too little.\n")
    print("| | rows asked | of | mean absolute error | worst | too low by more than 2 % | bias |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = {"A": "grade A", "AB": "grades A and B", "AB_training_on_one_device": "A and B, training on one device"}
    for name, result in groups(scored).items():
        numbers = [result[key] for key in ("mape", "worst", "under", "bias")]
        shown = ["-" if number is None else f"{number} %" for number in numbers]
        print(f"| {names[name]} | {result['rows']} | {result['of']} | " + " | ".join(shown) + " |")
    print("\n## Rules\n\nA request is made of each row by these rules, the same for all rows.\n")
    print(RULES)
    print("Tools:\n\n| a source with | stack | counter where none is named | adapter | other keys | known from |")
    print("| --- | --- | --- | --- | --- | --- |")
    for word, stack, counter, adapter, keys, reason in TOOLS:
        said = [f"{key} {value}" for key, value in adapter.items() if key != "target_modules"]
        shown = ", ".join(said + adapter.get("target_modules", []))
        others = ", ".join(f"{key} {value if key != 'versions' else value['date']}" for key, value in keys.items())
        print(f"| {word} | {stack} | {counter or 'device'} | {shown} | {others} | {reason} |")
    for grade, title in [("A", "Grade A"), ("B", "Grade B"), ("C", "Grade C")]:
        print(f"\n## {title}")
        before = None
        for one in scored:
            if one["row"]["grade"] != grade:
                continue
            if source_of(one["row"]) != before:
                before = source_of(one["row"])
                print(f"\n{clean(before)}\n\n| {' | '.join(HEAD[1:])} |\n|{' --- |' * (len(HEAD) - 1)}")
            print(f"| {' | '.join(clean(cell) for cell in cells(one)[1:])} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True, help="the program")
    parser.add_argument("file", type=Path)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    with open(args.file, newline="", encoding="utf-8") as file:
        rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    context = Context(rows)
    with ThreadPoolExecutor(2) as pool:
        scored = list(pool.map(lambda row: score(args.plimsoll, row, context), rows))
    if args.json:
        json.dump(groups(scored), sys.stdout)
        print()
    elif args.markdown:
        print_markdown(scored, args.file.name)
    else:
        print_table(scored)


if __name__ == "__main__":
    main()
