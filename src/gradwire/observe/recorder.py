"""The flight recorder: on the first failure, what this rank was doing goes to a file, for people and for programs.

The file is JSON: the error (type, rank, tensor, phase), what was still waited for, when each peer was last heard, and
the latest events.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from gradwire.core.errors import SyncError
from gradwire.core.events import EventStream

_numbers = itertools.count()  # several synchronisers of a process may fail in one second


def default_directory() -> Path:
    """``$GRADWIRE_DUMP_DIR``, else a folder ``gradwire`` among the system's temporary files."""
    return Path(os.environ.get("GRADWIRE_DUMP_DIR") or Path(tempfile.gettempdir()) / "gradwire")


def write_dump(
    error: SyncError,
    *,
    rank: int,
    world_size: int,
    events: EventStream,
    state: dict[str, Any],
    directory: Path | None = None,
) -> Path:
    """Write the file and return its path; `error.dump` holds it too.

    Args:
        error: what ended the synchroniser.
        state: more about the moment: what is waited for, bytes a peer.
        directory: where the file goes; made where missing.
    """
    directory = directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    moment = time.strftime("%Y%m%d-%H%M%S")
    path = directory / f"flight-{moment}-rank{rank}-{os.getpid()}-{next(_numbers)}.json"
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
    path.write_text(json.dumps(record, indent=1, default=str))
    error.dump = str(path)
    return path
