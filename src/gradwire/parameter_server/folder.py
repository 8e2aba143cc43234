"""The folder of a server's state: locked by one server at a time, and readable only by its owner.

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
from pathlib import Path
from typing import IO

from gradwire.core.errors import StateError
from gradwire.net.forks import ProcessBound

logger = logging.getLogger("gradwire")
_LOCK = "lock"
_PRIVATE = 0o600
_HELD = frozenset({errno.EAGAIN, errno.EACCES})


class StateFolder(ProcessBound):
    """A folder that is locked until `close`.

    Args:
        path: Path of the folder; created if missing.

    Raises:
        StateError: Another server uses the folder.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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

    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open a file of the folder that only its owner can read."""
        return open(self.path / name, mode, opener=_open_private)

    def sync(self) -> None:
        """Write the directory to disk, so that file names survive a power failure."""
        number = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

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


def _open_private(path: str, flags: int) -> int:
    number = os.open(path, flags, _PRIVATE)
    with contextlib.suppress(PermissionError):  # the file of another user, who lets this one write
        os.chmod(number, _PRIVATE)  # files of an earlier version were readable for all
    return number
