"""Compile the CPU kernels for aarch64 with LLVM's cross target.

`python -m tests.kernels.cross_compile FOLDER [NAME...]`, with an empty folder for the cache. In this process gradwire
finds no x86 processor, so kernels take the same path as on aarch64 and must produce the golden bytes. The LLVM IR of
all kernels compiled on the way is then compiled for aarch64, which fails if it contains an x86 intrinsic.
"""

from __future__ import annotations

import os
import platform
import re
import sys

import llvmlite.binding as llvm

TRIPLE = "aarch64-unknown-linux-gnu"
DATA_LAYOUT = "e-m:e-i8:8:32-i16:16:32-i64:64-i128:128-n32:64-S128"


def main(folder: str, *names: str) -> None:
    os.environ["NUMBA_CACHE_DIR"] = folder
    from numba.core import codegen, config

    # Before gradwire is imported: these are what it asks about the processor. Numba still compiles for this one.
    config.CPU_FEATURES = llvm.get_host_cpu_features().flatten()
    llvm.get_host_cpu_features = llvm.FeatureMap
    platform.machine = lambda: "aarch64"

    sources = []
    add = codegen.CPUCodeLibrary.add_ir_module

    def keep_and_add(library: codegen.CPUCodeLibrary, module: object) -> None:
        sources.append(str(module))
        add(library, module)

    codegen.CPUCodeLibrary.add_ir_module = keep_and_add

    from gradwire import compressors
    from tests.golden.payloads import golden

    for name in names or compressors.names():
        assert golden.render(name) == (golden.FOLDER / f"{name}.txt").read_text(), f"{name}: other bytes"

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="generic", opt=2)
    for source in sources:
        found = re.search(r"llvm\.x86\.[\w.]+", source)
        assert found is None, found
        module = llvm.parse_assembly(retargeted(source))
        module.verify()
        assert machine.emit_object(module)
    print(f"{len(sources)} kernels compiled for {TRIPLE}")


def retargeted(source: str) -> str:
    """LLVM IR for aarch64 instead of the processor it was written for."""
    source = re.sub(r"^target datalayout = .*$", f'target datalayout = "{DATA_LAYOUT}"', source, flags=re.M)
    return re.sub(r"^target triple = .*$", f'target triple = "{TRIPLE}"', source, flags=re.M)


if __name__ == "__main__":
    main(*sys.argv[1:])
