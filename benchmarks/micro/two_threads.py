"""Encoding of one tensor of 256 MB by the engine, with one computation thread and with two.

The tensor has the chunks that its plan gives it (four), and each is encoded with its residual, as by all-gather.
Nothing is sent. A copy of the same memory, in as many pieces, is timed too. A thread pool cannot gain more than a
second core and a second stream to memory do, so the copy's gain says what this machine allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.micro.hundred_tensors import Inbox, MemoryTransport
from benchmarks.options import listed
from gradwire.bench.statistics import Spread
from gradwire.compressors import make
from gradwire.core.events import EventStream
from gradwire.core.spec import TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import codec_of
from gradwire.sync.engine import Engine
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.operations import Draft, Operations
from gradwire.sync.plan import Plan
from gradwire.sync.run import Run
from gradwire.sync.runtime import Runtime
from gradwire.sync.warmup import warm_up
from gradwire.wire.frame import FrameKind

METHODS = ("onebit", "int8", "threelc", "topk")
ELEMENTS, REPETITIONS = 1 << 26, 7
KEY, CHOICES = ("method", "case"), ("methods",)
Row = dict[str, Any]


@contextmanager
def engine(threads: int) -> Iterator[tuple[Engine, Runtime]]:
    """An engine of one of two ranks that receive nothing."""
    transport, events = MemoryTransport(0, [Inbox(), Inbox()]), EventStream()
    made = Engine(
        transport,
        admit=lambda header: None,
        events=events,
        stall_timeout=timedelta(minutes=5),
        on_failure=lambda error, state: None,
        threads=threads,
    )
    try:
        yield made, Runtime(transport, Residuals(), events, seed=0)
    finally:
        made.close()


def encoding(method: str, threads: int, repetitions: int) -> list[float]:
    """Seconds of each encoding of the tensor."""
    compressor = make(method)
    entry = Plan(compressor, strategy="allgather").entry("w", TensorSpec((ELEMENTS, 1)))
    layout = TensorLayout("w", 0, entry, torch.float32, ELEMENTS)
    draft, values, found = Draft(), torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)), []
    for chunk in layout.chunks(1):
        draft.add("encode", "start", "encode", chunk, frame=FrameKind.PAYLOAD)
    operations = Operations(draft.ops, layout.fields)
    warm_up([(entry, torch.float32)])
    with engine(threads) as (made, runtime):
        for step in range(repetitions + 2):  # the first two allocate residuals
            run = Run(operations, codec_of(TensorJob(layout, values, step, step), runtime), "w", step)
            start = time.perf_counter()
            made.run(run)
            made.wait_idle()
            found.append(time.perf_counter() - start)
            runtime.residuals.commit()
    return found[2:]


def copying(threads: int, repetitions: int) -> list[float]:
    """Seconds of each copy of the tensor."""
    source, target, found = np.ones(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32), []
    pieces = np.array_split(np.arange(ELEMENTS), 4)
    ranges = [slice(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions + 1):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), ranges))
            found.append(time.perf_counter() - start)
    return found[1:]


def run(
    methods: Annotated[str, typer.Option(help="Methods, such as onebit,int8.")] = "",
    repetitions: Annotated[int, typer.Option(help="How often each is timed.")] = REPETITIONS,
) -> Iterator[Row]:
    """The copy, then all methods; one and two threads in turns."""
    for method in ("copy", *listed(methods, METHODS)):
        measure: Callable[[int], list[float]] = (
            (lambda threads: copying(threads, repetitions))
            if method == "copy"
            else (lambda threads, method=method: encoding(method, threads, repetitions))  # type: ignore[misc]
        )
        for threads in (1, 2):
            spread = Spread.of(measure(threads))
            figures = {"value": spread.median, "p20": spread.p20, "p80": spread.p80, "samples": spread.size}
            where = {"method": method, "case": f"{threads} threads", "size": ELEMENTS, "dtype": "float32"}
            yield {**where, "metric": "encode", "unit": "s", "source": "measured", **figures}


def table(rows: Sequence[Row]) -> str:
    """Milliseconds with one thread and with two, and the gain."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(1e3 * row["value"])
    lines = [f"{'':12}{'1 thread ms':>14}{'2 threads ms':>14}{'gain':>8}"]
    lines += [f"{method:12}{one:14.1f}{two:14.1f}{one / two:8.2f}" for method, (one, two) in found.items()]
    return "\n".join(lines)
