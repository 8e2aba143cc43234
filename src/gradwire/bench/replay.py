"""Replays a recorded backward as waits: forward and backward sleep, gradients, codecs and network are real.

Two cores cannot compute for four ranks without disturbing the clock; here each rank finds the processor as free as
on a machine of its own. Codecs do so too: a real backward leaves them less of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from gradwire.bench import methods
from gradwire.bench.job import Outcome, Segment
from gradwire.bench.methods import Costs
from gradwire.bench.recording import RecordedBucket, Recording
from gradwire.bench.segment import is_identical
from gradwire.bench.statistics import ring_bytes
from gradwire.bench.timing import time_steps

if TYPE_CHECKING:
    from gradwire.bench.worker import Rank


class Exchange(methods.Connection, Protocol):
    """Averages the buckets of a step over the ranks, by one method."""

    def begin(self) -> None:
        """Called before the first bucket of a step."""
        ...

    def submit(self, bucket: RecordedBucket, buffer: torch.Tensor) -> None:
        """Begin to average one bucket, and return at once."""
        ...

    def wait(self) -> None:
        """Return once all buckets of the step hold their mean."""
        ...


class NativeExchange:
    """What DDP and its fp16 hook do: divide, all-reduce, and for fp16 copy back.

    Args:
        method: one of DDP's own, or the one that sends nothing.
        recording: tells the bytes.
    """

    def __init__(self, method: str, recording: Recording) -> None:
        self._method = method
        self._world_size = dist.get_world_size()
        self._running: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        elements = sum(bucket.gradients[0].numel() for bucket in recording.buckets)
        self._dense_bytes = ring_bytes(4 * elements, self._world_size)
        width = {methods.DDP_FP32: 4, methods.DDP_FP16: 2, methods.SILENT: 0}[method]
        self._sent_bytes = ring_bytes(width * elements, self._world_size)

    def begin(self) -> None:
        """Nothing to prepare."""

    def submit(self, bucket: RecordedBucket, buffer: torch.Tensor) -> None:
        """See `Exchange`."""
        if self._method == methods.SILENT:
            return
        sent = buffer.half() if self._method == methods.DDP_FP16 else buffer
        work = dist.all_reduce(sent.div_(self._world_size), async_op=True)
        assert work is not None, "an asynchronous all-reduce returns its work"
        self._running.append((work, sent, buffer))

    def wait(self) -> None:
        """See `Exchange`."""
        for work, sent, buffer in self._running:
            work.wait()
            if sent is not buffer:
                buffer.copy_(sent)
        self._running.clear()

    def costs(self, steps: int) -> Costs:
        """See `Exchange`."""
        return Costs(self._sent_bytes * steps, self._dense_bytes * steps)

    def close(self) -> None:
        """Nothing to end."""


class GradwireExchange:
    """What `gradwire.attach` does in the hook, on the same entry: `Synchronizer.submit`.

    Args:
        method: a compressor with its options.
        seed: of its random streams.
    """

    def __init__(self, method: str, seed: int) -> None:
        from gradwire.sync.plan import Plan
        from gradwire.sync.synchronizer import Synchronizer

        self._synchronizer = Synchronizer(None, Plan(methods.compressor(method)), seed=seed)

    def begin(self) -> None:
        """See `Exchange`."""
        self._synchronizer.begin_step()

    def submit(self, bucket: RecordedBucket, buffer: torch.Tensor) -> None:
        """See `Exchange`."""
        from gradwire.sync.synchronizer import Shard

        views = bucket.views(buffer)
        shards = [Shard(name, view) for name, view in zip(bucket.names, views, strict=True)]
        self._synchronizer.submit(shards, result=buffer)

    def wait(self) -> None:
        """See `Exchange`."""
        self._synchronizer.wait()
        self._synchronizer.commit()

    def costs(self, steps: int) -> Costs:
        """See `Exchange`."""
        total = self._synchronizer.report().total
        return Costs(total.sent_bytes, total.dense_bytes, total.encode_seconds, total.decode_seconds)

    def close(self) -> None:
        """See `Exchange`."""
        self._synchronizer.close()


@dataclass
class Replay:
    """Steps that wait where the recorded rank computed."""

    rank: Rank
    segment: Segment
    recording: Recording
    exchange: Exchange
    steps: int = 0
    buffers: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = [torch.empty_like(bucket.gradients[0]) for bucket in self.recording.buckets]

    @property
    def connection(self) -> methods.Connection:
        """What counts."""
        return self.exchange

    def step(self) -> tuple[float, float]:
        """One step; returns no loss, and its seconds."""
        start = time.perf_counter()
        # While the recorded rank computed its forward.
        for bucket, buffer in zip(self.recording.buckets, self.buffers, strict=True):
            buffer.copy_(bucket.gradients[self.steps % len(bucket.gradients)])
        self.exchange.begin()
        for bucket, buffer in zip(self.recording.buckets, self.buffers, strict=True):
            _sleep_until(start + bucket.ready_seconds)
            self.exchange.submit(bucket, buffer)
        _sleep_until(start + self.recording.backward_seconds)
        self.exchange.wait()
        time.sleep(self.recording.step_seconds - self.recording.backward_seconds)  # the optimizer
        self.steps += 1
        return float("nan"), time.perf_counter() - start


def run_replay(rank: Rank, index: int, recordings: Mapping[float, Recording]) -> Outcome:
    """One segment: a method at each rate."""
    segment = rank.job.segments[index]
    rank.set_rate(None)
    recording = recordings[segment.bucket_mb]
    replay = Replay(rank, segment, recording, _exchange(segment.method, recording, rank.job.seed))
    replay.step()
    timed = [time_steps(replay, index, rate) for rate in segment.rates]
    rank.set_rate(None)
    identical = None if segment.method == methods.SILENT else is_identical(replay.buffers)
    replay.exchange.close()
    return Outcome(index, rank.rank, identical=identical, timed=timed)


def _exchange(method: str, recording: Recording, seed: int) -> Exchange:
    return NativeExchange(method, recording) if methods.is_native(method) else GradwireExchange(method, seed)


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
