"""How ranges are encoded and decoded where a stand-alone server reduces the statistics and adds the indices.

The server answers when it has heard enough ranks, and says whose contributions a sum is of. Who was too late keeps what
it sent in its residual; the mean is over the others. Three things that all ranks must decide alike, they decide from
what the server tells all of them, bit for bit the same:

* *Who is absent*, as its backward did not use the parameter: marked beside the statistics. An absent rank counts, as a
  gradient of zero.
* *Whether a gradient is not finite*: an infinity among the statistics, or a flag of the sum. Such a step is rolled
  back. A rank that was heard in neither drops that gradient, and keeps its residual.
* *The divisor* of each packet: the ranks counted, and those absent.

Source: THC (Li et al. 2024), section 6: partial aggregation. Differences: in the paper late gradients are lost.
"""
# Shapes: W = ranks, N = elements of the range, G = its blocks, P = its indices

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch

from gradwire.aggregator.interface import Reply
from gradwire.aggregator.service import AggregatorConnection, num_statistics
from gradwire.compressors.base import LookupCompressor
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.transaction import Residuals
from gradwire.sync.codec import EMPTY, AccumulatorCodec
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload


class ServedCodec(AccumulatorCodec):
    """Sums that a server adds: `stats`, `ask_stats`, `take_stats`, `start`, `ask_sum`, `take`, for each part."""

    def __init__(
        self,
        item: TensorJob,
        service: AggregatorConnection,
        residuals: Residuals,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        super().__init__(item, residuals, rank, world_size, seed)
        assert isinstance(item.entry.compressor, LookupCompressor), "a plan refuses others"
        self._lookup: LookupCompressor = item.entry.compressor
        self._service = service
        self._largest: dict[int, np.ndarray] = {}  # what the server made of the statistics, by part; likewise:
        self._num_absent: dict[int, int] = {}
        self._sent: dict[int, Payload] = {}
        self._sums_of: dict[int, np.ndarray] = {}
        self._broken: set[int] = set()  # parts whose own gradient is not finite

    # -- the preliminary round ---------------------------------------------------------------------------------

    def stats(self, part: Chunk, encoded: bool = True) -> EncodedChunk:
        """Statistics of which the server takes the largest, then a mark a rank: 1 from one that is absent."""
        num_own = num_statistics(self._lookup, self.item.spec(part))
        row = np.zeros(num_own + self.world_size, np.float32)
        own = self._own(part)
        if own is None:
            row[:num_own] = -np.inf
            row[num_own + self.rank] = 1
        elif self._service.partial and not np.isfinite(kernels.abs_max(as_array(own[0]))):
            # Nothing is staged: nobody may hear of this, and then nobody rolls back.
            row[:num_own] = np.inf
        else:
            row[:num_own] = self._turned(part, super().stats(part).body.view(np.float32))
        if np.isposinf(row[:num_own]).any():
            self._broken.add(part.index)
        return self._message(FrameKind.STATS, Payload(row.view(np.uint8)))

    def ask_stats(self, part: Chunk, message: EncodedChunk) -> Future[Reply]:
        """Send what `stats` gave."""
        row = message.body.view(np.float32)
        self._largest[part.index] = out = np.empty_like(row)
        return self._service.submit(self.item, part, FrameKind.STATS, row, out, FrameFlags.USED)

    def take_stats(self, part: Chunk) -> None:
        """Take what the server answered."""
        row = self._largest.pop(part.index)
        marks, values = row[-self.world_size :], row[: -self.world_size]
        values[np.isneginf(values)] = 0  # of those that were heard, none has used the parameter
        reduced = self._turned(part, values)
        lengths = [length for length, _ in self._lookup.stats_spec(self.item.spec(part))]
        self._stats[part.index] = np.split(reduced, np.cumsum(lengths)[:-1])
        self._num_absent[part.index] = int((marks == 1).sum())

    def _turned(self, part: Chunk, values: np.ndarray) -> np.ndarray:
        """With the sign changed of those of which the smallest is wanted, so that the largest is."""
        signs = [np.full(length, -1 if reduction == "min" else 1, np.float32)
                 for length, reduction in self._lookup.stats_spec(self.item.spec(part))]  # fmt: skip
        return np.asarray(values * np.concatenate(signs))

    # -- the sum -----------------------------------------------------------------------------------------------

    def start(self, part: Chunk) -> EncodedChunk:
        if part.index in self._broken:
            return self._message(FrameKind.PAYLOAD, Payload(EMPTY, nonfinite=True))
        return super().start(part)

    def ask_sum(self, part: Chunk, message: EncodedChunk) -> Future[Reply] | None:
        """Send what `start` gave; None where all ranks know that there is nothing to add."""
        if self._num_absent[part.index] == self.world_size or not self._is_finite(part):
            return None
        payload = None
        if message.used and not message.nonfinite:
            self._sent[part.index] = Payload(message.body)
            payload = message.body
        size = self._lookup.accumulator_size(self.item.spec(part)) - 1
        self._sums_of[part.index] = out = np.empty(size, self._lookup.accumulator_dtype(self.world_size))
        return self._service.submit(self.item, part, FrameKind.PAYLOAD, payload, out, message.flags)

    def take(self, part: Chunk, reply: Reply | None) -> int:
        """Write the mean over the gradient; returns how many elements this rank sent too late, and keeps."""
        out = self.item.values[part.slice]
        if self._num_absent[part.index] == self.world_size:
            out.zero_()
            return 0
        if reply is None or reply.flags & FrameFlags.NONFINITE:
            self.item.nonfinite = True
            out.fill_(torch.nan)
            return 0
        num_late = self._keep(part, reply)
        mean = out if out.dtype == torch.float32 else torch.empty(part.count)
        self._write(part, reply, mean)
        if mean is not out:
            kernels.cast(mean.numpy(), as_array(out))
        return num_late

    def _write(self, part: Chunk, reply: Reply, mean: torch.Tensor) -> None:
        stats = self._stats[part.index]
        counts = reply.counts_of_blocks(self._lookup.block, stats[0].size)
        sums, context = self._sums_of.pop(part.index), self._context(part, self.first)
        self._lookup.finalize_blocks(sums, counts, context, stats, mean)
        # In units of the mean of all ranks; of those who were too late nothing is in it.
        divisors = np.maximum(counts, 1) + self._num_absent[part.index]
        if (divisors != self.world_size).any():
            mean *= torch.from_numpy(self._by_element(part, (self.world_size / divisors).astype(np.float32)))

    def _keep(self, part: Chunk, reply: Reply) -> int:
        """Stage what this rank sent and the server did not count: elements."""
        if part.index not in self._sent:
            return 0
        stats = self._stats[part.index]
        counted = reply.counted_blocks(self.rank, self._lookup.block, stats[0].size)
        if counted.all():
            return 0
        late, context = self._by_element(part, ~counted), self._context(part, self.first)
        size, dtype = (
            self._lookup.accumulator_size(self.item.spec(part)),
            self._lookup.accumulator_dtype(self.world_size),
        )
        own_sum = np.zeros(size, dtype)
        self._lookup.accumulate(self._sent[part.index], context, own_sum)
        sent = self._lookup.finalize(own_sum, 1, context, stats, torch.empty(part.count)).numpy()
        own = self._own(part)
        assert own is not None, "it has sent something"
        self._policy.take_back(self._residuals, self._key(part, "local"), *own, sent, late)
        return int(late.sum())

    def _by_element(self, part: Chunk, values: np.ndarray) -> np.ndarray:
        """Of each block, for each of its elements."""
        return np.repeat(values, self._lookup.block)[: part.count]

    def _is_finite(self, part: Chunk) -> bool:
        return all(bool(np.isfinite(values).all()) for values in self._stats[part.index])
