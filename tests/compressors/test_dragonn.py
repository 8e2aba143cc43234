"""What is particular to DRAGONN: who is lost to a collision, that it is another one each step, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.spec import Range
from gradwire.feedback import ResidualKey, Residuals, get
from gradwire.kernels.reference.hashing import hash_numbers, hash_slots
from gradwire.lang.operators.arithmetic import evaluate_static
from tests.compressors.harness import body, list_bytes, sent, traced
from tests.contracts.compressor_cases import context, heavy_tailed, normal


def test_slots_are_filled_as_balls_fill_bins() -> None:
    """As many survivors as slots, so that 1 - 1/e of them stay; all are among the largest."""
    grad, codec = normal(50_000), traced("dragonn", ratio=0.02)
    filled = []
    for step in range(40):
        found = sent(codec, grad, step=step)
        kept = np.flatnonzero(found)
        assert np.array_equal(found[kept], grad.numpy()[kept])
        assert kept.size <= 1000
        filled.append(kept.size / 1000)
    # Of the sample's 400 elements 8 are above the threshold: a load of 1 with an error of a third.
    assert 0.56 <= np.mean(filled) <= 0.68


def test_what_is_sent_is_above_a_threshold_that_not_many_more_exceed() -> None:
    grad, codec = heavy_tailed(100_000), traced("dragonn", ratio=0.01)
    size = np.sort(np.abs(grad.numpy()))[::-1]
    for step in range(10):
        found = sent(codec, grad, step=step)
        assert np.abs(found[found != 0]).min() >= size[3000]


def test_element_0_is_sent() -> None:
    for size in (1, 7, 1000, 70_000):
        found = sent(
            traced("dragonn"),
            torch.eye(size)[0] if size < 5000 else torch.zeros(size).index_fill(0, torch.tensor([0]), 2.0),
        )
        assert np.flatnonzero(found).tolist() == [0]
    grad = normal(3000).index_fill(0, torch.tensor([0]), 100.0)
    times = sum(sent(traced("dragonn", ratio=0.05), grad, step=step)[0] == 100 for step in range(60))
    assert 20 <= times <= 50  # first in order, it stays where nobody else meets it: 37 % of steps at a load of 1


def test_each_step_rank_seed_and_tensor_loses_others_and_none_for_ever() -> None:
    """64 survivors of equal size in 64 slots."""
    grad, codec = torch.zeros(6400), traced("dragonn", ratio=0.01)
    grad[::100] = 1.0
    steps = [np.flatnonzero(sent(codec, grad, step=step)) for step in range(80)]
    assert len({tuple(each) for each in steps}) == 80
    assert np.unique(np.concatenate(steps)).size == 64
    first = steps[3].tolist()
    for other in ({"rank": 1}, {"seed": 8}, {"name": "fc.bias"}, {"stage": 1}):
        assert np.flatnonzero(sent(codec, grad, step=3, **other)).tolist() != first
    assert np.flatnonzero(sent(codec, grad, step=3)).tolist() == first


def test_zeros_are_not_sent() -> None:
    """The sampled threshold is zero, and all elements reach it."""
    grad = torch.zeros(10_000).index_fill(0, torch.tensor([17, 9000]), 3.0)
    assert set(np.flatnonzero(sent(traced("dragonn", ratio=0.01), grad)).tolist()) <= {17, 9000}
    assert body(traced("dragonn"), torch.zeros(500)).nbytes == 4


def test_a_constant_gradient_fills_the_slots_and_the_rest_waits() -> None:
    grad, codec, residuals = torch.ones(2000), traced("dragonn", ratio=0.05), Residuals()
    applied, key = np.zeros(2000), ResidualKey("w", Range(0, 2000))
    for step in range(200):
        payload = get("error").encode(codec, grad, context(grad, step=step), residuals, key)
        assert payload.body.nbytes <= list_bytes(2000, 100)
        applied += codec.decode(payload, context(grad, step=step)).numpy()
        residuals.commit()
    kept = residuals.total()["w"]
    np.testing.assert_array_equal(applied + kept, 200.0)  # integers: not a bit is lost
    assert applied.min() > 0
    assert kept.mean() < 40


@settings(max_examples=40, deadline=None)
@given(
    d=st.integers(2, 300),
    share=st.floats(0.01, 1),
    load=st.floats(0.3, 5),
    seed=st.integers(0, 2**31),
    heavy=st.booleans(),
)
def test_it_contracts_as_lemma_a8_says(d: int, share: float, load: float, seed: int, heavy: bool) -> None:
    """The mean error over 200 draws of the hash; six standard errors for chance."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(d) * (np.exp(rng.standard_normal(d)) if heavy else 1) + 1e-3
    n = max(1, int(share * d))
    m = max(1, round(n / load))
    index = np.sort(np.argsort(-np.abs(theta), kind="stable")[:n])
    energy, top = theta**2, np.abs(theta[index])
    errors = []
    for draw in range(200):
        table = np.full(m, -1)
        table[hash_slots(index, *hash_numbers(seed + 1000 * draw + 1), m)] = index  # NumPy keeps the last
        errors.append(energy.sum() - energy[table[table >= 0]].sum())
    tau = top.max() / top.min()
    bound = (1 - m * (1 - ((m - 1) / m) ** n) / (d * tau**2)) * energy.sum()
    assert np.mean(errors) <= bound + 6 * np.std(errors) / np.sqrt(200) + 1e-9 * energy.sum()


def test_the_codec_contracts_as_lemma_a8_says() -> None:
    grad, codec = normal(400), traced("dragonn", ratio=0.1)  # sampled as a whole: exactly the 40 largest survive
    x = grad.numpy().astype(np.float64)
    errors = [np.square(x - sent(codec, grad, step=step)).sum() for step in range(300)]
    top = np.sort(np.abs(x))[-40:]
    epsilon = 40 * (1 - (39 / 40) ** 40) / (400 * (top.max() / top.min()) ** 2)
    assert np.mean(errors) <= (1 - epsilon) * np.square(x).sum()
    assert abs(np.mean(errors) - (np.square(x).sum() - 0.64 * np.square(top).sum())) < 0.05 * np.square(x).sum()


@pytest.mark.parametrize(
    ("size", "ratio", "expected"), [(10_000, 0.01, 800), (10**8, 0.0001, 80_000), (10**8, 0.01, 800)]
)
def test_a_sample_has_8_above_the_threshold(size: int, ratio: float, expected: int) -> None:
    (sampled,) = [node for node in traced("dragonn", ratio=ratio).program.encode_nodes() if node.op == "sample"]
    assert evaluate_static(sampled.inputs[1], size) == expected


def test_the_kept_fraction_warms_up() -> None:
    grad, codec = normal(8000), traced("dragonn", ratio=0.01, warmup=40)
    kept = [np.count_nonzero(sent(codec, grad, step=step)) for step in (0, 10, 20, 40)]
    for found, ratio in zip(kept, (0.25, 0.0625, 0.015625, 0.01)):
        assert 0.25 * ratio * 8000 <= found <= ratio * 8000
