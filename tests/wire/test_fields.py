from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import PayloadError
from gradwire.wire.fields import Reader, Writer

SCALARS = {
    "u8": st.integers(0, (1 << 8) - 1),
    "u16": st.integers(0, (1 << 16) - 1),
    "u32": st.integers(0, (1 << 32) - 1),
    "u64": st.integers(0, (1 << 64) - 1),
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
}
arrays = st.tuples(st.sampled_from(["<f4", "<u2", "|u1", "<i8"]), st.lists(st.integers(0, 100), max_size=20))
fields = st.one_of(
    *[st.tuples(st.just(name), values) for name, values in SCALARS.items()],
    st.tuples(st.just("array"), arrays),
    st.tuples(st.just("align"), st.sampled_from([2, 4, 8])),
)


def body(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


def write(layout: list) -> np.ndarray:
    writer = Writer(4096)
    for name, value in layout:
        getattr(writer, name)(np.array(value[1], dtype=value[0]) if name == "array" else value)
    return writer.done()


def check(reader: Reader, layout: list) -> None:
    for name, value in layout:
        if name == "array":
            found = reader.array(np.dtype(value[0]), len(value[1]))
            assert found.tolist() == value[1]
            assert found.flags.aligned
        elif name == "align":
            reader.align(value)
        else:
            assert getattr(reader, name)() == value
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
    reader.u8()
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
    reader.u8()
    unaligned = reader.array(np.float32, 15)
    assert unaligned.flags.aligned
    assert not np.shares_memory(unaligned, content)


def test_rest_is_a_view_of_all_that_is_left():
    content = body(1, 2, 3)
    reader = Reader(content)
    reader.u8()
    assert reader.rest().tolist() == [2, 3]
    reader.end()


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_can_be_refused(name, value):
    writer = Writer(8)
    getattr(writer, name)(value)
    getattr(Reader(writer.done()), name)()
    with pytest.raises(PayloadError, match="finite"):
        getattr(Reader(writer.done()), name)(finite=True)


def test_padding_must_be_zero():
    reader = Reader(body(1, 0, 9, 0))
    reader.u8()
    with pytest.raises(PayloadError, match="padding"):
        reader.align(4)


def test_reserve_is_room_in_the_body_and_can_be_given_back():
    writer = Writer(16)
    writer.reserve(np.uint16, 4)[:] = 7
    writer.give_back(4)
    assert Reader(writer.done()).array(np.uint16, 2).tolist() == [7, 7]


def test_a_body_beyond_the_capacity_is_our_own_error():
    with pytest.raises(AssertionError, match="max_encoded_bytes"):
        Writer(3).u32(1)


@pytest.mark.parametrize("wrong", [np.zeros(4), np.zeros((2, 2), dtype=np.uint8)])
def test_reader_takes_only_bytes(wrong):
    with pytest.raises(TypeError, match="1-D uint8"):
        Reader(wrong)
