"""What `auto` costs while it leaves gradients to DDP's own all-reduce: steps with it and without it, in turns.

Ranks on the loopback train three replicas of one model in turns: plain DDP, DDP under `auto`, which has settled on
DDP's own all-reduce, and plain DDP once more. The second plain one shows how far DDP differs from itself. Where a
replica lies in memory and what ran before it matter, too: in each of three jobs another one is made first, and every
other turn is in the opposite order. A run has the mean of its steps: `auto` does more in some, which a median would not
see.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from benchmarks.intervals import interval
from gradwire.bench.workload import iterate
from gradwire.bench.workloads import make_workload
from gradwire.tuning.auto import Autopilot
from gradwire.tuning.candidates import NATIVE
from gradwire.tuning.trials import Script

METHODS = ("ddp", "auto", "ddp again")
RUNS = 2
"""Turns of each method in a job, after one that warms up."""
WARM_UP_STEPS = 12


def settle(pilot: Autopilot) -> None:
    """Skip calibration and trials: settle on DDP's own all-reduce, and watch as after any decision."""

    def script() -> Script[None]:
        yield from pilot.switch(NATIVE)
        timing = yield from pilot._trials.time(warm_up=1)
        while True:
            yield from pilot._watch(timing, strikes=1 << 30, rival=float("inf"))

    pilot._script = script()


def rank_main(
    rank: int, ranks: int, methods: Sequence[str], workload: str, steps: int, folder: str, line: Connection
) -> None:
    """One rank: sends the mean seconds of a step, for each run of each method."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    task = make_workload(workload)
    replicas = {}
    for method in methods:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(task.model())
        optimizer = task.optimizer(ddp.module)
        if method == "auto":
            handle = gw.attach(ddp, "auto", optimizer=optimizer)
            assert handle.autopilot is not None
            settle(handle.autopilot)
        replicas[method] = ddp, optimizer
    batches = list(islice(iterate(task, 0, rank, ranks), 16))
    found: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(1 + RUNS):
        for method in methods[:: (-1) ** turn]:
            ddp, optimizer = replicas[method]
            times = []
            for step in range(steps if turn else WARM_UP_STEPS):
                inputs, targets = batches[step % len(batches)]
                begun = time.perf_counter()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                times.append(time.perf_counter() - begun)
            if turn:
                found[method].append(statistics.fmean(times))
    line.send(found)
    handle.detach()
    dist.destroy_process_group()


def run(
    workload: Annotated[str, typer.Option(help="Workload of the benchmarks.")] = "blocks",
    ranks: Annotated[int, typer.Option(help="Ranks on the loopback.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 64,
) -> Iterator[dict[str, Any]]:
    """All runs of all methods."""
    for job in range(len(METHODS)):
        slowest = run_job([*METHODS[job:], *METHODS[:job]], workload, ranks, steps)
        for method in METHODS:
            where = {"method": method, "workload": workload, "ranks": ranks, "rate": "none", "source": "measured"}
            for index, seconds in enumerate(slowest[method]):
                yield {**where, "run": RUNS * job + index, "metric": "step", "value": seconds, "unit": "s"}


def run_job(methods: Sequence[str], workload: str, ranks: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step on the slowest rank, by method and run, if the replicas are made in this order."""
    context = multiprocessing.get_context("forkserver")
    lines, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            line, theirs = context.Pipe()
            arguments = (rank, ranks, methods, workload, steps, folder, theirs)
            processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
            processes[-1].start()
            lines.append(line)
        found = [line.recv() for line in lines]
        for process in processes:
            process.join(60)
    return {method: [max(each[method][index] for each in found) for index in range(RUNS)] for method in methods}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the runs, and each method's speed against plain DDP, run by run with a 95 % interval."""
    steps = {method: [row["value"] for row in rows if row["method"] == method] for method in METHODS}
    lines = []
    for method, times in steps.items():
        mean, half = interval([ddp / each for ddp, each in zip(steps["ddp"], times, strict=True)])
        lines.append(
            f"{method:10} {1000 * statistics.median(times):7.2f} ms a step ({1000 * min(times):.2f} to "
            f"{1000 * max(times):.2f}), {mean:.3f} ± {half:.3f} of DDP's speed"
        )
    return "\n".join(lines)
