"""An append-only file of frames, which a journal consists of.

Guarantees: reading gives a prefix of the written records. A crash or a power failure may leave an incomplete, zero or
garbage end, possibly with blocks of older files: none of it is read as a record. Damage before complete records of the
same file is an error. Reading changes nothing; an incomplete end is cut off by the first `append`.

Layout: a head, then records. Each record begins with a seal, which is followed by a frame.

| bytes | field of the head | |
|---|---|---|
| 8 | magic | ``GWJRNL02`` |
| 16 | follows | digest of the state that the records continue; 0 if there is none |
| 16 | salt | random |
| 16 | digest | BLAKE2b of the fields before |

| bytes | field of the seal | |
|---|---|---|
| 8 | place | BLAKE2b of salt, offset in the file, and header of the frame (which has the CRC-32C of the body) |
| 8 | chain | BLAKE2b of the chain of the record before (of the head's digest for the first), and place |
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
from collections.abc import Iterator

import numpy as np

from gradwire.core.errors import FrameError, StateError
from gradwire.parameter_server.folder import RESTORE, StateFolder
from gradwire.wire.frame import HEADER_BYTES, MAGIC, Header, seal, unpack, verify

DIGEST_BYTES = 16
NOTHING = bytes(DIGEST_BYTES)
"""What the first journal of a job follows."""
_FILE_MAGIC = b"GWJRNL02"
HEAD_BYTES = len(_FILE_MAGIC) + 3 * DIGEST_BYTES
_HALF_SEAL_BYTES = 8
SEAL_BYTES = 2 * _HALF_SEAL_BYTES


class RecordFile:
    """A file of records. Read it once from the beginning, then append.

    Args:
        folder: Folder of the file.
        name: Name of the file, which `create` has made.

    Attributes:
        follows: Digest of the state that the records continue.
        num_bytes: Bytes of head and records.
        num_left: Bytes after the last complete record, which are no record.

    Raises:
        StateError: The file is no such file, is damaged at its beginning, or cannot be read.
    """

    def __init__(self, folder: StateFolder, name: str) -> None:
        self.path = folder.path / name
        self._file = folder.open(name, "r+b")
        self.num_bytes, self.num_left = HEAD_BYTES, 0
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            head = bytes(self._bytes(0, HEAD_BYTES))
            if len(head) < HEAD_BYTES or head != _head(head[8:24], head[24:40]):
                raise StateError(
                    f"The journal {self.path} is damaged at its beginning, or was written by another version of "
                    f"gradwire. {RESTORE}"
                )
        except BaseException:
            self.close()
            raise
        self.follows, self._salt, self._chain = head[8:24], head[24:40], head[40:]

    @classmethod
    def create(cls, folder: StateFolder, name: str, follows: bytes) -> RecordFile:
        """Create a file without records, on disk when this returns. A file of this name is replaced."""
        with folder.replace(name) as fresh, folder.open(fresh, "wb") as file:
            file.write(_head(follows, secrets.token_bytes(DIGEST_BYTES)))
        return cls(folder, name)

    def read(self, *, last: bool = True) -> Iterator[tuple[int, Header, np.ndarray]]:
        """Yield each record with its offset.

        Args:
            last: Whether no other file continues this one, so that the error for damage can advise to do without the
                records after it.

        Raises:
            StateError: The file is damaged before complete records, or cannot be read.
        """
        while (record := self._record(self.num_bytes)) is not None:
            place, chain, header, body = record
            if chain != _hash(self._chain + place):
                break
            yield self.num_bytes, header, body
            self._chain = chain
            self.num_bytes += SEAL_BYTES + HEADER_BYTES + body.nbytes
        self.num_left = self._size - self.num_bytes
        self._check_end(last)

    def append(self, header: Header, body: np.ndarray) -> None:
        """Write a record and hand it to the operating system, so that it outlives this process.

        Raises:
            OSError: The record could not be written whole. Close the file: nothing can follow.
        """
        if self.num_left:
            self._file.truncate(self.num_bytes)
            self.num_left = 0
        self._file.seek(self.num_bytes)
        frame_header = seal(header, body)
        place = self._place(self.num_bytes, frame_header)
        self._chain = _hash(self._chain + place)
        self.num_bytes += self._write(place + self._chain + frame_header) + self._write(body.data)

    def sync(self) -> None:
        """Write all records to disk, so that they outlive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _write(self, content: bytes | memoryview) -> int:
        left = memoryview(content)
        while left.nbytes:
            left = left[self._file.write(left) :]
        return len(content)

    def _bytes(self, at: int, num_bytes: int) -> bytearray:
        """The bytes from an offset on; fewer at the end of the file."""
        content, filled = bytearray(num_bytes), 0
        try:
            self._file.seek(at)
            while read := self._file.readinto(memoryview(content)[filled:]):
                filled += read
        except OSError as error:
            raise StateError(f"The journal {self.path} cannot be read ({error}). {RESTORE}") from error
        del content[filled:]
        return content

    def _record(self, at: int) -> tuple[bytes, bytes, Header, np.ndarray] | None:
        """The complete record of this file at an offset: place, chain, header and body. None if there is none."""
        start = bytes(self._bytes(at, SEAL_BYTES + HEADER_BYTES))
        place, chain, frame_header = start[:8], start[8:16], start[16:]
        try:
            header = unpack(frame_header)
            if place != self._place(at, frame_header) or header.length > self._size - at - len(start):
                return None
            body = np.frombuffer(self._bytes(at + len(start), header.length), np.uint8)
            verify(header, body)
        except FrameError:
            return None
        return place, chain, header, body

    def _place(self, at: int, frame_header: bytes) -> bytes:
        return _hash(self._salt + at.to_bytes(8, "little") + frame_header)

    def _check_end(self, last: bool) -> None:
        left = self._bytes(self.num_bytes, self.num_left)
        at = left.find(MAGIC)
        while at >= 0:
            begin = self.num_bytes + at - SEAL_BYTES
            if begin > self.num_bytes and self._record(begin) is not None:
                command = f"truncate -s {self.num_bytes} {shlex.quote(str(self.path))}"
                advice = f" To go back to the state before the damage instead, run: {command}" if last else ""
                raise StateError(
                    f"The journal {self.path} is damaged at byte {self.num_bytes} of {self._size}, and complete "
                    f"records follow at byte {begin}. {RESTORE}{advice}"
                )
            at = left.find(MAGIC, at + 1)


def _head(follows: bytes, salt: bytes) -> bytes:
    fields = _FILE_MAGIC + follows + salt
    return fields + hashlib.blake2b(fields, digest_size=DIGEST_BYTES).digest()


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HALF_SEAL_BYTES).digest()
