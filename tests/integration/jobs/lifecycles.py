"""Jobs on lifecycles: attached a thousand times, forked in the middle of a step, two in one process."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import gradwire as gw
from gradwire.core.spec import TensorSpec
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

PLANS = [
    gw.Plan(method, strategy=strategy, min_elements=0)
    for method, strategy in [
        *(("none", "ring"), ("onebit", "scatter_reduce"), ("threelc", "allgather"), ("powersgd", "ring")),
        *(("lossless", "hierarchical"), ("int8shared", "scatter_reduce"), ("topk:ratio=0.1", "allgather")),
    ]
]


# -- attached again and again --------------------------------------------------------------------------------------


def attach_again_and_again(rank: int, world_size: int, times: int) -> dict[str, list[int]]:
    """Attach, take a step and detach, with all plans in turn; what the process has then, early and in the end."""
    ddp, source = wrap(model()), batches(rank, world_size)
    settled = 2 * len(PLANS)
    found: dict[str, list[int]] = {"threads": [], "descriptors": [], "keys": [], "bytes": []}
    for turn in range(settled + times):
        handle = gw.attach(ddp, PLANS[turn % len(PLANS)])
        ddp.zero_grad()
        loss_of(ddp, next(source)).backward()
        handle.detach()
        del handle
        if turn + 1 in (settled, settled + times // 2, settled + times):
            gc.collect()
            dist.barrier()  # all ranks have detached, and read what was in the store for them
            for name, count in _vitals().items():
                found[name].append(count)
            dist.barrier()  # rank 0 has the store
    return found


def _vitals() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": _get_default_store().num_keys(),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


# -- forks ---------------------------------------------------------------------------------------------------------


def fork_in_a_step(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank in turn forks while its step waits for the other ranks; what the child is told, and the means."""
    plan = gw.Plan("none", min_elements=0)
    found: dict[str, Any] = {"said": {}, "means": []}
    with closing(Synchronizer(None, plan, tensors={"w": TensorSpec((5000,))})) as one:
        for forking in range(world_size):
            grad = torch.full((5000,), float(rank + forking))
            one.begin_step()
            if rank == forking:
                one.submit([GradientSlice("w", grad)])
                found["said"] = _fork(one)
            dist.barrier()  # all other ranks submit only now
            if rank != forking:
                one.submit([GradientSlice("w", grad)])
            one.wait()
            one.commit()
            found["means"].append(sorted(set(grad.tolist())))
    return found


def _fork(one: Synchronizer) -> dict[str, str]:
    """Fork, and return what the child was told by each call."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        _be_a_child(one, theirs)
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(60) else {"wait": "nothing within 60 s"}
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_a_child(one: Synchronizer, line: Connection) -> None:
    """Try all that a rank does with a step, and end as an interpreter does."""
    calls: dict[str, Callable[[], object]] = {
        "wait": one.wait,
        "begin_step": one.begin_step,
        "commit": one.commit,
        "submit": lambda: one.submit([GradientSlice("w", torch.ones(5000))]),
    }
    try:
        said = {name: _said(call) for name, call in calls.items()}
        one.close()
        atexit._run_exitfuncs()
        line.send(said)
    finally:
        os._exit(0)


def _said(call: Callable[[], object]) -> str:
    try:
        call()
        return "nothing"
    except gw.errors.SyncError as error:
        return str(error)


# -- two in one process --------------------------------------------------------------------------------------------


def one_of_two_fails(rank: int, world_size: int) -> dict[str, Any]:
    """Two modules, each on a process group of its own. In step 2, rank 1's backward of the first one raises."""
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    failing, going_on = (wrap(model(), process_group=group) for group in groups)
    handles = [gw.attach(ddp, gw.Plan("threelc", min_elements=0), check_every=1) for ddp in (failing, going_on)]
    optimizer, source = torch.optim.SGD(going_on.parameters(), 0.1), batches(rank, world_size)
    error: Exception | None = None
    for step in range(5):
        batch = next(source)
        if step == 2 and rank == 1:
            failing.module[0].weight.register_hook(lambda _: 1 / 0)
        if error is None:
            try:
                loss_of(failing, batch).backward()
                failing.zero_grad()
            except Exception as raised:
                error = raised
                handles[0].detach()
        optimizer.zero_grad()
        loss_of(going_on, batch).backward()
        optimizer.step()
    steps = handles[1].report().steps
    handles[1].detach()
    return {
        "error": [type(error).__name__, getattr(error, "rank", None)],
        "step": step,
        "steps": steps,
        "weights": fingerprint(going_on.parameters()),
    }
