#!/usr/bin/env python3
"""Watches real processes with `plimsoll monitor` and compares what it says with what they do.

usage: monitor_check.py [--plimsoll PROGRAM] [--leaks N] [--steady N] [--traces N] [--write FILE] [--at-once N]

leaks    processes that keep 1 MB a step, under work that comes and goes: reported when they end after 200 steps, the rate within 10 %;
         and when the monitor told of them while they ran
steady   processes that do the same work again and again: no report, no forecast
traces   processes that grow until they reach 600 MB: at least ten steps before, the forecast says so. With --write, the traces of
         these and of the steady ones are kept, a line each, for the tests of the crate `monitor`

Each process has a step of 20 ms and takes its memory by touching it. The last line of each part is its verdict; the exit status is 0
if all are good. The processor time of the monitors is shown as a share of one core.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT = 600_000_000
PROCESS = """
import random, sys, time
kind, seed, log, steps = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "w", 1), int(sys.argv[4])
draw = random.Random(seed)
base = bytearray(b"x") * draw.randint(50_000_000, 150_000_000)
period, depth = draw.randint(1, 30), draw.randint(0, 120_000_000)
grows = {"leak": 1_000_000, "steady": 0, "ends": draw.randint(1_500_000, 8_000_000)}[kind]
kept = []
begun = time.time()
for step in range(steps):
    due = begun + 0.02 * step
    time.sleep(max(0.0, due - time.time()))
    if grows:
        kept.append(bytearray(b"x") * grows)
    work = bytearray(b"x") * int(depth * (step % period) / period + draw.random() * 5_000_000)
    print(step, flush=True, file=log)
    del work
    if kind == "ends" and len(base) + grows * len(kept) + depth > 600_000_000:
        break
print("seconds a step:", (time.time() - begun) / (step + 1), file=sys.stderr)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default="plimsoll", help="the program")
    parser.add_argument("--leaks", type=int, default=10)
    parser.add_argument("--steady", type=int, default=20)
    parser.add_argument("--traces", type=int, default=20)
    parser.add_argument("--write", type=Path, help="keep the traces in this file")
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    options.plimsoll = os.path.abspath(shutil.which(options.plimsoll) or sys.exit(f"{options.plimsoll} is not a program"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        run = lambda kind, seeds: list(pool.map(lambda seed: watch(options, Path(folder), kind, seed), seeds))
        begun = time.time()
        leaks, steady, ends = run("leak", range(options.leaks)), run("steady", range(options.steady)), run("ends", range(options.traces))
        good = all([check_leaks(leaks), check_steady(steady), check_ends(ends)])
        everybody = leaks + steady + ends
        share = sum(one["processor"] for one in everybody) / sum(one["seconds"] for one in everybody)
        print(f"{len(everybody)} monitors in {time.time() - begun:.0f} s: each took {100 * share:.2f} % of a core, sampling every 20 ms")
    if options.write:
        lines = [" ".join([one["kind"], *map(str, one["trace"])]) for one in steady + ends]
        options.write.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


def watch(options, folder, kind, seed):
    """What a monitor said of one process."""
    log = folder / f"{kind}-{seed}.log"
    log.write_text("")
    steps = 300 if kind == "ends" else 200
    process = subprocess.Popen([sys.executable, "-c", PROCESS, kind, str(seed), log, str(steps)], stderr=subprocess.PIPE, text=True)
    command = [options.plimsoll, "monitor", "--pid", str(process.pid), "--interval", "20ms", "--json", "--limit", str(LIMIT), "--steps", log]
    begun = time.time()
    monitor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in monitor.stdout]
    _, status, usage = os.wait4(monitor.pid, 0)
    monitor.returncode = os.waitstatus_to_exitcode(status)
    process.communicate()
    samples, last = lines[:-1], lines[-1]["leak"]
    told = next((line["step"] for line in samples if "leak_found" in line), None)
    forecasts = [line["step"] for line in samples if line["forecast_steps"] is not None and line["status"] == "normal"]
    trace, seen = [], -1
    for line in samples:
        if line["step"] != seen:
            seen = line["step"]
            trace.append(line["used_bytes"] // 1024)
    return {
        "kind": kind, "seed": seed, "told": told, "leak": last, "forecasts": forecasts, "steps": samples[-1]["step"], "trace": trace,
        "processor": usage.ru_utime + usage.ru_stime, "seconds": time.time() - begun,
    }


def check_leaks(runs):
    off = [abs(run["leak"].get("bytes_per_step", 0) / 1e6 - 1) for run in runs]
    missed = [run["seed"] for run in runs if not run["leak"]["suspected"]]
    good = not missed and all(share <= 0.1 for share in off)
    told = sorted(run["told"] for run in runs if run["told"] is not None)
    print(f"leaks: {len(runs) - len(missed)} of {len(runs)} reported after 200 steps, rates off by {100 * max(off, default=0):.1f} % at most; missed: {missed}: {verdict(good)}")
    print(f"       of these {len(told)} while the process ran, after {told} steps")
    return good


def check_steady(runs):
    wrong = [run["seed"] for run in runs if run["leak"]["suspected"] or run["told"] is not None]
    alarms = [run["seed"] for run in runs if run["forecasts"]]
    print(f"steady: {len(runs)} processes, reported as leaking: {wrong}, forecasts for: {alarms}: {verdict(not wrong and not alarms)}")
    return not wrong and not alarms


def check_ends(runs):
    warned = [run["steps"] - run["forecasts"][0] if run["forecasts"] else 0 for run in runs]
    print(f"ends: {len(runs)} processes, steps of warning {sorted(warned)}: {verdict(all(steps >= 10 for steps in warned))}")
    return all(steps >= 10 for steps in warned)


def verdict(good):
    return "good" if good else "FAILED"


if __name__ == "__main__":
    sys.exit(main())
