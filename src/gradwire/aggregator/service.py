"""The stand-alone aggregator as a synchronizer uses it: where it is, what is agreed with it, and a rank's line to it.

Each range of a tensor is two streams there: the statistics of its blocks, of which the largest is taken, and its
indices, which are looked up and added. Both follow from the plan and the tensors alone, so all ranks say the same.
"""
# Shapes: W = ranks, P = indices of a range, G = its blocks

from __future__ import annotations

import logging
import math
import os
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.aggregator.interface import Aggregation, Reply
from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream, num_needed
from gradwire.compressors.base import Compressor, LookupCompressor
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.sync.job import Chunk, TensorJob, split
from gradwire.sync.registry import TensorRegistry
from gradwire.wire.frame import HEADER_BYTES, FrameFlags, FrameKind

logger = logging.getLogger("gradwire")
ADDRESS_VARIABLE = "GRADWIRE_AGGREGATOR"


@dataclass(frozen=True)
class Aggregator:
    """A stand-alone aggregator (`gradwire serve --aggregate`), and how it is used. The same on all ranks.

    Attributes:
        address: ``"host:port"``.
        fraction: of the ranks, rounded up, that a packet's sum waits for; above 1/2. Where those are not all, who is
            late keeps what it sent in its residual. 0.9 of 4 ranks are all of them, 0.75 are 3.
        max_misses: a rank that was not waited for so many times in a row is waited for.
        packet_elements: elements that are answered together, a multiple of 1,024; where ranks may be left out, made one
            of the compressor's block. As many as fit a datagram in accumulators of 8 bits.
        job: name of the job, as the server has it.
        key_file: with the job key; see `gradwire.net.keys.job_key`.
        insecure: whether a key that everybody can guess will do beyond loopback.
    """

    address: str
    fraction: float = 1.0
    max_misses: int = 8
    packet_elements: int = 60 << 10
    job: str = "gradwire"
    key_file: str | Path | None = None
    insecure: bool = False

    @classmethod
    def of(cls, given: str | Aggregator | None) -> Aggregator | None:
        """An address, or options; None for what the environment says, if anything."""
        if given is None:
            given = os.environ.get(ADDRESS_VARIABLE)
        return cls(given) if isinstance(given, str) else given

    def waits_for(self, world_size: int) -> int:
        """How many ranks a packet's sum waits for."""
        return num_needed(self.fraction, world_size)

    def describe(self) -> dict[str, Any]:
        """What ranks compare."""
        return {
            "address": self.address,
            "fraction": self.fraction,
            "max_misses": self.max_misses,
            "packet_elements": self.packet_elements,
            "job": self.job,
        }

    def connect(
        self,
        tensors: TensorRegistry,
        rank: int,
        world_size: int,
        session: int,
        timeout: timedelta,
        stall_timeout: timedelta,
    ) -> AggregatorConnection:
        """Connect a rank; see `gradwire.sync.strategies.register.ServiceAddress`."""
        return AggregatorConnection(self, tensors, rank, world_size, session, timeout, stall_timeout)

    def client(
        self, terms: SessionConfig, rank: int, session: int, timeout: timedelta, stall_timeout: timedelta
    ) -> Aggregation:
        """Call the server.

        Raises:
            SyncError: it is not there within `timeout`, or refuses.
            OptionError: no job key where one is needed.
        """
        from gradwire.aggregator.client import AggregationClient

        return AggregationClient(
            self.address, terms, rank,
            job=self.job, session=session, timeout=timeout, stall_timeout=stall_timeout, key_file=self.key_file,
            insecure=self.insecure,
        )  # fmt: skip


class AggregatorConnection:
    """A rank's line to the aggregator.

    Args:
        aggregator: where it is.
        tensors: what all ranks have agreed on.
        rank: this one.
        world_size: W.
        session: the same on all ranks, and higher than that of an earlier start of the job.
        timeout: how long the server may be silent, or not be there.
        stall_timeout: how long a result may wait for other ranks.

    Attributes:
        partial: whether ranks may be left out of a sum.

    Raises:
        OptionError: options that do not fit each other.
        SyncError: no server.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        tensors: TensorRegistry,
        rank: int,
        world_size: int,
        session: int,
        timeout: timedelta,
        stall_timeout: timedelta,
    ) -> None:
        self.partial = aggregator.waits_for(world_size) < world_size
        if aggregator.fraction < 1 and not self.partial:
            most = math.floor(1000 * (world_size - 1) / world_size) / 1000
            logger.warning(
                "Expected a fraction that leaves a rank out, got %g: of %d ranks that is all of them, rounded up. Do: "
                "pass %s.",
                aggregator.fraction, world_size, f"fraction={most:g}, or 1 to say so" if most > 0.5 else "fraction=1",
            )  # fmt: skip
        self._aggregator = aggregator
        terms, self._places = agree(aggregator, tensors, world_size)
        self._client = aggregator.client(terms, rank, session, timeout, stall_timeout)

    def check(self, tensors: TensorRegistry) -> None:
        """Refuse tensors other than those that the server knows.

        Raises:
            OptionError: there are others.
        """
        terms, places = agree(self._aggregator, tensors, self._client.terms.world_size)
        if places and (terms, places) != (self._client.terms, self._places):
            raise OptionError(
                "Expected the tensors that the aggregator was told of when this rank connected, got others. Do: "
                "register all that travel by it at once, or pass tensors= to the Synchronizer."
            )

    def submit(
        self,
        item: TensorJob,
        part: Chunk,
        kind: FrameKind,
        payload: np.ndarray | None,
        out: np.ndarray,
        flags: FrameFlags,
    ) -> Future[Reply]:
        """Contribute to the statistics or to the sum of a range; see `Aggregation.submit`."""
        return self._client.submit(item.round, self._stream(item, part, kind), payload, out, flags)

    def sent_bytes(self, item: TensorJob, part: Chunk, kind: FrameKind, payload: np.ndarray) -> int:
        """Of a contribution on its way, a header for each packet included, when nothing is lost."""
        num_packets = self._client.terms.num_packets(self._stream(item, part, kind))
        return num_packets * (HEADER_BYTES + PACKET_HEADER_BYTES) + payload.nbytes

    def close(self, reason: str = "") -> None:
        """Say goodbye; or, with a reason, that this rank gives up."""
        self._client.close(reason)

    def _stream(self, item: TensorJob, part: Chunk, kind: FrameKind) -> int:
        return self._places[item.tensor, part.index] + (kind is not FrameKind.STATS)


def agree(
    aggregator: Aggregator, tensors: TensorRegistry, world_size: int
) -> tuple[SessionConfig, dict[tuple[int, int], int]]:
    """The terms, and the first of the two streams of each part, by tensor and part."""
    tables: dict[IndexTable, int] = {}
    streams: list[Stream] = []
    places: dict[tuple[int, int], int] = {}
    partial, largest_block = aggregator.waits_for(world_size) < world_size, 1
    for name, entry in tensors.entries.items():
        if entry.strategy != "server":
            continue
        codec, dtype = entry.compressor, tensors.specs[name].dtype
        assert isinstance(codec, LookupCompressor), "a plan refuses others"
        if partial and not codec.has_independent_blocks:
            raise OptionError(
                f"Expected blocks that packets are made of, got {codec!r} (in {name!r}) and a fraction of "
                f'{aggregator.fraction}. Do: pass rotate="block", or fraction=1 to wait for all ranks.'
            )
        if partial:  # each block is then of one divisor
            largest_block = max(largest_block, codec.block)
        values, bits = codec.lookup_table(world_size)
        table = IndexTable(bits, tuple(values.tolist()), 8 * codec.accumulator_dtype(world_size).itemsize)
        index = tables.setdefault(table, len(tables))
        for part in split(tensors.specs[name].numel, entry.partitions):
            if part.count:
                spec = TensorSpec((part.count,), dtype)
                places[tensors.ids[name], part.index] = len(streams)
                streams.append(Stream(Operation.MAXIMUM, num_statistics(codec, spec) + world_size))
                streams.append(Stream(Operation.SUM, codec.accumulator_size(spec) - 1, index))
    terms = SessionConfig(
        world_size,
        tuple(tables),
        tuple(streams),
        packet_elements=-(-aggregator.packet_elements // largest_block) * largest_block,
        fraction=aggregator.fraction,
        max_misses=aggregator.max_misses,
    )
    return terms, places


def num_statistics(codec: Compressor, spec: TensorSpec) -> int:
    """Numbers of a range that ranks must share."""
    return sum(length for length, _ in codec.stats_spec(spec))
