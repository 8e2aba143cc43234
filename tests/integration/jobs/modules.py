"""Jobs on DDP modules out of the ordinary: copied, dropped, frozen in part, moved to another group, and the like."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from tests.integration.jobs.training import batches, loss_of, model, wrap


def of_two(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All that two ranks can show, in one launch."""
    jobs = (sparse, frozen, ignored_root, copies, dropped, another_group)
    found = {job.__name__: job(rank, world_size) for job in jobs}
    found["distributed_autograd"] = distributed_autograd(rank, world_size, folder)
    return found | {"strayed": strayed(rank, world_size)}  # at the end: Gloo's ranks are out of step after an error


def deviation(left: nn.Module, right: nn.Module) -> float:
    """The largest difference between the gradients of two modules; infinite where only one has them."""
    largest = 0.0
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        if (one.grad is None) != (other.grad is None):
            return float("inf")
        if one.grad is not None and other.grad is not None:
            assert one.grad.layout == other.grad.layout
            largest = max(largest, (one.grad.to_dense() - other.grad.to_dense()).abs().max().item())
    return largest


def beside_plain(
    make: Callable[[], nn.Module],
    inputs: Callable[[int], torch.Tensor],
    steps: int = 4,
    each_step: Callable[[nn.Module, int], None] = lambda module, step: None,
    after_wrap: Callable[[nn.Module], None] = lambda module: None,
    attach: dict[str, Any] | None = None,
    **ddp_options: Any,
) -> dict[str, Any]:
    """Train an attached module by the side of a plain one; by step, how far their gradients are apart."""
    modules = [wrap(make(), **ddp_options) for _ in range(2)]
    for ddp in modules:
        after_wrap(ddp.module)
    handle = gw.attach(modules[1], **{"method": gw.Plan("none", min_elements=0)} | (attach or {}))
    found = []
    for step in range(steps):
        for ddp in modules:
            each_step(ddp.module, step)
            ddp.zero_grad()
            ddp(inputs(step)).square().mean().backward()
        found.append(deviation(*modules))
    names = list(handle.synchronizer.tensors)
    handle.detach()
    return {"deviations": found, "names": names}


AUTO = {"method": gw.Plan("auto", min_elements=0), "fidelity": "exact"}


# -- gradients and parameters --------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.head = nn.EmbeddingBag(40, 32, sparse=True), nn.Linear(32, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.words(words))
        return result


def sparse(rank: int, world_size: int) -> dict[str, Any]:
    """A sparse gradient together with dense ones."""

    def words(step: int) -> torch.Tensor:
        return torch.randint(0, 40, (6, 3), generator=torch.Generator().manual_seed(10 * step + rank))

    return {
        "plain": beside_plain(Bag, words),
        "views": beside_plain(Bag, words, gradient_as_bucket_view=True, static_graph=True),
        "auto": beside_plain(Bag, words, steps=3, attach=AUTO),
        "auto, nothing else": beside_plain(lambda: Bag().words, words, steps=12, attach=AUTO),
    }


def strayed(rank: int, world_size: int) -> str | None:
    """Rows of a sparse embedding that only one rank has changed."""
    ddp = wrap(Bag())
    handle = gw.attach(ddp, "none", check_every=1)
    if rank == 1:
        ddp.module.words.weight.data[7, 3] += 1
    try:
        ddp(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        return None
    except gw.errors.SyncError as error:
        return f"rank {error.rank}"
    finally:
        handle.detach()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(inputs))
        return result


def frozen(rank: int, world_size: int) -> dict[str, Any]:
    """The body is frozen after DDP was made and before attach, and trains again from the third step on."""

    def inputs(step: int) -> torch.Tensor:
        return torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))

    def each_step(module: nn.Module, step: int) -> None:
        module.body.requires_grad_(step >= 2)

    def after_wrap(module: nn.Module) -> None:
        module.body.requires_grad_(False)

    return {
        name: beside_plain(Branches, inputs, 4, each_step, after_wrap, options, find_unused_parameters=True)
        for name, options in {"none": {}, "lossless": {"method": "lossless"}, "auto": AUTO}.items()
    }


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale, self.body = nn.Parameter(torch.ones(8)), nn.Linear(32, 8)
        self._ddp_params_and_buffers_to_ignore = ["scale", "body.bias"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.body(inputs)


def ignored_root(rank: int, world_size: int) -> dict[str, Any]:
    """DDP ignores parameters by name, but not those of the root module."""

    def inputs(step: int) -> torch.Tensor:
        return torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))

    return beside_plain(Scaled, inputs)


def distributed_autograd(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Gradients that go into a context and never into .grad; how far from the mean, by method."""
    from torch.distributed import autograd, rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    found = {}
    for method, unused in itertools.product(("none", "lossless", "fp16"), (False, True)):
        ddp = wrap(nn.Linear(160, 160), find_unused_parameters=unused)
        handle = gw.attach(ddp, gw.Plan(method, min_elements=0))
        for _ in range(2):
            with autograd.context() as context:
                autograd.backward(context, [ddp(torch.full((1, 160), 2.0 + 2 * rank)).sum()])
                grad = autograd.get_gradients(context)[ddp.module.weight]
        found[f"{method} {unused}"] = (grad - 3.0).abs().max().item()
        handle.detach()
    rpc.shutdown()
    return found


# -- the module itself ---------------------------------------------------------------------------------------------


def copies(rank: int, world_size: int) -> dict[str, Any]:
    """A copy of an attached module averages as plain DDP does, then as it is attached itself."""
    ddp, native = wrap(model()), wrap(model())
    handle = gw.attach(ddp, gw.Plan("onebit", min_elements=0))
    batch = next(batches(rank, world_size))
    loss_of(ddp, batch).backward()
    twin = copy.deepcopy(ddp)
    found = {}
    for name in ("plain", "attached"):
        own = gw.attach(twin, "none") if name == "attached" else None
        for each in (twin, native):
            each.zero_grad()
            loss_of(each, batch).backward()
        found[name] = deviation(twin, native)
        if own is not None:
            own.detach()
    found["steps"] = handle.report().steps
    handle.detach()
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire")}


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


def dropped(rank: int, world_size: int) -> dict[str, Any]:
    """A module is dropped without `detach`, first by rank 0, while both go on with another one."""
    kept = wrap(model())
    handle = gw.attach(kept, gw.Plan("threelc", min_elements=0))
    source = batches(rank, world_size)
    loss_of(kept, next(source)).backward()
    gc.collect()
    threads, descriptors = _threads(), _open()
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    alive = weakref.ref(gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer).synchronizer)
    for _ in range(3):
        loss_of(ddp, next(source)).backward()
        optimizer.step()
    started = len(_threads() - threads)
    for turn in range(world_size):
        if turn == rank:
            del ddp
            gc.collect()
            for thread in _threads() - threads:
                thread.join(20)
            gc.collect()
            left = len(_threads() - threads), _open() - descriptors, alive() is not None
        loss_of(kept, next(source)).backward()  # all ranks, one of which has dropped the other module
    steps = handle.report().steps
    handle.detach()
    return {"started": started, "left": left, "steps": steps}


def another_group(rank: int, world_size: int) -> dict[str, Any]:
    """DDP gets another group, here of one rank: attached it must not average in silence over the old one."""
    groups = [dist.new_group([each]) for each in range(world_size)]
    ddp, alone = wrap(model()), model()
    batch = next(batches(rank, world_size))
    handle = gw.attach(ddp, "none")
    loss_of(ddp, batch).backward()
    ddp._update_process_group(groups[rank])
    try:
        loss_of(ddp, batch).backward()
        refused = None
    except gw.errors.SyncError as error:
        refused = str(error)
    handle.detach()
    ddp = wrap(model())
    gw.attach(ddp, "none").detach()
    ddp._update_process_group(groups[rank])
    loss_of(alone, batch).backward()
    found = {"refused": refused}
    for name in ("native", "attached again"):
        again = gw.attach(ddp, "none") if name == "attached again" else None
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
        found[name] = deviation(ddp.module, alone)
        if again is not None:
            again.detach()
    return found
