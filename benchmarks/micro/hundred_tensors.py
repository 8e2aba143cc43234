"""Processor time of synchronizing 100 tensors of 64 × 64, without a network: four ranks are threads of one process.

Synchronizers, their engines and the wire format are real: every frame is packed, checked and copied. Processor time is
that of all threads of the process, per rank and step. It includes the caller's part: submitting, committing, and
filling in new gradients (0.05 ms). The tensors of a step are neighbors in memory and submitted together, as in a bucket
of DDP. No sockets take part, and the threads of one interpreter wait for each other, so a step takes longer than in a
real job.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

from benchmarks.options import listed
from gradwire.bench.statistics import Spread
from gradwire.core.errors import SyncError
from gradwire.net.transport import Callbacks, Transport
from gradwire.sync.group import GroupInfo
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.submission import GradientSlice
from gradwire.sync.synchronizer import Synchronizer
from gradwire.wire.frame import Header, pack, parse

METHODS = ("none", "onebit", "threelc", "topk", "int8")
RANKS, TENSORS, SIDE = 4, 100, 64
REPETITIONS, STEPS, WARM_UP_STEPS = 9, 50, 5
KEY, CHOICES = ("method",), ("methods",)
Row = dict[str, Any]
Inbox = queue.SimpleQueue[bytes | None]

_names = itertools.count()


class MemoryTransport(Transport):
    """Passes whole frames to the threads of the other ranks.

    Args:
        rank: Rank of this end.
        inboxes: Frames for each rank, the same queues on all ends. None ends the rank's thread.
    """

    def __init__(self, rank: int, inboxes: Sequence[Inbox]) -> None:
        self.rank, self.world_size, self.epoch = rank, len(inboxes), 1
        self.sent_bytes, self.received_bytes, self.control_bytes = ([0] * len(inboxes) for _ in range(3))
        self._inboxes = inboxes
        self._thread: threading.Thread | None = None

    def start(self, callbacks: Callbacks) -> None:
        """See `Transport`."""
        self._thread = threading.Thread(target=self._deliver, args=(callbacks,), daemon=True)
        self._thread.start()

    def send(self, peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        """See `Transport`."""
        frame = pack(header, body)
        self.sent_bytes[peer] += len(frame)
        self._inboxes[peer].put(frame)
        if on_sent is not None:
            on_sent()

    def departed(self, peer: int) -> SyncError | None:
        """See `Transport`."""
        return None

    def abort(self, reason: str, blame: int | None = None) -> None:
        """See `Transport`. The other ranks notice nothing and time out."""
        self._inboxes[self.rank].put(None)

    def close(self) -> None:
        """See `Transport`."""
        self._inboxes[self.rank].put(None)
        if self._thread is not None:
            self._thread.join()

    def _deliver(self, callbacks: Callbacks) -> None:
        while (frame := self._inboxes[self.rank].get()) is not None:
            header, body = parse(frame)
            self.received_bytes[header.sender] += len(frame)
            callbacks.admit(header.sender, header)
            callbacks.deliver(header.sender, header, body.copy())


class RankThread:
    """One rank: its synchronizer, and gradients that are neighbors in memory."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.synchronizer = synchronizer
        generator = torch.Generator().manual_seed(synchronizer.rank)
        self._gradients = torch.randn(TENSORS, SIDE, SIDE, generator=generator)
        self._bucket = torch.empty_like(self._gradients)
        self._slices = [GradientSlice(f"layers.{index}.weight", view) for index, view in enumerate(self._bucket)]

    def take(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            self._bucket.copy_(self._gradients)
            self.synchronizer.begin_step()
            self.synchronizer.submit(self._slices).wait()
            self.synchronizer.commit()


@contextmanager
def connected(method: str, options: SyncOptions = SyncOptions()) -> Iterator[Callable[[int], None]]:
    """Connect ranks. The result takes steps on all of them at the same time."""
    store, name = dist.HashStore(), f"hundred-tensors-{next(_names)}"
    inboxes = [Inbox() for _ in range(RANKS)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(RANKS))

        def connect(rank: int) -> RankThread:
            info = GroupInfo(rank, RANKS, store, name)
            transport = MemoryTransport(rank, inboxes)
            return RankThread(Synchronizer(info, Plan(method), options=options, transport=transport))

        def take(steps: int) -> None:
            list(pool.map(lambda rank: rank.take(steps), ranks))

        ranks = list(pool.map(connect, range(RANKS)))
        stack.callback(lambda: list(pool.map(lambda rank: rank.synchronizer.close(), ranks)))
        yield take


def measure(method: str, repetitions: int, steps: int) -> Iterator[Row]:
    """Time a method."""
    processor, elapsed = [], []
    with connected(method) as take:
        take(WARM_UP_STEPS)
        for _ in range(repetitions):
            began, began_processor = time.perf_counter(), time.process_time()
            take(steps)
            elapsed.append((time.perf_counter() - began) / steps)
            processor.append((time.process_time() - began_processor) / steps / RANKS)
    where = {"method": method, "size": TENSORS * SIDE * SIDE, "dtype": "float32", "ranks": RANKS, "rate": "none",
             "source": "measured"}  # fmt: skip
    for metric, seconds in (("processor", processor), ("step", elapsed)):
        spread = Spread.of(seconds)
        figures = {"value": spread.median, "p20": spread.p20, "p80": spread.p80, "samples": spread.size}
        yield {**where, "metric": metric, "unit": "s", **figures}


def run(
    methods: Annotated[str, typer.Option(help="Methods, such as onebit,threelc.")] = "",
    repetitions: Annotated[int, typer.Option(help="How often each method is timed.")] = REPETITIONS,
    steps: Annotated[int, typer.Option(help="Steps of a repetition.")] = STEPS,
) -> Iterator[Row]:
    """All methods."""
    for method in listed(methods, METHODS):
        yield from measure(method, repetitions, steps)


def table(rows: Sequence[Row]) -> str:
    """Processor time of a rank and step, and duration of a step."""
    lines = [f"{'':12}{'processor ms':>14}{'p20-p80':>14}{'step ms':>10}"]
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["metric"]] = row
    for method, row in found.items():
        processor, step = row["processor"], row["step"]
        spread = f"{1e3 * processor['p20']:.2f}-{1e3 * processor['p80']:.2f}"
        lines.append(f"{method:12}{1e3 * processor['value']:14.2f}{spread:>14}{1e3 * step['value']:10.2f}")
    return "\n".join(lines)
