"""Compare golden bytes as on an x86 processor without AVX-512.

`python -m tests.kernels.without_avx512 FOLDER NAME...`, with an empty folder for the cache. LLVM is told the features
of such a processor, and so is gradwire.
"""

from __future__ import annotations

import os
import sys

import llvmlite.binding as llvm


def main(folder: str, *names: str) -> None:
    features = llvm.get_host_cpu_features()
    features.update({name: False for name in features if name.startswith("avx512")})
    os.environ |= {"NUMBA_CACHE_DIR": folder, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features.flatten()}
    llvm.get_host_cpu_features = lambda: features

    from tests.golden.payloads import golden

    for name in names:
        assert golden.render(name) == (golden.FOLDER / f"{name}.txt").read_text(), f"{name}: other bytes"
    print("same bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
