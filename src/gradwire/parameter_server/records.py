"""A file of frames that grows: what a journal consists of.

Guarantees: what is read is a prefix of what was written. A crash, or a loss of power, may leave an end that is cut
short, zero or garbage; the records before it are used, and the log says how many bytes were not. Damage ahead of whole
records is no such end: it is an error, and nothing is changed.
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
    """One file of records, read once from its beginning, then written at its end.

    Args:
        folder: where it is.
        name: of the file; made if missing.
    """

    def __init__(self, folder: StateFolder, name: str) -> None:
        self.path = folder.path / name
        self._file = folder.open(name, "a+b")

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._file.tell()

    def read(self) -> Iterator[tuple[int, Header, np.ndarray]]:
        """Yield each record with its offset, then cut off an end that is not a whole one.

        Raises:
            StateError: the file is damaged ahead of whole records.
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
        """Write a record, and hand it to the system, which outlives the process."""
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
                    f"The journal {self.path} is damaged at byte {whole} of {len(content)}, and whole records follow "
                    f"from byte {at} on, so its end was not just cut short. Restore the folder from a copy, or start "
                    "the job again in an empty one."
                )
            at = content.find(MAGIC, at + 1)
        logger.warning(
            "The journal %s ends with %d bytes that are no whole record, as after a crash or a loss of power. They "
            "are cut off; the state is that of the %d bytes before them.",
            self.path, left, whole,
        )  # fmt: skip


def _record_at(content: mmap.mmap, at: int) -> tuple[Header, np.ndarray] | None:
    """The record at an offset, copied; None where there is no whole one."""
    try:
        header = unpack(content[at : at + HEADER_BYTES])
        if header.length > len(content) - at - HEADER_BYTES:
            return None
        body = np.frombuffer(content, np.uint8, header.length, at + HEADER_BYTES).copy()
        verify(header, body)
    except FrameError:
        return None
    return header, body
