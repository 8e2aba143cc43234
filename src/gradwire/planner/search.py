"""The search: chooses compressor, strategy and partitions of each tensor for the shortest step.

1. Each tensor alone, as in HiPress: the option with the least time by the closed forms.
2. All tensors during backward (`schedule`). Where backward hides a dense all-reduce, compression gains nothing, and
   where the codec is the bottleneck, the best options of single tensors do not make the best plan. The search starts
   from the dense plan, from the best options of single tensors, and from each compressor for all tensors. It changes
   the best of these tensor by tensor while that helps. Finally, where that makes the step no longer, it makes tensors
   dense again, and cuts the others into no more ranges than there are ranks. It must be no longer either if codec and
   link take twice as long as predicted: what fills the time of backward to the brim is not hidden in practice.

A compressed tensor with one partition is fused with its neighbors (`gradwire.sync.fusion`). So the cost model decides
which are: neighbors share the tasks, frames and calls that they would pay for one by one, but a rank that owns a tensor
takes longer for it than all ranks for a part each. The dense tensors of a bucket travel in a batch, except for those
that are faster alone, in fewer or more ranges than one for each rank. A schedule has a batch for all of them, whatever
the search has made dense.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.planner import schedule
from gradwire.planner.batches import Batch, Batches, Size
from gradwire.planner.closed_forms import Route, native_seconds
from gradwire.planner.costs import Costs
from gradwire.planner.fidelity import DENSE, RankedCompressor
from gradwire.planner.options import Option, PlannedTensor, best_alone, num_shares, on_nodes, options, unbeaten
from gradwire.planner.schedule import Schedule, ScheduledTensor
from gradwire.planner.table import PlanRow
from gradwire.sync.plan_entry import is_small

MIN_GAIN = 0.02  # predictions are no more accurate than this
_DOUBT = 2.0  # what backward hides must be hidden by twice the time, as it slows down codecs on its own processors
_STEP = 0.002  # relative difference that counts in the search
_MAX_CHANGES = 40  # times that a plan is changed without making it slower
_MAX_SCHEDULED = 10_000  # batches of tensors in all schedules of a search, which bounds its time


@dataclass
class Search:
    """The search: a pick is the index of an option, for each large tensor and, last, for all batches of small ones."""

    tensors: list[PlannedTensor]
    costs: Costs
    methods: Sequence[RankedCompressor]
    partitions: Sequence[int] | None
    min_elements: int | None
    cast: str | None = None
    velocities: bool = False  # are sent in place of gradients: neither between nodes alone nor added where they are
    given: Sequence[ScheduledTensor] = ()  # in every schedule
    _known: dict[tuple[tuple[int, ...], float], Schedule] = field(default_factory=dict)
    _slower: dict[tuple[Route, float], Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.velocities:
            self.methods = [on_nodes(method, self.costs) for method in self.methods]
        others = [method for method in self.methods if method.spec != DENSE.spec]
        smallest = min(self._min_elements(method) for method in others or [DENSE])
        self.large = [tensor for tensor in self.tensors if not is_small(tensor.shape, smallest)]
        small = [tensor for tensor in self.tensors if is_small(tensor.shape, smallest)]
        known: dict[tuple[int, ...], list[Option]] = {}  # by size and neighbors: models repeat their layers
        neighbors = _neighbors(self.large)
        self._keys: list[tuple[int, ...]] = [(*tensor.size, count) for tensor, count in zip(self.large, neighbors)]
        for tensor, key in zip(self.large, self._keys):
            if key not in known:
                fitting = [method for method in others if tensor.numel >= self._min_elements(method)]
                known[key] = options(tensor, self.costs, fitting, self.partitions, key[-1], not self.velocities)
        self._choices = [known[key] for key in self._keys]
        self._worth: dict[tuple[int, ...], list[int]] = {}
        specs = [DENSE.spec]
        if self.cast is not None and any(_may_be_cast(tensor) for tensor in small):
            specs.append(self.cast)
        self._batches = Batches(self.costs, small, not self.velocities)
        self._keys.append(())
        self._choices.append(self._batches.options(specs))
        self._left = max(20 * len(self.large), _MAX_SCHEDULED)

    def _min_elements(self, method: RankedCompressor) -> int:
        return method.min_elements if self.min_elements is None else self.min_elements

    def _sizes(self, picks: Sequence[int]) -> dict[Batch, Size]:
        """Return the size of each batch."""
        return self._batches.sizes(self._choices[-1][picks[-1]], self._large(picks))

    def _large(self, picks: Sequence[int]) -> Iterator[tuple[PlannedTensor, Option]]:
        """Yield the large tensors with their options."""
        return ((tensor, choices[pick]) for tensor, choices, pick in zip(self.large, self._choices, picks))

    def run(self, picks: Sequence[int], slowdown: float = 1.0) -> Schedule:
        """Return the schedule of these picks, if codec and link take `slowdown` times as long as predicted."""
        key = tuple(picks), slowdown
        if key not in self._known:
            jobs = [ScheduledTensor(batch.ready, self._batches.option(batch.spec, batch.strategy, size).route)
                    for batch, size in self._sizes(picks).items()]  # fmt: skip
            jobs += [ScheduledTensor(tensor.ready, option.route)
                     for tensor, option in self._large(picks) if not option.batched]  # fmt: skip
            jobs += self.given
            jobs.sort(key=lambda job: job.ready)
            if slowdown != 1:
                jobs = [job._replace(route=self._scaled(job.route, slowdown)) for job in jobs]
            self._left -= sum(min(job.route.batches, schedule.MAX_BATCHES) for job in jobs)
            self._known[key] = schedule.run(jobs)
        return self._known[key]

    def _scaled(self, route: Route, factor: float) -> Route:
        if (route, factor) not in self._slower:
            self._slower[route, factor] = route.scaled(factor)
        return self._slower[route, factor]

    # -- starts ----------------------------------------------------------------------------------------------

    def dense(self) -> list[int]:
        """Return the best dense picks: one strategy for all tensors, or the best of each tensor alone."""
        plans = [self.uniform(DENSE.spec, strategy) for strategy in (None, *DENSE.strategies)]
        plans += [self._all_batched(strategy) for strategy in DENSE.strategies]
        return min(plans, key=lambda picks: self.run(picks).finish)

    def _all_batched(self, strategy: str) -> list[int]:
        return [
            next(index for index, option in enumerate(choices) if option.batched and option.strategy == strategy)
            for choices in self._choices
        ]

    def compresses(self, picks: Sequence[int]) -> bool:
        return any(choices[pick].spec != DENSE.spec for choices, pick in zip(self._choices, picks))

    def uniform(self, spec: str, strategy: str | None) -> list[int]:
        """Pick one method for all tensors, with the best partitions of each. Batches stay dense if they must.

        The time of a tensor alone counts only where it is longer than what hides it: the rest of backward, or the time
        in which codec or link is busy with what comes later. Elsewhere, the time counts in which it keeps these busy,
        unless that gains next to nothing.
        """
        ready = [tensor.ready for tensor in self.large]
        picks, later, end = [], 0.0, max(ready, default=0.0)
        for start, choices in zip((end, *reversed(ready)), reversed(self._choices)):
            hidden = max(later, end - start)

            def cost(index: int, routes: Sequence[Option] = choices, hidden: float = hidden) -> float:
                way = routes[index].route
                return max(way.seconds, hidden + way.busy) + MIN_GAIN * way.seconds

            wanted = [i for i, each in enumerate(choices) if each.spec == spec and strategy in (None, each.strategy)]
            dense = [i for i, each in enumerate(choices) if each.spec == DENSE.spec]
            picks.append(min(wanted or dense, key=cost))
            later += choices[picks[-1]].route.busy
        return picks[::-1]

    def _starts(self) -> list[list[int]]:
        starts = [self.dense()]
        for method in self.methods:
            if method.spec != DENSE.spec:
                starts += [self.uniform(method.spec, strategy) for strategy in method.strategies]
        return [*starts, [choices.index(best_alone(choices)) for choices in self._choices]]

    # -- search ----------------------------------------------------------------------------------------------

    def best(self, backward: float) -> list[int]:
        """Search for the picks with the shortest step."""

        def end(picks: Sequence[int]) -> float:
            return max(backward, self.run(picks).finish)

        best, least = self.dense(), math.inf
        for start in self._starts():
            if end(start) < least * (1 - _STEP):
                best, least = start, end(start)
        best = self._improve(best, backward)
        limits = {slowdown: max(backward, self.run(best, slowdown).finish) * (1 + _STEP) for slowdown in (1.0, _DOUBT)}
        return self._cut_less(self._make_dense(best, limits), limits)

    def _improve(self, picks: list[int], backward: float) -> list[int]:
        """Change one tensor at a time, the slowest first, while the step becomes shorter and time is left."""
        order = sorted(range(len(picks)), key=lambda index: -self._choices[index][picks[index]].route.seconds)
        least, improved = self.run(picks).finish, True
        while improved and least > backward and self._left > 0:
            improved = False
            for index in order:
                for pick in self._worth_trying(index):
                    if self._left <= 0 or least <= backward:
                        break
                    trial = [*picks[:index], pick, *picks[index + 1 :]]
                    finish = self.run(trial).finish
                    if finish < least * (1 - _STEP):
                        picks, least, improved = trial, finish, True
        return picks

    def _worth_trying(self, index: int) -> list[int]:
        key = self._keys[index]
        if key not in self._worth:
            self._worth[key] = unbeaten(self._choices[index])
        return self._worth[key]

    def _make_dense(self, picks: list[int], limits: Mapping[float, float]) -> list[int]:
        """Make tensors dense again, those that gain least first."""
        dense = self.dense()

        def gain(index: int) -> float:
            choices = self._choices[index]
            return choices[dense[index]].route.busy - choices[picks[index]].route.busy

        order = sorted((i for i, pick in enumerate(picks) if self._choices[i][pick].spec != DENSE.spec), key=gain)
        return self._change_most(picks, order, dense, limits)

    def _cut_less(self, picks: list[int], limits: Mapping[float, float]) -> list[int]:
        """Cut compressed tensors into a range for each rank: further ones cost every processor tasks and frames."""
        fewer = list(picks)
        for i, (choices, pick) in enumerate(zip(self._choices, picks)):
            option = choices[pick]
            least = option._replace(partitions=num_shares(option.strategy, self.costs))[:3]
            if option.spec != DENSE.spec and option.partitions > least[-1]:
                fewer[i] = next((j for j, other in enumerate(choices) if other[:3] == least), pick)
        return self._change_most(picks, [i for i, pick in enumerate(picks) if fewer[i] != pick], fewer, limits)

    def _change_most(
        self, picks: list[int], order: Sequence[int], others: Sequence[int], limits: Mapping[float, float]
    ) -> list[int]:
        """Take the picks of `others` for all tensors, in this order, that keep within the limits of all slowdowns.

        Many are tried at once: half as many after a failure, twice as many after a success. A tensor that fails alone
        keeps its pick.
        """
        start, count = 0, len(order)
        for _ in range(_MAX_CHANGES):
            if start >= len(order):
                break
            changed = set(order[start : start + count])
            trial = [others[i] if i in changed else pick for i, pick in enumerate(picks)]
            if all(self.run(trial, slowdown).finish <= limit for slowdown, limit in limits.items()):
                picks, start, count = trial, start + count, 2 * count
            elif count > 1:
                count //= 2
            else:
                start += 1
        return picks

    # -- result ----------------------------------------------------------------------------------------------

    def rows(self, picks: Sequence[int]) -> list[PlanRow]:
        """Return the rows of the table, in the order of backward."""
        dense, sizes, small = self.dense(), self._sizes(picks), self._choices[-1][picks[-1]]
        alone = {tensor.name: option.route.seconds for tensor, option in self._large(dense)}
        chosen = {tensor.name: option for tensor, option in self._large(picks)}
        found = []
        for tensor in self.tensors:
            option = chosen.get(tensor.name, small)
            if option.batched:
                found.append(self._row_of_batch(tensor, option, sizes))
            else:
                least = min(native_seconds(tensor.nbytes, self.costs), alone[tensor.name])
                found.append(_row(tensor, option, 1.0, least))
        return found

    def _row_of_batch(self, tensor: PlannedTensor, option: Option, sizes: Mapping[Batch, Size]) -> PlanRow:
        """Return the row of a tensor with its share of the batch."""
        size = sizes[Batch(tensor.ready, option.spec, option.strategy)]
        batch, uncast = (self._batches.option(spec, option.strategy, size) for spec in (option.spec, DENSE.spec))
        share = tensor.numel / max(1, size.numel)
        least = min(native_seconds(size.nbytes, self.costs), uncast.route.seconds)
        return _row(tensor, batch if _may_be_cast(tensor) else uncast, share, share * least)


def _neighbors(tensors: Sequence[PlannedTensor]) -> list[int]:
    """Return with how many of its bucket each tensor is fused if it has one partition, itself included.

    Where one partition pays for a tensor, it does for smaller ones. Numbers are powers of two, so that not every tensor
    has options of its own.
    """
    buckets: dict[float, list[int]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.ready, []).append(tensor.numel)
    for bucket in buckets.values():
        bucket.sort()
    counts = [bisect_right(buckets[tensor.ready], tensor.numel) for tensor in tensors]
    return [1 << count.bit_length() - 1 for count in counts]


def _may_be_cast(tensor: PlannedTensor) -> bool:
    """Whether a cast to 16 bits makes a tensor smaller."""
    return tensor.dtype.itemsize > 2


def _row(tensor: PlannedTensor, option: Option, share: float, dense: float) -> PlanRow:
    times = option.route
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PlanRow(
        tensor.name, tensor.numel, dtype, tensor.ready, option.spec, option.strategy, option.partitions, option.batched,
        share * times.encode, share * times.wire, share * times.decode, share * times.seconds, dense,
    )  # fmt: skip
