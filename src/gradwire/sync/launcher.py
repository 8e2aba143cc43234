"""Launcher: turns the gradient slices of a submission into jobs, and runs the operations of each.

A large compressed tensor is a job of its own. All others are fused (`gradwire.sync.fusion`). Which tensors travel
together, and the operations of each job, depend on names, ranges and plan entries alone, so they are found once for
each list of slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch

from gradwire.core.errors import SyncError
from gradwire.core.events import Event
from gradwire.sync.adding_codecs import DenseCodec
from gradwire.sync.chunk import Chunk
from gradwire.sync.engine import Engine
from gradwire.sync.fusion import (
    FUSION_FLAG,
    DenseGroup,
    FusionGroup,
    FusionLayout,
    SubmissionLayout,
    flush_residuals,
)
from gradwire.sync.job import TensorJob, TensorLayout, nonfinite_names
from gradwire.sync.optimizer_view import OptimizerSlices, OptimizerView
from gradwire.sync.run import Run
from gradwire.sync.runtime import Runtime
from gradwire.sync.strategies import STRATEGIES, operations_of
from gradwire.sync.submission import GradientSlice, Submission
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.wire.payload import Payload

_MAX_LAYOUTS = 1024


class JobRun(Run):
    """The run of one job of a submission.

    Args:
        job: What is synchronized.
        submission: Told when the run ends.
        runtime: What all jobs share.
        priority: Runs with lower numbers go first.
        on_nonfinite: Called at the end if the gradient of any rank was not finite, with the names of the tensors
            concerned, and whether ranks turned out to hold different optimizer state.
    """

    def __init__(
        self,
        job: TensorJob | FusionGroup,
        submission: Submission,
        runtime: Runtime,
        priority: int,
        on_nonfinite: Callable[[Collection[str], bool], None],
    ) -> None:
        layout = job.layout
        codec, operations = STRATEGIES[layout.entry.strategy].codec(job, runtime), layout.operations
        if operations.num_encoders:
            codec.encode_from(operations.first_stage, operations.num_encoders)
        super().__init__(operations, codec, layout.name, job.round, priority)
        self._job = job
        self._submission = submission
        self._events = runtime.events
        self._on_nonfinite = on_nonfinite
        self._submitted = time.monotonic()

    def destination(self, chunk: Chunk, nbytes: int) -> np.ndarray | None:
        return self.codec.destination(chunk, nbytes) if isinstance(self.codec, DenseCodec) else None

    def lends(self, payload: Payload) -> bool:
        return isinstance(self.codec, DenseCodec) and self.codec.lends(payload)

    def on_done(self) -> None:
        self.codec.finish()
        if self._job.nonfinite:
            self._on_nonfinite(nonfinite_names(self._job.pieces), self._job.mismatch)
        submitted = self._submitted
        self._events.emit(Event("done", submitted, time.monotonic() - submitted, self.name, self.round))
        self._submission.arrived()

    def on_failed(self, error: SyncError) -> None:
        self._submission.failed(error)


class Launcher:
    """Makes the jobs of a synchronizer's submissions, and runs them.

    Args:
        engine: Runs the operations.
        runtime: What all jobs share.
        tensors: Tensors that all ranks have agreed on.
        rounds: Numbers of the jobs, the same on all ranks.
        aux: Optimizer state for compressors with `needs_optimizer`.
        forward_first: If true, tensors have priority in the order in which they were registered. If false, in the
            order in which they were submitted.
        on_nonfinite: Called when a job ends in which the gradient of any rank was not finite; see `JobRun`.
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
        on_nonfinite: Callable[[Collection[str], bool], None],
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
        for single in layout.single:
            self._launch(self._job(single, slices, submission, step), submission)
        for dense in layout.dense:
            self._launch(self._dense_group(dense, slices, submission, step), submission)
        for group in layout.groups:
            self._launch(self._group(group, slices, submission, step), submission)

    def _layout(self, slices: Sequence[GradientSlice]) -> SubmissionLayout:
        if self._version != self._tensors.version or len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.clear()
            self._version = self._tensors.version
        key: object = tuple([(each.name, each.offset, each.tensor.numel(), each.tensor.dtype) for each in slices])
        layout = self._cached(key, slices, frozenset())
        # Another plan may have left residuals, which must still be sent.
        flushed = frozenset(name for name in layout.without_feedback if self._holds(name))
        return self._cached(key, slices, flushed) if flushed else layout

    def _cached(self, key: object, slices: Sequence[GradientSlice], flushed: frozenset[str]) -> SubmissionLayout:
        found = self._layouts.get((key, flushed))
        if found is None:
            found = self._layouts[key, flushed] = self._make_layout(slices, flushed)
        return found

    def _make_layout(self, slices: Sequence[GradientSlice], flushed: frozenset[str]) -> SubmissionLayout:
        tensors, found = self._tensors, []
        for index, each in enumerate(slices):
            self._check(each)
            count = each.tensor.numel()
            if count:
                name, spec, entry = each.name, tensors.specs[each.name], tensors.entries[each.name]
                where = tensors.ids[name], entry, spec.dtype, count, each.offset, spec.shape
                found.append((TensorLayout(name, *where, index, tensors.rotations[name]), spec.numel))
        layout, transport = SubmissionLayout(found, flushed), self._runtime.transport
        for job in layout.jobs:
            job.operations = operations_of(job, transport.rank, transport.world_size, self._runtime.nodes)
        return layout

    def _holds(self, name: str) -> bool:
        return self._runtime.residuals.holds_after_pruning(name)

    def _job(
        self, layout: TensorLayout, slices: Sequence[GradientSlice], submission: Submission, step: int
    ) -> TensorJob:
        values, used = submission.staging.flat(layout.index), slices[layout.index].used
        if layout.entry.adds_in_place:
            self._flush([layout], values, slices, submission)
        return TensorJob(layout, values, next(self._rounds), step, used, self._aux_of(layout))

    def _dense_group(
        self, group: DenseGroup, slices: Sequence[GradientSlice], submission: Submission, step: int
    ) -> TensorJob:
        values = submission.staging.joined([member.index for member in group.members])
        self._flush(group.members, values, slices, submission)
        return TensorJob(group.layout, values, next(self._rounds), step)

    def _flush(
        self,
        members: Sequence[TensorLayout],
        values: torch.Tensor,
        slices: Sequence[GradientSlice],
        submission: Submission,
    ) -> None:
        """Add to dense gradients what another plan has left, so that what is sent does not tell who had residuals."""
        if any(self._holds(member.name) for member in members):
            submission.staging.wait_loaded()
            used = [slices[member.index].used for member in members]
            flush_residuals(members, values, used, self._runtime.residuals, self._world_size)

    def _group(
        self, layout: FusionLayout, slices: Sequence[GradientSlice], submission: Submission, step: int
    ) -> FusionGroup:
        tensors = submission.staging.contiguous([member.index for member in layout.members])
        used = [slices[member.index].used for member in layout.members]
        return FusionGroup(layout, tensors, used, next(self._rounds), step, self._aux_of(layout))

    def _aux_of(self, layout: TensorLayout | FusionLayout) -> OptimizerView | None:
        if self._aux is None or not layout.entry.compressor.needs_optimizer:
            return None
        strategy = STRATEGIES[layout.entry.strategy]
        return OptimizerView(self._aux, strategy.shows_mismatch, strategy.merges_once)

    def _launch(self, job: TensorJob | FusionGroup, submission: Submission) -> None:
        submission.expect()
        layout = job.layout
        priority = layout.tensor & ~FUSION_FLAG if self._forward_first else job.round
        run = JobRun(job, submission, self._runtime, priority, self._on_nonfinite)
        dense_bytes = 2 * (self._world_size - 1) * layout.nbytes // self._world_size
        name, detail = layout.name, layout.detail
        self._runtime.events.emit(Event("submit", time.monotonic(), 0.0, name, job.round, dense_bytes, detail=detail))
        self._engine.run(run, submission.staging.loading())
