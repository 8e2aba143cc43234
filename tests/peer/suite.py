"""The tests of the installed torch that concern DDP, as test cases whose ranks are forks of this process."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import re
from types import ModuleType
from typing import Any

from tests.peer import on_cpu

INTERNAL = "torch.testing._internal"


def load(world_size: int, limit_seconds: float) -> dict[str, type]:
    """Import torch's tests, which read their world size from the environment; return the class of each test by name.

    Args:
        world_size: Ranks of a DDP module. Tests with distributed autograd have two more processes.
        limit_seconds: Time after which torch ends a test, with the stacks of its ranks.
    """
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(limit_seconds)),
    }
    for slow in ("gradwire.ddp.attach", "torch._dynamo"):  # imported once, not in each fork
        importlib.import_module(slow)
    on_cpu.install()
    classes = [_ddp(importlib.import_module(f"{INTERNAL}.distributed.distributed_test"))]
    autograd = importlib.import_module(f"{INTERNAL}.distributed.ddp_under_dist_autograd_test")
    autograd.NUM_TRAINERS, autograd.WORLD_SIZE = world_size, world_size + 2
    autograd.TRAINER_RANKS = list(range(world_size))
    autograd.REMOTE_WORKER_RANK, autograd.MASTER_RANK = world_size, world_size + 1
    classes += _under_distributed_autograd(autograd)
    return {
        name: each
        for each in classes
        for name in sorted(dir(each))
        if name.startswith("test_") and _is_about_ddp(each, name)
    }


class _Forked:
    """Starts the ranks of a test. torch would start them as new processes, which import torch again."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)


def _ddp(tests: ModuleType) -> type:
    class Ddp(_Forked, tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            with on_cpu.CudaIsCpu():
                super()._run(*args, **kwargs)

    return Ddp


def _under_distributed_autograd(tests: ModuleType) -> list[type]:
    common = importlib.import_module(f"{INTERNAL}.common_distributed")
    rpc = importlib.import_module(f"{INTERNAL}.distributed.rpc.tensorpipe_rpc_agent_test_fixture")
    bases = _Forked, rpc.TensorPipeRpcAgentTestFixture, common.MultiProcessTestCase
    return [
        type(each.__name__, (each, *bases), {}) for each in (tests.DdpUnderDistAutogradTest, tests.DdpComparisonTest)
    ]


def _is_about_ddp(cls: type, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether the source of a test, or of a helper that it calls, wraps a module in DDP."""
    source = inspect.getsource(inspect.unwrap(getattr(cls, name)))
    if re.search(r"DistributedDataParallel\(|DdpMode\.(IN|OUT)SIDE", source):
        return True
    helpers = {each for each in re.findall(r"self\.(_\w+)\(", source) if hasattr(cls, each)} - seen
    return any(_is_about_ddp(cls, each, seen | helpers) for each in helpers)
