"""Aggregation servers as a synchronizer uses them: addresses and options, and a rank's connection to them.

Each chunk of a tensor has two streams: the block statistics, of which the server takes the largest, and the indices,
which it looks up and adds. The streams follow from the plan and the tensors, so all ranks derive the same ones.
"""
# Shapes: W = ranks, P = indices of a chunk, G = its blocks

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.request import Reply
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream, num_needed
from gradwire.aggregator.sharded_client import ShardedClient
from gradwire.compressors.base import Compressor, LookupCompressor
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.net.address import parse_addresses
from gradwire.net.client import ConnectionOptions
from gradwire.net.tls import TlsFiles
from gradwire.sync.chunk import Chunk
from gradwire.sync.job import TensorJob
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.wire.frame import FrameFlags, FrameKind

logger = logging.getLogger("gradwire")
ADDRESS_VARIABLE = "GRADWIRE_AGGREGATOR"
_POLICIES = {"late": ("kept", "dropped"), "divide_by": ("all", "counted")}


@dataclass(frozen=True)
class Aggregator:
    """Addresses and options of aggregation servers (`gradwire serve --aggregate`), the same on all ranks.

    Attributes:
        servers: Address of the server as ``"host:port"``, or those of several servers, which share each tensor: in a
            sequence or separated by commas, in the same order on all ranks.
        fraction: Fraction of the ranks, rounded up, that a packet's sum waits for; above 1/2. Of 4 ranks, 0.75 waits
            for 3, and 0.9 for all.
        late: What a rank does with what it sent too late to be counted. ``"kept"``: it goes to its residual, and is
            sent with the next step. ``"dropped"``: it is lost, as in the paper.
        divide_by: Divisor of a sum without the late ranks: ``"all"`` ranks, or the ``"counted"`` ones.
        max_misses: A rank that was left out of a packet this many times in a row is waited for.
        fill_after: Time after which a rank stops waiting for a packet of a sum, counted from when it has sent its own
            contribution, and takes zeros for the mean there, as in the paper. **Replicas may then differ**: call
            `Handle.synchronize_replicas` after each epoch. None waits for all sums.
        packet_elements: Most elements per packet, a multiple of 1,024. The default fits a datagram with accumulators of
            8 bits. If ranks may be left out, it is rounded up to a multiple of the compressor's block.
        mtu: MTU of the path to the server in bytes, for a server that takes datagrams: no packet is longer, in either
            direction, so that IP fragments none. 1,500 on Ethernet. 0 sets no bound.
        job: Name of the job, the same as on the servers.
        key_file: File with the job key; see `gradwire.net.keys.job_key`.
        insecure: If true, a job key that anyone can guess is allowed beyond loopback.
        integrity: How frames of the connection are protected; see `ConnectionOptions`.
        tls: Certificates, if the server uses TLS; see `ConnectionOptions`.

    Raises:
        UnknownNameError: There is no such policy.
        OptionError: `fill_after` is not positive, or asked for together with ranks that keep what was too late.
    """

    servers: str | Sequence[str]
    fraction: float = 1.0
    late: str = "kept"
    divide_by: str = "counted"
    max_misses: int = 8
    fill_after: timedelta | None = None
    packet_elements: int = 60 << 10
    mtu: int = 0
    job: str = "gradwire"
    key_file: str | Path | None = None
    insecure: bool = False
    integrity: str | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for name, known in _POLICIES.items():
            if getattr(self, name) not in known:
                raise UnknownNameError(f"{name} policy of an aggregator", getattr(self, name), known)
        if not self.addresses:
            raise OptionError('No aggregation server is named. Pass "host:port", or ["host:port", "host:port"].')
        if self.fill_after is not None and self.fill_after <= timedelta(0):
            raise OptionError(
                f"fill_after must be positive, but it is {self.fill_after}. Pass timedelta(seconds=0.1), or leave it "
                "out to wait for all sums."
            )
        if self.fill_after is not None and self.fraction < 1 and self.late == "kept":
            raise OptionError(
                "A rank that fills a sum cannot know whether its own gradient was too late for it, so it cannot keep "
                'it. With fill_after and fraction below 1, pass late="dropped".'
            )

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each server."""
        return parse_addresses(self.servers)

    @property
    def replicas_may_differ(self) -> bool:
        """Whether ranks may apply different means."""
        return self.fill_after is not None

    @classmethod
    def of(cls, given: str | Sequence[str] | Aggregator | None) -> Aggregator | None:
        """Return the options for addresses, or the given ones; for None, those that the environment names, if any."""
        found = os.environ.get(ADDRESS_VARIABLE) if given is None else given
        return found if found is None or isinstance(found, Aggregator) else cls(found)

    def waits_for(self, world_size: int) -> int:
        """Number of ranks that a packet's sum waits for."""
        return num_needed(self.fraction, world_size)

    def describe(self) -> dict[str, Any]:
        """Return the options that ranks compare."""
        names = "fraction", "late", "divide_by", "max_misses", "packet_elements", "mtu", "job"
        servers = [f"{host}:{port}" for host, port in self.addresses]
        agreed = {name: getattr(self, name) for name in names}
        return {"servers": servers, **agreed, "fill_after": self.fill_seconds}

    @property
    def fill_seconds(self) -> float:
        """`fill_after` in seconds; 0 for None."""
        return 0.0 if self.fill_after is None else self.fill_after.total_seconds()

    def connect(
        self, tensors: TensorRegistry, rank: int, world_size: int, session: int,
        timeout: timedelta, stall_timeout: timedelta,
    ) -> AggregatorConnection:  # fmt: skip
        """Connect a rank; see `gradwire.sync.strategies.register.ServiceAddress`."""
        if self.fraction < 1 and self.waits_for(world_size) == world_size:
            most = math.floor(1000 * (world_size - 1) / world_size) / 1000
            advice = f"fraction={most:g}, or 1 to say so" if most > 0.5 else "fraction=1"
            logger.warning(
                "A fraction of %g leaves no rank out: of %d ranks it is all of them, rounded up. Pass %s.",
                self.fraction, world_size, advice,
            )  # fmt: skip
        config, streams = agree(self, tensors, world_size)
        connection = ConnectionOptions(self.key_file, self.insecure, timeout, stall_timeout, self.integrity, self.tls)
        return AggregatorConnection(self, self.client(config, rank, session, connection), streams)

    def client(
        self, config: SessionConfig, rank: int, session: int, connection: ConnectionOptions
    ) -> AggregationClient | ShardedClient:
        """Connect to the server, or to all of them; see `AggregationClient`."""
        if len(self.addresses) > 1:
            return ShardedClient(self.addresses, config, rank, job=self.job, session=session, connection=connection)
        (address,) = self.addresses
        return AggregationClient(address, config, rank, job=self.job, session=session, connection=connection)


class AggregatorConnection:
    """A rank's connection to aggregation servers.

    Args:
        aggregator: Addresses and options.
        client: Client of this rank.
        streams: The first of the two streams of each chunk, by tensor and chunk.

    Attributes:
        partial: If true, ranks may be left out of a sum.
        keeps_late: Whether a rank that is late keeps what it sent.
        divides_by_all: Whether a sum without the late ranks is divided by the number of all ranks.
    """

    def __init__(
        self, aggregator: Aggregator, client: AggregationClient | ShardedClient, streams: dict[tuple[int, int], int]
    ) -> None:
        self.partial = client.config.needed < client.config.world_size
        self.keeps_late, self.divides_by_all = aggregator.late == "kept", aggregator.divide_by == "all"
        self._aggregator, self._client, self._streams = aggregator, client, streams
        self._has_warned = False

    def check(self, tensors: TensorRegistry) -> None:
        """Refuse tensors that the server does not know.

        Raises:
            OptionError: There are other tensors than when this rank connected.
        """
        config, streams = agree(self._aggregator, tensors, self._client.config.world_size)
        if streams and (config, streams) != (self._client.config, self._streams):
            raise OptionError(
                "The aggregator was told of other tensors when this rank connected. Register all tensors that use it "
                "at once, or pass tensors= to the Synchronizer."
            )

    def submit(
        self, job: TensorJob, chunk: Chunk, kind: FrameKind, payload: np.ndarray | None, out: np.ndarray,
        flags: FrameFlags,
    ) -> Future[Reply]:  # fmt: skip
        """Contribute to the statistics or the sum of a chunk; see `AggregationClient.submit`."""
        return self._client.submit(job.round, self._stream(job, chunk, kind), payload, out, flags)

    def sent_bytes(self, job: TensorJob, chunk: Chunk, kind: FrameKind, body_bytes: int) -> int:
        """Size of a contribution in bytes, with the headers of all packets, if nothing is lost."""
        return self._client.header_bytes(self._stream(job, chunk, kind)) + body_bytes

    def warn_of_filling(self, tensor: str) -> None:
        """Log once that this rank has filled a sum."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A sum of '%s' did not come within %g s, and rank %d took zeros for it (fill_after). Replicas may "
                "differ from now on: call handle.synchronize_replicas() after each epoch. "
                "handle.report().total.filled_elements counts them.",
                tensor, self._aggregator.fill_seconds, self._client.rank,
            )  # fmt: skip

    def close(self, reason: str = "") -> None:
        """Say goodbye; or, with a reason, make the job fail with it."""
        self._client.close(reason)

    def _stream(self, job: TensorJob, chunk: Chunk, kind: FrameKind) -> int:
        return self._streams[job.layout.tensor, chunk.index] + (kind is not FrameKind.STATS)


def agree(
    aggregator: Aggregator, tensors: TensorRegistry, world_size: int
) -> tuple[SessionConfig, dict[tuple[int, int], int]]:
    """Return the session configuration, and the first of the two streams of each chunk, by tensor and chunk."""
    tables: dict[IndexTable, int] = {}
    streams: list[Stream] = []
    first_streams: dict[tuple[int, int], int] = {}
    option = _needs_blocks(aggregator, world_size)
    largest_block = 1
    for name, entry in tensors.entries.items():
        if entry.strategy != "server":
            continue
        compressor, dtype, numel = entry.compressor, tensors.specs[name].dtype, tensors.specs[name].numel
        assert isinstance(compressor, LookupCompressor), "a plan refuses others"
        if option and not compressor.has_independent_blocks:
            raise OptionError(
                f"{compressor!r} (in {name!r}) does not have independent blocks, which {option} needs. Pass "
                'rotate="block", or leave the option out to wait for all ranks.'
            )
        if option:  # a block is there as a whole and has one divisor, so it must not span packets
            largest_block = max(largest_block, compressor.block)
        index = tables.setdefault(table_of(compressor, world_size), len(tables))
        for chunk in entry.chunks(numel, 1):
            if chunk.count:
                first_streams[tensors.ids[name], chunk.index] = len(streams)
                streams.extend(streams_of(compressor, TensorSpec((chunk.count,), dtype), world_size, index))
    config = SessionConfig(
        world_size,
        tuple(tables),
        tuple(streams),
        packet_elements=-(-aggregator.packet_elements // largest_block) * largest_block,
        fraction=aggregator.fraction,
        max_misses=aggregator.max_misses,
        mtu=aggregator.mtu,
        fill_seconds=aggregator.fill_seconds,
    )
    if option:
        _check_blocks(config, largest_block, option)
    return config, first_streams


def table_of(compressor: LookupCompressor, world_size: int) -> IndexTable:
    """Return the table in which the server looks up a compressor's indices."""
    values, bits = compressor.lookup_table(world_size)
    return IndexTable(bits, tuple(values.tolist()), 8 * compressor.accumulator_dtype(world_size).itemsize)


def streams_of(compressor: LookupCompressor, spec: TensorSpec, world_size: int, table: int) -> tuple[Stream, Stream]:
    """Return the streams of a chunk's statistics, with a mark per rank, and of its indices."""
    statistics = Stream(Operation.MAXIMUM, num_statistics(compressor, spec) + world_size)
    return statistics, Stream(Operation.SUM, compressor.accumulator_size(spec) - 1, table)


def _needs_blocks(aggregator: Aggregator, world_size: int) -> str:
    """Return the option by which packets of a sum may differ in who is in them; empty if they cannot."""
    if aggregator.waits_for(world_size) < world_size:
        return f"fraction={aggregator.fraction:g}"
    return f"fill_after={aggregator.fill_seconds:g} s" if aggregator.fill_after else ""


def _check_blocks(config: SessionConfig, block: int, option: str) -> None:
    """Raise `OptionError` if a block would span packets, which an option forbids."""
    for number, stream in enumerate(config.streams):
        size = config.packet_size(number)
        if stream.operation is Operation.SUM and size % block:
            raise OptionError(
                f"Packets may be without some ranks ({option}), so they must be whole blocks of {block}, but with "
                f"mtu={config.mtu} they have {size} elements. Pass block={size} to the compressor, a mtu that fits "
                f"{block} sums of {8 * config.result_dtype(number).itemsize} bits, or leave the option out."
            )


def num_statistics(compressor: Compressor, spec: TensorSpec) -> int:
    """Number of values of a chunk that the preliminary round reduces."""
    return sum(length for length, _ in compressor.stats_spec(spec))
