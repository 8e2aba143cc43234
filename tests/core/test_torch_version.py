"""A torch that is too old is one clear error, whatever is used first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.core.torch_version import LEAST_TORCH, check_torch

ROOT = Path(__file__).parents[2]


def test_the_least_version_is_that_of_the_package() -> None:
    least = ".".join(map(str, LEAST_TORCH))
    assert f'"torch>={least}"' in (ROOT / "pyproject.toml").read_text()
    assert f"| torch | {least} |" in (ROOT / "docs" / "versions.md").read_text()


def test_the_installed_torch_is_new_enough() -> None:
    check_torch()


@pytest.mark.parametrize("use", ["gw.attach", "gw.make", "gw.ParameterClient"])
def test_an_older_torch_is_refused_with_the_command_to_install_one(use: str) -> None:
    script = f"import torch; torch.__version__ = '2.3.1+cpu'; import gradwire as gw; {use}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "gradwire needs torch 2.4 or newer, but version 2.3.1+cpu is installed." in done.stderr
    assert "pip install 'torch>=2.4'" in done.stderr
