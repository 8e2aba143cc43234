"""The folder of status files: written by each rank for itself, read by `gradwire top`.

Guarantees: a file is whole or absent, because it gets its name when it is written, and only its owner can read it. A
reader takes no file of another user, follows no link, waits for no pipe, and reads no more than `status.MAX_BYTES`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradwire.core.errors import StatusError
from gradwire.observe import status as statuses
from gradwire.observe.status import RankStatus, printable

PREFIX, SUFFIX, UNFINISHED = "status-", ".json", ".new"
_WRITTEN_HERE = re.compile(rf"{PREFIX}[0-9a-f]{{16}}-rank\d+{re.escape(SUFFIX)}({re.escape(UNFINISHED)})?")
MAX_FILES = 1024
"""Most files that are read, the newest."""
MAX_ENTRIES = 100_000
"""Most entries of a folder that are looked at."""
KEPT_SECONDS = 3600.0
"""Age from which a file that nobody writes any more is removed by the next job."""


@dataclass(frozen=True)
class StatusFile:
    """A file that was read.

    Attributes:
        status: What it says.
        age: Seconds since it was written.
    """

    status: RankStatus
    age: float


@dataclass(frozen=True)
class StatusFolder:
    """A folder that was read.

    Attributes:
        path: Its path.
        files: Its status files.
        refused: Other files with such names: why they were not read, by name.
    """

    path: Path
    files: tuple[StatusFile, ...]
    refused: dict[str, str]


def path_of(folder: Path, job: str, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"{PREFIX}{job}-rank{rank}{SUFFIX}"


def write(path: Path, status: RankStatus) -> None:
    """Write a status file, which replaces the one before at once.

    Raises:
        OSError: It cannot be written.
    """
    fresh = path.with_name(path.name + UNFINISHED)
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()  # of a write that failed
    number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(number, "wb") as file:
        file.write(statuses.encode(status))
    os.replace(fresh, path)


def remove_old(folder: Path) -> None:
    """Remove this user's status files that nobody writes any more, and the remains of writes that failed."""
    now = time.time()
    for entry in _entries(folder):
        if not _WRITTEN_HERE.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if found.st_uid == os.getuid() and now - found.st_mtime > KEPT_SECONDS:
                os.unlink(entry.path)


def read_folder(folder: Path) -> StatusFolder:
    """Read the status files of a folder.

    Raises:
        OSError: The folder cannot be read.
    """
    owners = {os.geteuid()}
    if os.geteuid() == 0:
        owners.add(folder.stat().st_uid)
    entries = [entry for entry in _entries(folder) if entry.name.endswith(SUFFIX)]
    files, refused = [], {}
    for entry in heapq.nlargest(MAX_FILES, entries, key=_written):
        try:
            files.append(_read(Path(entry.path), owners))
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, StatusError) as error:
            refused[printable(entry.name)] = str(error) if isinstance(error, StatusError) else str(error.strerror)
    return StatusFolder(folder, tuple(files), refused)


def _read(path: Path, owners: set[int]) -> StatusFile:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise StatusError("It is not a file.")
        if found.st_uid not in owners:
            raise StatusError(f"It belongs to another user ({found.st_uid}).")
        data = file.read(statuses.MAX_BYTES + 1)
    return StatusFile(statuses.decode(data), max(0.0, time.time() - found.st_mtime))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_ENTRIES):
            if entry.name.startswith(PREFIX):
                yield entry


def _written(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
