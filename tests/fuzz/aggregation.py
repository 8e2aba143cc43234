"""Targets of the fuzz campaign: what an aggregation server and its workers read of each other."""

from __future__ import annotations

import contextlib
import random
import struct
from functools import cache

import numpy as np

from gradwire.aggregator.multicast import ResultHashes, hashes_of
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, SERVER, PacketKey, PacketKind, keys_to, pack, seal, unpack
from gradwire.aggregator.retransmission import Window
from gradwire.aggregator.server import AggregatorStateMachine
from gradwire.aggregator.session import AggregatorJoin, AggregatorWelcome
from gradwire.aggregator.worker import WorkerStateMachine
from gradwire.core.errors import FrameError, SyncError
from gradwire.wire.frame import FrameFlags
from tests.fuzz.target import BrokenPromiseError, Seed, Target, put_checksum
from tests.fuzz.words import WordsTarget
from tests.schedules import jobs

EPOCH = 7
KEY = PacketKey(3, 0, 1)
CONFIG = jobs.small_config(2)


def payload(stream: int) -> np.ndarray:
    """A contribution."""
    return np.arange(CONFIG.payload_bytes(stream, CONFIG.streams[stream].size), dtype=np.uint8) % 63


def from_workers() -> list[bytes]:
    """What workers send."""
    pieces = [
        (PacketKey(3, 0, 0), payload(0)[:256]),
        (KEY, payload(0)[256:]),
        (PacketKey(3, 1, 0), payload(1)),
        (KEY, b""),
    ]
    made = [pack(PacketKind.DATA, key, worker, EPOCH, body) for key, body in pieces for worker in range(2)]
    return [packet.tobytes() for packet in [*made, pack(PacketKind.ASK, KEY, 0, EPOCH)]]


@cache
def from_server() -> list[bytes]:
    """What the server sends."""
    end = AggregatorStateMachine(CONFIG, EPOCH)
    results = [message.packet for packet in from_workers() for message in end.receive(packet, 0.0)]
    said = [pack(kind, KEY, SERVER, EPOCH) for kind in (PacketKind.WANTED, PacketKind.OBSOLETE)]
    held = pack(PacketKind.HELD, PacketKey(0, 0, 0), SERVER, EPOCH, keys_to([KEY, PacketKey(3, 1, 0)]))
    hashes = ResultHashes()
    for result in results:
        hashes.add(result)
    return [packet.tobytes() for packet in [*results, *said, held, *hashes.flush(EPOCH)]]


def with_checksum(data: bytes, rng: random.Random) -> bytes:
    """Mostly, give a packet the length of what follows its header, and its checksum: else it hides every change."""
    if len(data) < PACKET_HEADER_BYTES or rng.random() < 0.3:
        return data
    right = bytearray(data)
    right[36:40] = (len(data) - PACKET_HEADER_BYTES).to_bytes(4, "little")
    put_checksum(right, 40)
    return bytes(right)


class PacketTarget(Target):
    """A packet is taken only in the one form that `pack` writes."""

    name = "aggregation packet"
    framed = False

    def corpus(self) -> list[Seed]:
        return [Seed(packet) for packet in [*from_workers(), *from_server()]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        data = with_checksum(data, rng)
        try:
            found = unpack(data)
        except FrameError:
            return False
        again = np.frombuffer(data, np.uint8).copy()
        seal(again, found.kind, found.key, found.worker, found.epoch, flags=found.flags, count=found.num_added)
        if again.tobytes() != data:
            raise BrokenPromiseError("a packet in another form than ours was taken")
        return True


class DigestTarget(Target):
    """A list of hashes is taken only in the one form that it is written in."""

    name = "hashes of results"
    framed = False

    def corpus(self) -> list[Seed]:
        return [
            Seed(bytes(unpack(packet).body)) for packet in from_server() if unpack(packet).kind is PacketKind.DIGEST
        ]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        try:
            found = hashes_of(np.frombuffer(data, np.uint8))
        except FrameError:
            return False
        if b"".join(struct.pack("<QII32s", *key, named) for key, named in found) != data:
            raise BrokenPromiseError("hashes in another form than ours were taken")
        return bool(found)


def worker_with_tensors(rng: random.Random) -> WorkerStateMachine:
    """A worker that has not joined yet, with a tensor of each stream to send."""
    end = WorkerStateMachine(CONFIG, 0, Window(64, rng))
    for index, stream in enumerate(CONFIG.streams):
        out = np.zeros(stream.size, CONFIG.result_dtype(index))
        end.submit(3, index, payload(index), out, FrameFlags.NONE, 100.0)
    return end


class MulticastTarget(Target):
    """A worker uses a result of the group only when the server has named its hash, whatever else the group gets."""

    name = "results to a group"
    framed = False

    def corpus(self) -> list[Seed]:
        return [Seed(packet) for packet in from_server()]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        end = worker_with_tensors(rng)
        list(end.joined(EPOCH, 0.0))
        results = [packet for packet in from_server() if unpack(packet).kind is PacketKind.RESULT]
        digest = next(packet for packet in from_server() if unpack(packet).kind is PacketKind.DIGEST)
        to_group = [data, with_checksum(data, rng)]
        for packet in rng.sample([*to_group, digest], 3):
            with contextlib.suppress(FrameError):
                end.receive(packet, 0.1, from_group=packet is not digest)
        if end.counters.taken and not set(to_group) & set(results):
            raise BrokenPromiseError("a result was used whose hash the server has not named")
        return end.counters.taken > 0


class AggregatorTarget(Target):
    """A server takes a packet, or refuses it and changes nothing; memory is bounded by the configuration."""

    name = "aggregation server"
    framed = False

    def corpus(self) -> list[Seed]:
        return [Seed(packet) for packet in from_workers()]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        end, valid = AggregatorStateMachine(CONFIG, EPOCH), from_workers()
        for packet in valid[: rng.randrange(len(valid))]:
            end.receive(packet, 0.0)
        try:
            messages = end.receive(with_checksum(data, rng), 0.0)
        except FrameError:
            for packet in valid[:2]:  # goes on as before
                end.receive(packet, 0.0)
            return False
        if sum(message.packet.nbytes for message in messages) > 2000:
            raise BrokenPromiseError("a packet drew more bytes than a result has")
        return True


class ContributorTarget(Target):
    """A worker takes a packet of the server, or refuses it and goes on; results are written where they belong."""

    name = "aggregation worker"
    framed = False

    def corpus(self) -> list[Seed]:
        return [Seed(packet) for packet in from_server()]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        end = worker_with_tensors(rng)
        sent = len([*end.joined(EPOCH, 0.0), *end.poll(0.0)])
        if sent != 3:
            raise BrokenPromiseError(f"{sent} packets were sent, not 3")
        try:
            end.receive(with_checksum(data, rng), 0.1)
        except (FrameError, SyncError):
            return False
        list(end.poll(0.5))
        return True


def aggregation_targets() -> list[Target]:
    """All of them."""
    readers = [
        (AggregatorJoin.from_bytes, AggregatorJoin.to_bytes),
        (AggregatorWelcome.from_bytes, AggregatorWelcome.to_bytes),
    ]
    said = WordsTarget("aggregation server's words", [each.to_bytes() for each in (jobs.JOIN, *jobs.WELCOMES)], readers)
    return [PacketTarget(), DigestTarget(), MulticastTarget(), AggregatorTarget(), ContributorTarget(), said]
