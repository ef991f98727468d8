#!/usr/bin/env python3
"""Other programs that estimate memory, on the rows that `score_estimates.py` asks: fitcheck-llm and vramcalc from the package index.

    pip install fitcheck-llm==0.3.1 vramcalc==0.1.2
    other_estimators.py --plimsoll BIN FILE.csv

Prints a table in Markdown. They answer training on one device, and each is asked what it has words for: a row that one of them cannot say is
left out of its line alone. Numbers are those that are nearest to the row's counter: fitcheck's total without its overhead for what is
allocated, with it for what is reserved and shown; vramcalc's total without its overhead, and with it.
"""

import argparse
import csv
import json
import subprocess
import tempfile
from pathlib import Path

import score_estimates as score

OPTIMIZERS = {None: "adamw", "adamw_bnb_8bit": "adam8bit", "sgd": "sgd"}


def shape_of(plimsoll, model):
    short = model.split("/")[-1]
    done = subprocess.run([plimsoll, "inspect", short, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise score.NotAsked(f"{model} is not in the catalogue")
    return json.loads(done.stdout)


def targets_of(request):
    names = request["lora"]["target_modules"] or ["q", "v"]
    full = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if names == ["all-linear"]:
        return full
    found = [name if name.endswith("_proj") else f"{name}_proj" for name in names]
    if any(name not in full for name in found):
        raise score.NotAsked("layers of other names")
    return found


def fitcheck(request, shape, counter):
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import GPU_DB

    if request["precision"].endswith("-amp") or request.get("optimizer") not in OPTIMIZERS:
        raise score.NotAsked("precision or optimizer")
    model = ModelConfig(
        name=shape["name"], num_params=shape["parameters"], hidden_size=shape["hidden_size"],
        num_layers=shape["num_hidden_layers"], num_attention_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"], intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"], head_dim=shape["head_dim"], tie_word_embeddings=shape["tie_word_embeddings"],
    )
    lora = request.get("lora")
    training = TrainingConfig(
        precision={"f32": "fp32"}.get(request["precision"], request["precision"]),
        quantization=request.get("quantization", "none"), double_quant=request.get("double_quantization", False),
        optimizer=OPTIMIZERS[request.get("optimizer")], batch_size=request["batch_size"],
        seq_len=request["sequence_length"], lora_rank=lora["rank"] if lora else None,
        **({"lora_targets": targets_of(request)} if lora else {}),
        grad_checkpoint=request["gradient_checkpointing"], flash_attn=request.get("attention", "sdpa") != "eager",
    )
    hardware = request.get("hardware", "").lower()
    key = next((key for key in ("t4", "a100-40" if "40gb" in hardware else "a100-80", "l40s", "4090", "a6000")
                if key.split("-")[0] in hardware), "a100-80")
    report = estimate(model, training, GPU_DB[key])
    total = report.total_mib - (report.overhead_mib if counter == "allocated" else 0)
    return total / 1024


def vramcalc(request, shape, counter):
    if "quantization" in request or request.get("optimizer") not in (None, "sgd"):
        raise score.NotAsked("quantised weights, or another optimizer")
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
    config = {key: shape[key] for key in keys}
    config.update(model_type=shape["architecture"], architectures=["LlamaForCausalLM"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        precision = request["precision"]
        command = ["vramcalc", "estimate", folder, "--train", "--json", "--batch", str(request["batch_size"]),
                   "--seq", str(request["sequence_length"]), "--precision", "amp" if precision.endswith("amp") else "pure",
                   "--dtype", {"f32": "fp32"}.get(precision.split("-")[0], precision.split("-")[0]),
                   "--attn", {"flash_attention_2": "flash"}.get(request.get("attention", "sdpa"), request.get("attention", "sdpa"))]
        if request.get("lora"):
            command += ["--lora", str(request["lora"]["rank"])]
        if request["gradient_checkpointing"]:
            command.append("--grad-checkpoint")
        if counter == "allocated":
            command += ["--overhead-gb", "0"]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise score.NotAsked(done.stderr.strip()[-100:]) from error
    return answer["estimate"]["total"] / 2**30


def plain(request):
    """The request in words that others have: autocast over 16-bit weights is their 16-bit precision."""
    if request.get("dtype") and request["precision"] == request["dtype"] + "-amp":
        return {**request, "precision": request["dtype"]}
    return request


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    with open(args.file, newline="", encoding="utf-8") as file:
        rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    context = score.Context(rows)
    scored = {name: [] for name in ("fitcheck-llm 0.3.1", "vramcalc 0.1.2")}
    programs = {"fitcheck-llm 0.3.1": fitcheck, "vramcalc 0.1.2": vramcalc}
    ours = {name: [] for name in programs}
    for row in rows:
        if row["grade"] not in "AB" or row["phase"] != "train" or not row["parallelism"].startswith("single"):
            continue
        answer = score.score(args.plimsoll, row, context)
        if "error" not in answer:
            continue
        shape = shape_of(args.plimsoll, answer["request"]["model"])
        for name, program in programs.items():
            try:
                found = program(plain(answer["request"]), shape, answer["counter"])
            except score.NotAsked:
                continue
            scored[name].append({"row": row, "error": 100 * (found / answer["measured"] - 1)})
            ours[name].append(answer)
    print("| program | rows | mean absolute error | worst | too low by more than 2 % | bias | Plimsoll on these rows |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, results in scored.items():
        theirs, own = score.summary(results), score.summary(ours[name])
        if theirs["rows"]:
            shown = " | ".join(f"{theirs[key]} %" for key in ("mape", "worst", "under", "bias"))
            print(f"| {name} | {theirs['rows']} | {shown} | {own['mape']} %, worst {own['worst']} % |")


if __name__ == "__main__":
    main()
