"""Submissions: the order of priorities, and what their futures say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.launcher import Launcher
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


@pytest.mark.parametrize("method", ["none", "onebit"])
def test_parameters_can_be_averaged_in_place(method: str) -> None:
    """They require gradients, and are written on a thread of the engine."""

    def run(one: Synchronizer) -> list[torch.Tensor]:
        parameters = {name: torch.nn.Parameter(gradient(one.rank, name)) for name in SHAPES}
        one.begin_step()
        one.submit([GradientSlice(*each) for each in parameters.items()]).wait()
        one.wait()
        one.commit()
        return [parameter.detach() for parameter in parameters.values()]

    with ranks(2, method) as group:
        one, other = group.each(run)
    assert all(map(torch.equal, one, other))
    if method == "none":
        mean = torch.stack([gradient(rank, "a.bias") for rank in range(2)]).mean(0)
        torch.testing.assert_close(one[0], mean)


def test_a_mean_that_cannot_be_copied_back_fails_the_future() -> None:
    def run(one: Synchronizer) -> list[Exception]:
        frozen = [torch.ones(1).expand(size) for (size,) in ((10,), (7,))]  # their elements share memory
        one.begin_step()
        found = []
        future = one.submit(
            [GradientSlice(name, each) for name, each in zip(("a.bias", "b.bias"), frozen, strict=True)]
        )
        for wait in (future.wait, one.wait):
            with pytest.raises(Exception, match="could not be copied to where the gradients are") as caught:
                wait()
            found.append(caught.value)
        return found

    with ranks(2, "none") as group:
        for error in itertools.chain(*group.each(run)):
            assert "single memory location" in str(error)


def test_a_mean_that_the_caller_cannot_copy_back_fails_the_synchronizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs have ended before `submit` returns, so that the copy is made on the caller's thread."""
    launch = Launcher._launch

    def launch_and_wait(self: Launcher, *arguments: Any) -> None:
        launch(self, *arguments)
        self._engine.wait_idle()

    def run(one: Synchronizer) -> None:
        frozen = torch.ones(1).expand(SHAPES["a.bias"])
        one.begin_step()
        for call in (lambda: one.submit([GradientSlice("a.bias", frozen)]), one.wait, one.commit):
            with pytest.raises(SyncError, match="could not be copied to where the gradients are"):
                call()

    monkeypatch.setattr(Launcher, "_launch", launch_and_wait)
    with ranks(2, "none") as group:
        group.each(run)
