from __future__ import annotations

import struct
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import FrameError
from gradwire.wire import frame
from gradwire.wire.frame import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameFlags,
    FrameKind,
    Header,
    pack,
    parse,
    seal,
    unpack,
    verify,
    without_seal,
)

from . import golden


def unsigned(bits: int) -> st.SearchStrategy[int]:
    edges = st.sampled_from([0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1])
    return edges | st.integers(0, (1 << bits) - 1)


headers = st.builds(
    Header,
    kind=st.sampled_from(FrameKind),
    compressor=unsigned(16),
    flags=st.integers(0, 15).map(FrameFlags),
    sender=unsigned(16),
    stage=unsigned(16),
    dtype=st.integers(0, 4),
    epoch=unsigned(64),
    round=unsigned(64),
    tensor=unsigned(32),
    partition=unsigned(32),
    offset=st.integers(0, 1 << 62),
    count=st.integers(0, 1 << 62),
    members=unsigned(32),
)


@given(headers, st.binary(max_size=300))
def test_a_frame_comes_back_as_it_was(header, body):
    packed = pack(header, body)
    assert len(packed) == HEADER_BYTES + len(body)
    found, content = parse(packed)
    assert without_seal(found) == header
    assert found.length == len(body)
    assert content.tobytes() == body
    assert pack(header, np.frombuffer(body, dtype=np.uint8)) == packed


@pytest.mark.parametrize("name", golden.FRAMES)
def test_golden_frames_have_not_changed(name):
    header, body = golden.FRAMES[name]
    assert pack(header, body) == golden.read(name)
    assert without_seal(parse(golden.read(name))[0]) == header


def test_fields_lie_where_the_format_says():
    packed = golden.read("payload")
    assert packed[:4] == b"GWF1"
    assert packed[4] == 1
    assert packed[5] == FrameKind.PAYLOAD
    assert struct.unpack_from("<HHHHBB", packed, 6) == (3, 0x0102, 3, 1, 1, 0)
    assert struct.unpack_from("<QQIIQQQ", packed, 16) == (
        0x1122334455667788, 1 << 40, 7, 2, 1 << 33, 100, 100,
    )  # fmt: skip
    checksum, members = struct.unpack_from("<II", packed, 64)
    assert members == 0
    assert golden.read("group")[68:72] == bytes([4, 3, 2, 1])
    assert checksum == google_crc32c.value(packed[:64] + bytes(8) + packed[72:])


@pytest.mark.parametrize("name", golden.FRAMES)
def test_every_flipped_bit_is_found(name):
    good = golden.read(name)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            parse(bytes(bad))


@pytest.mark.parametrize("name", golden.FRAMES)
def test_every_truncation_and_extension_is_found(name):
    good = golden.read(name)
    for size in range(len(good)):
        with pytest.raises(FrameError):
            parse(good[:size])
    for tail in (b"\0", good):
        with pytest.raises(FrameError):
            parse(good + tail)


@given(st.sampled_from(sorted(golden.FRAMES)), st.sampled_from(sorted(golden.FRAMES)), st.data())
def test_splices_are_found(first, second, data):
    left, right = golden.read(first), golden.read(second)
    spliced = left[: data.draw(st.integers(0, len(left)))] + right[data.draw(st.integers(0, len(right))) :]
    if spliced not in (left, right):
        with pytest.raises(FrameError):
            parse(spliced)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"GWF1\x01" + tail))
def test_arbitrary_bytes_are_a_frame_or_a_frame_error(data):
    try:
        header, body = parse(data)
    except FrameError:
        return
    assert pack(without_seal(header), body) == data


def with_field(layout: str, at: int, value: int) -> bytes:
    bad = bytearray(golden.read("payload"))
    struct.pack_into(layout, bad, at, value)
    return bytes(bad)


@pytest.mark.parametrize(
    ("layout", "at", "value", "message"),
    [
        ("<I", 0, 0, "Expected magic"),
        ("<B", 4, 2, "Run one gradwire version"),
        ("<B", 5, 0, "known frame kind"),
        ("<B", 5, 255, "known frame kind"),
        ("<H", 6, 16, "flags"),
        ("<H", 6, 0x8001, "flags"),
        ("<B", 14, 5, "element type"),
        ("<B", 15, 1, "reserved"),
        ("<Q", 40, (1 << 64) - 1, "range below"),
        ("<Q", 40, (1 << 63) - 99, "range below"),
        ("<Q", 48, (1 << 63) + 1, "range below"),
        ("<Q", 56, MAX_BODY_BYTES + 1, "at most"),
        ("<Q", 56, (1 << 64) - 1, "at most"),
    ],
)
def test_unpack_refuses_what_the_format_does_not_know(layout, at, value, message):
    with pytest.raises(FrameError, match=message):
        unpack(with_field(layout, at, value))


def test_ranges_up_to_the_limit_are_taken():
    assert unpack(with_field("<Q", 40, (1 << 63) - 100)).offset == (1 << 63) - 100
    assert unpack(with_field("<Q", 56, MAX_BODY_BYTES)).length == MAX_BODY_BYTES


@pytest.mark.parametrize("size", range(HEADER_BYTES))
def test_a_short_header_is_refused(size):
    with pytest.raises(FrameError, match="72 bytes"):
        unpack(golden.read("payload")[:size])


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, dtype=np.uint8)])
def test_unpack_takes_any_buffer(convert):
    assert unpack(convert(golden.read("payload"))).tensor == 7


def test_verify_refuses_another_length_and_another_checksum():
    header, body = parse(golden.read("payload"))
    with pytest.raises(FrameError, match="body of 100 bytes, got 99"):
        verify(header, body[:99])
    with pytest.raises(FrameError, match="check both hosts"):
        verify(replace(header, checksum=header.checksum ^ 1), body)
    with pytest.raises(FrameError, match="round 5"):
        verify(replace(header, round=5), body)


@pytest.mark.parametrize(
    "fields", [{"sender": 1 << 16}, {"sender": -1}, {"epoch": 1 << 64}, {"tensor": 1 << 32}, {"dtype": 256}]
)
def test_seal_refuses_fields_that_do_not_fit(fields):
    with pytest.raises(ValueError, match="within their widths"):
        pack(Header(FrameKind.PAYLOAD, **fields))


def test_seal_refuses_a_range_that_no_reader_takes():
    with pytest.raises(ValueError, match="range below"):
        pack(Header(FrameKind.PAYLOAD, offset=1 << 63, count=1))


@pytest.mark.parametrize("body", [np.zeros(3), np.zeros((2, 2), dtype=np.uint8), np.zeros(8, dtype=np.uint8)[::2]])
def test_seal_refuses_other_bodies_and_says_what_to_pass(body):
    with pytest.raises(ValueError, match="ascontiguousarray"):
        seal(Header(FrameKind.PAYLOAD), body)


def test_checksums_run_in_compiled_code():
    # The library falls back to Python, a thousand times slower, where its extension is missing.
    assert google_crc32c.implementation == "c"
    assert frame.google_crc32c is google_crc32c
