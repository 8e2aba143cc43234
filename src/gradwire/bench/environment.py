"""Versions, machine and commit of a run, which records store with every figure."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""Root of the checkout, if the package runs from one."""
RECORDS = Path("benchmarks/results")
"""Folder of the records in a checkout. Changes there do not count as changes of the measured code."""


@dataclass(frozen=True)
class Checkout:
    """A git checkout.

    Attributes:
        root: Folder of the checkout.
        commit: Short hash of the commit that was checked out when this process asked first.
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
    """Versions, machine, commit and date of this run. A commit with changes on top ends in ``-dirty``."""
    import numba
    import torch

    from gradwire import __version__
    from gradwire.simulate.machine import processor_name

    checkout = Checkout.of(ROOT)
    return {
        "gradwire": __version__,
        "commit": checkout.commit + "-dirty" * bool(checkout.changes()) if checkout else f"release {__version__}",
        "torch": torch.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "device": processor_name(),
        "cores": str(os.cpu_count()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _git(root: Path, *arguments: str) -> list[str]:
    """Lines printed by a git command; none if git is missing or fails."""
    try:
        found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return []
    return found.stdout.splitlines()
