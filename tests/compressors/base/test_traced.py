"""Compressors in the language, apart from their code: sizes, states, and what is kept from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.compressors import make, names
from gradwire.compressors.base import registry
from gradwire.compressors.base.on_device import previous_state as state_in
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.lang import concat, int8, previous_state, round_even, where

SIZE = 300


@pytest.fixture
def declared() -> Iterator[Callable[..., Any]]:
    """Declares a compressor with these options, which steps by what `previous_state` gives, for one test."""
    known = set(names())

    def declare(**declarations: Any) -> Any:
        @gw.compressor("declared", **declarations)
        def algorithm(g: Any) -> Any:
            step = where(previous_state() > 0, previous_state(), 1)
            return concat(step=step, q=g.map(lambda x: round_even(x / (0.0 * g.reduce(max) + step)), dtype=int8))

        @algorithm.decode
        def _(p: Any) -> Any:
            return p.q * p.step

        return algorithm()

    yield declare
    for name in set(names()) - known:
        registry.unregister(name)


def context(**fields: Any) -> Context:
    return Context("w", spec=TensorSpec((SIZE,)), **fields)


@pytest.mark.parametrize(
    "found", [0.25, np.float64(0.25), np.array(0.25), np.array([0.25]), [0.25], torch.tensor(0.25)]
)
def test_a_state_is_kept_as_one_float32(declared: Callable[..., Any], found: object) -> None:
    codec, grad = declared(next_state=lambda body, size, step: found), torch.linspace(-9, 9, SIZE)
    state = codec.next_state(codec.encode(grad, context()), context())
    assert (state.dtype, state.shape, state.tolist()) == (np.float32, (1,), [0.25])
    ctx = context(state=state)
    assert state_in(ctx) == 0.25
    assert codec.encode(grad, ctx).body[:4].view(np.float32) == 0.25


def test_none_keeps_the_present_state(declared: Callable[..., Any]) -> None:
    codec = declared(next_state=lambda body, size, step: None)
    assert codec.next_state(codec.encode(torch.ones(SIZE), context()), context()) is None


@pytest.mark.parametrize(
    "found", [np.nan, np.inf, 1e300, [1.0, 2.0], np.zeros((2, 1)), [], "much", {}, [[1.0], [1.0, 2.0]]], ids=repr
)
def test_what_is_not_one_finite_number_is_no_state(declared: Callable[..., Any], found: object) -> None:
    codec = declared(next_state=lambda body, size, step: found)
    payload = codec.encode(torch.ones(SIZE), context())
    with pytest.raises(OptionError, match="next_state of 'declared' must return one finite number"):
        codec.next_state(payload, context())


def test_a_sample_whose_size_depends_on_the_state_has_space_for_all_elements() -> None:
    @gw.compressor("sampled")
    def sampled(g: Any) -> Any:
        return concat(some=g.sample(where(previous_state() > 0, 200, 1)), q=g.map(dtype=int8))

    @sampled.decode
    def _(p: Any) -> Any:
        return p.q * 1.0

    try:
        codec, grad = sampled(), torch.randn(SIZE)
        most = codec.max_encoded_bytes(TensorSpec((SIZE,)))
        assert most == 4 + 4 * SIZE + SIZE
        for state, count in ((None, 1), (np.ones(1, np.float32), 200)):
            payload = codec.encode(grad, context(state=state))
            assert payload.body.nbytes == 4 + 4 * count + SIZE
            assert torch.equal(codec.decode(payload, context()), grad.trunc())
    finally:
        registry.unregister("sampled")


@pytest.fixture
def of_all_ranks() -> Iterator[TracedCompressor]:
    """Sends a number computed from a value of all ranks, and uses another one that it does not send."""

    @gw.compressor("of_all_ranks", feedback="none")
    def of_all_ranks(g: Any) -> Any:
        step = abs(g).reduce(max).over_ranks(max) / 127
        unused = 0.0 * g.reduce(min).over_ranks(min)
        return concat(step=step, q=g.map(lambda x: round_even(x / step + unused), dtype=int8))

    @of_all_ranks.decode
    def _(p: Any) -> Any:
        return p.q * p.step

    yield of_all_ranks()
    registry.unregister("of_all_ranks")


@pytest.fixture
def of_a_sample() -> Iterator[TracedCompressor]:
    @gw.compressor("of_a_sample", feedback="none")
    def of_a_sample(g: Any) -> Any:
        step = abs(g).sample(10).sort()[5].over_ranks(max)
        return concat(step=step, q=g.map(lambda x: round_even(x / step), dtype=int8))

    @of_a_sample.decode
    def _(p: Any) -> Any:
        return p.q * p.step

    yield of_a_sample()
    registry.unregister("of_a_sample")


def test_what_is_computed_from_values_of_all_ranks_is_sent(of_all_ranks: TracedCompressor) -> None:
    grad, ctx = torch.linspace(-9, 9, SIZE), context()
    stats = [each.values for each in of_all_ranks.stats(grad, ctx)]
    payload = of_all_ranks.encode(grad, ctx, stats)
    decoded = of_all_ranks.decode(payload, ctx, stats=stats)
    assert (decoded - grad).abs().max() <= 9 / 127 / 2 * 1.001
    total = of_all_ranks.decode_sum([payload, payload], [ctx, ctx], torch.empty(SIZE), stats)
    assert torch.equal(total, 2 * decoded)


def test_statistics_of_what_is_not_finite_outlast_their_reduction(
    of_all_ranks: TracedCompressor, of_a_sample: TracedCompressor
) -> None:
    """Wherever it is, also outside of a sample."""
    for index in range(0, SIZE, 20):
        grad = torch.linspace(-9, 9, SIZE)
        grad[index] = torch.nan
        found = {each.reduction: each.values.tolist() for each in of_all_ranks.stats(grad, context())}
        assert found == {"max": [np.inf], "min": [-np.inf]}
        (sampled,) = of_a_sample.stats(grad, context())
        assert sampled.values.tolist() == [np.inf]


def traced(method: str) -> TracedCompressor:
    codec = make(method)
    assert isinstance(codec, TracedCompressor)
    return codec


class Cleared(dict[Any, Any]):
    """A cache that another thread clears after every write."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_static_values_are_found_though_another_thread_clears_the_cache() -> None:
    codec = traced("dgc")
    wanted = codec._static(1000, 0)
    codec._static_values = Cleared()
    assert codec._static(1000, 0).tolist() == wanted.tolist()


def test_static_values_are_computed_once() -> None:
    codec = traced("dgc")
    assert codec._static(1000, 0) is codec._static(1000, 1)


def test_tensors_whose_positions_do_not_fit_are_refused_with_advice() -> None:
    for method in ("dgc", "threshold", "dragonn"):
        codec = traced(method)
        codec._expect_positions(2**32 - 1)
        with pytest.raises(ValueError, match=rf"{method} sends positions of 32 bits.* has 4294967296 el.*Partition it"):
            codec._expect_positions(2**32)
        with pytest.raises(ValueError, match="positions of 32 bits"):
            codec._expect_size(np.empty(4, np.uint8), 2**32 + 7, ())
    traced("onebit")._expect_positions(2**40)


def test_a_gradient_whose_positions_do_not_fit_is_refused_before_it_is_read() -> None:
    grad = torch.zeros(1).expand(2**32)
    with pytest.raises(ValueError, match="positions of 32 bits"):
        traced("dgc").encode(grad, Context("w"))
