"""Versions, machine and commit of a run, so that its figures can be reproduced."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""Folder of the checkout that the package is run from, if it is one."""
RECORDS = Path("benchmarks/results")
"""Folder of the records in a checkout. Changes there are no changes of the code that is measured."""


@dataclass(frozen=True)
class Checkout:
    """A git checkout.

    Attributes:
        root: Its folder.
        commit: Short hash of the commit that was checked out when this process first asked.
    """

    root: Path
    commit: str

    @classmethod
    @functools.cache
    def of(cls, root: Path) -> Checkout | None:
        """The checkout in a folder, or None if there is none."""
        if not (root / ".git").exists():
            return None
        commit = _git(root, "rev-parse", "--short", "HEAD")
        return cls(root, commit[0]) if commit else None

    def changes(self) -> list[str]:
        """Paths that differ from the commit, untracked ones included. Records do not count."""
        paths = "--", ".", f":(exclude){RECORDS.as_posix()}"
        changed = _git(self.root, "diff", "--name-only", self.commit, *paths)
        return changed + _git(self.root, "ls-files", "--others", "--exclude-standard", *paths)


def environment() -> dict[str, str]:
    """Versions and machine, for the record. A commit with changes on top ends in ``-dirty``."""
    import numba
    import torch

    from gradwire import __version__

    checkout = Checkout.of(ROOT)
    return {
        "gradwire": __version__,
        "commit": checkout.commit + "-dirty" * bool(checkout.changes()) if checkout else f"release {__version__}",
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


def _git(root: Path, *arguments: str) -> list[str]:
    """Lines that a git command prints; none if git is missing or refuses."""
    try:
        found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return []
    return found.stdout.splitlines()
