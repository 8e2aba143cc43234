"""Submissions: small dense tensors of several share a message, and the order of priorities."""

from __future__ import annotations

import pytest
import torch

from gradwire.core.spec import TensorSpec
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SHAPES = {"a.bias": (10,), "a.weight": (200, 100), "b.bias": (7,), "c.bias": (5,)}


def gradient(rank: int, name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(31 * rank + len(name) + ord(name[0])))


def run(one: Synchronizer, hold: bool) -> tuple[dict[str, torch.Tensor], list[bool], int]:
    """Submit tensor by tensor. Return means, which futures were pending before the last one, and messages sent."""
    sent = []
    one.events.listen(lambda event: sent.append(event) if event.kind == "send" else None)
    grads = {name: gradient(one.rank, name) for name in SHAPES}
    names = list(SHAPES)
    one.register({name: TensorSpec(shape) for name, shape in SHAPES.items()})
    one.begin_step()
    futures = [one.submit([GradientSlice(name, grads[name])], hold=hold) for name in names[:-1]]
    futures[1].wait()  # the large one does not wait for the small ones
    waiting = [not future.done() for future in futures]
    futures.append(one.submit([GradientSlice(names[-1], grads[names[-1]])]))
    for future in futures:
        future.wait()
    one.commit()
    return grads, waiting, len(sent)


def test_held_tensors_travel_with_the_next_submission_that_does_not_hold() -> None:
    found = {}
    for hold in (False, True):
        with ranks(2, "none") as group:
            found[hold] = group.each(lambda one, hold=hold: run(one, hold))
    for grads, _, _ in found[True]:
        for name, grad in grads.items():
            mean = (gradient(0, name) + gradient(1, name)) / 2
            assert torch.allclose(grad, mean, atol=1e-6), name
    assert all(waiting == [True, False, True] for _, waiting, _ in found[True])
    # Two ranks: the small tensors share one message in each direction instead of three.
    assert sum(messages for _, _, messages in found[True]) == sum(messages for _, _, messages in found[False]) - 2 * 2


def test_wait_sends_what_is_held() -> None:
    def hold_and_wait(one: Synchronizer) -> torch.Tensor:
        grad = gradient(one.rank, "a.bias")
        one.begin_step()
        future = one.submit([GradientSlice("a.bias", grad)], hold=True)
        assert not future.done()
        one.wait()
        assert future.done()
        return grad

    with ranks(3, "none") as group:
        means = group.each(hold_and_wait)
    assert torch.allclose(means[0], sum(gradient(rank, "a.bias") for rank in range(3)) / 3, atol=1e-6)
    assert all(torch.equal(means[0], mean) for mean in means)


@pytest.mark.parametrize(("order", "earlier", "later"), [("backward", "w8", "w0"), ("forward", "w0", "w8")])
def test_which_tensor_is_encoded_first(order: str, earlier: str, later: str) -> None:
    names = [f"w{index}" for index in range(10)]

    def run(one: Synchronizer) -> list[str]:
        one.register({name: TensorSpec((512, 512)) for name in names})
        one.begin_step()
        assert one._engine is not None
        with one._engine._condition:  # its thread takes nothing before all are submitted, as backward makes them
            one.submit([GradientSlice(name, torch.ones(512, 512)) for name in reversed(names)])
        one.wait()
        return [event.tensor for event in one.events.latest() if event.kind == "encode"]

    with ranks(2, "onebit", order=order) as group:
        for encoded in group.each(run):
            assert encoded.index(earlier) < encoded.index(later)
