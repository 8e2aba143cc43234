"""Deep gradient compression: a sampled threshold, and a second selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.spec import TensorSpec
from gradwire.lang.operators.arithmetic import evaluate_static
from tests.compressors.harness import list_bytes, sent, traced
from tests.contracts.compressor_cases import context, heavy_tailed, normal


@pytest.mark.parametrize(("ratio", "sample"), [(0.01, 0.05), (0.1, 0.01), (0.001, 0.01)])
@pytest.mark.parametrize("family", [normal, heavy_tailed])
def test_what_is_kept_are_the_largest_and_at_most_as_many_as_the_ratio_says(family, ratio, sample) -> None:
    grad = family(20_000)
    found = sent(traced("dgc", ratio=ratio, sample=sample), grad)
    kept, size = np.flatnonzero(found), np.abs(grad.numpy())
    assert 1 <= kept.size <= ratio * 20_000
    assert np.array_equal(found[kept], grad.numpy()[kept])
    assert size[kept].min() >= np.sort(size)[-kept.size]


def test_with_all_elements_sampled_it_is_exact_selection() -> None:
    grad = torch.from_numpy(np.random.default_rng(0).permutation(1000).astype(np.float32) - np.float32(500.25))
    found = sent(traced("dgc", ratio=0.02, sample=1.0), grad)
    x = grad.numpy()
    assert np.array_equal(found, np.where(np.abs(x) >= np.sort(np.abs(x))[-20], x, 0))


def test_too_low_a_threshold_is_made_good_by_the_second_selection() -> None:
    """Two of ten thousand elements are not zero, so a sample of a fiftieth rarely has one: its threshold is 0."""
    grad = torch.zeros(10_000).index_fill(0, torch.tensor([17, 9000]), 3.0)
    codec = traced("dgc", ratio=0.01, sample=0.02)
    found = sent(codec, grad)
    assert np.array_equal(found, grad.numpy())
    assert codec.encode(grad, context(grad)).body.nbytes == list_bytes(10_000, 100)


@pytest.mark.parametrize(
    ("step", "kept"), [(1, 0.25), (10, 0.25), (11, 0.0625), (30, 0.015625), (31, 0.01), (9999, 0.01)]
)
def test_the_kept_fraction_falls_to_the_ratio(step: int, kept: float) -> None:
    grad = normal(8_000)
    codec = traced("dgc", ratio=0.01, sample=1.0, warmup=40)
    payload = codec.encode(grad, context(grad, step=step))
    count = int(np.ceil(kept * 8_000))
    assert payload.body.nbytes == list_bytes(8_000, count) <= codec.max_encoded_bytes(TensorSpec.of(grad))
    found = codec.decode(payload, context(grad, step=step)).numpy()
    size = np.abs(grad.numpy())
    assert np.array_equal(found, np.where(size >= np.sort(size)[-count], grad.numpy(), 0))


def test_small_tensors_are_sampled_as_a_whole() -> None:
    """A sample of a hundredth of 500 elements has five, whose largest is far from the largest element."""
    grad = normal(500)
    found = sent(traced("dgc"), grad)
    assert np.flatnonzero(found).tolist() == [int(np.abs(grad.numpy()).argmax())]


@pytest.mark.parametrize("name", ["dgc", "graddrop"])
@pytest.mark.parametrize(
    ("size", "ratio", "sample", "expected"),
    [(10_000, 0.01, 0.1, 1000), (10_000, 0.01, 0.001, 200), (10_000_000, 0.01, 0.1, 10_000), (10**9, 0.3, 1.0, 334)],
)
def test_a_sample_is_large_enough_and_does_not_grow_without_bound(name, size, ratio, sample, expected) -> None:
    """2 to 100 elements of the sample are expected above the threshold."""
    nodes = traced(name, ratio=ratio, sample=sample).program.encode_nodes()
    (sampled,) = [node for node in nodes if node.op == "sample"]
    assert evaluate_static(sampled.inputs[1], size) == expected
