"""gradwire's PowerSGD learns like torch's hook of the same rank, and like DDP alone."""

from __future__ import annotations

import pytest

from tests.integration.launch import launch


@pytest.mark.ci
def test_it_learns_like_torchs_hook_of_the_same_rank() -> None:
    found = [outcome.result for outcome in launch("powersgd.losses", 2, steps=150, low=2)]
    for method, (_, parameters) in found[0].items():
        assert parameters == found[1][method][1], f"{method}: replicas differ"
    loss = {method: value for method, (value, _) in found[0].items()}
    assert loss["dense"] < 1  # from 2.3
    assert loss["gradwire"] < 1.05 * loss["torch"], loss
    assert loss["gradwire"] < 1.1 * loss["dense"], loss
