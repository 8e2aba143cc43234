"""Which commit a campaign has tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGED = "-dirty"
EVERYTHING = ".", ":!tests/*.csv"  # but what campaigns record


def last_commit(*paths: str) -> str:
    """The last commit that changed any of these paths, and whether they have changes since."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *paths]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h") + CHANGED * bool(git("status", "--porcelain"))
