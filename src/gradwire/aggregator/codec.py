"""Encoding and decoding of chunks whose statistics and indices an aggregation server reduces.

The server answers when it has heard enough ranks, and names the ranks in each sum. What becomes of the others is a
policy, the same on all ranks: a rank that was too late keeps what it sent in its residual, or drops it, and the sum of
the others is divided by the number of all ranks, or by theirs (`gradwire.Aggregator`). All ranks must agree on three
things. They derive them from the server's answers, which are identical on all ranks:

- *Which ranks are absent*, because their backward pass did not use the parameter: marked next to the statistics. An
  absent rank counts as a gradient of zero.
- *Whether a gradient is not finite*: infinity among the statistics, or a flag of the sum. Such a step is rolled back.
  If the rank was heard in neither, it drops its gradient and keeps its residual, and the others go on.
- *The divisor* of each packet: the number of all ranks, or of those counted and absent.

With `Aggregator.fill_after`, a rank takes zeros for the mean of a packet whose sum does not come in time, and no other
rank knows. Statistics are always waited for, so that all ranks decode by the same.

Guarantees: kept, and divided by all, what was produced is the sum of all means and residuals. Divided by the counted,
the same holds with each mean weighted by its share of the ranks. Dropped, residuals are bit for bit those of a job in
which no rank is late: the payloads that were late are lost, and nothing else. Filled, a rank loses the mean of the
packet, and nothing else: its residual is bit for bit that of a job in which nothing is filled.

Source: THC (Li et al. 2024), section 6: partial aggregation, zeros after a timeout. Differences: in the paper, late
gradients are lost.
"""
# Shapes: W = ranks, N = elements of the chunk, G = its blocks, P = its indices

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from gradwire.aggregator.request import Reply
from gradwire.aggregator.service import AggregatorConnection, num_statistics
from gradwire.compressors.base import LookupCompressor
from gradwire.core import host
from gradwire.core.events import Event
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.sync.adding_codecs import AccumulatorCodec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY
from gradwire.sync.job import TensorJob
from gradwire.sync.runtime import Runtime
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload


class ServedCodec(AccumulatorCodec):
    """Codec of one job whose sums a server forms.

    The order of calls for each chunk is `stats`, `ask_stats`, `take_stats`, `start`, `ask_sum`, `take`.
    """

    def __init__(self, job: TensorJob, service: AggregatorConnection, runtime: Runtime) -> None:
        transport = runtime.transport
        super().__init__(job, runtime.residuals, transport.rank, transport.world_size, runtime.seed)
        assert isinstance(self.compressor, LookupCompressor), "a plan refuses others"
        self._lookup: LookupCompressor = self.compressor
        self._service = service
        self._events = runtime.events
        # By index of the chunk:
        self._reduced: dict[int, np.ndarray] = {}  # statistics and marks of all ranks, reduced by the server
        self._num_absent: dict[int, int] = {}
        self._sent: dict[int, Payload] = {}
        self._server_sums: dict[int, np.ndarray] = {}
        self._nonfinite: set[int] = set()  # chunks whose own gradient is not finite

    # -- the preliminary round ---------------------------------------------------------------------------------

    def stats(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Return this rank's statistics, as the server reduces them, and a mark per rank: 1 if it is absent."""
        num_own = num_statistics(self._lookup, self.layout.spec(chunk))
        row = np.zeros(num_own + self.world_size, np.float32)
        own = self._own(chunk)
        if own is None:
            row[:num_own] = -np.inf
            row[num_own + self.rank] = 1
        elif self._service.partial and not np.isfinite(kernels.abs_max(as_array(own.grad))):
            # Nothing is staged: if no rank hears of this, no rank rolls back.
            row[:num_own] = np.inf
        else:
            row[:num_own] = self._negate_minima(chunk, super().stats(chunk).body.view(np.float32))
        if np.isposinf(row[:num_own]).any():
            self._nonfinite.add(chunk.index)
        return Payload(row.view(np.uint8))

    def ask_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Future[Reply]:
        """Send the result of `stats`."""
        row = payloads[0].body.view(np.float32)
        self._reduced[chunk.index] = out = np.empty_like(row)
        return self._ask(chunk, FrameKind.STATS, row, out, FrameFlags.USED)

    def _ask(
        self, chunk: Chunk, kind: FrameKind, body: np.ndarray | None, out: np.ndarray, flags: FrameFlags
    ) -> Future[Reply]:
        start, job = time.monotonic(), self.job
        future = self._service.submit(job, chunk, kind, body, out, flags)
        nbytes = self._service.sent_bytes(job, chunk, kind, 0 if body is None else body.nbytes)
        self._events.emit(Event("send", start, time.monotonic() - start, self.layout.name, job.round, nbytes))
        return future

    def take_stats(self, chunk: Chunk, replies: Sequence[Reply], stage: int) -> None:
        """Read the reduced statistics once the server has answered."""
        row = self._reduced.pop(chunk.index)
        marks, values = row[-self.world_size :], row[: -self.world_size]
        values[np.isneginf(values)] = 0  # no rank that was heard used the parameter
        reduced = self._negate_minima(chunk, values)
        lengths = [length for length, _ in self._lookup.stats_spec(self.layout.spec(chunk))]
        self._stats[chunk.index] = np.split(reduced, np.cumsum(lengths)[:-1])
        self._num_absent[chunk.index] = int((marks == 1).sum())

    def _negate_minima(self, chunk: Chunk, values: np.ndarray) -> np.ndarray:
        """Change the signs of statistics that are reduced by minimum, since the server only takes maxima."""
        signs = [np.full(length, -1 if reduction == "min" else 1, np.float32)
                 for length, reduction in self._lookup.stats_spec(self.layout.spec(chunk))]  # fmt: skip
        return np.asarray(values * np.concatenate(signs))

    # -- the sum -----------------------------------------------------------------------------------------------

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        if chunk.index in self._nonfinite:
            return Payload(EMPTY, nonfinite=True)
        return super().start(chunk)

    def ask_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Future[Reply] | None:
        """Send the result of `start`; None if all ranks know that there is nothing to add."""
        if self._num_absent[chunk.index] == self.world_size or not self._is_finite(chunk):
            return None
        (mine,), body = payloads, None
        if mine.used and not mine.nonfinite:
            self._sent[chunk.index] = mine
            body = mine.body
        size = self._lookup.accumulator_size(self.layout.spec(chunk)) - 1
        self._server_sums[chunk.index] = out = np.empty(size, self._lookup.accumulator_dtype(self.world_size))
        return self._ask(chunk, FrameKind.PAYLOAD, body, out, mine.flags)

    def take(self, chunk: Chunk, replies: Sequence[Reply | None], stage: int) -> None:
        """Write the mean over the gradient, and keep or drop what this rank sent too late."""
        (reply,) = replies
        out = self.job.values[chunk.slice]
        if self._num_absent[chunk.index] == self.world_size:
            out.zero_()
            return
        if reply is None or reply.flags & FrameFlags.NONFINITE:
            self.job.nonfinite = True
            out.fill_(torch.nan)
            return
        num_late = self._settle_late(chunk, reply)
        mean = out if out.dtype == torch.float32 else host.empty(chunk.count)
        was_scaled = self._write(chunk, reply, mean)
        if mean is not out:
            kernels.cast(mean.numpy(), as_array(out))
        self._note_overflow(out, computed=was_scaled)
        self._count("late", num_late)
        if reply.filled.any():
            filled = reply.filled_blocks(self._lookup.block, self._stats[chunk.index][0].size)
            self._count("filled", int(self._by_element(chunk, filled).sum()))
            self._service.warn_of_filling(self.layout.name)

    def _count(self, kind: str, elements: int) -> None:
        if elements:
            detail = {"elements": elements}
            self._events.emit(Event(kind, time.monotonic(), 0.0, self.layout.name, self.job.round, detail=detail))

    def _write(self, chunk: Chunk, reply: Reply, mean: torch.Tensor) -> bool:
        """Write the mean, and return whether it was scaled to the number of ranks in the sum."""
        stats = self._stats[chunk.index]
        counts = reply.counts_of_blocks(self._lookup.block, stats[0].size)
        sums, context = self._server_sums.pop(chunk.index), self._context(chunk, self.first_stage)
        self._lookup.finalize_blocks(sums, counts, context, stats, mean)
        if self._service.divides_by_all:  # as encoders did
            return False
        divisors = np.maximum(counts, 1) + self._num_absent[chunk.index]
        if (divisors == self.world_size).all():
            return False
        mean *= torch.from_numpy(self._by_element(chunk, (self.world_size / divisors).astype(np.float32)))
        return True

    def _settle_late(self, chunk: Chunk, reply: Reply) -> int:
        """Keep or drop what this rank sent and the server did not count, and return its number of elements."""
        if chunk.index not in self._sent:
            return 0
        stats = self._stats[chunk.index]
        blocks = self._lookup.block, stats[0].size
        late_blocks = ~reply.counted_blocks(self.rank, *blocks) & ~reply.filled_blocks(*blocks)
        if not late_blocks.any():
            return 0
        late = self._by_element(chunk, late_blocks)
        if self._service.keeps_late:
            self._keep(chunk, late)
        return int(late.sum())

    def _keep(self, chunk: Chunk, late: np.ndarray) -> None:
        """Stage what this rank sent of the elements that were late, bool[N]."""
        context, stats = self._context(chunk, self.first_stage), self._stats[chunk.index]
        size = self._lookup.accumulator_size(self.layout.spec(chunk))
        own_sum = np.zeros(size, self._lookup.accumulator_dtype(self.world_size))
        self._lookup.accumulate(self._sent[chunk.index], context, own_sum)
        sent = self._lookup.finalize(own_sum, 1, context, stats, host.empty(chunk.count)).numpy()
        own = self._own(chunk)
        assert own is not None, "it has sent something"
        self._policy.restore_late(own, sent, late)

    def _by_element(self, chunk: Chunk, values: np.ndarray) -> np.ndarray:
        """Repeat a value per block for each element of the block."""
        return np.repeat(values, self._lookup.block)[: chunk.count]

    def _is_finite(self, chunk: Chunk) -> bool:
        return all(bool(np.isfinite(values).all()) for values in self._stats[chunk.index])
