"""A rank's client of several aggregation servers, which share the packets of each stream (`shards`).

Guarantees: results and replies are bit for bit those of one server. A server is restarted as if it were the only one.

On failure: if one server fails, all futures that wait for it and all later calls get the error of its
`AggregationClient`, which names it. Close this client with that error: the other servers then tell the other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.packet import PacketCounters
from gradwire.aggregator.request import Reply, checked_body
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.shards import assign
from gradwire.core.errors import OptionError
from gradwire.net.address import resolve
from gradwire.net.client import ConnectionOptions
from gradwire.wire.frame import FrameFlags


class ShardedClient:
    """One rank's client of several servers. It has the methods of an `AggregationClient`.

    Args:
        addresses: Host and port of each server, in the same order on all ranks.
        config: Session configuration, as for one server. Each server is told only of its own packets.
        rank, job, session, connection: See `AggregationClient`.

    Attributes:
        config, rank: The same.
        clients: The client of each server.

    Raises:
        OptionError: A server is named twice, or as by `AggregationClient`.
        SyncError: As by `AggregationClient`, for one of the servers. The others are told.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], config: SessionConfig, rank: int, *,
        job: str = "gradwire", session: int = 0, connection: ConnectionOptions = ConnectionOptions(),
    ) -> None:  # fmt: skip
        if len({(resolve(host), port) for host, port in addresses}) < len(addresses):
            named = ", ".join(f"{host}:{port}" for host, port in addresses)
            raise OptionError(f"One aggregation server is named twice: {named}. Name each server once.")
        self.config, self.rank = config, rank
        self.clients: list[AggregationClient] = []
        configs, self._shards = assign(config, len(addresses))
        try:
            for address, own in zip(addresses, configs):
                client = AggregationClient(address, own, rank, job=job, session=session, connection=connection)
                self.clients.append(client)
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise

    @property
    def counters(self) -> PacketCounters:
        """Packet counts so far, of all servers together."""
        return PacketCounters.total(client.counters for client in self.clients)

    def header_bytes(self, stream: int) -> int:
        """See `AggregationClient.header_bytes`."""
        return sum(self.clients[shard.server].header_bytes(shard.stream) for shard in self._shards[stream])

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        """See `AggregationClient.submit`."""
        for client in self.clients:
            client.check()
        body = checked_body(self.config, stream, payload, out)
        parts = [
            self.clients[shard.server].submit(
                round_, shard.stream, None if body is None else body[shard.body], out[shard.elements], flags
            )
            for shard in self._shards[stream]
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def close(self, reason: str = "") -> None:
        """Say goodbye to all servers; or, with a reason, make the job fail with it on all workers. Idempotent."""
        for client in self.clients:
            client.close(reason)


def _joined(parts: Sequence[Future[Reply]]) -> Future[Reply]:
    """Return the future of a whole reply. It fails as soon as a part of it does."""
    whole: Future[Reply] = Future()
    whole.set_running_or_notify_cancel()
    missing, lock = len(parts), threading.Lock()

    def note(part: Future[Reply]) -> None:
        nonlocal missing
        error = part.exception(0)  # it has ended
        with lock:
            was_open = missing > 0
            missing = 0 if error is not None else missing - 1
            if not was_open or missing:
                return
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result(Reply.join([each.result(0) for each in parts]))

    for each in parts:
        each.add_done_callback(note)
    return whole
