"""A rank's client of an aggregation server: a TCP connection, and UDP datagrams if the server takes them.

The connection authenticates both sides, agrees on the session configuration, carries errors and goodbyes, and detects
lost peers. Packets use it as well, unless the server takes datagrams. A thread of the client serves timers and
datagrams, the endpoint's thread serves the connection, and `submit` sends on the caller's thread.

Guarantees: see `AggregationClient.submit`. A lost connection is reestablished within the timeout, also to a restarted
server, and everything unanswered is sent again.
"""
# Shapes: W = workers, P = elements of a stream

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from gradwire.aggregator.datagram_keys import FROM_SERVER, FROM_WORKER, group_key
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, PacketCounters
from gradwire.aggregator.request import AggregationRequest, Reply
from gradwire.aggregator.retransmission import MIN_WIDTH, Window
from gradwire.aggregator.session import MAX_WELCOME_BYTES, NO_EPOCH, AggregatorJoin, AggregatorWelcome, SessionConfig
from gradwire.aggregator.worker import WorkerStateMachine
from gradwire.aggregator.xdp import seals
from gradwire.core import threads
from gradwire.core.errors import FrameError, PeerFailedError, SyncError
from gradwire.net.address import address_toward, parse_address, resolve
from gradwire.net.client import GRACE_SECONDS, Client, ConnectionOptions
from gradwire.net.datagrams import DatagramReceiver, DatagramSender, DatagramSocket, path_mtu
from gradwire.wire.frame import FrameFlags, FrameKind, Header, describe

logger = logging.getLogger("gradwire")
WINDOW_BYTES = 2 << 20
"""Packets in flight over UDP, and their results."""
_BATCH = 64
_TURN_SECONDS = 0.25
_Finished = tuple[Future[Reply], Reply]


class AggregationClient(Client):
    """One rank's client.

    Args:
        address: Host and port of the server, as a pair or as ``"host:port"``.
        config: Session configuration, the same on all ranks.
        rank: Rank of this worker.
        job: Name of the job.
        session: Number of this start of the job, the same on all ranks and another one with each start; for example,
            `secrets.randbits(62)` of rank 0. A server drops its session for one that it has not seen before, and
            rejects workers of a session that it has dropped.
        connection: Key and timeouts.

    Attributes:
        config: The same.

    Raises:
        OptionError: The job key is missing, or the configuration is too long.
        SyncError: The server is unreachable or rejects this rank.
    """

    kind = "aggregation server"
    serve_option = "--aggregate"

    def __init__(
        self, address: str | tuple[str, int], config: SessionConfig, rank: int, *,
        job: str = "gradwire", session: int = 0, connection: ConnectionOptions = ConnectionOptions(),
    ) -> None:  # fmt: skip
        config.check_size()
        host, port = parse_address(address) if isinstance(address, str) else address
        self._server_ip = resolve(host)  # once, not for every packet
        own_ip = address_toward(self._server_ip)
        super().__init__((host, port), rank, config.world_size, job, connection)
        self.config = config
        self._stall = connection.stall_timeout.total_seconds()
        self._session, self._client_id = session, secrets.randbits(64)
        self._worker = WorkerStateMachine(config, rank, server_name=self._server_name)
        largest = max((config.result_bytes(stream, 0) for stream in range(len(config.streams))), default=1)
        self._max_packet_bytes = PACKET_HEADER_BYTES + largest
        self._max_window = max(MIN_WIDTH, WINDOW_BYTES // largest)
        self._futures: dict[AggregationRequest, Future[Reply]] = {}
        self._goodbye = ""
        self._welcome: AggregatorWelcome | None = None
        self._datagrams = DatagramSocket((own_ip, 0))
        self._sources = [self._datagrams]  # and the multicast group, if the server has one
        self._sender: DatagramSender | None = None  # until the welcome
        self._receivers: list[DatagramReceiver] = []  # of the sources
        self._dropped = Counter[str]()  # datagrams of earlier receivers
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._selector.register(self._datagrams.socket, selectors.EVENT_READ)
        self._thread = threads.make(f"gradwire-aggregation-{rank}", self._run, self._end)
        try:
            self._thread.start()
            self._endpoint.start()
            with self._changed:  # `_check_lost` comes first, and says more
                limit = connection.timeout.total_seconds() + GRACE_SECONDS
                if not self._changed.wait_for(lambda: self._welcome is not None or self._error is not None, limit):
                    self._fail(SyncError(f"The {self._server_name} did not welcome rank {rank} within {limit:g} s."))
            self.check()
        except BaseException:
            self.close("This worker could not start.")
            raise

    @property
    def counters(self) -> PacketCounters:
        """Packet counts so far. They are also logged when the client is closed."""
        forged = self._dropped["forged"] + sum(each.forged for each in self._receivers)
        replayed = self._dropped["replayed"] + sum(each.replayed for each in self._receivers)
        return replace(self._worker.counters, forged=forged, replayed=replayed)

    def header_bytes(self, stream: int) -> int:
        """Return the bytes around a contribution to a stream: the headers of all packets, and what proves them."""
        window, sender = self._worker.window, self._sender
        around = self._key.prefix_bytes if window is None or sender is None else sender.trailer_bytes
        return self.config.num_packets(stream) * (around + PACKET_HEADER_BYTES)

    def check(self) -> None:
        """Raise the error that this client has failed with, if it has."""
        if self._error is not None:
            raise self._error

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        """Contribute to a stream, and request the aggregate of all contributions. Any thread may call this.

        Every worker submits the same streams in the same rounds, in any order. The rounds of a stream increase, and a
        round is submitted only when the previous one is done.

        Args:
            round_: Number of the synchronization, below 2^64 - 1.
            stream: Index of the stream in the session configuration.
            payload: Packed indices as uint8, or float32[P] for a maximum. None if this worker has nothing to add
                (it did not use the parameter, or its gradient is not finite): it is then heard, but not counted. Must
                stay unchanged until the future of the stream's next round is done, or the client is closed.
            out: Destination, uint8, uint16 or uint32[P] as the table says, or float32[P] for a maximum. Must not be
                used until the future is done. If nobody contributed, it is 0, or −infinity for a maximum.
            flags: Sent to all workers as the union over those that were heard.

        Returns:
            A future that completes on a thread of the client; callbacks must be short and not block.

        Raises:
            ValueError: The arguments do not fit the session configuration, or the round is out of order.
            SyncError: The client has failed or was closed, or this process is a fork of the client's.

        On failure: All pending futures and later calls get the same `SyncError` (`PeerTimeoutError` if the server or a
        worker was silent for too long). Create a new client in a new session.
        """
        self._endpoint.check_process()
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self.check()
            deadline = time.monotonic() + self._stall + GRACE_SECONDS
            self._futures[self._worker.submit(round_, stream, payload, out, flags, deadline)] = future
            self._send_due()
        self._wake()  # to update its timers
        return future

    def close(self, reason: str = "") -> None:
        """Say goodbye; or, with a reason, make the job fail with it on all workers. Idempotent."""
        if self._endpoint.forked:  # the parent says it
            return
        self._wait_for_goodbye()
        closed = SyncError(f"The aggregation client was closed. {reason}".rstrip())
        self._fail(closed, goodbye=reason)
        threads.end(self._thread, self._endpoint.end_seconds + threads.END_SECONDS)

    # -- on the endpoint's thread ----------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        limit = MAX_WELCOME_BYTES if header.kind is FrameKind.WELCOME else self._max_packet_bytes
        if header.kind not in (FrameKind.WELCOME, FrameKind.PACKET) or header.length > limit:
            raise FrameError(f"Expected a packet of at most {limit} bytes, got {describe(header)}, {header.length}.")

    def joined(self, peer: int) -> None:
        self._connected = True
        join = AggregatorJoin(
            self.config, self._session, self._client_id, self._worker.epoch, self._stall, self._datagrams.address
        )
        self._send_frame(FrameKind.JOIN, join.to_bytes())

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        if header.kind is FrameKind.PACKET:
            with self._completing() as finished:
                finished += self._take(body)
                self._send_due()
        elif welcome := self._read_welcome(AggregatorWelcome.from_bytes, body):
            self._enter(welcome)

    def left(self, peer: int, error: SyncError | None) -> None:
        super().left(peer, error or PeerFailedError("it said goodbye"))

    def _enter(self, welcome: AggregatorWelcome) -> None:
        with self._changed:
            lossy = welcome.port is not None
            if self._worker.epoch == NO_EPOCH and lossy:
                self._worker.window = Window(self._max_window, random.Random(self._client_id))
            if lossy != (self._worker.window is not None):
                self._fail(
                    SyncError(f"The {self._server_name} was restarted with another --udp. Restart it as before.")
                )
                return
            try:
                self._check_path(welcome)
                self._enter_group(welcome)
                self._take_keys(welcome)
                self._welcome = welcome
                self._lost_at = None
                for packet in self._worker.joined(welcome.epoch, time.monotonic()):
                    self._send(packet)
            except SyncError as error:
                self._fail(error)
            self._changed.notify_all()
        self._wake()

    def _check_path(self, welcome: AggregatorWelcome) -> None:
        """Raise `SyncError` if packets are bounded, and the path to the server carries less."""
        if welcome.port is None or not self.config.mtu:
            return
        found = path_mtu((self._server_ip, welcome.port))
        if found is not None and found < self.config.mtu:
            raise SyncError(
                f"Packets of up to {self.config.mtu} bytes do not fit the path from rank {self.rank} to the "
                f"{self._server_name}, whose mtu is {found}. Pass mtu={found} on all workers."
            )

    def _enter_group(self, welcome: AggregatorWelcome) -> None:
        if welcome.group is not None and len(self._sources) == 1:
            try:
                group = DatagramSocket(welcome.group, shared=True)
                self._sources.append(group)
                group.join(welcome.group[0], self._datagrams.address[0])
            except OSError as error:
                raise SyncError(
                    f"Rank {self.rank} cannot take results from the multicast group {welcome.group[0]}:"
                    f"{welcome.group[1]}: {error}. Start the server with another group, or without --multicast."
                ) from error
            self._selector.register(group.socket, selectors.EVENT_READ)

    def _take_keys(self, welcome: AggregatorWelcome) -> None:
        """Take the keys of datagrams of the connection that brought the welcome."""
        derive = partial(self._endpoint.derive, self._server)
        for each in self._receivers:
            self._dropped.update(forged=each.forged, replayed=each.replayed)
        if welcome.guard:
            self._sender, receiver = seals.ends(welcome.guard, *seals.keys(derive))
            self._receivers = [receiver]
            return
        self._sender = DatagramSender(derive(FROM_WORKER))
        keys = [derive(FROM_SERVER), group_key(self._key, welcome.epoch)]
        self._receivers = [DatagramReceiver(key) for key in keys[: len(self._sources)]]

    # -- on the client's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._error is None:
            self._turn()
        self._end(self._error)

    def _end(self, error: SyncError) -> None:
        """Fail everything that waits, and say goodbye."""
        self._fail(error)
        with self._changed:
            waiting, self._futures = list(self._futures.values()), {}
        for future in waiting:
            future.set_exception(self._error)
        self._endpoint.close(self._goodbye)
        logger.info("Aggregation at rank %d, %s: packets: %s", self.rank, self._server_name, self.counters)
        for source in self._sources:
            source.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _turn(self) -> None:
        with self._changed:
            deadline = self._worker.deadline()
        wait = _TURN_SECONDS if deadline is None else max(0.0, min(_TURN_SECONDS, deadline - time.monotonic()))
        self._selector.select(wait)
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        with self._completing() as finished:  # once for all that has arrived, like the timers
            for source, receiver in zip(self._sources, self._receivers):  # the group, if any, is the second
                for _, datagram in source.receive(_BATCH):
                    packet = receiver.open(datagram)
                    if packet is not None:
                        with contextlib.suppress(FrameError):  # counted
                            finished += self._take(packet, from_group=source is not self._datagrams)
            finished += self._finish(self._worker.fill(time.monotonic()))
            self._send_due()
            self._check_lost("aggregation")

    @contextlib.contextmanager
    def _completing(self) -> Iterator[list[_Finished]]:
        """Hold the lock, and complete the futures in the list after it: callbacks may submit. Also after an error."""
        finished: list[_Finished] = []
        try:
            with self._changed:
                yield finished
        finally:
            for future, reply in finished:
                future.set_result(reply)

    # -- packets, with the lock ----------------------------------------------------------------------------------

    def _take(self, datagram: np.ndarray | memoryview, *, from_group: bool = False) -> list[_Finished]:
        """Take a packet, send what it asks for, and return what it completes."""
        if self._error is not None:
            return []
        try:
            done, packets = self._worker.receive(datagram, time.monotonic(), from_group=from_group)
        except SyncError as error:
            self._fail(error)
            return []
        for packet in packets:
            self._send(packet)
        self._num_losses = 0 if done else self._num_losses
        return self._finish(done)

    def _finish(self, done: list[AggregationRequest]) -> list[_Finished]:
        """Return the futures to complete with their results."""
        return [(self._futures.pop(request), request.reply()) for request in done]

    def _send_due(self) -> None:
        try:
            for packet in self._worker.poll(time.monotonic()):
                self._send(packet)
        except SyncError as error:
            self._fail(error)

    def _send(self, packet: np.ndarray) -> None:
        assert self._welcome is not None and self._sender is not None, "nothing is sent before the welcome"
        if self._welcome.port is not None:
            self._datagrams.send(packet, (self._server_ip, self._welcome.port), self._sender)
            return
        self._send_frame(FrameKind.PACKET, packet)

    def _fail(self, error: SyncError, goodbye: str | None = None) -> None:
        """Record the first error; the client's thread then fails all futures and says goodbye."""
        with self._changed:
            if self._error is None:
                self._goodbye = str(error) if goodbye is None else goodbye
            super()._fail(error)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._wake_out.send(b"\0")
