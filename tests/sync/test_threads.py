"""Several computation threads give the bits of one, and what ends one of them ends all ranks."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.core.errors import OptionError, PeerFailedError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.engine import default_threads
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import MAX_RANGE_ELEMENTS
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SHAPES = {"large": (300, 500), "matrix": (64, 80), "small": (40, 30), "other": (70, 30), "vector": (300,)}
STRATEGIES = ["allgather", "hierarchical", "ring", "scatter_reduce"]
METHODS = ["none", "onebit", "threelc", "topk", "int8shared", "terngrad", "thc", "powersgd", "lossless", "adacomp"]


def train(one: Synchronizer, steps: int) -> dict[str, Any]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + one.rank)
        grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        one.begin_step()
        one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
        one.commit()
    return {"means": grads, "residuals": one.residuals.total()}


@pytest.mark.parametrize(
    ("method", "strategy"),
    [(method, strategy) for method in METHODS for strategy in STRATEGIES] + [("topk", "sparse_reduce")],
)
def test_means_and_residuals_are_the_same_to_the_bit(method: str, strategy: str) -> None:
    plan = Plan(method, strategy=strategy, partitions=3, min_elements=100)
    found = []
    for threads in (1, 4):
        with ranks(3, plan, threads=threads) as group:
            found.append(group.each(partial(train, steps=3)))
    for alone, together in zip(*found, strict=True):
        for name in SHAPES:
            assert torch.equal(alone["means"][name], together["means"][name])
            np.testing.assert_array_equal(alone["residuals"].get(name), together["residuals"].get(name))


class Failing(type(gw.make("topk"))):  # type: ignore[misc]
    """A compressor that raises on rank 1 in step 2."""

    cause: BaseException = ValueError("a bug in a compressor")

    def compiled(self) -> None:
        """None: each tensor is encoded by itself."""

    def encode(self, grad: torch.Tensor, ctx: gw.Context, *arguments: Any, **options: Any) -> Any:
        if (ctx.rank, ctx.step) == (1, 2):
            raise self.cause
        return super().encode(grad, ctx, *arguments, **options)


@pytest.mark.parametrize("cause", [ValueError("a bug in a compressor"), SystemExit("a bug in a compressor")])
def test_a_compressor_that_raises_is_one_typed_error_on_every_rank(
    cause: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "cause", cause)
    tensors = {"w": TensorSpec((6000,))}

    def take_steps(one: Synchronizer) -> None:
        for _ in range(3):
            one.begin_step()
            one.submit([GradientSlice("w", torch.randn(6000))])
            one.commit()

    def run(one: Synchronizer) -> SyncError:
        with pytest.raises(SyncError) as caught:
            take_steps(one)
        return caught.value

    plan = Plan({"w": Failing()}, strategy="allgather", partitions=1)
    with ranks(3, plan, tensors=tensors, dump_dir=tmp_path, stall_timeout=timedelta(seconds=600)) as group:
        errors = group.each(run)
    assert errors[1].__cause__ is cause
    for rank, error in enumerate(errors):
        assert "a bug in a compressor" in str(error)
        assert type(error) is (SyncError if rank == 1 else PeerFailedError)


def test_the_usual_number_is_the_share_of_the_cores_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    for ranks_here, expected in (("1", 15), ("4", 3), ("8", 1), ("16", 1), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
        assert default_threads() == expected


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(OptionError, match="threads must be at least 1, but it is 0"):
        gw.SyncOptions(threads=0)


def test_large_tensors_are_cut_for_several_threads() -> None:
    plan = Plan("onebit")
    for numel, expected in ((MAX_RANGE_ELEMENTS, 1), (MAX_RANGE_ELEMENTS + 1, 2), (4 * MAX_RANGE_ELEMENTS, 4)):
        assert plan.entry("w", TensorSpec((numel, 1))).num_ranges(numel, shares=4) == 4 * expected
        assert Plan("onebit", partitions=3).entry("w", TensorSpec((numel, 1))).num_ranges(numel, shares=4) == 3
    assert Plan("onebit", partitions=1).entry("w", TensorSpec((1 << 30, 1))).partitions == 1
