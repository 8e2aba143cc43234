"""What tensors save in a fusion group."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.planner.costs import SHARED
from gradwire.tuning.measure_codec import measure_codec


@pytest.mark.parametrize(("method", "is_shared"), [("onebit", True), ("powersgd", False), ("none", False)])
def test_compressors_that_compile_a_call_for_a_group_share_it(method: str, is_shared: bool) -> None:
    """A Python call takes many times as long as the work on 1,024 elements."""
    costs = measure_codec(gw.make(method), (1 << 10, 1 << 12), 0.01)
    for name in SHARED:
        cost = getattr(costs, name.removeprefix("shared_"))
        assert (getattr(costs, name) > 0) == is_shared
        assert getattr(costs.fused(1000), name.removeprefix("shared_"))(1 << 10) <= cost(1 << 10)
