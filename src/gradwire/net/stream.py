"""Reader of frames from a byte stream, without I/O: the caller receives bytes where the reader wants them.

Guarantees: a large body is received straight into the array that is delivered. `admit` decides on a frame before its
body is allocated. Memory is bounded by the admitted body and one staging buffer. Arbitrary bytes lead to frames or to
`FrameError`. After an error the stream cannot be read any further, and the error is raised again.

Differences from a reader with one buffer: small frames are parsed from a staging buffer, so that one system call serves
several. Only bodies that do not fit are received in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gradwire.core import buffers
from gradwire.core.errors import FrameError
from gradwire.wire.frame import (
    MAX_BODY_BYTES,
    TAGGED_VERSION,
    VERSION,
    Header,
    describe,
    prefix_bytes,
    unpack,
    verify,
    verify_tag,
)
from gradwire.wire.mac import FrameMac

STAGING_BYTES = 1 << 16


class FrameReader:
    """Reads the frames of one connection.

    Args:
        admit: Called with each header before its body is allocated. Raises `FrameError` to refuse.
        max_body_bytes: Largest body, even if `admit` would allow more.

    Attributes:
        admit: See above.
        destination: Called with the header of an admitted frame. Returns the array that receives its body, or None for
            a new one.
    """

    def __init__(self, admit: Callable[[Header], None], *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.admit = admit
        self.destination: Callable[[Header], np.ndarray | None] = _new_array
        self._max_body_bytes = max_body_bytes
        self._staging = np.empty(STAGING_BYTES, dtype=np.uint8)
        self._start = 0  # unparsed bytes are staging[start:end]
        self._end = 0
        self._header: Header | None = None  # of the body in progress
        self._prefix = b""  # the header and its tag, if frames have tags
        self._prefix_bytes = prefix_bytes(None)
        self._mac: FrameMac | None = None
        self._num_tagged = 0
        self._body = np.empty(0, dtype=np.uint8)
        self._filled = 0
        self._error: FrameError | None = None

    def expect_tags(self, mac: FrameMac) -> None:
        """Expect a tag in each frame from here on."""
        assert self._header is None, "between frames"
        self._mac, self._prefix_bytes = mac, prefix_bytes(mac)

    def wanted(self) -> memoryview:
        """Return the buffer for the next received bytes; never empty. Pass their number to `advance`."""
        if self._header is not None:
            return self._body.data[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif STAGING_BYTES - self._end < self._prefix_bytes:
            left = self._staging[self._start : self._end].copy()
            self._start, self._end = 0, left.nbytes
            self._staging[: self._end] = left
        assert self._end < STAGING_BYTES, "exhaust `advance` before asking for more room"
        return self._staging.data[self._end :]

    def advance(self, num_bytes: int) -> Iterator[tuple[Header, np.ndarray]]:
        """Process `num_bytes` received bytes and yield the frames that are now complete.

        Each header is admitted after the previous frame has been yielded. The iteration may be left early;
        `advance(0)` continues it.

        Raises:
            FrameError: A frame is malformed, refused or corrupted.
        """
        if self._header is not None:
            self._filled += num_bytes
            assert self._filled <= self._body.nbytes, "more bytes than were wanted"
        else:
            self._end += num_bytes
            assert self._end <= STAGING_BYTES, "more bytes than were wanted"
        return self._frames()

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that the body in progress still lacks."""
        return 0 if self._header is None else self._body.nbytes - self._filled

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and is not complete, so that the end of the stream would cut it off."""
        return self._header is not None or self._start != self._end

    def _frames(self) -> Iterator[tuple[Header, np.ndarray]]:
        if self._error is not None:
            raise self._error
        try:
            while self._header is not None or self._end - self._start >= self._prefix_bytes:
                if self._header is None:
                    self._begin_body()
                if self._filled < self._body.nbytes:
                    return
                yield self._finish_body()
        except FrameError as error:
            self._error = error
            raise

    def _begin_body(self) -> None:
        prefix = self._staging[self._start : self._start + self._prefix_bytes]
        header = unpack(prefix, VERSION if self._mac is None else TAGGED_VERSION)
        if header.length > self._max_body_bytes:
            raise FrameError(
                f"Expected a body of at most {self._max_body_bytes} bytes, got {header.length} declared "
                f"(in {describe(header)})."
            )
        self.admit(header)
        body = self.destination(header)
        if body is None:
            try:
                body = buffers.empty(header.length)
            except MemoryError as error:
                raise FrameError(f"A body of {header.length} bytes does not fit into memory.") from error
        assert body.nbytes == header.length, "a destination has the size of the body"
        self._body = body
        self._prefix = b"" if self._mac is None else prefix.tobytes()
        self._start += self._prefix_bytes
        self._filled = min(header.length, self._end - self._start)
        self._body[: self._filled] = self._staging[self._start : self._start + self._filled]
        self._start += self._filled
        self._header = header

    def _finish_body(self) -> tuple[Header, np.ndarray]:
        header, body = self._header, self._body
        assert header is not None
        self._header = None
        self._body = np.empty(0, dtype=np.uint8)
        self._filled = 0
        if self._mac is None:
            verify(header, body)
        else:
            verify_tag(self._mac, self._num_tagged, self._prefix, header, body)
            self._num_tagged += 1
        return header, body


def _new_array(header: Header) -> np.ndarray | None:
    return None
