"""CPU kernels compile for aarch64, and produce the golden bytes on the path that they take there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def cross_compile(folder: Path, *names: str) -> str:
    command = [sys.executable, "-m", "tests.kernels.cross_compile", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_all_kernels_compile_for_aarch64(tmp_path: Path) -> None:
    assert "compiled for aarch64" in cross_compile(tmp_path)
