"""The folder in which a server keeps its state: held by one server at a time, and made for its owner alone.

Guarantees: a second server is refused before it writes a byte. The system gives a dead holder's lock back; forked
children hold no copy of it. Where the file system has no locks, the log says so and nothing is refused.
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
    """A folder, from when it is locked to `close`.

    Args:
        path: the folder; made if missing.

    Raises:
        StateError: another server holds it.
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
        """Open a file of the folder that nobody but its owner may read."""
        return open(self.path / name, mode, opener=_open_private)

    def sync(self) -> None:
        """Have the names of all files outlast a loss of power."""
        number = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def close(self) -> None:
        """Let another server have it. Idempotent."""
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
                "The state folder %s cannot be locked (%s). Make sure that one server alone uses it.", self.path, error
            )

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            said = os.pread(self._lock, 256, 0).decode("utf-8", "replace").strip()
            if said:
                return said
        return "a process that has just begun"


def _open_private(path: str, flags: int) -> int:
    number = os.open(path, flags, _PRIVATE)
    with contextlib.suppress(PermissionError):  # another user's, who lets this one write
        os.chmod(number, _PRIVATE)  # files of an earlier version are open to all
    return number
