from __future__ import annotations

import copy
import pickle
import traceback
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import FrameError
from gradwire.net.challenges import Challenges
from gradwire.net.handshake import KEY_BYTES, Challenged, GroupMember, Handshake, HandshakeError, JobKey
from gradwire.net.stream import FrameReader
from gradwire.wire.frame import FrameKind, pack, parse, without_seal

SECRET = bytes(range(100, 100 + KEY_BYTES))
KEY = JobKey(SECRET)
CONNECTOR = GroupMember("group", rank=2, world_size=4, epoch=99)
ACCEPTOR = GroupMember("group", rank=1, world_size=4, epoch=99)


def ends(
    connector: GroupMember = CONNECTOR,
    acceptor: GroupMember = ACCEPTOR,
    connector_key: JobKey = KEY,
    acceptor_key: JobKey = KEY,
) -> tuple[Handshake, Handshake]:
    return (
        Handshake(connector, connector_key, frozenset({1}), connect=True),
        Handshake(acceptor, acceptor_key, frozenset({2, 3}), connect=False),
    )


def give(handshake: Handshake, frame: bytes) -> bytes:
    header, body = parse(frame)
    handshake.admit(header)
    return handshake.receive(header, body)


def converse(connector: Handshake, acceptor: Handshake, tamper=lambda turn, frame: frame) -> None:
    frame, receiver, other = connector.opening(), acceptor, connector
    turn = 0
    while frame:
        frame = give(receiver, tamper(turn, frame))
        receiver, other = other, receiver
        turn += 1


def test_both_ends_prove_themselves():
    connector, acceptor = ends()
    converse(connector, acceptor)
    assert connector.done
    assert acceptor.done
    assert connector.peer == 1
    assert acceptor.peer == 2


@pytest.mark.parametrize("wrong_end", ["connector_key", "acceptor_key"])
def test_a_wrong_key_is_refused_and_the_acceptor_proves_nothing_to_a_stranger(wrong_end):
    connector, acceptor = ends(**{wrong_end: JobKey.draw()})
    sent = []
    with pytest.raises(HandshakeError, match="proof of the job key from rank 2"):
        converse(connector, acceptor, lambda turn, frame: sent.append(parse(frame)[0].kind) or frame)
    assert sent == [FrameKind.HELLO, FrameKind.CHALLENGE, FrameKind.PROOF]
    assert not acceptor.done
    assert not connector.done


def test_an_acceptor_without_the_key_is_refused():
    connector, _ = ends()
    _, impostor = ends(acceptor_key=JobKey.draw())
    challenge = give(impostor, connector.opening())
    proof = give(connector, challenge)
    # The impostor sends the connector's own proof back, the only one it knows.
    header, body = parse(proof)
    with pytest.raises(HandshakeError, match="proof of the job key from rank 1"):
        give(connector, pack(replace(without_seal(header), sender=1), body.tobytes()))
    assert not connector.done


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 98}, "epoch 0x63"),
        ({"world_size": 5}, "world size 4"),
        ({"rank": 0}, "rank out of"),
        ({"rank": 1}, "rank out of"),
        ({"group": "other"}, "proof"),
    ],
)
def test_every_part_of_the_identity_is_bound(change, message):
    connector, acceptor = ends(connector=replace(CONNECTOR, **change))
    with pytest.raises(HandshakeError, match=message):
        converse(connector, acceptor)
    assert not acceptor.done


def test_a_rank_cannot_take_the_proof_of_another():
    connector, acceptor = ends()

    def pose_as_rank_3(turn: int, frame: bytes) -> bytes:
        header, body = parse(frame)
        return pack(replace(without_seal(header), sender=3), body.tobytes()) if turn % 2 == 0 else frame

    with pytest.raises(HandshakeError, match="proof"):
        converse(connector, acceptor, pose_as_rank_3)


def test_a_recorded_handshake_is_no_use():
    recorded: list[bytes] = []
    converse(*ends(), lambda turn, frame: recorded.append(frame) or frame)
    _, acceptor = ends()
    give(acceptor, recorded[0])
    with pytest.raises(HandshakeError, match="proof"):
        give(acceptor, recorded[2])


HOST = "10.0.0.1"


def call(challenges: Challenges, before: Challenged | None = None, host: str = HOST) -> tuple[Handshake, Handshake]:
    """Both ends of another connection with the same listener."""
    return (
        Handshake(CONNECTOR, KEY, frozenset({1}), connect=True, before=before),
        Handshake(ACCEPTOR, KEY, frozenset({2, 3}), connect=False, host=host, challenges=challenges),
    )


def challenged(challenges: Challenges) -> Challenged:
    """The challenge of a connection that was lost before its proof arrived."""
    connector, acceptor = call(challenges)
    give(connector, give(acceptor, connector.opening()))
    assert connector.challenged is not None
    return connector.challenged


def give_all(handshake: Handshake, frames: bytes) -> bytes:
    reader = FrameReader(handshake.admit)
    reader.wanted()[: len(frames)] = frames
    return b"".join(handshake.receive(header, body) for header, body in reader.advance(len(frames)))


def test_a_challenge_is_answered_on_the_next_connection():
    challenges = Challenges()
    connector, acceptor = call(challenges, challenged(challenges))
    give(connector, give_all(acceptor, connector.opening()))
    assert connector.done
    assert acceptor.done
    assert connector.derive("a use") == acceptor.derive("a use")


def test_a_challenge_is_answered_once():
    challenges = Challenges()
    before = challenged(challenges)
    for attempt in range(2):
        connector, acceptor = call(challenges, before)
        if attempt:
            with pytest.raises(HandshakeError, match="Rank 2 answers a challenge for the second time"):
                give_all(acceptor, connector.opening())
        else:
            give_all(acceptor, connector.opening())
        assert acceptor.done is (attempt == 0)


def test_a_recorded_handshake_is_no_use_at_the_same_listener():
    challenges, recorded = Challenges(lambda: 0.0), []
    converse(*call(challenges), lambda turn, frame: recorded.append(frame) or frame)
    _, acceptor = call(challenges)
    assert give(acceptor, recorded[0]) == recorded[1]  # the challenge is computed from what was asked
    with pytest.raises(HandshakeError, match="for the second time"):
        give(acceptor, recorded[2])
    assert not acceptor.done


@pytest.mark.parametrize("fresh", [False, True], ids=["another address", "another listener"])
def test_a_challenge_of_elsewhere_is_refused(fresh):
    challenges = Challenges()
    before = challenged(challenges)
    connector, acceptor = call(Challenges(), before) if fresh else call(challenges, before, "10.0.0.2")
    with pytest.raises(HandshakeError, match="not valid any more, or never was"):
        give_all(acceptor, connector.opening())


def test_an_answer_to_a_challenge_needs_the_key():
    challenges = Challenges()
    before = challenged(challenges)
    impostor = Handshake(CONNECTOR, JobKey.draw(), frozenset({1}), connect=True, before=before)
    _, acceptor = call(challenges)
    with pytest.raises(HandshakeError, match="wrong proof"):
        give_all(acceptor, impostor.opening())
    connector, acceptor = call(challenges, before)  # and does not use the challenge up
    give_all(acceptor, connector.opening())
    assert acceptor.done


def test_another_protocol_version_is_named():
    connector, acceptor = ends()
    header, body = parse(connector.opening())
    with pytest.raises(HandshakeError, match="Run one gradwire version"):
        give(acceptor, pack(without_seal(header), b"\x01\x00" + body.tobytes()[2:]))


@given(st.integers(0, 3), st.data())
def test_every_changed_byte_is_refused(turn, data):
    connector, acceptor = ends()

    def change(at: int, frame: bytes) -> bytes:
        if at != turn:
            return frame
        header, body = parse(frame)
        changed = bytearray(body.tobytes())
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
        return pack(without_seal(header), bytes(changed))

    with pytest.raises(HandshakeError):
        converse(connector, acceptor, change)
    assert not connector.done


@given(st.sampled_from(FrameKind), st.binary(max_size=80), st.integers(0, 3), st.booleans())
def test_arbitrary_frames_are_refused_with_one_error(kind, body, sender, connect):
    handshake = ends()[0 if connect else 1]
    header, content = parse(pack(replace(parse(ends()[0].opening())[0], kind=kind, sender=sender), body))
    try:
        handshake.admit(header)
        handshake.receive(header, content)
    except FrameError:
        pass
    assert not handshake.done


def test_a_frame_with_another_header_field_is_refused():
    connector, acceptor = ends()
    header, body = parse(connector.opening())
    with pytest.raises(HandshakeError, match="no other header fields"):
        give(acceptor, pack(replace(without_seal(header), round=1), body.tobytes()))


def test_nothing_comes_after_done():
    connector, acceptor = ends()
    last = []
    converse(connector, acceptor, lambda turn, frame: last.append(frame) or frame)
    with pytest.raises(HandshakeError):
        give(connector, last[-1])


def test_the_key_shows_itself_nowhere():
    connector, acceptor = ends()
    texts = [repr(KEY), str(KEY), f"{KEY}", repr(vars(connector)), repr(vars(acceptor))]
    try:
        converse(*ends(acceptor_key=JobKey.draw()))
    except HandshakeError as error:
        texts.append("".join(traceback.format_exception(error)))
    for text in texts:
        assert SECRET.hex() not in text
        assert repr(SECRET)[2:-1] not in text
    for leak in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            leak(KEY)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_has_one_size(size):
    with pytest.raises(ValueError, match=r"JobKey.draw\(\)"):
        JobKey(bytes(size))


def test_keys_and_nonces_are_fresh():
    assert JobKey.draw().reveal() != JobKey.draw().reveal()
    nonces = {np.asarray(parse(ends()[0].opening())[1]).tobytes() for _ in range(10)}
    assert len(nonces) == 10
