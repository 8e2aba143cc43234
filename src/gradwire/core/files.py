"""Files that other processes may read or write at the same time."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Write a file, which replaces the one before at once: no process sees part of it.

    Raises:
        OSError: It cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
