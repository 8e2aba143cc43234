"""The flight recorder: on the first failure, what this rank was doing goes to a file, for people and for programs.

The file is JSON: the error (type, rank, tensor, phase), what was still waited for, when each peer was last heard, and
the latest events.

Guarantees: no file that exists is touched, whoever has put a file or a link in the way. Among the system's temporary
files, which are everybody's, the folder is this user's alone. Where a folder cannot be used, the file goes to a fresh
one, and the log says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from gradwire.core.errors import SyncError
from gradwire.core.events import EventStream

logger = logging.getLogger("gradwire")


def default_directory() -> Path:
    """``$GRADWIRE_DUMP_DIR``, else this user's folder ``gradwire-UID`` among the system's temporary files; made here.

    Raises:
        OSError: it cannot be made, or the one among the temporary files is not this user's alone.
    """
    if chosen := os.environ.get("GRADWIRE_DUMP_DIR"):
        return Path(chosen)
    directory = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a folder of user {os.getuid()} alone ({stat.filemode(found.st_mode)})"
        )
    return directory


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
        error: what ended the synchronizer.
        state: more about the moment: what is waited for, bytes a peer.
        directory: where the file goes; made where missing.

    Raises:
        OSError: it can be written nowhere.
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
        logger.warning("The flight recorder's folder cannot be used (%s). Its file went to %s.", problem, path.parent)
    error.dump = str(path)
    return path


def _write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    with path.open("x") as file:  # neither an existing file nor, with O_EXCL, what a link points to
        file.write(text)
    return path
