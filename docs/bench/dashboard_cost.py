#!/usr/bin/env python3
"""What `train --dashboard` costs: the same run with and without it in turns, each on a terminal of 80 x 24 that this script plays.
Prints tokens/s of each run, the ratio of the medians, and what the dashboard's thread took of a core, which a busy machine does not blur.

    docs/bench/dashboard_cost.py examples/finetune-smollm2.yaml [--plimsoll target/release/plimsoll] [--rounds 3] [--set KEY=VALUE ...]
"""

import argparse
import fcntl
import json
import os
import pathlib
import pty
import statistics
import struct
import subprocess
import tempfile
import termios
import threading
import time

TICK = os.sysconf("SC_CLK_TCK")


def threads(pid):
    """CPU seconds by the name of the thread."""
    taken = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        fields = rest.split()
        taken[name] = taken.get(name, 0) + (int(fields[11]) + int(fields[12])) / TICK
    return taken


def run(program, arguments, folder, dashboard):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [program, "train", *arguments, "--set", f"output.dir={folder}", *(["--dashboard"] if dashboard else [])]
    environment = dict(os.environ, TERM="xterm-256color")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = []

    def read():
        try:
            while piece := os.read(ours, 1 << 16):
                said.append(piece)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    begun, shown, taken = time.time(), None, {}
    while process.poll() is None:
        now = threads(process.pid)
        if "dashboard" in now:
            shown = shown or time.time()
            taken = now
        last = time.time()
        time.sleep(0.2)
    reader.join()
    os.close(ours)
    if process.returncode != 0:
        raise SystemExit(b"".join(said).decode(errors="replace"))
    report = json.loads((pathlib.Path(folder) / "report.json").read_text())
    share = taken.get("dashboard", 0) / (last - shown) if shown else None
    return report["tokens_per_second_median"], report["measured"]["process_peak_rss_bytes"], share, last - begun


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config")
    arguments.add_argument("--plimsoll", default="target/release/plimsoll")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--set", action="append", default=[])
    arguments = arguments.parse_args()
    given = [arguments.config, *(part for own in arguments.set for part in ("--set", own))]
    speeds = {False: [], True: []}
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            # Who goes first changes, so that neither always follows the other.
            for dashboard in (False, True) if number % 2 == 0 else (True, False):
                out = f"{folder}/{number}-{dashboard}"
                speed, rss, share, seconds = run(arguments.plimsoll, given, out, dashboard)
                speeds[dashboard].append(speed)
                words = f", its thread {100 * share:.2f} % of a core" if share is not None else ""
                print(f"{'with' if dashboard else 'without'}: {speed:.1f} tokens/s, {rss / 2**20:.1f} MiB, {seconds:.0f} s{words}", flush=True)
                shares += [share] if share is not None else []
    ratio = statistics.median(speeds[True]) / statistics.median(speeds[False])
    print(f"with / without: {ratio:.4f}; the dashboard takes {100 * statistics.median(shares):.2f} % of a core")


if __name__ == "__main__":
    main()
