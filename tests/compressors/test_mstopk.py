"""MSTopk: few reads of the gradient find the k-th largest magnitude."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.bench.compressors import num_passes
from tests.compressors.harness import body, list_bytes, sent, traced
from tests.contracts.compressor_cases import heavy_tailed, normal

FAMILIES = {
    "normal": normal,
    "heavy tailed": heavy_tailed,
    "few values": lambda size: (3 * normal(size)).round(),
    "one large": lambda size: normal(size).index_fill(0, torch.tensor([size // 2]), 1e30),
    "constant": lambda size: torch.full((size,), -0.5),
    "tiny": lambda size: 1e-40 * normal(size),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 0.9])
def test_what_is_sent_is_what_top_k_sends(family: str, ratio: float) -> None:
    grad = FAMILIES[family](20_000)
    found, wanted = sent(traced("mstopk", ratio=ratio), grad), sent(compressors.make("topk", ratio=ratio), grad)
    assert np.array_equal(found, wanted)


def test_it_reads_the_gradient_four_times() -> None:
    assert num_passes(traced("mstopk")) == 4


def test_a_payload_has_as_many_as_the_ratio_says() -> None:
    assert body(traced("mstopk", ratio=0.05), normal(3000)).nbytes == list_bytes(3000, 150)
