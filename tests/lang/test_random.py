"""Stochastic rounding in the language: unbiased, and independent across elements, steps, ranks, names and calls.

Statistical tests with fixed seeds. The false-alarm rate of each, over seeds, is stated where it is made: a bound of
five standard deviations of a normal variable fails in 6e-7 of all seeds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gradwire.core.context import Context
from gradwire.lang import floor, int8, interpret, random
from gradwire.lang.interpret import Environment
from tests.lang.test_trace import concat, traced

SIZE = 100_000
SIGMAS = 5.0
BASE = Context("fc.weight", step=3, rank=1, world_size=4, seed=7)
OTHERS = {
    "step": Context("fc.weight", step=4, rank=1, world_size=4, seed=7),
    "rank": Context("fc.weight", step=3, rank=2, world_size=4, seed=7),
    "name": Context("fc.bias", step=3, rank=1, world_size=4, seed=7),
    "seed": Context("fc.weight", step=3, rank=1, world_size=4, seed=8),
    "stage": Context("fc.weight", step=3, rank=1, world_size=4, seed=7, stage=1),
}
ROUND = traced(lambda g: concat(q=g.map(lambda x: floor(x + random()), dtype=int8)), lambda p: p.q)
TWICE = traced(
    lambda g: concat(
        a=g.map(lambda x: floor(x + random()), dtype=int8), b=g.map(lambda x: floor(x + random()), dtype=int8)
    ),
    lambda p: p.a + p.b,
)
SHARED = traced(lambda g: concat(q=g.map(lambda x: floor(x + random(shared=True)), dtype=int8)), lambda p: p.q)


def between_levels(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(0).uniform(-3, 3, size).astype(np.float32)


def environment(ctx: Context, size: int = SIZE, offset: int = 0) -> Environment:
    return Environment(size, ctx.shared_key, ctx.private_key, offset)


def errors(program, ctx: Context, x: np.ndarray) -> np.ndarray:
    """Rounding errors, each divided by its standard deviation: of mean 0 and variance 1 if rounding is unbiased."""
    levels = interpret.encode(program, x, environment(ctx, x.size))[0].view(np.int8)[: x.size].astype(np.float64)
    fraction = x.astype(np.float64) - np.floor(x)
    return (levels - x) / np.sqrt(fraction * (1 - fraction))


def is_noise(products: np.ndarray) -> bool:
    """Whether the mean of independent values of mean 0 is 0: within five of its standard deviations."""
    return abs(products.mean()) <= SIGMAS * products.std() / math.sqrt(products.size)


def test_each_element_is_unbiased_over_steps() -> None:
    """Hoeffding's bound for 500 elements at once: false alarms in 1e-6 of seeds. 2^-17 is what 16 bits round."""
    x, draws = between_levels(500), 1500
    total = np.zeros(x.size)
    for step in range(draws):
        ctx = Context("w", step=step)
        total += interpret.encode(ROUND, x, environment(ctx, x.size))[0].view(np.int8)
    bound = math.sqrt(math.log(2 * x.size / 1e-6) / (2 * draws)) + 2**-17
    assert np.abs(total / draws - x).max() <= bound


def test_the_mean_over_elements_is_unbiased() -> None:
    assert is_noise(errors(ROUND, BASE, between_levels()))


@pytest.mark.parametrize("distance", [1, 2, 63, 64, 128, 512, 1024, 5120])
def test_elements_are_independent_of_others_at_a_distance(distance: int) -> None:
    """Distances of the lanes, words and groups from which random bits are taken."""
    found = errors(ROUND, BASE, between_levels())
    assert is_noise(found[:-distance] * found[distance:])


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations([BASE, *OTHERS.values()], 2)))
def test_steps_ranks_names_seeds_and_stages_are_independent(one: Context, other: Context) -> None:
    x = between_levels()
    assert is_noise(errors(ROUND, one, x) * errors(ROUND, other, x))


def test_two_calls_in_one_algorithm_are_independent() -> None:
    x = between_levels()
    body = interpret.encode(TWICE, x, environment(BASE))[0].view(np.int8).astype(np.float64)
    first, second = body[: x.size] - x, body[x.size :] - x
    assert is_noise(first * second)


def test_how_often_elements_meet_by_chance() -> None:
    """16 bits, 100,000 elements, two ranks: 1.53 equal pairs on average, Poisson; more than 15 in 1e-10."""
    draw = traced(lambda g: concat(u=g.map(lambda x: x * 0.0 + random())), lambda p: p.u)
    one, other = (
        interpret.encode(draw, between_levels(), environment(ctx))[0].view(np.float32) for ctx in (BASE, OTHERS["rank"])
    )
    assert one.min() > 0 and one.max() < 1
    assert (one * 131072 % 2 == 1).all()
    assert (one == other).sum() <= 15
    assert len(np.unique(one)) > 50_000  # 51,300 of 65,536 values expected, with a deviation of 82


def test_shared_numbers_are_the_same_on_ranks_and_stages_and_new_each_step() -> None:
    x = between_levels(5000)
    bodies = {key: errors(SHARED, ctx, x).tobytes() for key, ctx in OTHERS.items()}
    base = errors(SHARED, BASE, x).tobytes()
    assert {key for key, body in bodies.items() if body == base} == {"rank", "stage"}


def test_a_range_draws_what_the_whole_would_draw_there() -> None:
    x = between_levels(5000)
    whole = interpret.encode(ROUND, x, environment(BASE, x.size))[0]
    for start, end in ((0, 64), (100, 1500), (1024, 2048), (4999, 5000)):
        part = interpret.encode(ROUND, x[start:end], environment(BASE, end - start, start))[0]
        assert np.array_equal(part, whole[start:end])
