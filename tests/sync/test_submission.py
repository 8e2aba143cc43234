"""Submissions: the order of priorities."""

from __future__ import annotations

import pytest
import torch

from gradwire.core.spec import TensorSpec
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SHAPES = {"a.bias": (10,), "a.weight": (200, 100), "b.bias": (7,), "c.bias": (5,)}


def gradient(rank: int, name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(31 * rank + len(name) + ord(name[0])))


@pytest.mark.parametrize(("order", "earlier", "later"), [("backward", "w8", "w0"), ("forward", "w0", "w8")])
def test_which_tensor_is_encoded_first(order: str, earlier: str, later: str) -> None:
    names = [f"w{index}" for index in range(10)]

    def run(one: Synchronizer) -> list[str]:
        one.register({name: TensorSpec((512, 512)) for name in names})
        one.begin_step()
        assert one._engine is not None
        with one._engine._work:  # its thread takes nothing before all are submitted, as backward makes them
            one.submit([GradientSlice(name, torch.ones(512, 512)) for name in reversed(names)])
        one.wait()
        return [event.tensor for event in one.events.latest() if event.kind == "encode"]

    with ranks(2, "onebit", order=order) as group:
        for encoded in group.each(run):
            assert encoded.index(earlier) < encoded.index(later)
