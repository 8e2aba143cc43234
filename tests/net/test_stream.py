from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import FrameError
from gradwire.net.stream import STAGING_BYTES, FrameReader
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, pack

from ..wire import golden
from .pieces import feed, piece_sizes


def take_all(header: Header) -> None:
    pass


def frames_of(reader: FrameReader, stream: bytes, sizes: list[int]) -> list[tuple[Header, np.ndarray]]:
    return list(feed(reader.wanted, reader.advance, stream, sizes))


bodies = st.lists(st.sampled_from([0, 1, 72, 1000, STAGING_BYTES - HEADER_BYTES, STAGING_BYTES, 150_000]), max_size=8)


@given(bodies, piece_sizes)
def test_frames_come_out_whatever_the_pieces(sizes, pieces):
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]
    stream = b"".join(pack(Header(FrameKind.PAYLOAD, tensor=n), body) for n, body in enumerate(sent))
    reader = FrameReader(take_all)
    # Single bytes of megabytes prove nothing more, and take minutes.
    pieces = [max(piece, len(stream) // 2000) for piece in pieces]
    found = frames_of(reader, stream, pieces)
    assert [body.tobytes() for _, body in found] == sent
    assert [header.tensor for header, _ in found] == list(range(len(sent)))
    assert not reader.in_frame


@given(st.lists(st.sampled_from(sorted(golden.FRAMES)), min_size=1, max_size=5), piece_sizes, st.data())
def test_a_damaged_stream_ends_in_a_frame_error_or_unfinished(names, pieces, data):
    good = [golden.read(name) for name in names]
    stream = bytearray(b"".join(good))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    reader = FrameReader(take_all, max_body_bytes=1 << 20)
    found = []
    try:
        for frame in feed(reader.wanted, reader.advance, bytes(stream), pieces):
            found.append(frame)
    except FrameError:
        pass
    else:
        assert reader.in_frame  # a larger length was declared: the rest would come, and fail its checksum
    whole = 0
    while whole < len(good) and sum(map(len, good[: whole + 1])) <= at:
        whole += 1
    assert len(found) == whole  # the frames before the damage, and none after it


@given(st.binary(max_size=1000), piece_sizes)
def test_arbitrary_bytes_are_frames_or_a_frame_error(stream, pieces):
    reader = FrameReader(take_all, max_body_bytes=1 << 20)
    try:
        frames_of(reader, stream, pieces)
    except FrameError:
        return
    assert reader.in_frame == bool(stream)


def test_admit_is_asked_before_the_body_is_allocated():
    def refuse(header: Header) -> None:
        raise FrameError("not due")

    frame = pack(Header(FrameKind.PAYLOAD), bytes(100))
    huge = frame[:56] + (1 << 39).to_bytes(8, "little") + frame[64:72]
    reader = FrameReader(refuse)
    tracemalloc.start()
    with pytest.raises(FrameError, match="not due"):
        frames_of(reader, huge, [1 << 20])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_body_beyond_the_bound_is_refused_before_admit():
    asked = []
    reader = FrameReader(asked.append, max_body_bytes=99)
    with pytest.raises(FrameError, match="at most 99 bytes, got 100"):
        frames_of(reader, pack(Header(FrameKind.PAYLOAD), bytes(100)), [1 << 20])
    assert asked == []


def test_a_header_is_admitted_after_the_frame_before_it_came_out():
    order = []
    reader = FrameReader(lambda header: order.append(("admit", header.tensor)))
    stream = b"".join(pack(Header(FrameKind.PAYLOAD, tensor=n), b"abc") for n in range(3))
    for header, _ in feed(reader.wanted, reader.advance, stream, [1 << 20]):
        order.append(("out", header.tensor))
    assert order == [(what, n) for n in range(3) for what in ("admit", "out")]


def test_an_error_is_for_good():
    reader = FrameReader(take_all)
    with pytest.raises(FrameError, match="magic") as first:
        frames_of(reader, bytes(HEADER_BYTES), [1 << 20])
    with pytest.raises(FrameError) as second:
        list(reader.advance(0))
    assert second.value is first.value


def test_an_iteration_that_was_left_is_taken_up_again():
    reader = FrameReader(take_all)
    stream = b"".join(pack(Header(FrameKind.PAYLOAD, tensor=n), b"abc") for n in range(3))
    room = reader.wanted()
    room[: len(stream)] = stream
    assert next(iter(reader.advance(len(stream))))[0].tensor == 0
    assert [header.tensor for header, _ in reader.advance(0)] == [1, 2]


def test_a_large_body_is_received_in_place():
    body = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    frame = pack(Header(FrameKind.PAYLOAD), body)
    reader = FrameReader(take_all)
    room = reader.wanted()
    room[:100] = frame[:100]
    assert list(reader.advance(100)) == []
    room = reader.wanted()
    assert len(room) == len(frame) - 100
    room[:] = frame[100:]
    [(_, found)] = reader.advance(len(room))
    np.testing.assert_array_equal(found, body)
    assert np.shares_memory(found, np.frombuffer(room, dtype=np.uint8))


def test_bodies_belong_to_whoever_takes_them():
    reader = FrameReader(take_all)
    frame = pack(Header(FrameKind.PAYLOAD), b"abcd")
    first, second = (body for _, body in frames_of(reader, frame * 2, [1 << 20]))
    first[:] = 0
    assert first.flags.writeable
    assert second.tobytes() == b"abcd"


def test_a_body_is_received_where_the_destination_says():
    sent = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in (150_000, 10, 150_000)]
    stream = b"".join(pack(Header(FrameKind.PAYLOAD, tensor=n), body) for n, body in enumerate(sent))
    where = np.zeros(150_000, np.uint8)
    reader = FrameReader(take_all)
    reader.destination = lambda header: where if header.tensor == 2 else None
    found = [body for _, body in frames_of(reader, stream, [1000])]
    assert found[2] is where and not any(np.shares_memory(each, where) for each in found[:2])
    for body, expected in zip(found, sent, strict=True):
        np.testing.assert_array_equal(body, expected)


def test_a_destination_is_asked_after_admit_and_a_damaged_body_is_not_delivered():
    asked = []
    where = np.zeros(1000, np.uint8)
    reader = FrameReader(lambda header: asked.append("admit"))
    reader.destination = lambda header: asked.append("destination") or where
    frame = bytearray(pack(Header(FrameKind.PAYLOAD), bytes(1000)))
    frame[-1] ^= 1
    with pytest.raises(FrameError, match="checksum"):
        frames_of(reader, bytes(frame), [300])
    assert asked == ["admit", "destination"]
