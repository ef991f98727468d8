"""Makes kernels.ptx, kernels_80.ptx and kernels_90.ptx in crates/device/src/cuda of the sources beside them, and a table of what an
assembler makes of these.

    pip install nvidia-cuda-nvrtc-cu11==11.8.89      # PTX 7.8: drivers from 520 on take it
    pip install nvidia-cuda-nvrtc-cu12==12.0.140     # PTX 8.0, for compute capability 9.0 alone: drivers from 525 on
    python docs/bench/gpu_kernels.py
    python docs/bench/gpu_kernels.py --ptxas path/to/ptxas      # of the wheel nvidia-cuda-nvcc-cu12: a table, for every architecture

No GPU is needed. The first line of the PTX names the sources that it was made of; a test compares it with those that are there.
"""

import argparse
import ctypes
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parents[2] / "crates/device/src/cuda"
# In the order of `SOURCES` in crates/device/src/cuda/mod.rs.
PARTS = ["prelude.cuh", "units.cuh", "shapes.cuh", "elementwise.cu", "rows.cu", "product.cu", "attention.cu", "loss.cu",
         "reduction.cu", "update.cu", "quantization.cu", "subspace.cu", "routing.cu", "grouped.cu", "sink.cu"]
# `SHARED_80` and `SOURCES_80`: the kernels for tensor cores.
PARTS_80 = ["prelude.cuh", "units.cuh", "shapes.cuh", "tensor.cuh", "product_80.cu", "attention_tiles.cuh",
            "attention_80.cu", "attention_backward_80.cu"]
# `SHARED_90` and `SOURCES_90`: products of whole tiles, on compute capability 9.0 alone.
PARTS_90 = ["prelude.cuh", "units.cuh", "shapes.cuh", "tensor.cuh", "attention_tiles.cuh", "hopper.cuh", "product_90.cu",
            "attention_90.cu"]
PROGRAMS = [("kernels.ptx", "75", 11, PARTS), ("kernels_80.ptx", "80", 11, PARTS_80), ("kernels_90.ptx", "90a", 12, PARTS_90)]
ARCHITECTURES = ["75", "80", "86", "89", "90", "90a", "100", "120"]


def nvrtc(version, paths):
    """The library of a version, by its path or from a wheel."""
    for path in map(pathlib.Path, paths or []):
        if path.name.startswith(f"libnvrtc.so.{version}"):
            return ctypes.CDLL(str(path))
    for folder in map(pathlib.Path, sys.path):
        for found in sorted(folder.glob(f"nvidia/cuda_nvrtc/lib/libnvrtc.so.{version}*")):
            return ctypes.CDLL(str(found))
    sys.exit(f"NVRTC {version} is not there: see `--help` for its package")


def compile_ptx(library, source, architecture):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture=compute_{architecture}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if code:
        sys.exit(log.value.decode())
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    return text.value


def resources(ptxas, architecture, ptx):
    """Registers, stack and spills of each kernel, as the assembler counts them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        command = [ptxas, "-v", f"-arch=sm_{architecture}", "-o", out.name, str(ptx)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = {}
    for part in done.stderr.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        numbers = [int(re.search(rf"(\d+) {what}", part).group(1)) for what in ("bytes stack", "bytes spill stores")]
        found[name] = [int(re.search(r"Used (\d+) registers", part).group(1)), *numbers]
    return found


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--nvrtc", nargs="*", help="libnvrtc.so.11.2 and libnvrtc.so.12, if they are not those of installed wheels")
    arguments.add_argument("--ptxas", help="assemble the PTX that is there, and print a table")
    given = arguments.parse_args()
    if given.ptxas:
        found = {}
        for name, least, _, _ in PROGRAMS:
            for architecture in ARCHITECTURES:
                if architecture == least or not least.endswith("a") and int(architecture.rstrip("a")) >= int(least):
                    for kernel, numbers in resources(given.ptxas, architecture, FOLDER / name).items():
                        found.setdefault(kernel, {})[architecture] = numbers
        print("| kernel |" + "".join(f" sm_{name} |" for name in ARCHITECTURES))
        print("|---|" + "---:|" * len(ARCHITECTURES))
        for kernel in sorted(found):
            cells = [found[kernel].get(name, ("-", 0, 0)) for name in ARCHITECTURES]
            print(f"| {kernel} |" + "".join(f" {r}{f', {s} spilled' if s else ''} |" for r, _, s in cells))
        return
    for name, architecture, version, parts in PROGRAMS:
        library = nvrtc(version, given.nvrtc)
        source = b"".join((FOLDER / "kernels" / part).read_bytes() for part in parts)
        head = f"// sources: sha256 {hashlib.sha256(source).hexdigest()}\n".encode()
        ptx = FOLDER / name
        ptx.write_bytes(head + compile_ptx(library, source, architecture))
        print(f"{ptx}: {ptx.stat().st_size} bytes")


if __name__ == "__main__":
    main()
