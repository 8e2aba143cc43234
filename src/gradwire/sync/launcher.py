"""Launcher: turns the gradient slices of a submission into jobs, and runs one task graph per job.

A large compressed tensor is a job of its own. All others are fused (`gradwire.sync.fusion`). Which tensors travel
together depends on names, ranges and plan entries alone, so it is found once for each list of slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from gradwire.core.events import Event
from gradwire.core.spec import ElementRange
from gradwire.sync.engine import Engine
from gradwire.sync.fusion import (
    FUSION_FLAG,
    FusionGroup,
    FusionLayout,
    Member,
    SubmissionLayout,
    flush_residuals,
)
from gradwire.sync.graph import TaskGraph
from gradwire.sync.job import TensorJob
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Runtime
from gradwire.sync.submission import GradientSlice, Submission
from gradwire.sync.tensor_registry import TensorRegistry

OptimizerSlices = Callable[[str, ElementRange], Mapping[str, torch.Tensor]]
"""Slices of parameter and optimizer state, by parameter name and element range."""

_MAX_LAYOUTS = 1024


class Launcher:
    """Runs the jobs of a synchronizer's submissions.

    Args:
        engine: Runs the task graphs.
        runtime: What all jobs share.
        tensors: Tensors that all ranks have agreed on.
        rounds: Numbers of the jobs, the same on all ranks.
        aux: Optimizer state for compressors with `needs_optimizer`.
        forward_first: If true, tensors have priority in the order in which they were registered. If false, in the
            order in which they were submitted.
        on_nonfinite: Called when a job ends in which the gradient of any rank was not finite.
        check: Raises an error for a slice that is not of a registered tensor.
    """

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        tensors: TensorRegistry,
        rounds: Iterator[int],
        *,
        aux: OptimizerSlices | None,
        forward_first: bool,
        on_nonfinite: Callable[[], None],
        check: Callable[[GradientSlice], None],
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._tensors = tensors
        self._rounds = rounds
        self._aux = aux
        self._forward_first = forward_first
        self._on_nonfinite = on_nonfinite
        self._check = check
        self._world_size = runtime.transport.world_size
        self._layouts: dict[object, SubmissionLayout] = {}
        self._version = -1  # of the registry, when the layouts were made

    def submit(self, slices: Sequence[GradientSlice], submission: Submission, step: int) -> None:
        """Launch the jobs of a submission."""
        layout = self._layout(slices)
        for member, entry in layout.single:
            job = self._job(member, entry, slices, submission, step)
            self._launch(job, submission, [job.name])
        for group in layout.groups:
            make = self._dense_group if group.entry.batched else self._group
            self._launch(make(group, slices, submission, step), submission, group.names)

    def _layout(self, slices: Sequence[GradientSlice]) -> SubmissionLayout:
        if self._version != self._tensors.version or len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.clear()
            self._version = self._tensors.version
        key: object = tuple([(each.name, each.offset, each.tensor.numel(), each.tensor.dtype) for each in slices])
        if key not in self._layouts:
            self._layouts[key] = self._make_layout(slices, frozenset())
        layout = self._layouts[key]
        # Another plan may have left residuals, which must still be sent.
        flushed = frozenset(name for name in layout.without_feedback if self._holds(name))
        return self._make_layout(slices, flushed) if flushed else layout

    def _make_layout(self, slices: Sequence[GradientSlice], flushed: frozenset[str]) -> SubmissionLayout:
        tensors, found = self._tensors, []
        for index, each in enumerate(slices):
            self._check(each)
            if each.tensor.numel():
                spec, entry = tensors.specs[each.name], tensors.entries[each.name]
                if each.name in flushed:
                    entry = replace(entry, feedback="error")
                fusion_index = tensors.fusion_indices.get(each.name, 0)
                where = index, each.name, tensors.ids[each.name], each.offset, each.tensor.numel()
                found.append((Member(*where, spec.shape, fusion_index), entry, spec))
        return SubmissionLayout(found)

    def _holds(self, name: str) -> bool:
        return self._runtime.residuals.holds_after_pruning(name)

    def _job(
        self,
        member: Member,
        entry: PlanEntry,
        slices: Sequence[GradientSlice],
        submission: Submission,
        step: int,
    ) -> TensorJob:
        aux = self._aux if entry.compressor.needs_optimizer else None
        staging, used = submission.staging, slices[member.index].used
        return TensorJob(
            *(member.name, member.tensor, staging.flat(member.index), entry, next(self._rounds), step, member.offset),
            used=used,
            wait_loaded=staging.wait_loaded,
            shape=member.shape,
            aux=None if aux is None else partial(aux, member.name),
        )

    def _dense_group(
        self, layout: FusionLayout, slices: Sequence[GradientSlice], submission: Submission, step: int
    ) -> TensorJob:
        values = submission.staging.joined([member.index for member in layout.members])
        if any(map(self._holds, layout.names)):
            submission.staging.wait_loaded()
            used = [slices[member.index].used for member in layout.members]
            flush_residuals(layout, values, used, self._runtime.residuals, self._world_size)
        return TensorJob(
            *(layout.name, layout.tensor, values, layout.entry, next(self._rounds), step),
            wait_loaded=submission.staging.wait_loaded,
        )

    def _group(
        self, layout: FusionLayout, slices: Sequence[GradientSlice], submission: Submission, step: int
    ) -> FusionGroup:
        tensors = [submission.staging.contiguous(member.index) for member in layout.members]
        used = [slices[member.index].used for member in layout.members]
        aux = self._aux if layout.entry.compressor.needs_optimizer else None
        return FusionGroup(layout, tensors, used, next(self._rounds), step, submission.staging.wait_loaded, aux)

    def _launch(self, job: TensorJob | FusionGroup, submission: Submission, names: Sequence[str]) -> None:
        submission.expect()
        submitted = time.monotonic()
        dense_bytes = 2 * (self._world_size - 1) * job.nbytes // self._world_size
        method = f"{job.entry.compressor!r} {job.entry.strategy}"
        detail = {"method": method, "elements": job.num_elements, "members": names}
        events = self._runtime.events
        events.emit(Event("submit", submitted, 0.0, job.name, job.round, dense_bytes, detail=detail))

        def done() -> None:
            if job.nonfinite:
                self._on_nonfinite()
            builder.finish()
            events.emit(Event("done", submitted, time.monotonic() - submitted, job.name, job.round))
            submission.arrived()

        priority = job.tensor & ~FUSION_FLAG if self._forward_first else job.round
        graph = TaskGraph(job.name, job.round, priority, on_done=done, on_failed=submission.failed)
        strategy = STRATEGIES[job.entry.strategy]
        builder = strategy.builder(job, graph, self._runtime)
        strategy.build(builder)
        self._engine.run(graph)
