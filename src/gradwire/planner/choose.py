"""The planner: for each tensor the compressor, strategy and number of partitions, so that the step becomes shortest.

1. Each tensor by itself, as in HiPress: the least of the closed forms over all that is allowed.
2. All of them beside the backward (`schedule`). Where the backward hides a dense all-reduce, compressing gains nothing,
   and where the codec is the bottleneck a plan of single winners is not the best. The search starts from the dense
   plan, the single winners and every method for all tensors, changes the best of them tensor by tensor while that
   helps, and at last gives back to dense what does not help.

Guarantees: the plan's predicted step is never above the dense one's, by gradwire or by the framework's own all-reduce.
Between plans that predict the same, the more faithful method wins. The result depends on the arguments alone.

Source: HiPress (SOSP 2021), section 3.3, selective compression and partitioning; DRAGONN (ICML 2022), section 4.2.
Differences: HiPress decides each tensor by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire.core.errors import OptionError
from gradwire.planner import fidelity as levels
from gradwire.planner import schedule
from gradwire.planner.closed_forms import Route, native_seconds, route
from gradwire.planner.costs import Costs
from gradwire.planner.fidelity import DENSE, RankedCompressor
from gradwire.planner.options import Option, PlannedTensor, best_alone, is_small, options, unbeaten
from gradwire.planner.schedule import Schedule, ScheduledTensor
from gradwire.planner.table import PlanRow, PlanTable
from gradwire.sync.dense_fusion import DENSE_FUSION_BYTES
from gradwire.sync.fusion import MAX_FUSED_ELEMENTS

PARTITIONS = (1, 2, 3, 4, 6, 8, 12, 16)
MIN_GAIN = 0.02  # predictions are no better than this, and values that were not rounded are worth something
_STEP = 0.002  # what counts as better or worse in the search
_TENSOR_RUNS = 10_000  # tensors scheduled in all, about two seconds on one core


def plan(
    tensors: Sequence[PlannedTensor],
    costs: Costs,
    methods: Sequence[RankedCompressor] | None = None,
    *,
    fidelity: str = "balanced",
    partitions: Sequence[int] = PARTITIONS,
    min_elements: int = 16_384,
    backward: float | None = None,
    rest: float = 0.0,
    min_gain: float = MIN_GAIN,
    bucket_bytes: int = 25 << 20,
) -> PlanTable:
    """Plan a model.

    Args:
        tensors: its gradients.
        costs: measured on this job.
        methods: what may be chosen beside dense, the most faithful first; None takes what `fidelity` allows, gcomp only
            where it was measured, since that takes an optimizer.
        fidelity: see `gradwire.planner.fidelity`.
        partitions: numbers to try.
        min_elements: smaller tensors, and vectors, travel in batches, dense or cast to 16 bits where that is allowed.
        backward: seconds of the backward; None takes the last gradient's.
        rest: seconds of a step before and after backward.
        min_gain: compress only where the step becomes shorter by this share of the dense one.
        bucket_bytes: of the framework's own all-reduce.

    Raises:
        OptionError: no tensors, or numbers out of range.
        UnknownNameError: a method without costs, or a fidelity that does not exist.
    """
    if not tensors or not partitions or min(partitions) < 1 or not 0 <= min_gain < 1:
        raise OptionError(
            f"Expected tensors, partitions of at least 1 and a min_gain from 0 up to 1, got {len(tensors)} tensors, "
            f"{list(partitions)} and {min_gain}. Do: plan(tensors, costs)."
        )
    allowed = _allowed(fidelity, costs) if methods is None else list(methods)
    ordered = sorted(tensors, key=lambda tensor: tensor.ready)
    search = _Search(ordered, costs, allowed, partitions, min_elements, levels.batch_cast(allowed))
    end = max(tensor.ready for tensor in tensors)
    backward = end if backward is None else max(backward, end)
    dense, best = search.dense(), search.best(backward)
    if not search.compresses(best):
        dense = best
    native = _native(search.tensors, costs, bucket_bytes)
    dense_finish, best_finish = (max(backward, search.run(picks).finish) for picks in (dense, best))
    native_finish = max(backward, native.finish)
    if rest + best_finish > (1 - min_gain) * (rest + min(dense_finish, native_finish)):
        best = dense
    use_native = best == dense and native_finish <= dense_finish
    outcome = native if use_native else search.run(best)
    return PlanTable(
        rows=tuple(search.rows(best)),
        world_size=costs.world_size,
        fidelity=fidelity if methods is None else ", ".join(method.spec for method in allowed),
        native=use_native,
        step=rest + max(backward, outcome.finish),
        dense_step=rest + dense_finish,
        native_step=rest + native_finish,
        ideal_step=max(rest + backward, outcome.link),
        limit=_limit(outcome, backward),
    )


def uniform(
    tensors: Sequence[PlannedTensor],
    costs: Costs,
    method: RankedCompressor,
    *,
    min_elements: int = 16_384,
    rest: float = 0.0,
    bucket_bytes: int = 25 << 20,
) -> PlanTable:
    """One method for all large tensors, by its best strategy, whether it pays or not; small ones travel dense.

    Arguments as for `plan`.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.ready)
    search = _Search(ordered, costs, [method], PARTITIONS, min_elements)
    backward = max(tensor.ready for tensor in tensors)
    picks = min((search.uniform(method.spec, strategy) for strategy in method.strategies),
                key=lambda picks: search.run(picks).finish)  # fmt: skip
    outcome = search.run(picks)
    return PlanTable(
        rows=tuple(search.rows(picks)),
        world_size=costs.world_size,
        fidelity=method.spec,
        native=False,
        step=rest + max(backward, outcome.finish),
        dense_step=rest + max(backward, search.run(search.dense()).finish),
        native_step=rest + max(backward, _native(ordered, costs, bucket_bytes).finish),
        ideal_step=max(rest + backward, outcome.link),
        limit=_limit(outcome, backward),
    )


def _allowed(fidelity: str, costs: Costs) -> list[RankedCompressor]:
    """Methods of a level. Those that need an optimizer are allowed if one was there when costs were measured."""
    without = levels.methods(fidelity)
    return [each for each in levels.methods(fidelity, optimizer=True) if each in without or each.spec in costs.codecs]


@dataclass
class _Search:
    """The discrete search: what is picked for each large tensor, and, at the end, for the batches of all small ones."""

    tensors: list[PlannedTensor]
    costs: Costs
    methods: Sequence[RankedCompressor]
    partitions: Sequence[int]
    min_elements: int
    cast: str | None = None
    _known: dict[tuple[int, ...], Schedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.large = [tensor for tensor in self.tensors if not self._small(tensor)]
        small = [tensor for tensor in self.tensors if self._small(tensor)]
        known: dict[tuple[int, ...], list[Option]] = {}  # by size and neighbors: models repeat their layers
        buckets = Counter(tensor.ready for tensor in self.large if tensor.numel <= MAX_FUSED_ELEMENTS)
        self._keys: list[tuple[int, ...]] = [(*tensor.size, buckets[tensor.ready]) for tensor in self.large]
        for tensor, key in zip(self.large, self._keys):
            if key not in known:
                known[key] = options(tensor, self.costs, self.methods, self.partitions, buckets[tensor.ready])
        self._choices = [known[key] for key in self._keys]
        self._worth: dict[tuple[int, ...], list[int]] = {}
        self._batch_numel = sum(tensor.numel for tensor in small)
        self._batch_bytes = sum(tensor.nbytes for tensor in small)
        specs = [DENSE.spec]
        if self.cast is not None and any(_may_be_cast(tensor) for tensor in small):
            specs.append(self.cast)
        self._batches = [self._held(small, spec) for spec in specs]
        self._keys.append((self._batch_numel,))
        self._choices.append(
            [
                Option(spec, "scatter_reduce", 1, self._batch(spec, self._batch_numel, self._batch_bytes))
                for spec in specs
            ]
        )
        self._left = max(20, _TENSOR_RUNS // max(1, len(self.large)))

    def _small(self, tensor: PlannedTensor) -> bool:
        return is_small(tensor.shape, self.min_elements)

    def _batch(self, spec: str, numel: int, nbytes: int) -> Route:
        return route(spec, "scatter_reduce", 1, numel, self.costs, -(-nbytes // max(1, numel)))

    def _held(self, small: Sequence[PlannedTensor], spec: str) -> list[ScheduledTensor]:
        """The batches of small tensors: each when `DENSE_FUSION_BYTES` are there, the last with the last bucket."""
        jobs, numel, nbytes = [], 0, 0
        last = max((tensor.ready for tensor in self.tensors), default=0.0)
        for index, tensor in enumerate(small):
            numel, nbytes = numel + tensor.numel, nbytes + tensor.nbytes
            end = index == len(small) - 1
            if end or (nbytes >= DENSE_FUSION_BYTES and small[index + 1].ready > tensor.ready):
                jobs.append(ScheduledTensor(last if end else tensor.ready, self._batch(spec, numel, nbytes)))
                numel, nbytes = 0, 0
        return jobs

    def run(self, picks: Sequence[int]) -> Schedule:
        """The schedule of one choice for each large tensor, and one for all batches."""
        key = tuple(picks)
        if key not in self._known:
            self._left -= 1
            jobs = [ScheduledTensor(tensor.ready, choices[pick].route)
                    for tensor, choices, pick in zip(self.large, self._choices, picks)]  # fmt: skip
            jobs += self._batches[picks[-1]]
            self._known[key] = schedule.run(jobs)
        return self._known[key]

    # -- starts ----------------------------------------------------------------------------------------------

    def dense(self) -> list[int]:
        """The best dense plan: one strategy for all, or for each tensor the one that is best for it alone."""
        plans = [self.uniform(DENSE.spec, strategy) for strategy in (None, *DENSE.strategies)]
        return min(plans, key=lambda picks: self.run(picks).finish)

    def compresses(self, picks: Sequence[int]) -> bool:
        return any(choices[pick].spec != DENSE.spec for choices, pick in zip(self._choices, picks))

    def uniform(self, spec: str, strategy: str | None) -> list[int]:
        """One method for all, each with its best partitions; batches are dense where they cannot travel so."""
        picks = []
        for choices in self._choices:
            fitting = [index for index, option in enumerate(choices)
                       if option.spec == spec and strategy in (None, option.strategy)] or [0]  # fmt: skip
            picks.append(min(fitting, key=lambda index: choices[index].route.seconds))
        return picks

    def _starts(self) -> list[list[int]]:
        starts = [self.dense()]
        for method in self.methods:
            if method.spec != DENSE.spec:
                starts += [self.uniform(method.spec, strategy) for strategy in method.strategies]
        return [*starts, [choices.index(best_alone(choices)) for choices in self._choices]]

    # -- search ----------------------------------------------------------------------------------------------

    def best(self, backward: float) -> list[int]:
        """The picks with the shortest step found."""

        def end(picks: Sequence[int]) -> float:
            return max(backward, self.run(picks).finish)

        best, least = self.dense(), math.inf
        for start in self._starts():
            if end(start) < least * (1 - _STEP):
                best, least = start, end(start)
        best = self._improve(best, backward)
        return self._give_back(best, backward)

    def _improve(self, picks: list[int], backward: float) -> list[int]:
        """Change one tensor at a time, the slowest first, while the step becomes shorter and there is time."""
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
        """The options of a tensor that no other beats in codec, link and time alike."""
        size = self._keys[index]
        if size not in self._worth:
            self._worth[size] = unbeaten(self._choices[index])
        return self._worth[size]

    def _give_back(self, picks: list[int], backward: float) -> list[int]:
        """Make dense again as many compressed tensors as cost the step nothing, those that gain least first."""
        dense, limit = self.dense(), max(backward, self.run(picks).finish) * (1 + _STEP)

        def gain(index: int) -> float:
            choices = self._choices[index]
            return choices[dense[index]].route.seconds - choices[picks[index]].route.seconds

        order = sorted((i for i, pick in enumerate(picks) if self._choices[i][pick].spec != DENSE.spec), key=gain)
        low, high, best = 0, len(order), picks
        while low < high:
            count = (low + high + 1) // 2
            back = set(order[:count])
            trial = [dense[i] if i in back else pick for i, pick in enumerate(picks)]
            if self.run(trial).finish <= limit:
                low, best = count, trial
            else:
                high = count - 1
        return best

    # -- result ----------------------------------------------------------------------------------------------

    def rows(self, picks: Sequence[int]) -> list[PlanRow]:
        """The table's rows, in the order of backward."""
        dense = self.dense()
        chosen = {}
        for tensor, choices, pick, none in zip(self.large, self._choices, picks, dense):
            native = native_seconds(tensor.nbytes, self.costs)
            chosen[tensor.name] = (choices[pick], 1.0, min(native, choices[none].route.seconds))
        as_they_are, batch = self._choices[-1][0], self._choices[-1][picks[-1]]
        together = min(native_seconds(self._batch_bytes, self.costs), as_they_are.route.seconds)
        found = []
        for tensor in self.tensors:
            share = tensor.numel / max(1, self._batch_numel)
            small = batch if _may_be_cast(tensor) else as_they_are
            option, share, least = chosen.get(tensor.name, (small, share, share * together))
            found.append(_row(tensor, option, share, least, tensor.name not in chosen))
        return found


def _may_be_cast(tensor: PlannedTensor) -> bool:
    """Of 16 bits a cast makes nothing smaller."""
    return tensor.dtype.itemsize > 2


def _row(tensor: PlannedTensor, option: Option, share: float, dense: float, batched: bool) -> PlanRow:
    way = option.route
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PlanRow(
        tensor.name, tensor.numel, dtype, tensor.ready, option.spec, option.strategy, option.partitions, batched,
        share * way.encode, share * way.wire, share * way.decode, share * way.seconds, dense,
    )  # fmt: skip


def _native(tensors: Sequence[PlannedTensor], costs: Costs, bucket_bytes: int) -> Schedule:
    """The framework's own all-reduce: a bucket after another, each when its last gradient is there."""
    finish, busy, nbytes = 0.0, 0.0, 0
    waiting = 2 * (costs.world_size - 1) * (costs.native or costs.slowest).latency
    for index, tensor in enumerate(tensors):
        nbytes += tensor.nbytes
        if nbytes >= bucket_bytes or index == len(tensors) - 1:
            seconds = native_seconds(nbytes, costs)
            finish, busy, nbytes = max(finish, tensor.ready) + seconds, busy + max(0.0, seconds - waiting), 0
    return Schedule(finish, 0.0, busy)


def _limit(outcome: Schedule, backward: float) -> str:
    """What a step waits for."""
    tail = outcome.finish - backward
    if tail <= 0.02 * outcome.finish:
        return "backward"
    if max(outcome.codec, outcome.link) < tail / 2:
        return "latency"
    return "link" if outcome.link >= outcome.codec else "codec"
