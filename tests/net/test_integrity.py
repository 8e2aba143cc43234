"""Somebody on the way between two ends, who has seen everything and can write into the connection."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import pytest

from gradwire.core.errors import FrameError, OptionError, SyncError
from gradwire.net.handshake import GroupMember, Handshake, HandshakeError, JobKey
from gradwire.net.link import Link
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import HEADER_BYTES, Outgoing, pack, parse, without_seal

from .attacker import Attacker, Frames, prefix_of, rewritten
from .test_handshake import ACCEPTOR, CONNECTOR, SECRET, converse
from .test_reconnecting import EPOCH, SERVER, Owner, frame


def change_a_body(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], rewritten(sent[1], body=b"evil"), *sent[2:]]


def change_a_header(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], rewritten(sent[1], round=7), *sent[2:]]


def repeat(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], sent[0], *sent[1:]]


def reorder(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], sent[2], sent[1]]


def drop(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], *sent[2:]]


def reflect(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], with_sender(seen[-1], 1), *sent[1:]]


def forge(sent: list[bytes], seen: list[bytes]) -> list[bytes]:
    return [sent[0], pack(frame(1, 9), b"evil"), *sent[1:]]


def with_sender(whole: bytes, sender: int) -> bytes:
    if prefix_of(whole) == HEADER_BYTES:
        return rewritten(whole, sender=sender)
    changed = bytearray(whole)
    struct.pack_into("<H", changed, 10, sender)
    return bytes(changed)


class Ends:
    """A server, a worker, and whoever is between them."""

    def __init__(self, integrity: str, attack: Frames) -> None:
        key = JobKey(SECRET, integrity)
        self.there, self.here = Owner(), Owner()
        listener = socket.create_server(("127.0.0.1", 0))
        limit = timedelta(seconds=10)
        self.server = ReconnectingEndpoint(
            GroupMember("job", SERVER, SERVER + 1, EPOCH), key, self.there, timeout=limit, listener=listener,
            callers=frozenset({1}),
        )  # fmt: skip
        self.attacker = Attacker(listener.getsockname(), attack)
        self.worker = ReconnectingEndpoint(
            GroupMember("job", 1, SERVER + 1, EPOCH),
            key,
            self.here,
            timeout=limit,
            call=(SERVER, self.attacker.address),
        )
        self.server.start()
        self.worker.start()
        self.there.hear("joined")
        self.here.hear("joined")

    def exchange(self) -> None:
        """The server sends a frame, then the worker sends three."""
        self.server.send(1, frame(SERVER, 5), np.frombuffer(b"from the server", np.uint8))
        self.here.hear("frame")
        for number in range(3):
            self.worker.send(SERVER, frame(1, number), np.frombuffer(b"good", np.uint8))

    def close(self) -> None:
        self.worker.close()
        self.server.close()
        self.attacker.close()


@pytest.fixture
def ends() -> Iterator[Callable[[str, Frames], Ends]]:
    made: list[Ends] = []

    def make(integrity: str, attack: Frames) -> Ends:
        made.append(Ends(integrity, attack))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("attack", [change_a_body, change_a_header, repeat, reorder, drop, reflect, forge])
def test_with_tags_an_attack_costs_the_connection_and_delivers_nothing(ends, attack):
    made = ends("mac", attack)
    made.exchange()
    assert made.there.hear("frame") == ("frame", 1, 0, b"good")
    _, peer, error = made.there.hear("left")
    assert peer == 1
    assert isinstance(error, SyncError)
    assert isinstance(error.__cause__, FrameError)
    assert made.there.events.empty()


@pytest.mark.parametrize("attack", [change_a_body, change_a_header, repeat, reorder, drop, reflect, forge])
def test_a_checksum_keeps_nobody_out(ends, attack):
    """What the tags are for. The test would fail if the attacks above failed for another reason than the tags."""
    made = ends("crc", attack)
    made.exchange()
    got = [made.there.hear("frame")[2:] for _ in range(2)]
    assert got != [(0, b"good"), (1, b"good")]


def test_without_an_attack_everything_passes(ends):
    made = ends("mac", lambda sent, seen: sent)
    made.exchange()
    assert [made.there.hear("frame")[2:] for _ in range(3)] == [(number, b"good") for number in range(3)]
    assert made.worker.sent_bytes == 3 * (HEADER_BYTES + 16 + 4)


def test_a_recorded_session_is_no_use():
    """Keys are those of one connection: a frame of another, with the same number, is refused."""
    first, second = (converse_with("mac") for _ in range(2))
    header, body = b"h" * HEADER_BYTES, np.frombuffer(b"body", np.uint8)
    tags = {each.tag(0, header, body) for ends in (first, second) for each in ends}
    assert len(tags) == 4  # for each connection and direction another


def converse_with(integrity: str):
    """The keys of both directions, as the connector has them."""
    key = JobKey(SECRET, integrity)
    connector = Handshake(CONNECTOR, key, frozenset({1}), connect=True)
    acceptor = Handshake(ACCEPTOR, key, frozenset({2, 3}), connect=False)
    converse(connector, acceptor)
    if integrity == "mac":
        header, body = b"h" * HEADER_BYTES, np.frombuffer(b"body", np.uint8)
        for mine, theirs in zip(connector.frame_macs(), reversed(acceptor.frame_macs())):
            assert mine.matches(theirs.tag(4, header, body), 4, header, body)
    return connector.frame_macs()


def test_without_tags_there_are_no_keys():
    assert converse_with("crc") == (None, None)


@pytest.mark.parametrize("order", [("mac", "crc"), ("crc", "mac")])
def test_ends_with_different_integrity_do_not_talk(order):
    connector = Handshake(CONNECTOR, JobKey(SECRET, order[0]), frozenset({1}), connect=True)
    acceptor = Handshake(ACCEPTOR, JobKey(SECRET, order[1]), frozenset({2, 3}), connect=False)
    with pytest.raises(HandshakeError, match=rf"integrity='{order[1]}', .* Pass the same integrity at both ends"):
        converse(connector, acceptor)


def test_nobody_on_the_way_can_take_the_tags_away():
    """The hint in the challenge is not proven, but the proof covers what each end believes."""
    connector = Handshake(CONNECTOR, JobKey(SECRET, "crc"), frozenset({1}), connect=True)
    acceptor = Handshake(ACCEPTOR, JobKey(SECRET, "mac"), frozenset({2, 3}), connect=False)

    def pretend(turn: int, whole: bytes) -> bytes:
        header, body = parse(whole)
        return pack(without_seal(header), b"\0" + body.tobytes()[1:]) if turn == 1 else whole

    with pytest.raises(HandshakeError, match="wrong proof"):
        converse(connector, acceptor, pretend)


def test_an_unknown_integrity_is_refused():
    with pytest.raises(OptionError, match=r'must be "crc" or "mac", not .none.\. Leave it out'):
        JobKey(SECRET, "none")


def test_frames_that_were_never_sent_leave_no_gap():
    """A closing message overtakes what is queued, and takes the number of the first frame that it replaces."""
    here, there = socket.socketpair()
    mine, _ = converse_with("mac")
    with here, there:
        link = Link(here, None, mine)
        for number in range(3):
            link.enqueue(Outgoing(frame(1, number), np.zeros(4, np.uint8)))
        link._fill()
        link._sent(HEADER_BYTES)  # the first has begun
        link.enqueue(Outgoing(frame(1, 3), np.zeros(4, np.uint8)))
        link.drop_unsent()
        last = Outgoing(frame(1, 4), np.zeros(4, np.uint8))
        link.enqueue(last)
        sealed = last.seal()
        assert mine.matches(sealed[HEADER_BYTES:], 1, sealed[:HEADER_BYTES], last.body)
