"""An append-only file of frames, which a journal consists of.

Guarantees: reading gives a prefix of the written records. A crash or a power failure may leave an incomplete, zero or
garbage end. Such an end is cut off and its size is logged. Damage before complete records is an error, and the file
is not changed.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import numpy as np

from gradwire.core.errors import FrameError, StateError
from gradwire.parameter_server.folder import StateFolder
from gradwire.wire.frame import HEADER_BYTES, MAGIC, Header, seal, unpack, verify

logger = logging.getLogger("gradwire")


class RecordFile:
    """A file of records. Read it once from the beginning, then append.

    Args:
        folder: Folder of the file.
        name: Name of the file; created if missing.
    """

    def __init__(self, folder: StateFolder, name: str) -> None:
        self.path = folder.path / name
        self._file = folder.open(name, "a+b")

    @property
    def num_bytes(self) -> int:
        """Total bytes of all records."""
        return self._file.tell()

    def read(self) -> Iterator[tuple[int, Header, np.ndarray]]:
        """Yield each record with its offset, then cut off an incomplete end.

        Raises:
            StateError: The file is damaged before complete records.
        """
        size = self._file.seek(0, 2)
        whole = 0
        if size:
            with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as content:
                while (record := _record_at(content, whole)) is not None:
                    yield (whole, *record)
                    whole += HEADER_BYTES + record[1].nbytes
                self._check_end(content, whole)
        self._file.truncate(whole)
        self._file.seek(whole)

    def append(self, header: Header, body: np.ndarray) -> None:
        """Write a record and hand it to the operating system, so that it outlives this process."""
        self._file.write(seal(header, body))
        self._file.write(body.data)
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _check_end(self, content: mmap.mmap, whole: int) -> None:
        left = len(content) - whole
        if not left:
            return
        at = content.find(MAGIC, whole + 1)
        while at >= 0:
            if _record_at(content, at) is not None:
                raise StateError(
                    f"The journal {self.path} is damaged at byte {whole} of {len(content)}. This is not an incomplete "
                    f"end, since complete records follow at byte {at}. Restore the folder from a copy, or start the "
                    "job again in an empty one."
                )
            at = content.find(MAGIC, at + 1)
        logger.warning(
            "The journal %s ends with %d bytes of an incomplete record, as after a crash or a power failure. They are "
            "cut off. The state is that of the %d bytes before them.",
            self.path, left, whole,
        )  # fmt: skip


def _record_at(content: mmap.mmap, at: int) -> tuple[Header, np.ndarray] | None:
    """A copy of the record at an offset; None if there is no complete one."""
    try:
        header = unpack(content[at : at + HEADER_BYTES])
        if header.length > len(content) - at - HEADER_BYTES:
            return None
        body = np.frombuffer(content, np.uint8, header.length, at + HEADER_BYTES).copy()
        verify(header, body)
    except FrameError:
        return None
    return header, body
