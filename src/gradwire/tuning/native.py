"""DDP's own all-reduce under `auto`, and its events, so that the report has its bytes and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from gradwire.core import host, torch_private
from gradwire.core.events import Event
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.candidates import FP32, HOOKS, Candidate, Future


class NativeAverage:
    """Averages buckets by DDP's own all-reduce, as a candidate says.

    Args:
        synchronizer: Synchronizer of the module, whose events these are.
        group: Process group.

    Attributes:
        rested: Steps by `rest` that are not in the report yet.
    """

    def __init__(self, synchronizer: Synchronizer, group: dist.ProcessGroup) -> None:
        self.rested = 0
        self._synchronizer = synchronizer
        self._group = group
        self._last: dict[str, tuple[Event, Event]] = {}  # submit and done of the last step, by bucket

    @cached_property
    def has_bf16(self) -> bool:
        """Whether the group adds bfloat16, as not every Gloo does. All ranks ask first in the same step."""
        if "gloo" not in dist.get_backend(self._group):
            return True
        try:
            dist.all_reduce(host.zeros(1, torch.bfloat16), group=self._group)
        except RuntimeError:
            return False
        return True

    def begin(self) -> None:
        """Begin a step that does not rest."""
        self.count_rested()
        self._last = {}  # a bucket that no rank has used need not come again

    def rest(self, bucket: torch_private.GradBucket, candidate: Candidate) -> Future:
        """Average a bucket and do nothing else."""
        is_half = candidate.kind != FP32 and not torch_private.is_sparse(bucket)
        return HOOKS[candidate.hook if is_half else "fp32"](self._group, bucket)

    def average(self, bucket: torch_private.GradBucket, names: Sequence[str], candidate: Candidate) -> Future:
        """Average a bucket, and emit the events of a tensor of ours. The bytes are those of a ring."""
        buffer, world_size, events = bucket.buffer(), self._synchronizer.world_size, self._synchronizer.events
        begun, row, sends = time.monotonic(), f"bucket {bucket.index()}", 2 * (world_size - 1)
        itemsize = buffer.element_size() if candidate.kind == FP32 else 2
        sent_bytes = sends * buffer.numel() * itemsize // world_size
        detail = {"method": candidate.name, "elements": buffer.numel(), "members": names, "sent_bytes": sent_bytes}
        submit = Event("submit", begun, tensor=row, nbytes=sends * buffer.nbytes // world_size, detail=detail)
        events.emit(submit)

        def arrived(mean: Future) -> torch.Tensor:
            done = Event("done", begun, time.monotonic() - begun, row)
            self._last[row] = submit, done
            events.emit(done)
            return mean.value()

        return HOOKS[candidate.hook](self._group, bucket).then(arrived)

    def count_rested(self) -> None:
        """Emit the events of the steps that rested: those of the last step, as often."""
        times, self.rested = self.rested, 0
        for submit, done in self._last.values() if times else ():
            detail = {**submit.detail, "sent_bytes": times * submit.detail["sent_bytes"]}
            self._synchronizer.events.emit(submit._replace(nbytes=times * submit.nbytes, detail=detail))
            self._synchronizer.events.emit(done._replace(duration=times * done.duration, detail={"syncs": times}))
