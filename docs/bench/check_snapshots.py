"""Memory snapshots against PyTorch's own code: `torch.cuda._memory_viz` must open what Plimsoll writes, and what `plimsoll snapshot` says of
the live bytes at the peak must be what `_memory_viz` counts.

    cargo run --release -p plimsoll-stacks --example write_snapshots -- FOLDER
    python docs/bench/check_snapshots.py --plimsoll target/release/plimsoll FOLDER/*.pickle

The script needs torch (any version since 2.0, CPU or CUDA; no GPU is used), or `--memory-viz PATH` with one or more copies of
`torch/cuda/_memory_viz.py`, as they are in wheels. With `--viewer MemoryViz.js` (torch/utils/viz in PyTorch's sources) and node, the
viewer's own function counts the peak too.

`_memory_viz` counts what segments hold. So the trace is undone from its end back to the peak, the snapshot of that moment is put together, and
`_memory_viz.memory` adds it up. Each file is also written again with every protocol of Python's pickle, and must be read as before.
"""

import argparse
import importlib.util
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile

FREED = "free_completed"


def load(path):
    """A copy of _memory_viz.py as a module."""
    spec = importlib.util.spec_from_file_location("memory_viz_" + str(abs(hash(path))), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plimsoll(binary, path, *arguments):
    run = subprocess.run([binary, "snapshot", path, "--json", *arguments], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{path}: {run.stderr}")
    return json.loads(run.stdout)


def blocks_of(snapshot, device):
    """Address to (bytes asked for, frames) of the blocks that are in use at the end."""
    blocks = {}
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            history = (block.get("history") or [{}])[0]
            asked = block.get("requested_size", history.get("real_size", block["size"]))
            if segment["device"] == device and block["state"].startswith("active"):
                blocks[address] = asked, block.get("frames", history.get("frames", []))
            address += block["size"]
    return blocks


def at_the_peak(snapshot, device):
    """The blocks at the moment with most, found by undoing the trace from its end."""
    blocks = blocks_of(snapshot, device)
    live = sum(asked for asked, _ in blocks.values())
    most, best = live, dict(blocks)
    for entry in reversed(snapshot["device_traces"][device] if snapshot["device_traces"] else []):
        if entry["action"] == "alloc":
            live -= blocks.pop(entry["addr"], (0, None))[0]
        elif entry["action"] == FREED:
            blocks[entry["addr"]] = entry["size"], entry.get("frames", [])
            live += entry["size"]
        if live > most:
            most, best = live, dict(blocks)
    return best


def counted(memory_viz, blocks):
    """What `_memory_viz.memory` adds up for these blocks."""
    entries = [
        {"address": address, "size": asked, "requested_size": asked, "state": "active_allocated", "frames": frames}
        for address, (asked, frames) in blocks.items()
    ]
    total = sum(entry["size"] for entry in entries)
    segment = {"address": 0, "total_size": total, "stream": 0, "blocks": entries}
    lines = memory_viz.memory({"segments": [segment]}, format_flamegraph=str).splitlines()
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines)


def opens(memory_viz, snapshot):
    """Everything that `_memory_viz` can print of a snapshot."""
    memory_viz.segsum(snapshot)
    memory_viz.segments(snapshot, format_flamegraph=str)
    memory_viz.memory(snapshot, format_flamegraph=str)
    memory_viz.trace(snapshot)
    return len(memory_viz.trace_plot(snapshot)) > 1000


def by_viewer(viewer, path, device):
    """`max_size` of the viewer's `process_alloc_data`, run by node."""
    source = pathlib.Path(viewer).read_text()
    source = "\n".join(line for line in source.splitlines() if not line.startswith("import "))
    source = source[: source.index("function MemoryPlot(")].replace("'use strict';", "")
    with open(path, "rb") as file:
        snapshot = json.dumps(pickle.load(file))
    program = f"""{source}
const snapshot = {snapshot};
annotate_snapshot(snapshot);
console.log(process_alloc_data(snapshot, {device}, false, 15000).max_size);"""
    return int(subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", required=True)
    parser.add_argument("--memory-viz", action="append", help="a copy of torch/cuda/_memory_viz.py; default: the installed torch")
    parser.add_argument("--viewer", help="torch/utils/viz/MemoryViz.js of PyTorch's sources")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.memory_viz:
        modules = {path: load(path) for path in arguments.memory_viz}
    else:
        import torch
        import torch.cuda._memory_viz

        modules = {torch.__version__: torch.cuda._memory_viz}
    wrong = 0
    for path in arguments.files:
        with open(path, "rb") as file:
            snapshot = pickle.load(file)
        for device in range(max(1, len(snapshot["device_traces"]))):
            said = plimsoll(arguments.plimsoll, path, "--device", str(device))
            peak = said["peak"]["allocated_bytes"]
            counts = {name: counted(module, at_the_peak(snapshot, device)) for name, module in modules.items()}
            if arguments.viewer:
                counts["viewer"] = by_viewer(arguments.viewer, path, device)
            good = all(count == peak for count in counts.values())
            good &= sum(live["bytes"] for live in said["peak"]["live"]) == peak
            for protocol in range(6):
                with tempfile.NamedTemporaryFile(suffix=".pickle") as again:
                    pickle.dump(snapshot, again, protocol=protocol)
                    again.flush()
                    good &= plimsoll(arguments.plimsoll, again.name, "--device", str(device)) == said
            wrong += not good
            print(f"{path} device {device}: {peak:,} bytes; {'equal' if good else f'NOT EQUAL: {counts}'}")
        for name, module in modules.items():
            opened = opens(module, snapshot)
            wrong += not opened
            print(f"  opened by _memory_viz {name}: {opened}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
