"""The flight recorder: writes what this rank was doing to a JSON file on the first failure.

The file has the error (type, rank, tensor, phase), the state of the engine (what it waited for, bytes per peer), and
the latest events.

Guarantees: existing files are never overwritten, not even through a link that someone else has created. The default
folder in the system's temporary directory is private to the user. If a folder cannot be used, the file goes to a new
one, with a warning in the log.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from gradwire.core.errors import SyncError
from gradwire.core.events import EventStream
from gradwire.core.private_folder import private_folder

logger = logging.getLogger("gradwire")


def default_directory() -> Path:
    """Return ``$GRADWIRE_DUMP_DIR``, else the user's `private_folder`, which raises `OSError` if it is not private."""
    if chosen := os.environ.get("GRADWIRE_DUMP_DIR"):
        return Path(chosen)
    return private_folder()


def write_dump(
    error: SyncError,
    *,
    rank: int,
    world_size: int,
    events: EventStream,
    state: dict[str, Any],
    directory: Path | None = None,
) -> Path:
    """Write the file, and return its path, which is also stored in `error.dump`.

    Args:
        error: Error that ended the synchronizer.
        rank: This rank.
        world_size: Number of ranks.
        events: Event stream, whose latest events are written.
        state: State of the engine: what it waits for, bytes per peer.
        directory: Folder of the file; created if missing. None is `default_directory`.

    Raises:
        OSError: The file cannot be written, not even to a new temporary folder.
    """
    record = {
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "error": {
            "type": type(error).__name__,
            "message": str(error),
            "rank": error.rank,
            "tensor": error.tensor,
            "phase": error.phase,
        },
        "state": state,
        "monotonic_now": time.monotonic(),
        "events": [event.as_dict() for event in events.latest()],
    }
    text = json.dumps(record, indent=1, default=str)
    name = f"flight-{time.strftime('%Y%m%d-%H%M%S')}-rank{rank}-{os.getpid()}-{secrets.token_hex(4)}.json"
    try:
        path = _write(directory or default_directory(), name, text)
    except OSError as problem:
        path = _write(Path(tempfile.mkdtemp(prefix="gradwire-")), name, text)
        logger.warning("The flight recorder's folder cannot be used (%s). Its file is in %s.", problem, path.parent)
    error.dump = str(path)
    return path


def _write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    with path.open("x") as file:  # fails if the file exists and, because of O_EXCL, if it is a link
        file.write(text)
    return path
