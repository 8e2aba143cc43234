"""Versions and machine of a run, so that a figure can be had again."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path


def environment() -> dict[str, str]:
    """Versions and machine, for the record."""
    import numba
    import torch

    from gradwire import __version__

    return {
        "gradwire": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "device": _processor(),
        "cores": str(os.cpu_count()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit that the package is run from, or nothing where it is installed."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return ""
    return found.stdout.strip()
