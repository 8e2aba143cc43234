"""The disk cache: several processes at once, and sources that change."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gradwire.kernels.cpu import compile as compiling

DTYPES = ["float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
MODULE = """
import numpy as np
from gradwire.kernels.cpu.compile import kernel

@kernel
def total(x):
    found = x[0]
    for i in range(1, x.size):
        found += x[i]
    return found
"""
RUN = """
import sys, time, numpy as np, summing
from numba.core.caching import IndexDataCacheFile

read_index = IndexDataCacheFile._load_index
def read_index_slowly(self):  # a slow disk: the others come in between
    entries = read_index(self)
    time.sleep(0.2)
    return entries
IndexDataCacheFile._load_index = read_index_slowly
sys.stdin.read()
print(summing.total(np.arange(5, dtype=sys.argv[1])), sum(summing.total.stats.cache_hits.values()))
"""


def start(folder: Path, dtype: str) -> subprocess.Popen[str]:
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", textwrap.dedent(RUN), dtype]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_all(folder: Path) -> list[str]:
    processes = [start(folder, dtype) for dtype in DTYPES]
    for process in processes:
        process.stdin.close()  # go
        process.stdin = None
    return [process.communicate(timeout=100)[0].strip() for process in processes]


@pytest.mark.ci
def test_processes_that_compile_at_once_keep_each_others_entries(tmp_path: Path) -> None:
    (tmp_path / "summing.py").write_text(MODULE)
    for hits in (0, 1):
        for dtype, printed in zip(DTYPES, run_all(tmp_path), strict=True):
            value, num_hits = printed.split()
            assert float(value) == 10, dtype
            assert int(num_hits) == hits, f"{dtype}: {num_hits} of its entry were found on disk"
    # Each signature has machine code of its own: no two processes took the same file.
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == len(DTYPES)


DIE = """
import os, numpy as np, summing
from numba.core.caching import IndexDataCacheFile

IndexDataCacheFile._save_data = lambda self, name, data: os._exit(3)  # the index names it already
summing.total(np.arange(5, dtype="float32"))
"""


def test_code_of_older_sources_is_never_run(tmp_path: Path) -> None:
    source = tmp_path / "summing.py"
    source.write_text(MODULE)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def total() -> float:
        process = start(tmp_path, "float32")
        return float(process.communicate(timeout=100)[0].split()[0])

    assert total() == 10
    source.write_text(MODULE.replace("found = x[0]", "found = x[0] + 100"))
    assert subprocess.run([sys.executable, "-c", DIE], env=env, timeout=100).returncode == 3
    assert total() == 110


def test_the_stamp_of_a_kernel_covers_all_sources_of_kernels() -> None:
    stamp = compiling.kernel(compiling.fingerprint.__wrapped__)._cache._cache_file._source_stamp
    assert stamp[1] == compiling.fingerprint()
