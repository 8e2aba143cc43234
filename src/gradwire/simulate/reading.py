"""From the engine's times to the result of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from gradwire.simulate.assemble import Assembled, SimulatedItem
from gradwire.simulate.cluster import Cluster, Compute
from gradwire.simulate.events import Trail
from gradwire.simulate.fold import Fold
from gradwire.simulate.result import CAUSES, ItemTime, RankUse, SimulatedTrace, StepResult


def alone(cluster: Cluster, fold: Fold, compute: Compute) -> StepResult:
    """A step in which nothing is sent."""
    uses = []
    for place, rank in enumerate(fold.ranks):
        straggler = cluster.straggler(rank)
        seconds = straggler.delay_seconds + straggler.slowdown * compute.total_seconds
        share = straggler.slowdown * compute.total_seconds / seconds if seconds else 0.0
        uses.append(RankUse(rank, fold.stands_for[place], seconds, share, 0.0, 0.0, 0.0, 0.0))
    slowest = max(use.seconds for use in uses)
    split = dict.fromkeys(CAUSES, 0.0) | {"compute": slowest}
    return StepResult(slowest, slowest, split, uses, [], cluster.ranks, fold.folded, 0.0)


class Reading:
    """Reads a result from the times of all tasks."""

    def __init__(
        self,
        items: Sequence[SimulatedItem],
        cluster: Cluster,
        fold: Fold,
        compute: Compute,
        assembled: Assembled,
        trail: Trail,
    ) -> None:
        self._items = items
        self._cluster = cluster
        self._fold = fold
        self._compute = compute
        self._assembled = assembled
        self._trail = trail
        # The last task of each graph, then the time of each item on each simulated rank.
        edges = assembled.tasks.graph_at
        self._last = [int(a + trail.ended[a:b].argmax()) for a, b in itertools.pairwise(edges.tolist()) if b > a]
        self._done = np.zeros((len(items), len(fold.ranks)))
        for task in self._last:
            graph = int(np.searchsorted(edges, task, side="right")) - 1
            self._done[assembled.graph_item[graph], assembled.graph_place[graph]] = trail.ended[task]

    def result(self, trace: bool) -> StepResult:
        """The whole."""
        places = range(len(self._fold.ranks))
        spans = [self._compute_spans(place) for place in places]
        ends = [rank_spans[-1][2] for rank_spans in spans]
        slowest = max(places, key=lambda place: ends[place])
        recorded = SimulatedTrace(
            self._assembled, self._trail, [item.name for item in self._items], self._fold.ranks, spans
        )
        undisturbed = alone(self._cluster, self._fold, self._compute)
        items = [
            ItemTime(item.name, item.ready_seconds, float(self._done[index].max()))
            for index, item in enumerate(self._items)
        ]
        return StepResult(
            ends[slowest],
            undisturbed.seconds,
            self._split(slowest, spans[slowest], recorded),
            [self._use(place, spans[place]) for place in places],
            items,
            self._cluster.ranks,
            self._fold.folded,
            self._assembled.num_messages,
            float(self._trail.processor_busy.reshape(2, -1).sum(0) @ np.array(self._fold.stands_for)),
            recorded if trace else None,
        )

    def _compute_spans(self, place: int) -> list[tuple[str, float, float]]:
        """Forward, backward and optimizer of a rank: the last begins once every gradient holds the mean."""
        straggler = self._cluster.straggler(self._fold.ranks[place])
        begin = straggler.delay_seconds
        middle = begin + straggler.slowdown * self._compute.forward_seconds
        end = middle + straggler.slowdown * self._compute.backward_seconds
        synced = max(end, float(self._done[:, place].max()))
        last = synced + straggler.slowdown * self._compute.optimizer_seconds
        return [("forward", begin, middle), ("backward", middle, end), ("optimizer", synced, last)]

    def _split(self, place: int, spans: list[tuple[str, float, float]], recorded: SimulatedTrace) -> dict[str, float]:
        (_, _, end), (_, synced, last) = spans[1], spans[2]
        if synced <= end:
            return dict.fromkeys(CAUSES, 0.0) | {"compute": last}
        graphs = self._assembled.graph_place
        task = max(
            (task for task, at in zip(self._last, graphs.tolist()) if at == place),
            key=lambda task: float(self._trail.ended[task]),
        )
        found = recorded.split(task)
        found["compute"] += last - synced
        return found

    def _use(self, place: int, spans: list[tuple[str, float, float]]) -> RankUse:
        seconds = spans[-1][2]
        computing = sum(end - start for _, start, end in spans)
        link = 2 * (place // self._cluster.ranks_per_node)
        busy, of = self._trail.channel_busy, 1 / seconds if seconds else 0.0
        return RankUse(
            self._fold.ranks[place],
            self._fold.stands_for[place],
            seconds,
            computing * of,
            float(self._trail.processor_busy[place]) * of,
            float(busy[link]) * of,
            float(busy[link + 1]) * of,
            float(self._assembled.sent_bytes[place]),
        )
