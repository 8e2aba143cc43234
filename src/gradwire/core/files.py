"""Files that other processes may read or write at the same time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Write a file, which replaces the one before at once: no process sees part of it. A pipe or device is written to.

    Raises:
        OSError: It cannot be written, or no file can be created in its folder.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    unfinished = path.with_name(f".{uuid4().hex}.part")
    try:
        unfinished.write_text(text)
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
