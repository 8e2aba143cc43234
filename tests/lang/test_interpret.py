"""The oracle compared with NumPy formulas, written out for the small algorithms."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.kernels.reference.positions import pack_positions, positions_bytes
from gradwire.kernels.reference.random import random16
from gradwire.lang import concat, count, interpret
from tests.lang import algorithms
from tests.lang.targets.test_numba import OFFSET, environment, gradient
from tests.lang.test_trace import traced
from tests.lang.test_types import digits, planes

SIZES = (1, 5, 64, 1000, 1025, 6000)
f32 = np.float32
each_size = pytest.mark.parametrize("size", SIZES)


def uniform(size: int, shared: bool = False) -> np.ndarray:
    """Numbers drawn by the first call of `random`."""
    env, words = environment(size), np.empty(size, np.uint16)
    random16(env.shared_key if shared else env.private_key, OFFSET, words)
    return (words.astype(f32) + f32(0.5)) / f32(65536)


def body_and_rest(name: str, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Body and residual of the oracle, after a check that the residual is what decoding leaves."""
    program = algorithms.program(name)
    body, rest = interpret.encode(program, x, environment(x.size))
    assert np.array_equal(rest, x - interpret.decode(program, body, environment(x.size)))
    return body.tobytes(), rest


@each_size
def test_between(size: int) -> None:
    x = gradient(size)
    low, high = x.min(), x.max()
    gap = f32((float(high) - float(low)) / 3)
    with np.errstate(all="ignore"):
        level = np.clip(np.nan_to_num(np.floor((x - low) / gap + uniform(size))), 0, 3)
    expected = low.tobytes() + gap.tobytes() + planes(level, 2).tobytes()
    assert body_and_rest("between", x)[0] == expected


@each_size
def test_two_means(size: int) -> None:
    x = gradient(size)
    body, rest = body_and_rest("two_means", x)
    low, high = np.frombuffer(body[:8], f32)
    means = [float(np.mean(part, dtype=np.float64)) if part.size else 0.0 for part in (x[x < 0], x[x >= 0])]
    np.testing.assert_allclose([low, high], means, rtol=1e-7)
    assert body[8:] == np.packbits(x >= 0, bitorder="little").tobytes()
    assert np.array_equal(rest, x - np.where(x >= 0, high, low))


@each_size
def test_block_scales(size: int) -> None:
    x = gradient(size)
    scale = np.array([float(np.abs(x[s : s + 100]).max()) / 127 for s in range(0, size, 100)]).astype(f32)
    level = np.clip(np.floor(x / np.repeat(scale, 100)[:size] + uniform(size)), -127, 127)
    assert body_and_rest("block_scales", x)[0] == scale.tobytes() + level.astype(np.int8).tobytes()


@each_size
def test_ternary(size: int) -> None:
    x = gradient(size)
    largest = np.abs(x).max()
    level = np.sign(x) * (uniform(size) < np.abs(x) / largest)
    assert body_and_rest("ternary", x)[0] == largest.tobytes() + digits(level).tobytes()


@each_size
def test_first_few(size: int) -> None:
    x = gradient(size)
    index = np.flatnonzero(np.abs(x) > 1)[: -(-size // 20)].astype(np.uint32)
    bits = x[index].view(np.uint32).astype(np.uint64)
    short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # halves to even
    body, rest = body_and_rest("first_few", x)
    places = np.empty(positions_bytes(size, index.size), np.uint8)
    pack_positions(index, size, places)
    assert body == np.uint32(index.size).tobytes() + short.tobytes() + places.tobytes()
    assert np.array_equal(np.delete(rest, index), np.delete(x, index))


@each_size
def test_a_shared_dither_that_is_subtracted_leaves_half_a_step_at_most(size: int) -> None:
    x = gradient(size)
    step = f32(float(np.abs(x).max()) / 100)
    body, rest = body_and_rest("dithered", x)
    level = np.floor(x / step + uniform(size, shared=True))
    assert body == step.tobytes() + level.astype(np.int8).tobytes()
    assert np.abs(rest).max() <= 0.5001 * step


def test_count_of_a_condition_is_how_often_it_holds() -> None:
    x = gradient(200)
    program = traced(
        lambda g: concat(n=(g > 0).reduce(count), b=(g > 0).blocks(100).reduce(count), q=g), lambda p: p.q
    )  # fmt: skip
    body, _ = interpret.encode(program, x, environment(200))
    held = x > 0
    assert body[:12].view(f32).tolist() == [held.sum(), held[:100].sum(), held[100:].sum()]


def test_min_and_max_may_be_infinite_and_leave_out_what_is_no_number() -> None:
    x = np.float32([1, 0, -1, 0])

    def encode(g):
        y = g / (g - g)
        return concat(
            most=y.reduce(max), least=y.reduce(min), positive=y.filter(lambda v: v > 0).reduce(min),
            none=y.filter(lambda v: v != v).reduce(max), block=y.blocks(8).reduce(max), q=g,
        )  # fmt: skip

    body, _ = interpret.encode(traced(encode, lambda p: p.q), x, environment(4))
    largest = float(np.finfo(f32).max)
    assert body[:20].view(f32).tolist() == [largest, -largest, largest, 0, largest]


def test_numbers_that_are_known_beforehand_can_be_sent() -> None:
    body, _ = interpret.encode(algorithms.program("known_numbers"), gradient(9), environment(9))
    known = dict(zip(["scale", "rate", "offset", "large"], body[:16].view(f32).tolist()))
    assert known == {"scale": f32(0.1), "rate": f32(0.3), "offset": 3, "large": np.finfo(f32).max}


def test_a_limit_of_a_filter_holds_for_what_is_reduced() -> None:
    x = gradient(1000)
    body, _ = interpret.encode(algorithms.program("few_of_many"), x, environment(x.size))
    kept = x[x > 0.5][:20]
    assert kept.size == 20 < (x > 0.5).sum()
    assert body[:4].view(f32)[0] == pytest.approx(float(kept.sum()) + 20)


def test_scale_and_residual_come_before_everything() -> None:
    x, residual = gradient(500), gradient(500, seed=1)
    program = algorithms.program("ternary")
    body, rest = interpret.encode(program, x, environment(500), 0.25, residual)
    alone = interpret.encode(program, x * f32(0.25) + residual, environment(500))
    assert body.tobytes() == alone[0].tobytes()
    assert rest.tobytes() == alone[1].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_encoded_and_shows_in_the_statistics(bad: float) -> None:
    x = gradient(100)
    x[50] = bad
    program = algorithms.program("shared_scale")
    assert interpret.encode(program, x, environment(100)) is None
    assert interpret.encode(program, gradient(100), environment(100), stats=[np.float32([np.inf])]) is None
    assert interpret.statistics(program, x, environment(100)) == [np.inf]
    assert interpret.statistics(program, gradient(100), environment(100), 0.5) == [np.abs(gradient(100)).max() / 2]
