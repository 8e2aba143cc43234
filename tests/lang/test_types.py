"""Element types: ranges, sizes, and the layout of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.lang import TraceError, interpret, trit, types, uint, uint1, uint2, uint4
from gradwire.lang.interpret import Environment
from gradwire.lang.ir import Program
from gradwire.lang.operators.arithmetic import cast_reference
from tests.lang.test_trace import concat, traced

INTEGERS = [each for each in types.TYPES.values() if each.is_integer]
SIZES = (0, 1, 2, 3, 5, 8, 9, 1023, 1024, 1025, 5120, 5121)
each_integer = pytest.mark.parametrize("dtype", INTEGERS, ids=repr)


def sent_as(dtype: types.ElementType) -> Program:
    return traced(lambda g: concat(q=g.map(dtype=dtype)), lambda p: p.q)


def packed(x: np.ndarray, dtype: types.ElementType) -> np.ndarray:
    body, _ = interpret.encode(sent_as(dtype), np.asarray(x, np.float32), Environment(len(x)))
    return body


def planes(x: np.ndarray, bits: int) -> np.ndarray:
    """Byte i of a chunk of S bytes holds elements i, i + S, i + 2 S, ... from its least significant bits up."""
    parts = [np.empty(0, np.uint8)]
    for start in range(0, x.size, 1024):
        chunk = x[start : start + 1024].astype(int)
        num_bytes = -(-chunk.size * bits // 8)
        out = [sum(int(v) << k * bits for k, v in enumerate(chunk[i::num_bytes])) for i in range(num_bytes)]
        parts.append(np.array(out, np.uint8))
    return np.concatenate(parts)


def digits(x: np.ndarray) -> np.ndarray:
    """Five trits per byte, the first plane the most significant digit; padding digits have the value 0."""
    parts = [np.empty(0, np.uint8)]
    for start in range(0, x.size, 5120):
        chunk = x[start : start + 5120].astype(int) + 1
        num_bytes = -(-chunk.size // 5)
        padded = np.concatenate([chunk, np.ones(5 * num_bytes - chunk.size, int)])
        parts.append((padded.reshape(5, num_bytes).T @ [81, 27, 9, 3, 1]).astype(np.uint8))
    return np.concatenate(parts)


@pytest.mark.parametrize("size", SIZES)
def test_layouts_are_those_of_the_documentation(size: int) -> None:
    rng = np.random.default_rng(size)
    for dtype in (uint2, uint4):
        x = rng.integers(0, dtype.high + 1, size)
        assert np.array_equal(packed(x, dtype), planes(x, int(dtype.bits)))
    x = rng.integers(0, 2, size)
    assert np.array_equal(packed(x, uint1), np.packbits(x.astype(bool), bitorder="little"))
    x = rng.integers(-1, 2, size)
    assert np.array_equal(packed(x, trit), digits(x))


@each_integer
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_round_trips(dtype: types.ElementType, size: int) -> None:
    x = np.random.default_rng(size).integers(max(dtype.low, -(1 << 24)), min(dtype.high, 1 << 24) + 1, size)
    body = packed(x, dtype)
    assert body.nbytes == dtype.num_bytes(size) == -(-size * dtype.bits // 8)
    assert np.array_equal(interpret.decode(sent_as(dtype), body, Environment(size)), x)


@each_integer
def test_values_outside_the_range_are_clamped_and_fractions_cut(dtype: types.ElementType) -> None:
    x = np.float32([-3e38, -1.75, -0.5, 0.5, 1.75, 3e38])
    found = interpret.decode(sent_as(dtype), packed(x, dtype), Environment(x.size))
    assert np.array_equal(found, np.trunc(np.clip(x, np.float32(dtype.low), np.float32(dtype.high))))


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(types.float16, 65504.0), (types.bfloat16, 3.3895313892515355e38), (types.float32, 3.4028234663852886e38)],
    ids=repr,
)
def test_floats_are_clamped_to_the_finite_ones_of_their_type(dtype: types.ElementType, largest: float) -> None:
    x = np.float32([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 70_000.0, 0.5, -0.0, 65_519.0, 65_520.0])
    found = cast_reference(x, dtype)
    exact = {types.float16: np.float16, types.float32: np.float32}.get(dtype)
    wanted = np.clip(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf), -largest, largest).astype(np.float32)
    if exact is not None:
        assert found.tobytes() == wanted.astype(exact).astype(np.float32).tobytes()
    assert np.isfinite(found).all() and np.abs(found).max() == np.float32(largest)
    np.testing.assert_allclose(found, wanted, rtol=2**-8)


def test_floats_that_no_type_was_named_for_are_clamped_as_float32() -> None:
    program = traced(lambda g: concat(q=g / g.reduce(min)), lambda p: p.q)
    body, rest = interpret.encode(program, np.float32([0, 1, 2, 0]), Environment(4))
    largest = np.finfo(np.float32).max
    assert body.view(np.float32).tolist() == [0, largest, largest, 0]
    assert rest.tolist() == [0, -largest, -largest, 0]


def test_finite_elements_of_the_gradient_are_sent_as_they_are() -> None:
    for encode in (lambda g: concat(q=g), lambda g: concat(q=abs(g))):
        assert all(node.op != "cast" for node in traced(encode, lambda p: p.q).encode_nodes())
    kept = traced(
        lambda g: concat(v=g.filter(lambda x: x > 0).top(3).value, i=g.filter(lambda x: x > 0).top(3).index),
        lambda p: p.v.scatter(p.i),
    )  # fmt: skip
    assert all(node.op != "cast" for node in kept.encode_nodes())


@each_integer
def test_the_ends_of_a_range_are_float32s(dtype: types.ElementType) -> None:
    assert float(np.float32(dtype.low)) == dtype.low
    assert float(np.float32(dtype.high)) == dtype.high


def test_uint_gives_the_type_of_so_many_bits_or_says_which_there_are() -> None:
    assert [uint(bits).high for bits in (1, 2, 4, 8)] == [1, 3, 15, 255]
    with pytest.raises(TraceError, match=r"no uint\(3\).*1, 2, 4 or 8 bits.*in test_types.py:.*Use .*uint\(4\)"):
        traced(lambda g: concat(q=g.map(dtype=uint(3))))
    with pytest.raises(TraceError, match=r"no uint\(16\).*Use one of these, or int32"):
        uint(16)
