"""Warm-up: after it, no step of a plan compiles a kernel or loads one from the cache."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch
from numba.core.dispatcher import Dispatcher

import gradwire as gw
from gradwire.compressors.base import registry
from gradwire.core.spec import ELEMENT_TYPES, ElementRange, TensorSpec
from gradwire.kernels import cpu
from gradwire.sync.plan import Plan
from gradwire.sync.strategies import peer_strategies
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ANY, ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions

METHODS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in registry.names()),
    ("int8shared", {}),
    ("int8", {"stochastic": False}),
    ("threelc", {"zero_run": False}),
]
SHAPE = (50, 100)


def aux(dtype: torch.dtype) -> Any:
    """Return a function for `aux` whose tensors are all ones."""

    def slices(name: str, elements: ElementRange) -> dict[str, torch.Tensor]:
        ones = torch.ones(elements.count, dtype=dtype)
        return {"parameter": ones, "first": ones, "numbers": torch.ones(8), "loss_scale": torch.tensor(1.0)}

    return slices


def kernels() -> dict[str, Dispatcher]:
    """Return all functions that Numba compiles on the first call with new types, by name."""
    modules = [import_module(f"{cpu.__name__}.{found.name}") for found in pkgutil.iter_modules(cpu.__path__)]
    return {
        f"{value.__module__}.{value.__name__}": value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    }


def compiled() -> set[tuple[str, Any]]:
    return {(name, signature) for name, kernel in kernels().items() for signature in kernel.signatures}


@pytest.fixture
def fresh() -> None:
    """Unload all compiled kernels, as in a new process. They are loaded again from the cache on disk."""
    for kernel in kernels().values():
        kernel._reset_overloads()
    assert not compiled()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=() if dtype == torch.float32 else pytest.mark.ci) for dtype in ELEMENT_TYPES],
    ids=str,
)
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_after_the_warm_up_a_step_compiles_nothing(method: str, options: Any, dtype: torch.dtype) -> None:
    def step(one: Synchronizer) -> None:
        one.register({"w": TensorSpec(SHAPE, dtype)})
        before = compiled()
        assert before
        for _ in range(2):
            one.begin_step()
            one.submit(
                [GradientSlice("w", torch.randn(SHAPE, generator=torch.Generator().manual_seed(one.rank)).to(dtype))]
            )
            one.commit()
        assert compiled() == before

    names = peer_strategies() if gw.make(method, **options).sparse else ANY
    for strategy in names:
        with ranks(3, Plan({"w": gw.make(method, **options)}, strategy=strategy), aux=aux(dtype)) as group:
            group.each(step)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latecomers_and_16_bit_accumulators_compile_nothing_either(dtype: torch.dtype) -> None:
    """Kernels that only some steps need, at a width that only some groups need."""

    def step(one: Synchronizer) -> None:
        one.register({"w": TensorSpec(SHAPE, dtype)})
        before = compiled()
        for _ in range(2):
            one.begin_step()
            one.submit(
                [GradientSlice("w", torch.randn(SHAPE, generator=torch.Generator().manual_seed(one.rank)).to(dtype))]
            )
            one.commit()
        assert one.report().total.late_elements == (2 * 5000 if one.rank == 1 else 0)
        assert compiled() == before

    codec = gw.make("thc", granularity=120)
    aggregator = LocalAggregator(lambda round, stream, packet, rank: stream == 1 and rank == 1)
    server = LocalOptions("local:1", fraction=0.6, aggregator=aggregator)
    with ranks(3, Plan({"w": codec}, strategy="server"), server=server) as group:
        group.each(step)
