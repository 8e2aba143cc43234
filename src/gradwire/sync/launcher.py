"""Launcher: turns the gradient slices of a submission into jobs, and runs one task graph per job.

A large tensor is a job of its own. Small compressed tensors of a submission share a job (`fusion`). Small dense tensors
wait for those of the next submissions (`dense_fusion`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from gradwire.core.events import Event
from gradwire.core.spec import ElementRange
from gradwire.sync.dense_fusion import (
    DENSE_FUSION_FLAG,
    DenseFusionGroup,
    PendingSlice,
    PendingSlices,
    dense_fusion_entry,
)
from gradwire.sync.engine import Engine
from gradwire.sync.fusion import FUSION_FLAG, FusionGroup, fuse, is_fused
from gradwire.sync.graph import TaskGraph
from gradwire.sync.job import TensorJob
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Runtime
from gradwire.sync.submission import GradientSlice, Submission
from gradwire.sync.tensor_registry import TensorRegistry

OptimizerSlices = Callable[[str, ElementRange], Mapping[str, torch.Tensor]]
"""Slices of parameter and optimizer state, by parameter name and element range."""


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
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._tensors = tensors
        self._rounds = rounds
        self._aux = aux
        self._forward_first = forward_first
        self._on_nonfinite = on_nonfinite
        self._world_size = runtime.transport.world_size
        self._pending = PendingSlices()

    def submit(self, slices: Sequence[GradientSlice], submission: Submission, step: int) -> None:
        """Launch the jobs of a submission, except for small dense tensors, which wait for `flush`."""
        small: list[TensorJob] = []
        for index, each in enumerate(slices):
            if each.tensor.numel() == 0:
                continue
            entry = self._tensors.entries[each.name]
            if entry.batched:
                submission.expect()
                self._pending.add(PendingSlice(self._tensors.ids[each.name], each, submission))
                continue
            job = self._job(each, index, submission, step)
            if is_fused(entry, self._tensors.specs[each.name].numel):
                small.append(job)
            else:
                submission.expect()
                self._launch(job, submission, [job.name])
        for group in fuse(small, self._rounds):
            submission.expect()
            self._launch(group, submission, [job.name for job in group.members])

    def flush(self, step: int, *, complete: bool = False) -> None:
        """Launch the pending groups of small dense tensors, or only those that are complete."""
        for members in self._pending.take(self._tensors.group_ids, complete):
            group = DenseFusionGroup(members, self._runtime.residuals, self._world_size)
            entry = dense_fusion_entry(self._tensors.entries[members[0].gradient.name])
            job = TensorJob(
                *(group.name, group.tensor, group.values, entry, next(self._rounds), step),
                wait_loaded=group.staging.wait_loaded,
            )
            self._launch(job, group, [pending.gradient.name for pending in members])

    def _job(self, each: GradientSlice, index: int, submission: Submission, step: int) -> TensorJob:
        entry = self._entry(each.name)
        aux = self._aux if entry.compressor.needs_optimizer else None
        return TensorJob(
            each.name,
            self._tensors.ids[each.name],
            submission.staging.flat(index),
            entry,
            next(self._rounds),
            step,
            each.offset,
            each.used,
            wait_loaded=submission.staging.wait_loaded,
            shape=self._tensors.specs[each.name].shape,
            fusion_index=self._tensors.fusion_indices.get(each.name, 0),
            aux=None if aux is None else partial(aux, each.name),
        )

    def _entry(self, name: str) -> PlanEntry:
        """The tensor's entry, with feedback if another plan has left a residual that must still be sent."""
        entry = self._tensors.entries[name]
        if entry.feedback == "none" and self._runtime.residuals.holds_after_pruning(name):
            return replace(entry, feedback="error")
        return entry

    def _launch(self, job: TensorJob | FusionGroup, waiting: Submission | DenseFusionGroup, names: list[str]) -> None:
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
            waiting.arrived()

        priority = job.tensor & ~(DENSE_FUSION_FLAG | FUSION_FLAG) if self._forward_first else job.round
        graph = TaskGraph(job.name, job.round, priority, on_done=done, on_failed=waiting.failed)
        strategy = STRATEGIES[job.entry.strategy]
        builder = strategy.builder(job, graph, self._runtime)
        strategy.build(builder)
        self._engine.run(graph)
