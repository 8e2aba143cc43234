"""Handles are attached a thousand times, forked in the middle of a step, and two live in one process."""

from __future__ import annotations

import pytest

from tests.integration.jobs.lifecycles import PLANS
from tests.integration.launch import launch, results

MAX_BYTES_EACH = 16 << 10  # a time; a thread, a residual or a buffer that is left takes more


@pytest.mark.parametrize(
    "times",
    [
        4 * len(PLANS),
        pytest.param(200, marks=[pytest.mark.ci, pytest.mark.timeout(600)]),
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_attaching_again_and_again_leaves_nothing(times: int) -> None:
    for rank, found in enumerate(results(launch("lifecycles.attach_again_and_again", 2, timeout=3600, times=times))):
        for name in ("threads", "descriptors", "keys"):
            assert len(set(found[name])) == 1, (rank, name, found[name])
        _, middle, end = found["bytes"]
        assert times < 200 or end - middle < MAX_BYTES_EACH * times / 2, (rank, found["bytes"])


def test_a_forked_child_is_refused_and_its_end_does_not_touch_the_step() -> None:
    """Of its parent, which goes on with all its connections."""
    for found in results(launch("lifecycles.fork_in_a_step", 2)):
        assert all("use gradwire in the parent alone" in said for said in found["said"].values())
        assert list(found["said"]) == ["wait", "begin_step", "commit", "submit"]
        assert found["means"] == [[0.5], [1.5]]


def test_a_module_that_fails_takes_no_other_with_it() -> None:
    found = results(launch("lifecycles.one_of_two_fails", 2))
    assert [rank["error"] for rank in found] == [["PeerLostError", 1], ["ZeroDivisionError", None]]
    assert [rank["steps"] for rank in found] == [5, 5]
    assert found[0]["weights"] == found[1]["weights"]
