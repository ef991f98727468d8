#!/usr/bin/env python3
"""Loads what `plimsoll export` writes with the parsers of the programs that it is written for.

    docs/bench/export_check.py [--plimsoll target/release/plimsoll] [--keep FOLDER]

Three configurations (full fine-tuning with ZeRO 3, LoRA, QLoRA with offload to a disk) in every format. Each file is loaded by the
program's own parser, where that is installed, and some values are compared with the plan's. What has to be refused has to be
refused. Prints a line for each file, what was skipped and why, and ends with 1 if a file was not read. Wants any of the packages
deepspeed, accelerate, transformers, peft, bitsandbytes, axolotl, llamafactory, torchtune with torchao 0.8, torchtitan 0.2.
"""

import argparse
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = {"train": "samples.jsonl", "sequence_length": 2048}
TRAINING = {"steps": 1000, "warmup_ratio": 0.03, "learning_rate": 2e-5, "lr_schedule": "cosine", "min_lr_ratio": 0.1,
            "mixed_precision": "bf16", "batch_size": 2, "gradient_accumulation_steps": 4}
LORA = {"rank": 32, "alpha": 64, "dropout": 0.05, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
OFFLOAD = {"optimizer": "disk", "parameters": "disk", "gradients": "disk", "activations": "host"}
# Name, machine, ranks, configuration, formats that have to refuse it.
CONFIGURATIONS = [
    ("full-zero3", "8xa100-80", 8, {"training": {**TRAINING, "gradient_checkpointing": "full"}, "parallel": {"zero_stage": 3}},
     ["peft", "bitsandbytes"]),
    ("lora", "a100-80", 1, {"training": {**TRAINING, "method": "lora", "lora": LORA}}, ["bitsandbytes", "torchtitan"]),
    ("qlora-offload", "rtx-3060", 1, {
        "training": {**TRAINING, "method": "qlora", "optimizer": "adamw_8bit", "lora": LORA, "gradient_checkpointing": "full"},
        "memory": {"offload": OFFLOAD}}, ["torchtitan"]),
]


def yaml_of(path):
    import yaml
    return yaml.safe_load(path.read_text())


def equal(what, found, wanted):
    if found != wanted:
        raise ValueError(f"{what} is {found!r} and should be {wanted!r}")


def deepspeed(path, ranks):
    from deepspeed.runtime import config
    # Of a group of processes, which this is none of, it asks how many there are.
    config.dist.get_rank, config.dist.get_world_size = (lambda *_: 0), (lambda *_: ranks)
    read = config.DeepSpeedConfig(str(path))
    equal("train_batch_size", read.train_batch_size, 8 * ranks)
    zero = read.zero_config
    if ranks > 1:
        equal("stage", int(zero.stage), 3)
        equal("reduce_bucket_size", zero.reduce_bucket_size, 4096 * 4096)
    if zero.offload_param is not None:
        equal("offload_param", str(zero.offload_param.device), "nvme")
    document = json.loads(path.read_text())
    from deepspeed.runtime import lr_schedules
    scheduler = document["scheduler"]
    inspect.signature(getattr(lr_schedules, scheduler["type"])).bind(None, **scheduler["params"])
    if "optimizer" in document:
        import torch
        inspect.signature(getattr(torch.optim, document["optimizer"]["type"])).bind([], **document["optimizer"]["params"])


def accelerate(path, ranks):
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    read = load_config_from_file(str(path))
    equal("type", type(read), ClusterConfig)
    equal("num_processes", read.num_processes, ranks)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    known = set(vars(arguments))
    unknown = [key for part in (read.fsdp_config, read.parallelism_config) for key in part if key not in known]
    equal("unknown keys", unknown, [])
    _validate_launch_command(arguments)


def transformers(path, ranks):
    from transformers import TrainingArguments
    read = TrainingArguments(**json.loads(path.read_text()), use_cpu=True)
    equal("optim", read.optim.value in ("adamw_torch", "adamw_bnb_8bit"), True)
    equal("warm-up", read.get_warmup_steps(1000), 30)


def peft(path, ranks):
    from peft import LoraConfig
    read = LoraConfig.from_pretrained(str(path.parent))
    equal("r", read.r, 32)
    equal("target_modules", read.target_modules, set(LORA["target_modules"]))


def bitsandbytes(path, ranks):
    from transformers import BitsAndBytesConfig
    read = BitsAndBytesConfig(**json.loads(path.read_text()))
    equal("quantization_method", read.quantization_method(), "nf4")


def axolotl(path, ranks):
    from axolotl.utils.schemas.config import AxolotlInputConfig
    document = yaml_of(path)
    equal("unknown keys", [key for key in document if key not in AxolotlInputConfig.model_fields], [])
    read = AxolotlInputConfig(**document)
    equal("micro_batch_size", read.micro_batch_size, 2)


def llama_factory(path, ranks):
    # It names the versions of transformers that it was tested with.
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from llamafactory.hparams.parser import _TRAIN_ARGS
    from transformers import HfArgumentParser
    # DeepSpeed is read above; here its engine would want devices.
    document = {key: value for key, value in yaml_of(path).items() if key != "deepspeed"}
    model, data, training, tuning, _ = HfArgumentParser(_TRAIN_ARGS).parse_dict({**document, "use_cpu": True})
    # It takes a token away for the padding of packed sequences.
    equal("cutoff_len", data.cutoff_len, 2047)
    equal("finetuning_type", tuning.finetuning_type, "full" if ranks > 1 else "lora")


def torchtune(path, ranks):
    from omegaconf import OmegaConf
    from torchtune import config
    read = OmegaConf.load(path)
    config.validate(read)
    from torchtune.config._utils import _get_component_from_path
    builder = _get_component_from_path(read.model["_component_"])
    inspect.signature(builder).bind(**{key: value for key, value in read.model.items() if key != "_component_"})


def torchtitan(path, ranks):
    from torchtitan.config import ConfigManager
    read = ConfigManager().parse_args(["--job.config_file", str(path)])
    equal("shards", read.parallelism.data_parallel_shard_degree, ranks)
    equal("global_batch_size", read.training.global_batch_size, 8 * ranks)


# Format, file, package, loader.
FORMATS = [
    ("deepspeed", "ds.json", "deepspeed", deepspeed),
    ("accelerate", "accelerate.yaml", "accelerate", accelerate),
    ("transformers", "arguments.json", "transformers", transformers),
    ("peft", "adapter_config.json", "peft", peft),
    ("bitsandbytes", "bnb.json", "transformers", bitsandbytes),
    ("axolotl", "axolotl.yaml", "axolotl", axolotl),
    ("llama-factory", "llama-factory.yaml", "llamafactory", llama_factory),
    ("torchtune", "torchtune.yaml", "torchtune", torchtune),
    ("torchtitan", "torchtitan.toml", "torchtitan", torchtitan),
]


def check(program, folder, configuration, form):
    name, machine, ranks, settings, refused = configuration
    format_name, file, package, load = form
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "run.yaml", folder / file
    # JSON is YAML, too.
    source.write_text(json.dumps({"model": "llama-3.1-8b", "data": DATA, **settings}))
    command = [program, "export", format_name, str(source), "--hardware", machine, "-o", str(target)]
    run = subprocess.run(command, capture_output=True, text=True)
    if format_name in refused:
        if run.returncode == 2 and not target.exists():
            return "refused, as it should be"
        raise ValueError(f"it should be refused: {run.returncode} {run.stdout}{run.stderr}")
    if run.returncode != 0:
        raise ValueError(run.stderr.strip())
    if importlib.util.find_spec(package) is None:
        return f"skipped: {package} is not installed"
    load(target, ranks)
    return f"loaded by {package} {version(package)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(REPOSITORY / "target/release/plimsoll"))
    parser.add_argument("--keep", type=Path, help="leave the files in this folder")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for configuration in CONFIGURATIONS:
            for form in FORMATS:
                try:
                    folder = (options.keep or Path(temporary)) / configuration[0]
                    words = check(options.plimsoll, folder, configuration, form)
                except Exception as error:  # Whatever a parser raises is what this is for.
                    failed += 1
                    words = f"FAILED: {type(error).__name__}: {error}"
                print(f"{configuration[0]:14} {form[0]:14} {words}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
