#!/usr/bin/env python3
"""Runs every command that computes under many load lines and checks that each is refused (exit code 3) or keeps to its line.

    docs/bench/load_lines.py [--plimsoll target/release/plimsoll] [--model GGUF] [--lines 24,32,40,...] [--cgroup] [COMMAND ...]

COMMAND: generate, eval, chat, full, lora, qlora; all without one. Prints, for every line in MiB, what was planned and the
highest resident set of the process (VmHWM). --cgroup besides runs each in a memory cgroup of the line's size without swap
(version 1 or 2; needs root), where the kernel ends whoever goes over it. Needs no packages. Fails where a process took more
than its line or ended in another way.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATE_AND_EVAL = [24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 96, 112, 128, 160, 256]
TRAINING = {"full": [32, 96, 160, 256, 512], "lora": [32, 64, 96, 160, 256], "qlora": [32, 64, 96, 160, 256]}
REPOSITORY = Path(__file__).resolve().parents[2]


class Group:
    """A memory cgroup."""

    def __init__(self, mib):
        first = Path("/sys/fs/cgroup/memory")
        self.folder = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"plimsoll-line-{os.getpid()}"
        self.folder.mkdir()
        limits = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] if first.is_dir() else ["memory.max"]
        for name in limits:
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(mib << 20))
        if (self.folder / "memory.swap.max").exists():
            (self.folder / "memory.swap.max").write_text("0")

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        self.folder.rmdir()


def command(name, model, data, line, scratch):
    common = ["--memory", f"{line}MiB", "--json"]
    if name == "generate":
        return ["generate", "--model", model, "--prompt", "The sea", "--max-tokens", "4", *common]
    if name == "eval":
        return ["eval", "--model", model, "--data", data, "--sequence-length", "256", *common]
    if name == "chat":
        return ["chat", "--model", model, "--max-tokens", "4", "--no-history", *common]
    method = ["--set", f"training.method={name}", "--set", "training.steps=2", "--set", "output.save_steps=0"]
    return ["train", "--model", model, "--set", f"data.train={data}", "--sequence-length", "128", "--batch-size", "1",
            "--set", f"output.dir={scratch / 'run'}", "--set", f"memory.disk_path={scratch}", *method, *common]


def run(plimsoll, name, arguments, group):
    """Exit code, planned and highest bytes, and what it said."""
    enter = group.enter if group else None
    process = subprocess.Popen([plimsoll, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=enter)
    planned = peak = None
    if name == "chat":
        # It waits for the next message and can be looked at.
        try:
            process.stdin.write("Hello\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        if process.stdout.readline():
            for entry in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if entry.startswith("VmHWM:"):
                    peak = int(entry.split()[1]) << 10
    out, error = process.communicate()
    if process.returncode == 0 and name in ("generate", "eval"):
        memory = json.loads(out)["memory"]
        planned, peak = memory["planned_bytes"], memory["process_peak_rss_bytes"]
    elif process.returncode == 0 and name != "chat":
        report = json.loads(out)
        planned = report["planned"]["process_bytes"]
        peak = report["measured"]["process_peak_rss_bytes"]
    return process.returncode, planned, peak, error.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(REPOSITORY / "target/release/plimsoll"))
    parser.add_argument("--model", default=str(REPOSITORY / "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--lines", help="MiB, with commas")
    parser.add_argument("--cgroup", action="store_true")
    parser.add_argument("commands", nargs="*", metavar="COMMAND")
    args = parser.parse_args()
    broken = 0
    scratch = Path(tempfile.mkdtemp(prefix="load-lines-"))
    data = scratch / "text.txt"
    data.write_text("".join(f"The sea gives line {i} and takes line {i * 7 % 23}. " for i in range(120)))
    try:
        for name in args.commands or ["generate", "eval", "chat", "full", "lora", "qlora"]:
            lines = TRAINING.get(name, GENERATE_AND_EVAL)
            for line in [int(n) for n in args.lines.split(",")] if args.lines else lines:
                for limited in [False, True] if args.cgroup else [False]:
                    shutil.rmtree(scratch / "run", ignore_errors=True)
                    group = Group(line) if limited else None
                    arguments = command(name, args.model, str(data), line, scratch)
                    code, planned, peak, error = run(args.plimsoll, name, arguments, group)
                    if group:
                        group.close()
                    held = code == 3 or (code == 0 and peak is not None and peak <= line << 20)
                    broken += not held
                    mib = lambda n: "" if n is None else f"{n / 2**20:.1f}"
                    what = {0: "ran", 3: "refused"}.get(code, f"exit {code}")
                    where = " in a cgroup" if limited else ""
                    print(f"{name:9} line {line:4} {what:8} planned {mib(planned):6} highest {mib(peak):6}"
                          f"{where}{'' if held else '   BROKEN: ' + error[-300:]}", flush=True)
    finally:
        shutil.rmtree(scratch)
    sys.exit(f"{broken} broke their line" if broken else None)


if __name__ == "__main__":
    main()
