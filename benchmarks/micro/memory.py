"""How much memory a rank needs above DDP's, and how long its steps take: 100 million parameters on the loopback.

For each method, new processes train twelve linear layers, 400 MB of gradients, with 32 samples per rank. The backward
pass is short, so that many buckets are in flight at once. Memory is the peak of the resident set from warmed-up steps
on, which includes code and kernels that DDP does not load. Then the same processes detach and time steps of DDP.

Each gradient has 34 MB, which malloc maps by itself. Smaller ones would go to its heap, where small long-lived objects
keep it from giving memory back: with layers of 17 MB, plain DDP differs by 200 MB from run to run.

The limit is what residuals take (8 bytes an element with feedback: committed and staged) and half of the gradients.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.options import choose
from gradwire.bench import methods as bench_methods
from gradwire.bench.methods import DDP_FP32, Attached

BASELINES = {"gcomp": f"{DDP_FP32}+adam"}  # it needs moments
METHODS = (DDP_FP32, *BASELINES.values(), "none", "int8", "onebit", "threelc", "topk", "thc", "gcomp")
KEY, CHOICES = ("method",), ("methods",)
BATCH, WARM_UP_STEPS, STEPS = 32, 3, 6
MB = 1e6


def make_model() -> nn.Module:
    """100.7 million parameters in 24 tensors."""
    pairs = [(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)) for _ in range(6)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def peak_bytes() -> int:
    """Peak of the resident set of this process since `reset_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux reports it"
    return 1024 * int(found[1])


def reset_peak() -> None:
    """Let the peak begin at the present resident set."""
    Path("/proc/self/clear_refs").write_text("5")


def rank_main(rank: int, ranks: int, method: str, folder: str) -> dict[str, Any]:
    """One rank: its figures of one method."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    store, timeout = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    adam = method in {*BASELINES, *BASELINES.values()}
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(ddp.parameters(), lr=1e-4)
    connection = bench_methods.connect(method.partition("+")[0], ddp, optimizer, 0)
    inputs = torch.randn(BATCH, 2048, generator=torch.Generator().manual_seed(rank))

    def median_step(steps: int) -> float:
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    median_step(WARM_UP_STEPS)
    reset_peak()
    found: dict[str, Any] = {"step": median_step(STEPS), "memory": peak_bytes(), "residuals": 0, "limit": 0}
    if isinstance(connection, Attached):
        one = connection.handle.synchronizer
        entries = {name: one.plan.entry(name, spec) for name, spec in one.tensors.items()}
        compensated = [one.tensors[name].numel for name, entry in entries.items() if entry.feedback != "none"]
        found["residuals"] = one.residuals.nbytes
        found["limit"] = 8 * sum(compensated) + sum(spec.nbytes for spec in one.tensors.values()) // 2
    connection.close()
    median_step(1)
    found["ddp_step"] = median_step(STEPS)
    dist.destroy_process_group()
    return found


def run(
    methods: Annotated[str, typer.Option(help="Methods, instead of all.")] = "",
    ranks: Annotated[int, typer.Option(help="Ranks on the loopback.")] = 2,
) -> Iterator[dict[str, Any]]:
    """The figures of each method, from the rank with the largest."""
    for method in choose(methods, METHODS):
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
            futures = [pool.submit(rank_main, rank, ranks, method, folder) for rank in range(ranks)]
            by_rank = [future.result() for future in futures]
        where = {"method": method, "ranks": ranks, "rate": "none", "source": "measured"}
        for metric in by_rank[0]:
            unit = "s" if metric.endswith("step") else "B"
            yield {**where, "metric": metric, "value": max(each[metric] for each in by_rank), "unit": unit}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Memory above DDP's with the same optimizer, the limit, and the speed against DDP's."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["metric"]] = row["value"]
    lines = [f"{'method':15} {'MB above DDP':>13} {'limit':>6} {'residuals':>10} {'step':>10} {'of DDP speed':>13}"]
    for method, each in found.items():
        baseline = found.get(BASELINES.get(method, DDP_FP32))
        above = f"{(each['memory'] - baseline['memory']) / MB:.0f}" if baseline and each["limit"] else "-"
        lines.append(
            f"{method:15} {above:>13} {each['limit'] / MB:6.0f} {each['residuals'] / MB:10.0f} "
            f"{1000 * each['step']:7.0f} ms {each['ddp_step'] / each['step']:13.2f}"
        )
    return "\n".join(lines)
