from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import FrameError, PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.net.conversation import MAX_REASON_BYTES, Conversation, PeerIds
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, pack, parse

from ..wire import golden
from .pieces import feed, piece_sizes

EPOCH = 77


def conversation(admit=lambda peer, header: None, *, rank: int = 0, peer: int = 1) -> Conversation:
    made = Conversation(PeerIds(rank, peer, EPOCH), timedelta(seconds=8), now=0.0)
    if admit is not None:
        made.begin(admit, now=0.0)
    return made


def hear(made: Conversation, stream: bytes, now: float = 1.0, sizes: list[int] | None = None) -> list:
    return list(feed(made.wanted, lambda count: made.advance(count, now), stream, sizes or [1 << 20]))


def data(body: bytes = b"abc", **fields) -> bytes:
    return pack(Header(**{"kind": FrameKind.PAYLOAD, "sender": 1, "epoch": EPOCH, **fields}), body)


def test_data_comes_out_and_is_counted():
    made = conversation()
    assert len(hear(made, data() + golden.whole(made_by_peer().control(FrameKind.HEARTBEAT)) + data())) == 2
    assert made.received_bytes == 2 * (HEADER_BYTES + 3)
    assert made.control_bytes == HEADER_BYTES


def made_by_peer() -> Conversation:
    return conversation(rank=1, peer=0)


@pytest.mark.parametrize("fields", [{"sender": 2}, {"sender": 0}, {"epoch": EPOCH + 1}])
def test_a_peer_speaks_only_for_itself_and_its_epoch(fields):
    with pytest.raises(SyncError, match="Expected a frame of rank 1 in epoch 0x4d") as caught:
        hear(conversation(), data(**fields))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, FrameError)


def test_a_refused_frame_is_a_sync_error_with_its_cause():
    def refuse(peer: int, header: Header) -> None:
        raise FrameError(f"tensor {header.tensor} of rank {peer} is not due")

    with pytest.raises(SyncError, match="tensor 5 of rank 1 is not due") as caught:
        hear(conversation(refuse), data(tensor=5))
    assert caught.value.rank == 1


def test_data_before_begin_is_refused():
    with pytest.raises(SyncError, match="before `start`"):
        hear(conversation(admit=None), data())


def test_abort_carries_reason_and_blame():
    for blame, rank in ((None, 1), (0, 0), (5, 5)):
        with pytest.raises(PeerFailedError, match="Rank 1 gave up: disk full") as caught:
            hear(conversation(), golden.whole(made_by_peer().control(FrameKind.ABORT, "disk full", blame)))
        assert caught.value.rank == rank


def test_goaway_is_a_loss_with_a_reason():
    with pytest.raises(PeerLostError, match="Rank 1 went away: SIGTERM") as caught:
        hear(conversation(), golden.whole(made_by_peer().control(FrameKind.GOAWAY, "SIGTERM")))
    assert caught.value.rank == 1
    with pytest.raises(SyncError, match="no such control frame"):
        hear(conversation(), data(b"", kind=FrameKind.GOAWAY, count=1))


def test_reasons_are_bounded_and_decoded_whatever_they_are():
    long = golden.whole(made_by_peer().control(FrameKind.ABORT, "ü" * 5000))
    assert parse(long)[0].length == MAX_REASON_BYTES
    with pytest.raises(PeerFailedError, match="üüü"):
        hear(conversation(), long)
    with pytest.raises(PeerFailedError, match="�"):
        hear(conversation(), data(b"\xff\xfe", kind=FrameKind.ABORT))
    with pytest.raises(SyncError, match="no such control frame"):
        hear(conversation(), data(bytes(MAX_REASON_BYTES + 1), kind=FrameKind.ABORT))


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.CHALLENGE, FrameKind.PROOF])
def test_handshake_frames_have_no_place_here(kind):
    with pytest.raises(SyncError, match="no such control frame"):
        hear(conversation(), data(b"", kind=kind))


@pytest.mark.parametrize("kind", [FrameKind.HEARTBEAT, FrameKind.BYE])
def test_control_frames_have_no_body_and_no_other_fields(kind):
    with pytest.raises(SyncError, match="no such control frame"):
        hear(conversation(), data(b"x", kind=kind))
    with pytest.raises(SyncError, match="no such control frame"):
        hear(conversation(), data(b"", kind=kind, round=1))


def test_an_end_is_an_error_unless_bye_came_first():
    made = conversation()
    assert made.end is None
    error = made.lost("the end of its connection")
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    assert "Look at the log of rank 1" in str(error)
    assert made.end is error
    assert not made.departed
    hear(made, data()[:50])
    assert "in the middle of a frame" in str(made.lost("the end of its connection"))

    made = conversation()
    hear(made, golden.whole(made_by_peer().control(FrameKind.BYE)))
    assert made.departed
    assert made.lost("the end of its connection") is None
    assert "Run the same number of steps on every rank" in str(made.end)
    with pytest.raises(SyncError, match="nothing after BYE"):
        hear(made, data())


def test_any_byte_is_a_sign_of_life():
    made = conversation()
    hear(made, data()[:1], now=7.0)
    assert not made.liveness.silent(14.9)
    assert made.liveness.silent(15.0)
    error = made.silence()
    assert isinstance(error, PeerTimeoutError)
    assert error.rank == 1
    assert "within 8 s" in str(error)


@given(st.lists(st.sampled_from(sorted(golden.FRAMES)) | st.binary(max_size=150), max_size=6), piece_sizes)
def test_arbitrary_streams_end_in_a_sync_error_or_not_at_all(parts, pieces):
    stream = b"".join(golden.read(part) if isinstance(part, str) else part for part in parts)
    made = Conversation(PeerIds(0, 4, 5), timedelta(seconds=8), now=0.0)
    made.begin(lambda peer, header: None, now=0.0)
    with contextlib.suppress(SyncError):
        hear(made, stream, sizes=pieces)
