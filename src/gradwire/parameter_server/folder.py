"""The folder of a server's state: locked by one server at a time, and with files that only their owner can read.

Guarantees: a second server is refused before it writes a byte. The operating system releases the lock of a dead
process, and forked children have no copy of it. On a file system without locks, a warning is logged and no server is
refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import cast

from gradwire.core.errors import StateError
from gradwire.net.forks import ProcessBound

logger = logging.getLogger("gradwire")
RESTORE = "Restore the folder from a copy, or start the job again in an empty one."
"""What to do about a file that is damaged or missing."""
UNFINISHED = ".new"
"""End of the names of files that are not written whole."""
_LOCK = "lock"
_PRIVATE = 0o600
_HELD = frozenset({errno.EAGAIN, errno.EACCES})


class StateFolder(ProcessBound):
    """A folder that is locked until `close`.

    Args:
        path: Path of the folder; created if missing.

    Raises:
        StateError: Another server uses the folder, or everybody can write to it.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync(path.parent)
        if path.stat().st_mode & stat.S_IWOTH:
            raise StateError(
                f"Everybody can write to the state folder {path}. Run chmod o-w {path}, or give the server another "
                "folder."
            )
        self.path = path
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, _PRIVATE)
        self._bind()
        try:
            self._acquire()
        except BaseException:
            self.close()
            raise
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def open(self, name: str, mode: str) -> FileIO:
        """Open a file of the folder, without a buffer, that only its owner can read."""
        return cast(FileIO, open(self.path / name, mode, buffering=0, opener=_open_private))

    @contextlib.contextmanager
    def replace(self, name: str) -> Iterator[str]:
        """Yield the name of a file for the block to write. It becomes `name`, on disk, when the block has ended.

        A power failure leaves `name` as it was before, or whole. If the block raises, `name` stays as it was.
        """
        fresh = f"{name}{UNFINISHED}"
        yield fresh
        _sync(self.path / fresh)
        os.replace(self.path / fresh, self.path / name)
        _sync(self.path)

    def close(self) -> None:
        """Unlock the folder. Idempotent."""
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> None:
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (ImportError, OSError) as error:
            if getattr(error, "errno", None) in _HELD:
                raise StateError(
                    f"The state folder {self.path} is in use by another server ({self._holder()}). Stop that server "
                    "first, or give this one another folder."
                ) from None
            logger.warning(
                "The state folder %s cannot be locked (%s). Make sure that only one server uses it.", self.path, error
            )

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            holder = os.pread(self._lock, 256, 0).decode("utf-8", "replace").strip()
            if holder:
                return holder
        return "a process that has just started"


def _sync(path: Path) -> None:
    """Write a file to disk, or the names of the files of a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _open_private(path: str, flags: int) -> int:
    number = os.open(path, flags, _PRIVATE)
    with contextlib.suppress(PermissionError):  # the file of another user, who lets this one write
        os.chmod(number, _PRIVATE)  # files of an earlier version were readable for all
    return number
