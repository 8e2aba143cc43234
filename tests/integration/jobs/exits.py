"""Two ranks, each an interpreter of its own: rank 1 ends, in one of several ways, before rank 0 has decoded."""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.events import Event

STEPS = 3
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}


def step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(4, 256)).square().mean().backward()
    optimizer.step()


def leave(how: str, ddp: DistributedDataParallel) -> None:
    what, _, where = how.partition(" ")
    if where:  # at the last gradient of a backward: others are under way
        ddp.module[0].weight.register_hook(lambda _: fail(what))
        step(ddp, torch.optim.SGD(ddp.parameters(), 0.1))
    fail(what)


def fail(how: str) -> None:
    if how in SIGNALS:
        signal.raise_signal(SIGNALS[how])
    raise RuntimeError("a bug")


def stay(handle: gw.Handle, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Take the last step, whose end waits until rank 1 is gone, and one too many; say which one failed, and how."""
    begun, decodes = time.monotonic(), []

    def on_event(event: Event) -> None:
        if event.kind == "decode":
            decodes.append(event)
            if len(decodes) == len(list(ddp.parameters())):  # this rank has sent all that belongs to the step
                assert sys.stdin.readline()  # from the test

    handle.synchronizer.events.listen(on_event)
    try:
        step(ddp, optimizer)
        handle.state_dict()
        begun = time.monotonic()
        step(ddp, optimizer)
    except gw.errors.SyncError as error:
        found = {"type": type(error).__name__, "rank": error.rank, "message": str(error)}
        print(json.dumps({**found, "step": handle.synchronizer.step, "seconds": time.monotonic() - begun}))


def main(how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(2)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    # By all-gather a rank has sent all before it decodes, so the other one may leave then.
    handle = gw.attach(
        ddp,
        gw.Plan("int8", strategy="allgather"),
        optimizer=optimizer,
        options=gw.SyncOptions(stall_timeout=timedelta(seconds=300)),
    )
    for _ in range(STEPS - 1):
        step(ddp, optimizer)
    if dist.get_rank() == 0:
        stay(handle, ddp, optimizer)
    else:
        step(ddp, optimizer)
        leave(how, ddp)


if __name__ == "__main__":
    main(sys.argv[1])
