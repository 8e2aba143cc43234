"""Share compilation among the processes of a machine: what one has compiled, the others load.

Each process gets each name once. A name that another process is working on comes last: when that process is done with
it, when it has ended, or after `PATIENCE`. Without file locks every process does all the work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from gradwire.lang.cache import folder

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

PATIENCE = timedelta(seconds=120)
_LOOK_SECONDS = 0.1


def in_turns(names: Iterable[str]) -> Iterator[str]:
    """Yield the names. Each is locked against other processes until the next one is requested."""
    busy = []
    for name in names:
        with _claim(name) as claimed:
            if claimed:
                yield name
                continue
        busy.append(name)
    until = time.monotonic() + PATIENCE.total_seconds()
    for name in busy:
        while _is_claimed(name) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        yield name


def _is_claimed(name: str) -> bool:
    with _claim(name) as claimed:
        return not claimed


@contextlib.contextmanager
def _claim(name: str) -> Iterator[bool]:
    """Lock a name; yield False if another process has locked it."""
    if fcntl is None:
        yield True
        return
    path = folder("locks") / f"{re.sub(r'[^a-z0-9.]', '_', name.lower())}.lock"
    handle, claimed = None, True
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        claimed = False
    except OSError:  # a file system without locks
        pass
    try:
        yield claimed
    finally:
        if handle is not None:
            os.close(handle)
