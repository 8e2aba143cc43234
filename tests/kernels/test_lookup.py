"""Lookups without AVX-512: the instruction of the processor at hand is tested with every table elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.skipif(not llvm.get_host_cpu_features().get("avx2"), reason="This processor has no AVX2.")
def test_bytes_are_the_same_without_avx512(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.without_avx512", str(tmp_path), "thc", "uthc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "same bytes" in done.stdout
