#!/usr/bin/env python3
"""Makes PyTorch's CUDA wheel load on a machine without a GPU and without NVIDIA's libraries.

The Linux wheel of PyTorch is linked against some 3 GB of CUDA libraries, which a CPU run never calls. For each
library that is needed and absent, this writes a small one of the same name into torch/lib, with the symbols that
PyTorch looks up and nothing in them: the number of CUDA devices is an error, "no device", and every other function
returns zero. Needs gcc and readelf (the package binutils).

usage: torch_stubs.py SITE_PACKAGES/torch
"""

import collections
import ctypes.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
VERSION_FILE = re.compile(r"File: (\S+)\s+Cnt:")
VERSION_NAME = re.compile(r"Name: (\S+)\s+Flags:")
SYMBOL = re.compile(r"^\s*\d+: [0-9a-f]+\s+\S+\s+(\w+)\s+(\w+)\s+\w+\s+(\S+)\s+([^\s@]+)(?:@@?(\S+))?")


def readelf(option, path):
    return subprocess.run(["readelf", option, "-W", path], check=True, capture_output=True, text=True).stdout


class Library:
    """What a shared library needs and has."""

    def __init__(self, path):
        self.needed = NEEDED.findall(readelf("-d", path))
        self.owner = {}  # version name -> library that it is expected of
        owner = None
        for line in readelf("-V", path).splitlines():
            if file := VERSION_FILE.search(line):
                owner = file[1]
            elif owner and (name := VERSION_NAME.search(line)):
                self.owner[name[1]] = owner
        self.defined, self.undefined = set(), []  # undefined: (name, version or None)
        for line in readelf("--dyn-syms", path).splitlines():
            if symbol := SYMBOL.match(line):
                kind, binding, section, name, version = symbol.groups()
                if section != "UND":
                    self.defined.add(name)
                elif binding == "GLOBAL" and kind != "TLS":
                    self.undefined.append((name, version))


def stub_source(names):
    lines = ['static const char nothing[] = "";']
    for name in sorted(names):
        if name in ("cudaGetDeviceCount", "cuInit", "cuDeviceGetCount"):
            lines.append(f"int {name}(void) {{ return {NO_DEVICE}; }}")
        elif "Error" in name and ("String" in name or "Name" in name):
            lines.append(f"const char *{name}(void) {{ return nothing; }}")
        else:
            lines.append(f"long {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def write_stub(folder, soname, by_version):
    """One library with all the symbols that are looked up in it, under the versions that they are looked up with."""
    names = {name for names in by_version.values() for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text(stub_source(names))
        nodes = [
            f"{version} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};\n"
            for version, names in by_version.items()
            if version
        ]
        script.write_text("".join(nodes))
        versions = [f"-Wl,--version-script={script}"] if nodes else []
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}", *versions]
        subprocess.run([*command, "-o", folder / soname, source], check=True)


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "lib").is_dir():
        sys.exit(__doc__)
    torch = Path(sys.argv[1])
    folder = torch / "lib"
    present = {path.name: path for path in [*folder.glob("*.so*"), *torch.glob("_C*.so")]}
    libraries = {name: Library(path) for name, path in present.items()}
    defined = set().union(*(library.defined for library in libraries.values()))

    def absent(soname):
        stem = soname.removeprefix("lib").split(".so")[0]
        nvidia = stem.startswith(("cu", "nccl", "nv"))
        return nvidia and soname not in present and ctypes.util.find_library(stem) is None

    wanted = collections.defaultdict(lambda: collections.defaultdict(set))
    for library in libraries.values():
        missing = [soname for soname in library.needed if absent(soname)]
        for soname in missing:
            wanted[soname]  # a library from which nothing is looked up must still be there
        for name, version in library.undefined:
            if version:
                owner = library.owner.get(version)
                if owner in missing:
                    wanted[owner][version].add(name)
            elif missing and name not in defined and name.startswith(("cu", "nccl", "nv", "__cu", "__nv")):
                wanted[missing[0]][None].add(name)
    for soname, by_version in wanted.items():
        write_stub(folder, soname, by_version)
    symbols = sum(len(names) for by_version in wanted.values() for names in by_version.values())
    print(f"{len(wanted)} stub libraries with {symbols} symbols in {folder}")


if __name__ == "__main__":
    main()
