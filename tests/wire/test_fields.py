from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import PayloadError
from gradwire.wire.fields import Reader

arrays = st.tuples(st.sampled_from(["<f4", "<u2", "|u1", "<i8"]), st.lists(st.integers(0, 100), max_size=20))
fields = st.one_of(
    st.tuples(st.just("f32"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("take"), st.binary(max_size=20)),
    st.tuples(st.just("array"), arrays),
)


def body(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


def write(layout: list) -> np.ndarray:
    parts = {
        "f32": lambda value: struct.pack("<f", value),
        "take": bytes,
        "array": lambda value: np.array(value[1], dtype=value[0]).tobytes(),
    }
    return np.frombuffer(b"".join(parts[name](value) for name, value in layout), dtype=np.uint8)


def check(reader: Reader, layout: list) -> None:
    for name, value in layout:
        if name == "array":
            found = reader.array(np.dtype(value[0]), len(value[1]))
            assert found.tolist() == value[1]
            assert found.flags.aligned
        elif name == "take":
            assert reader.take(len(value)).tobytes() == value
        else:
            assert reader.f32() == value
    reader.end()


@given(st.lists(fields, max_size=12))
def test_what_is_written_is_read(layout):
    check(Reader(write(layout)), layout)


@given(st.lists(fields, min_size=1, max_size=12), st.data())
def test_a_cut_body_is_a_payload_error(layout, data):
    whole = write(layout)
    if whole.nbytes:
        reader = Reader(whole[: data.draw(st.integers(0, whole.nbytes - 1))])
        with pytest.raises(PayloadError):
            check(reader, layout)


def test_trailing_bytes_are_a_payload_error():
    reader = Reader(body(1, 2))
    reader.take(1)
    with pytest.raises(PayloadError, match="1 more bytes"):
        reader.end()


@pytest.mark.parametrize("count", [-1, 2, 1 << 31, 1 << 63, 1 << 64, 1 << 100])
def test_declared_sizes_are_compared_before_anything_is_allocated(count):
    reader = Reader(body(0, 0, 0, 0, 0, 0, 0, 0)[:7])
    with pytest.raises(PayloadError):
        reader.array(np.float32, count)
    with pytest.raises(PayloadError):
        reader.take(count * 8)
    assert reader.remaining == 7


def test_arrays_are_views_where_they_are_aligned():
    content = np.arange(16, dtype=np.float32).view(np.uint8)
    assert np.shares_memory(Reader(content).array(np.float32, 16), content)
    reader = Reader(content)
    reader.take(1)
    unaligned = reader.array(np.float32, 15)
    assert unaligned.flags.aligned
    assert not np.shares_memory(unaligned, content)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_can_be_refused(value):
    content = write([("f32", value)])
    Reader(content).f32()
    with pytest.raises(PayloadError, match="finite"):
        Reader(content).f32(finite=True)


@pytest.mark.parametrize("wrong", [np.zeros(4), np.zeros((2, 2), dtype=np.uint8)])
def test_reader_takes_only_bytes(wrong):
    with pytest.raises(TypeError, match="1-D uint8"):
        Reader(wrong)
