"""Byte streams in pieces, as a network hands them over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from hypothesis import strategies as st

from gradwire.wire.frame import Header

# Sizes of what one recv returns: mostly odd, sometimes everything there is.
piece_sizes = st.lists(st.sampled_from([1, 7, 71, 72, 73, 500, 1 << 16, 1 << 20]), min_size=1, max_size=20)


def feed(
    wanted: Callable[[], memoryview],
    advance: Callable[[int], Iterable[tuple[Header, np.ndarray]]],
    stream: bytes,
    sizes: list[int],
) -> Iterator[tuple[Header, np.ndarray]]:
    """Hand `stream` over in pieces of the given sizes, over and over; yield the frames."""
    at = turn = 0
    while at < len(stream):
        room = wanted()
        assert len(room) > 0
        count = min(sizes[turn % len(sizes)], len(room), len(stream) - at)
        room[:count] = stream[at : at + count]
        at += count
        turn += 1
        yield from advance(count)
