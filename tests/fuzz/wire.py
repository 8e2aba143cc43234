"""Targets of the fuzz campaign: frames, streams of frames, handshakes, and the lengths of a prefix code."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from datetime import timedelta

import numpy as np

from gradwire.core.errors import FrameError, PayloadError, SyncError
from gradwire.kernels.prefix_code import PrefixCode
from gradwire.net.conversation import Conversation, PeerIds
from gradwire.net.handshake import GroupMember, Handshake, JobKey
from gradwire.sync import sparse_codec
from gradwire.wire.frame import DATA_KINDS, FrameKind, Header, Outgoing, pack, parse, unpack, verify, without_seal
from gradwire.wire.mac import FrameMac
from tests.fuzz.target import BrokenPromiseError, Seed, Target, put_checksum


class CodeTarget(Target):
    """The lengths of a prefix code are taken only in the one form that they are written in."""

    name = "prefix code"
    framed = False

    def corpus(self) -> list[Seed]:
        draw = np.random.default_rng(0)
        counts = [np.ones(256, np.int64), np.zeros(256, np.int64), *(draw.geometric(0.01, 256) for _ in range(8))]
        return [Seed(PrefixCode.of(each).to_bytes()) for each in counts]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        try:
            code = PrefixCode.from_bytes(data)
        except PayloadError:
            return False
        if code.to_bytes() != data:
            raise BrokenPromiseError("lengths in another form than ours were taken")
        return True


class PairListTarget(Target):
    """A list of pairs of one owner is taken only in the one form that `pack` writes."""

    name = "list of pairs"
    framed = False
    ROWS = 300

    def corpus(self) -> list[Seed]:
        draw, found = np.random.default_rng(0), []
        for count in (0, 1, 3, 40, 150, 300):
            rows = np.sort(draw.choice(self.ROWS, count, replace=False)).astype(np.uint32)
            values = draw.standard_normal(count).astype(np.float32)
            found.append(Seed(sparse_codec.pack(sparse_codec.PairList(rows, values), self.ROWS).tobytes()))
        return found

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        try:
            pairs = sparse_codec.unpack(np.frombuffer(data, np.uint8), self.ROWS)
        except PayloadError:
            return False
        if (pairs.rows >= self.ROWS).any() or not np.isfinite(pairs.values).all():
            raise BrokenPromiseError("rows or values out of range were taken")
        if sparse_codec.pack(pairs, self.ROWS).tobytes() != data:
            raise BrokenPromiseError("a list in another form than ours was taken")
        return True


class FrameTarget(Target):
    """A frame is taken only in the one form that `pack` writes."""

    name = "frame"

    def corpus(self) -> list[Seed]:
        return [Seed(frame) for frame in one_of_each_kind()]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        with contextlib.suppress(FrameError):
            unpack(data)
        try:
            header, body = parse(data)
        except FrameError:
            return False
        verify(header, body)
        if pack(without_seal(header), body) != data:
            raise BrokenPromiseError("a frame in another form than ours was taken")
        return True


class StreamTarget(Target):
    """A stream in any pieces ends in data frames, a `SyncError` or a wait for more."""

    name = "stream"

    def corpus(self) -> list[Seed]:
        frames = [pack(Header(kind, sender=4, epoch=5), bytes(n)) for kind in sorted(DATA_KINDS) for n in (0, 9)]
        ends = [pack(Header(FrameKind(kind), sender=4, epoch=5)) for kind in (5, 6, 7)]
        return [Seed(a + b) for a in frames for b in [*frames, *ends, *one_of_each_kind()]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        talk = Conversation(PeerIds(0, 4, 5), timedelta(seconds=1), now=0.0)
        talk.begin(admit_small, now=0.0)
        try:
            taken = sum(1 for _ in feed(talk, data, rng))
        except SyncError:
            return False
        return taken > 0


class TaggedStreamTarget(Target):
    """Of a stream with tags, whatever is done to it, the first frames are delivered as they were sent, and no other."""

    name = "stream with tags"
    framed = False

    def __init__(self) -> None:
        self.key = bytes(range(32))

    def corpus(self) -> list[Seed]:
        streams = [tagged(FrameMac(self.key), frames) for frames in self.sent()]
        return [
            *map(Seed, streams),
            Seed(b"".join(one_of_each_kind())),
            Seed(tagged(FrameMac(bytes(32)), self.sent()[0])),
        ]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        talk = Conversation(PeerIds(0, 4, 5), timedelta(seconds=1), now=0.0, mac=FrameMac(self.key))
        talk.begin(admit_small, now=0.0)
        taken: list[tuple[FrameKind, bytes]] = []
        with contextlib.suppress(SyncError):
            for header, body in feed(talk, data, rng):
                taken.append((header.kind, body.tobytes()))
        if not any(taken == frames[: len(taken)] for frames in self.sent()):
            raise BrokenPromiseError(f"{len(taken)} frames were delivered that nobody has sent in this order")
        return len(taken) > 0

    @staticmethod
    def sent() -> list[list[tuple[FrameKind, bytes]]]:
        kinds = sorted(DATA_KINDS)
        return [[(kind, bytes([number]) * (40 * number + 1)) for number, kind in enumerate([first, *kinds])]
                for first in kinds]  # fmt: skip


def tagged(mac: FrameMac, frames: list[tuple[FrameKind, bytes]]) -> bytes:
    made = bytearray()
    for number, (kind, body) in enumerate(frames):
        frame = Outgoing(Header(kind, sender=4, epoch=5), np.frombuffer(body, np.uint8))
        frame.protect(mac, number)
        made += frame.seal() + body
    return bytes(made)


class HandshakeTarget(Target):
    """Only an unchanged handshake succeeds."""

    name = "handshake"

    def __init__(self) -> None:
        self.key = JobKey.draw()

    def corpus(self) -> list[Seed]:
        connector, acceptor = self.ends()
        frames = [connector.opening()]
        while frames[-1]:
            frames.append(answer(acceptor if len(frames) % 2 else connector, frames[-1]))
        return [Seed(frame) for frame in frames[:-1]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        connector, acceptor = self.ends()
        turn, at, frame = 0, rng.randrange(4), connector.opening()
        in_flight = rng.random() < 0.5  # damage the frame that is due, or put another in its place
        try:
            while frame:
                if turn == at:
                    frame = damage(frame, rng) if in_flight else data
                frame = answer(connector if turn % 2 else acceptor, frame)
                turn += 1
        except FrameError:
            pass
        if connector.done or (acceptor.done and at != 3):
            raise BrokenPromiseError(f"a handshake with a foreign frame in turn {at} succeeded")
        return False

    def ends(self) -> tuple[Handshake, Handshake]:
        return (
            Handshake(GroupMember("g", 2, 4, 5), self.key, frozenset({1}), connect=True),
            Handshake(GroupMember("g", 1, 4, 5), self.key, frozenset({2, 3}), connect=False),
        )


def one_of_each_kind() -> list[bytes]:
    kinds = [pack(Header(kind, sender=4, epoch=5, count=4, dtype=1), bytes(range(34))) for kind in FrameKind]
    return [*kinds, pack(Header(FrameKind.PAYLOAD, sender=4, epoch=5), bytes(300))]


def admit_small(peer: int, header: Header) -> None:
    if header.length > 1 << 16:
        raise FrameError("larger than anything that is due")


def feed(talk: Conversation, data: bytes, rng: random.Random) -> Iterator[tuple[Header, np.ndarray]]:
    at = 0
    while at < len(data):
        room = talk.wanted()
        count = min(rng.choice((1, 50, 72, 100, 1 << 16)), len(room), len(data) - at)
        room[:count] = data[at : at + count]
        at += count
        yield from talk.advance(count, now=0.0)


def answer(handshake: Handshake, frame: bytes) -> bytes:
    header, body = parse(frame)
    handshake.admit(header)
    return handshake.receive(header, body)


def damage(frame: bytes, rng: random.Random) -> bytes:
    """Return `frame` with one byte changed outside its checksum, and the checksum put right."""
    data = bytearray(frame)
    at = rng.choice([*range(64), *range(68, len(data))])
    data[at] ^= rng.randrange(1, 256)
    put_checksum(data, 64)
    return bytes(data)
