"""What a simulated step says: its time, what it waited for, how busy everything was, and a trace of it."""

# Shapes: N = tasks, G = graphs.

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.simulate.assemble import Assembled
from gradwire.simulate.events import Trail
from gradwire.simulate.loop import COMPUTE, RECV, SEND
from gradwire.simulate.recording import Work

CAUSES = ("compute", "encode", "merge", "decode", "wire", "processor")
_CALLS = {
    **dict.fromkeys(("start", "stats", "dense", "spread"), "encode"),
    **dict.fromkeys(("reduce_stats", "add_up"), "merge"),
    **dict.fromkeys(("decode_sum", "place"), "decode"),
}


@dataclass(frozen=True)
class RankUse:
    """A simulated rank.

    Attributes:
        rank: its number.
        stands_for: ranks that it stands for, itself included.
        seconds: its step.
        compute: share of the step in which it computes the model.
        processor: the same for encodes, merges, decodes and the engine's own work.
        egress, ingress: the same for its link (its node's, where there are nodes).
        sent_bytes: frames that it sends, the mean over the ranks that it stands for.
    """

    rank: int
    stands_for: int
    seconds: float
    compute: float
    processor: float
    egress: float
    ingress: float
    sent_bytes: float


@dataclass(frozen=True)
class ItemTime:
    """A tensor or a batch: when its gradient was ready, and when the last rank held the mean."""

    name: str
    ready_seconds: float
    done_seconds: float


@dataclass(frozen=True)
class StepResult:
    """A simulated step.

    Attributes:
        seconds: from its beginning until the slowest rank has ended it.
        compute_seconds: the same without any communication.
        split: the longest chain of what waited for what, by cause, in seconds; adds up to `seconds`: the model
            (``compute``), ``encode``, ``merge``, ``decode``, messages on their way or in a queue of the network
            (``wire``), and tasks that were ready but waited for the processor (``processor``).
        ranks: the simulated ranks.
        items: in the order in which they were ready.
        world_size: ranks of the cluster.
        folded: whether simulated ranks stand for others.
        num_messages: frames of all ranks.
        processor_seconds: that codecs, engine and frames take of all ranks' processors.
    """

    seconds: float
    compute_seconds: float
    split: dict[str, float]
    ranks: list[RankUse]
    items: list[ItemTime]
    world_size: int
    folded: bool
    num_messages: float
    processor_seconds: float = 0.0
    _trace: SimulatedTrace | None = field(default=None, repr=False, compare=False)

    @property
    def sent_bytes(self) -> float:
        """Bytes of frames that a rank sends, the mean over all."""
        return sum(use.sent_bytes * use.stands_for for use in self.ranks) / self.world_size

    @property
    def efficiency(self) -> float:
        """The step without communication over this one: the share of a rank's speed that is left."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "efficiency": self.efficiency,
            "sent_bytes": self.sent_bytes,
            "split": self.split,
            "world_size": self.world_size,
            "folded": self.folded,
            "num_messages": self.num_messages,
            "processor_seconds": self.processor_seconds,
            "ranks": [asdict(use) for use in self.ranks],
            "items": [asdict(item) for item in self.items],
        }

    def write_trace(self, path: str | Path) -> None:
        """Write the step as Chrome trace JSON, for chrome://tracing or ui.perfetto.dev."""
        assert self._trace is not None, "a result without a trace"
        events = list(self._trace.events())
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True)
class SimulatedTrace:
    """All tasks with their times, and what is needed to name them.

    Attributes:
        assembled: the tasks.
        trail: their times.
        names: of the items.
        ranks: numbers of the simulated ranks.
        compute: what each simulated rank computes besides: name, beginning and end in seconds.
    """

    assembled: Assembled
    trail: Trail
    names: list[str]
    ranks: list[int]
    compute: list[list[tuple[str, float, float]]]

    def cause(self, task: int) -> str:
        """What the time of a task counts as."""
        kind = self.assembled.tasks.kind[task]
        if kind != COMPUTE:
            return "wire"
        call = self._work(task).call
        return _CALLS.get(call, call)

    def split(self, task: int) -> dict[str, float]:
        """The chain that ends with a task, by cause, back to the beginning of the step."""
        trail, tasks = self.trail, self.assembled.tasks
        found = dict.fromkeys(CAUSES, 0.0)
        at, now = task, float(trail.ended[task])
        while at >= 0:
            kind, started, cause = tasks.kind[at], float(trail.started[at]), int(trail.cause[at])
            before = float(trail.ended[cause]) if cause >= 0 else self._graph_ready(at)
            if kind == RECV:
                arrived = max(before, float(trail.wire_ended[at]))
                found["wire"] += arrived - before
                found["processor"] += now - arrived
            else:
                found[self.cause(at)] += now - started
                found["processor"] += started - before
            at, now = cause, before
        found["compute"] += now
        return found

    def _graph_ready(self, task: int) -> float:
        return float(self.assembled.tasks.graph_ready[self._graph(task)])

    def _graph(self, task: int) -> int:
        return int(np.searchsorted(self.assembled.tasks.graph_at, task, side="right")) - 1

    def _work(self, task: int) -> Work:
        item = int(self.assembled.graph_item[self._graph(task)])
        return self.assembled.works[item][int(self.assembled.work[task])]

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of a Chrome trace: a process a rank, with a row each for model, processor and link."""
        for place, rank in enumerate(self.ranks):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for row, name in enumerate(("model", "engine", "egress", "ingress", "transport")):
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            for name, start, end in self.compute[place]:
                yield _span(name, rank, 0, start, end, {})
        tasks, trail, graph_at = self.assembled.tasks, self.trail, self.assembled.tasks.graph_at
        for graph in range(graph_at.size - 1):
            rank = self.ranks[int(self.assembled.graph_place[graph])]
            item = int(self.assembled.graph_item[graph])
            for task in range(int(graph_at[graph]), int(graph_at[graph + 1])):
                work = self.assembled.works[item][int(self.assembled.work[task])]
                args = {"part": int(self.assembled.part[task]), "elements": sum(work.sizes)}
                name = f"{work.phase} {self.names[item]}"
                if trail.ended[task] > trail.started[task]:
                    row = 1 if tasks.processor[task] < len(self.ranks) else 4
                    yield _span(name, rank, row, trail.started[task], trail.ended[task], args)
                if tasks.kind[task] in (SEND, RECV):
                    row = 2 if tasks.kind[task] == SEND else 3
                    yield _span(name, rank, row, trail.wire_started[task], trail.wire_ended[task], args)


def _span(name: str, rank: int, row: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    span = {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return span | {"args": args}
