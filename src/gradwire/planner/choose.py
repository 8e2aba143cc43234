"""The plan of a model: what `search` finds, or dense gradients where compression does not make the step shorter.

Guarantees: the plan's predicted step is never longer than the dense one, by gradwire or by the framework's own
all-reduce. Of plans with the same prediction, the method of higher fidelity wins. The result depends only on the
arguments.

Source: HiPress (SOSP 2021), section 3.3, selective compression and partitioning; DRAGONN (ICML 2022), section 4.2.
Differences: HiPress decides about each tensor separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradwire.core.errors import OptionError
from gradwire.planner import fidelity as levels
from gradwire.planner.closed_forms import Route
from gradwire.planner.costs import Costs
from gradwire.planner.fidelity import RankedCompressor
from gradwire.planner.native import natives
from gradwire.planner.options import PlannedTensor, buckets_of
from gradwire.planner.schedule import Schedule, ScheduledTensor
from gradwire.planner.search import MIN_GAIN, Search
from gradwire.planner.table import PlanRow, PlanTable, limit_of
from gradwire.sync.plan import WHOLE_ELEMENTS


def plan(
    tensors: Sequence[PlannedTensor],
    costs: Costs,
    methods: Sequence[RankedCompressor] | None = None,
    *,
    fidelity: str | None = None,
    momentum: bool = True,
    partitions: Sequence[int] | None = None,
    min_elements: int | None = None,
    backward: float | None = None,
    rest: float = 0.0,
    min_gain: float = MIN_GAIN,
    bucket_bytes: float | None = 25 << 20,
    native: Sequence[str] | None = None,
    feedback: str = "",
    given: Sequence[tuple[PlannedTensor, Route]] = (),
) -> PlanTable:
    """Plan a model.

    Args:
        tensors: Gradients of the model.
        costs: Costs of this job.
        methods: Compressors to choose from in addition to dense, the highest fidelity first. None takes those that
            `fidelity` allows, with gcomp only if it was measured, since it needs an optimizer.
        fidelity: Level of fidelity; see `gradwire.planner.fidelity`. None is ``"balanced"`` without `methods`.
        momentum: Whether the optimizer applies momentum, so that `fidelity` allows less.
        partitions: Numbers of partitions to try; None for `gradwire.planner.options.partition_counts`.
        min_elements: Vectors, and tensors of fewer elements, are not compressed: they travel dense, or cast to 16 bits
            if allowed. None for the number of each compressor.
        backward: Seconds of the backward pass. None ends it with the last gradient.
        rest: Seconds of a step before and after backward.
        min_gain: Share of the dense step that compression must save.
        bucket_bytes: Bytes of a bucket of the framework's own all-reduce. None: gradients that are ready at the same
            time are one.
        native: Kinds of the framework's own all-reduce to compare with: ``"fp32"``, ``"fp16"`` (DDP's fp16 hook). None
            is ``"fp32"``, and ``"fp16"`` if that is among the methods.
        feedback: Momentum correction of all tensors; see `gradwire.planner.table.PlanTable.feedback`.
        given: Further tensors with their routes. They are not planned, but share codec and link with those that are.

    Raises:
        OptionError: There are no tensors, or a number is out of range.
        UnknownNameError: A method has no costs, or the level of fidelity or a kind of all-reduce does not exist.
    """
    if not tensors:
        raise OptionError("There are no tensors to plan for. Pass the gradients of a model.")
    if partitions is not None and (not partitions or min(partitions) < 1):
        raise OptionError(f"partitions are numbers of at least 1, not {list(partitions)}. Pass for example (1, 2, 4).")
    if not 0 <= min_gain < 1:
        raise OptionError(f"min_gain is a share from 0 up to 1, not {min_gain}. Pass for example 0.02.")
    allowed = _allowed(fidelity or "balanced", costs, momentum) if methods is None else list(methods)
    cast = levels.batch_cast(allowed)
    if native is None:
        native = ("fp32", "fp16") if any(method.spec == "fp16" for method in allowed) else ("fp32",)
    if feedback:
        allowed, cast = [method.with_momentum_correction() for method in allowed], None
    jobs = [ScheduledTensor(tensor.ready, route) for tensor, route in given]
    search = Search(_ordered(tensors), costs, allowed, partitions, min_elements, cast, bool(feedback), jobs)
    everything = _ordered([*tensors, *(tensor for tensor, _ in given)])
    end = everything[-1].ready
    backward = end if backward is None else max(backward, end)
    dense, best = search.dense(), search.best(backward)
    if not search.compresses(best):
        dense = best
    rivals = natives(buckets_of(everything, bucket_bytes), costs, native)
    dense_finish, best_finish = (max(backward, search.run(picks).finish) for picks in (dense, best))
    least = min([dense_finish, *(max(backward, rival.finish) for rival in rivals.values())])
    if rest + best_finish > (1 - min_gain) * (rest + least):
        best = dense
    name = fidelity or ("balanced" if methods is None else ", ".join(method.spec for method in allowed))
    table = _table(search, best, dense, rivals, backward, rest, name, best == dense)
    return _with_velocities(table, feedback) if feedback else table


def _with_velocities(table: PlanTable, feedback: str) -> PlanTable:
    """Return the table under momentum correction, where nothing is batched, since a batch has no velocities.

    Small tensors are fused in place of it, and large ones travel in as many ranges as their batch would have had. Times
    stay those with batches.
    """

    def alone(row: PlanRow) -> PlanRow:
        if not row.batched:
            return row
        if row.numel > WHOLE_ELEMENTS:
            return replace(row, batched=False)
        return replace(row, batched=False, strategy="scatter_reduce", partitions=1)

    return replace(table, rows=tuple(map(alone, table.rows)), feedback=feedback)


def uniform(
    tensors: Sequence[PlannedTensor],
    costs: Costs,
    method: RankedCompressor,
    *,
    min_elements: int | None = None,
    rest: float = 0.0,
    bucket_bytes: float | None = 25 << 20,
) -> PlanTable:
    """Plan one method for all large tensors, with its best strategy, even if it does not pay. Small ones stay dense.

    The arguments are those of `plan`.
    """
    search = Search(_ordered(tensors), costs, [method], None, min_elements)
    picks = min((search.uniform(method.spec, strategy) for strategy in search.methods[0].strategies),
                key=lambda picks: search.run(picks).finish)  # fmt: skip
    rivals = natives(buckets_of(search.tensors, bucket_bytes), costs, ("fp32",))
    backward = max(tensor.ready for tensor in tensors)
    return _table(search, picks, search.dense(), rivals, backward, rest, method.spec, False)


def _ordered(tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    return sorted(tensors, key=lambda tensor: tensor.ready)


def _table(
    search: Search, picks: list[int], dense: list[int], rivals: Mapping[str, Schedule], backward: float, rest: float,
    fidelity: str, may_be_native: bool,
) -> PlanTable:  # fmt: skip
    steps = {kind: rest + max(backward, rival.finish) for kind, rival in rivals.items()}
    dense_step = rest + max(backward, search.run(dense).finish)
    fastest = min(steps, key=lambda kind: steps[kind], default="")
    native_step = steps.get(fastest, dense_step)
    native = may_be_native and bool(fastest) and native_step <= dense_step
    outcome = rivals[fastest] if native else search.run(picks)
    return PlanTable(
        rows=tuple(search.rows(picks)),
        world_size=search.costs.world_size,
        fidelity=fidelity,
        native=native,
        step=rest + max(backward, outcome.finish),
        dense_step=dense_step,
        native_step=native_step,
        native_kind=fastest,
        ideal_step=max(rest + backward, outcome.link),
        limit=limit_of(outcome.finish, backward, outcome.link, outcome.codec, margin=0.02),
    )


def _allowed(fidelity: str, costs: Costs, momentum: bool) -> list[RankedCompressor]:
    """Return the methods of a level, those that need an optimizer only if they were measured."""
    without, known = (levels.methods(fidelity, optimizer, momentum) for optimizer in (False, True))
    return [method for method in known if method in without or method.spec in costs.codecs]
