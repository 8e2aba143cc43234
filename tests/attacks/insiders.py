"""What somebody may do who sees or changes what the network carries, or who holds the job key."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from itertools import cycle, islice

import google_crc32c
import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, field
from gradwire.aggregator.session import NO_EPOCH, AggregatorJoin, SessionConfig
from gradwire.core.errors import SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.wire.frame import FrameKind
from tests.aggregator.aggregation_job import WAIT, Job, aggregation_job, submit_all
from tests.integration.flood import Flood
from tests.net.attacker import Attacker, prefix_of, rewritten
from tests.net.recorder import until
from tests.net.stranger import Stranger
from tests.schedules import jobs

WORKER = 1
"""The one that an intruder pretends to be."""
_CHECKSUM, _SENDER = (slice(each.offset, each.offset + each.num_bytes) for each in (field("checksum"), field("worker")))
_ROOM = 50
"""Datagrams that surely fit the server's buffer."""


def replay_from_the_worker(job: Job, recorded: list[bytes], number: int) -> Flood:
    """Send datagrams of worker 0 again from its own address, as somebody can who forges source addresses."""
    server, sock, flood = job.server, job.clients[0]._datagrams.socket, Flood()
    before, mine = server.counters, [each for each in recorded if each[_SENDER] == bytes(_SENDER.stop - _SENDER.start)]
    for datagram in islice(cycle(mine), number):
        flood.sent += 1
        flood.sent_bytes += sock.sendto(datagram, server.address)
        until(lambda: server.counters.replayed > before.replayed + flood.sent - _ROOM)
    until(lambda: server.counters.replayed == before.replayed + number)
    assert server.counters.sent == before.sent, "the worker was sent something"
    return flood


def join(job: Job, config: SessionConfig, where: tuple[str, int]) -> tuple[Flood, str]:
    """Join as a worker with the job key, and ask for datagrams at an address. Returns the server's answer."""
    words = AggregatorJoin(config, 0, 1, NO_EPOCH, 30.0, where).to_bytes()
    stranger = Stranger(job.server.address, WORKER, config.world_size, (FrameKind.JOIN, words))
    told = str(stranger.told.get(timeout=WAIT))
    stranger.endpoint.close()
    return Flood(sent=1, sent_bytes=len(words), got_bytes=len(told.encode()), closed=1), told


def join_with_another_model(job: Job) -> tuple[Flood, str]:
    config = job.clients[0].config
    return join(job, replace(config, streams=config.streams[:1]), ("127.0.0.1", 9))


def join_for_somebody_else(job: Job) -> tuple[Flood, str]:
    """Ask for all results at the address of a victim, which must not get any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as victim:
        victim.bind(("127.0.0.2", 0))
        flood, told = join(job, job.clients[0].config, victim.getsockname())
        victim.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            told += f", but that got {len(victim.recv(1 << 16))} bytes"
    return flood, told


def change_a_contribution(integrity: str) -> tuple[Flood, str]:
    """Change one bit of what a worker contributes over TCP, and every checksum with it. Returns what becomes of it."""
    flood = Flood()

    def attack(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
        flood.sent, flood.sent_bytes = 1, len(sent[1])
        return [sent[0], rewritten(sent[1], body=_changed(sent[1][prefix_of(sent[1]) :])), *sent[2:]]

    with aggregation_job() as job, contextlib.ExitStack() as stack:
        config = jobs.config(1)
        connection = ConnectionOptions(integrity=integrity)
        attacker = Attacker(job.serve(workers=1, integrity=integrity), attack, FrameKind.PACKET)
        stack.callback(attacker.close)
        (client,) = job.join(attacker.address, config, connection=connection)
        try:
            results = submit_all(client, 0)
            for _, future in results:
                future.result(WAIT)
        except SyncError as error:
            found = "a wrong tag" if "The tag of frame" in str(error) else str(error)
            return replace(flood, closed=1), f"the job ends for {found}; no sum is wrong"
        finally:
            client.close()
        right = [jobs.expected(config, 0, stream, slice(None), [0]) for stream in range(len(config.streams))]
        same = all(out.tobytes() == each.tobytes() for (out, _), each in zip(results, right))
        return flood, "sums right" if same else "a sum is wrong"


def _changed(packet: bytes) -> bytes:
    """The packet with another body, and a checksum that fits."""
    made = np.frombuffer(packet, np.uint8).copy()
    assert made.nbytes > PACKET_HEADER_BYTES, "there is nothing to change"
    made[PACKET_HEADER_BYTES] ^= 1
    made[_CHECKSUM] = 0
    made[_CHECKSUM] = np.frombuffer(google_crc32c.value(made).to_bytes(4, "little"), np.uint8)
    return made.tobytes()
