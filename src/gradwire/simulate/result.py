"""The result of a simulated step: its time, what it waited for, how busy everything was, and a trace."""

# Shapes: N = tasks, G = graphs, J = jobs, R = simulated ranks.

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.simulate.assemble import Assembled, SimulatedJob
from gradwire.simulate.cluster import Cluster, Straggler
from gradwire.simulate.events import Trail
from gradwire.simulate.fold import Fold
from gradwire.simulate.graphs import Work
from gradwire.simulate.loop import COMPUTE, RECV, SEND
from gradwire.simulate.workload import Compute

CAUSES = ("compute", "encode", "merge", "decode", "wire", "server", "processor")
_CALLS = {
    **dict.fromkeys(("start", "stats", "stats_of_gradient", "encode_dense", "encode_mean", "part"), "encode"),
    **dict.fromkeys(
        ("encode_and_merge", "reduce_stats", "merge_stats", "take_stats", "merge_dense", "sum_parts"), "merge"
    ),
    **dict.fromkeys(("decode_sum", "decode_dense", "decode_sums", "take", "take_reduced_stats"), "decode"),
}

_Span = tuple[str, float, float]  # name, beginning and end in seconds


@dataclass(frozen=True)
class RankUse:
    """How busy a simulated rank was.

    Attributes:
        rank: Number of the rank.
        stands_for: Number of ranks that it stands for, itself included.
        seconds: Time of its step.
        compute: Share of the step in which it computes the model.
        processor: Share of the step in which its processor encodes, merges, decodes or runs the engine.
        egress, ingress: Shares of the step in which its link (or its node's) sends and receives.
        sent_bytes: Bytes of frames that it sends: the mean over the ranks that it stands for.
        inner: Share of the step in which its link within the node is busy, in the busier direction.
    """

    rank: int
    stands_for: int
    seconds: float
    compute: float
    processor: float
    egress: float
    ingress: float
    sent_bytes: float
    inner: float = 0.0


@dataclass(frozen=True)
class JobTime:
    """When the gradient of a tensor or fusion group was ready, and when the last rank held the mean."""

    name: str
    ready_seconds: float
    done_seconds: float


@dataclass(frozen=True)
class StepResult:
    """One simulated step.

    Attributes:
        seconds: Time of the step, from the earliest beginning to the end of the slowest rank.
        compute_seconds: Time of the same step without communication.
        split: The longest chain of waiting by cause, in seconds, which adds up to `seconds`: the model (``compute``),
            ``encode``, ``merge``, ``decode``, messages that travel or queue (``wire``), packets that wait for the
            server's processor or are added there (``server``), and ready tasks that waited for a processor, as
            well as packets that a rank sends to a server or takes from it (``processor``).
        ranks: Use of the simulated ranks.
        jobs: Times of the jobs, in the order of submission.
        world_size: Ranks of the cluster.
        folded: Whether simulated ranks stand for others.
        num_messages: Frames sent by all ranks, and messages of the server.
        processor_seconds: Seconds of all ranks' processors for codecs, engine and frames.
        num_lost: Number of bursts that a queue has lost.
        server: Use of the aggregation server, whose number follows those of the ranks; None without one.
    """

    seconds: float
    compute_seconds: float
    split: dict[str, float]
    ranks: list[RankUse]
    jobs: list[JobTime]
    world_size: int
    folded: bool
    num_messages: float
    processor_seconds: float = 0.0
    num_lost: int = 0
    server: RankUse | None = None
    _trace: SimulatedTrace | None = field(default=None, repr=False, compare=False)

    @property
    def sent_bytes(self) -> float:
        """Bytes of frames that a rank sends, the mean over all ranks."""
        return sum(use.sent_bytes * use.stands_for for use in self.ranks) / self.world_size

    @property
    def efficiency(self) -> float:
        """Time of the step without communication over `seconds`."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0

    def write_trace(self, path: str | Path) -> None:
        """Write the step as Chrome trace JSON, for chrome://tracing or ui.perfetto.dev."""
        events = [] if self._trace is None else list(self._trace.events())
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True)
class SimulatedTrace:
    """All tasks with their times and names.

    Attributes:
        assembled: Tasks.
        trail: Times of the tasks.
        names: Names of the jobs (J).
        ranks: Numbers of the simulated ranks (R).
        spans: Forward pass, backward pass and optimizer of each simulated rank (R).
        world_size: Ranks of the cluster.
    """

    assembled: Assembled
    trail: Trail
    names: list[str]
    ranks: list[int]
    spans: list[list[_Span]]
    world_size: int

    def split(self, task: int) -> dict[str, float]:
        """Seconds by cause of the chain of waiting that ends with a task, back to the beginning of the step."""
        trail, tasks = self.trail, self.assembled.tasks
        found = dict.fromkeys(CAUSES, 0.0)
        at, now = task, float(trail.ended[task])
        while at >= 0:
            kind, started, cause = tasks.kind[at], float(trail.started[at]), int(trail.cause[at])
            at_server = self.assembled.graph_rank[self._graph(at)] == len(self.ranks)
            before = float(trail.ended[cause]) if cause >= 0 else float(tasks.graph_ready[self._graph(at)])
            if kind == RECV:
                arrived = max(before, float(trail.wire_ended[at]))
                found["wire"] += arrived - before
                found["server" if at_server else "processor"] += now - arrived
            elif at_server:
                found["server"] += now - before
            else:
                work = self._work(at, self._graph(at))
                sending = "processor" if work.packets else "wire"
                found[_CALLS.get(work.call, work.call) if kind == COMPUTE else sending] += now - started
                found["processor"] += started - before
            at, now = cause, before
        found["compute"] += now
        return found

    def _graph(self, task: int) -> int:
        return int(np.searchsorted(self.assembled.tasks.graph_at, task, side="right")) - 1

    def _work(self, task: int, graph: int) -> Work:
        return self.assembled.works[int(self.assembled.graph_job[graph])][int(self.assembled.work[task])]

    def events(self) -> Iterator[dict[str, Any]]:
        """Events of a Chrome trace: one process per rank, with rows for model, engine, link and transport."""
        numbers, servers = list(self.ranks), range(len(self.ranks), self.assembled.num_ends)
        numbers += [self.world_size for _ in servers]
        for rank, spans in zip(numbers, [*self.spans, *[[] for _ in servers]], strict=True):
            name = "server" if rank == self.world_size else f"rank {rank}"
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            for row, name in enumerate(("model", "engine", "egress", "ingress", "transport")):
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            for name, start, end in spans:
                yield _event(name, rank, 0, start, end, {})
        tasks, trail = self.assembled.tasks, self.trail
        for graph, (first, end_) in enumerate(itertools.pairwise(tasks.graph_at.tolist())):
            rank = numbers[int(self.assembled.graph_rank[graph])]
            for task in range(first, end_):
                work = self._work(task, graph)
                args = {"chunk": int(self.assembled.chunk[task]), "elements": sum(map(math.prod, work.shapes))}
                name = f"{work.phase} {self.names[int(self.assembled.graph_job[graph])]}"
                if trail.ended[task] > trail.started[task]:
                    row = 1 if tasks.processor[task] < self.assembled.num_ends else 4
                    yield _event(name, rank, row, trail.started[task], trail.ended[task], args)
                if tasks.kind[task] in (SEND, RECV):
                    row = 2 if tasks.kind[task] == SEND else 3
                    yield _event(name, rank, row, trail.wire_started[task], trail.wire_ended[task], args)


def _event(name: str, rank: int, row: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return event | {"args": args}


def result_of(
    jobs: Sequence[SimulatedJob], cluster: Cluster, fold: Fold, compute: Compute, assembled: Assembled, trail: Trail
) -> StepResult:
    """Read the result of a step from the times of its tasks."""
    last = {
        graph: first + int(trail.ended[first:end].argmax())
        for graph, (first, end) in enumerate(itertools.pairwise(assembled.tasks.graph_at.tolist()))
        if end > first
    }
    # When each simulated rank holds the mean of each job, and when the server has sent it (J, R or R + 1).
    done = np.zeros((len(jobs), assembled.num_ends))
    for graph, task in last.items():
        done[assembled.graph_job[graph], assembled.graph_rank[graph]] = trail.ended[task]
    spans = [
        _spans(cluster.straggler(rank), compute, float(done[:, index].max())) for index, rank in enumerate(fold.ranks)
    ]
    trace = SimulatedTrace(assembled, trail, [job.name for job in jobs], fold.ranks, spans, cluster.ranks)
    slowest = max(range(len(spans)), key=lambda index: spans[index][-1][2])
    _, (_, _, backward_end), (_, synchronized, end) = spans[slowest]
    if synchronized <= backward_end:
        split = dict.fromkeys(CAUSES, 0.0) | {"compute": end}
    else:
        tasks = [task for graph, task in last.items() if assembled.graph_rank[graph] == slowest]
        split = trace.split(max(tasks, key=lambda task: float(trail.ended[task])))
        split["compute"] += end - synchronized
    return StepResult(
        end,
        result_without_jobs(cluster, fold, compute).seconds,
        split,
        [_use(index, cluster, fold, assembled, trail, spans[index]) for index in range(len(fold.ranks))],
        [JobTime(job.name, job.ready_seconds, float(done[index].max())) for index, job in enumerate(jobs)],
        cluster.ranks,
        fold.folded,
        assembled.num_messages,
        float(trail.processor_busy.reshape(2, -1).sum(0)[: len(fold.ranks)] @ np.array(fold.stands_for)),
        int(trail.lost[0]),
        _server_use(cluster, fold, assembled, trail, end),
        trace,
    )


def _server_use(cluster: Cluster, fold: Fold, assembled: Assembled, trail: Trail, seconds: float) -> RankUse | None:
    index = len(fold.ranks)
    if assembled.num_ends == index:
        return None
    link = 2 * (index // cluster.ranks_per_node)
    return RankUse(
        *(cluster.ranks, 1, seconds, 0.0),
        processor=float(trail.processor_busy[index]) / seconds,
        egress=float(trail.channel_busy[link]) / seconds,
        ingress=float(trail.channel_busy[link + 1]) / seconds,
        sent_bytes=float(assembled.sent_bytes[index]),
    )


def result_without_jobs(cluster: Cluster, fold: Fold, compute: Compute) -> StepResult:
    """The result of a step in which nothing is sent."""
    uses = []
    for rank, stands_for in zip(fold.ranks, fold.stands_for, strict=True):
        straggler = cluster.straggler(rank)
        busy = straggler.slowdown * compute.total_seconds
        seconds = straggler.delay_seconds + busy
        uses.append(RankUse(rank, stands_for, seconds, busy / seconds if seconds else 0.0, 0.0, 0.0, 0.0, 0.0))
    slowest = max(use.seconds for use in uses)
    split = dict.fromkeys(CAUSES, 0.0) | {"compute": slowest}
    return StepResult(slowest, slowest, split, uses, [], cluster.ranks, fold.folded, 0.0)


def _spans(straggler: Straggler, compute: Compute, synchronized: float) -> list[_Span]:
    """Forward pass, backward pass and optimizer of a rank. The optimizer begins when all gradients hold the mean."""
    begin = straggler.delay_seconds
    middle = begin + straggler.slowdown * compute.forward_seconds
    end = middle + straggler.slowdown * compute.backward_seconds
    optimizer = max(end, synchronized)
    last = optimizer + straggler.slowdown * compute.optimizer_seconds
    return [("forward", begin, middle), ("backward", middle, end), ("optimizer", optimizer, last)]


def _use(index: int, cluster: Cluster, fold: Fold, assembled: Assembled, trail: Trail, spans: list[_Span]) -> RankUse:
    seconds = spans[-1][2]
    per_second = 1 / seconds if seconds else 0.0
    link = 2 * (index // cluster.ranks_per_node)
    inner = assembled.inner_channel(index)
    return RankUse(
        fold.ranks[index],
        fold.stands_for[index],
        seconds,
        compute=sum(end - start for _, start, end in spans) * per_second,
        processor=float(trail.processor_busy[index]) * per_second,
        egress=float(trail.channel_busy[link]) * per_second,
        ingress=float(trail.channel_busy[link + 1]) * per_second,
        sent_bytes=float(assembled.sent_bytes[index]),
        inner=float(trail.channel_busy[inner : inner + 2].max()) * per_second,
    )
