"""Packets: their layout, and that no flipped bit passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradwire.aggregator.packet import PacketKey, PacketKind, keys_of, keys_to, pack, unpack, workers_of
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine
from gradwire.aggregator.worker import WorkerStateMachine
from gradwire.core.errors import FrameError
from gradwire.wire.frame import FrameFlags
from tests.fuzz.aggregation import CONFIG, EPOCH, from_server, from_workers, payload


def test_layout():
    packet = pack(PacketKind.DATA, PacketKey(0x0807060504030201, 0x100, 0x200), 0x2A, 0x55, b"abc", flags=2).tobytes()
    assert packet[:8] == b"GWA1\x01\x01\x02\x00"
    assert packet[8:36] == (
        b"\x55" + bytes(7) + bytes(range(1, 9)) + b"\x00\x01\x00\x00\x00\x02\x00\x00\x2a\x00\x00\x00"
    )
    assert packet[36:40] == b"\x03\x00\x00\x00"
    assert packet[44:] == b"abc"


def test_no_flipped_bit_of_a_recorded_exchange_passes():
    for packet in [*from_workers(), *from_server()]:
        assert unpack(packet).epoch == EPOCH
        for bit in range(8 * min(len(packet), 400)):
            damaged = bytearray(packet)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FrameError):
                unpack(bytes(damaged))
        for cut in (0, 1, 43, len(packet) - 1):
            with pytest.raises(FrameError):
                unpack(packet[:cut])
        with pytest.raises(FrameError):
            unpack(packet + b"\x00")


def test_a_contribution_that_does_not_fit_the_configuration_changes_nothing():
    end = AggregatorStateMachine(CONFIG, EPOCH)
    wrong = {
        "a stream below 2, got 2": pack(PacketKind.DATA, PacketKey(3, 2, 0), 0, EPOCH, b""),
        "a packet below 2, got 2": pack(PacketKind.DATA, PacketKey(3, 0, 2), 0, EPOCH, b""),
        "a worker below 2, got 2": pack(PacketKind.DATA, PacketKey(3, 0, 0), 2, EPOCH, payload(0)[:256]),
        r"a body of 0 or \d+ bytes, got 256": pack(PacketKind.DATA, PacketKey(3, 0, 1), 0, EPOCH, payload(0)[:256]),
        "a body of 0 or 256 bytes, got 255": pack(PacketKind.DATA, PacketKey(3, 0, 0), 0, EPOCH, payload(0)[:255]),
        "a round of at most": pack(PacketKind.DATA, PacketKey((1 << 64) - 1, 0, 0), 0, EPOCH, payload(0)[:256]),
        "a body of 0 bytes, got 1": pack(PacketKind.ASK, PacketKey(3, 0, 0), 0, EPOCH, b"x"),
        "DATA or ASK, got RESULT": pack(PacketKind.RESULT, PacketKey(3, 0, 0), 0, EPOCH),
    }
    for misfit, packet in wrong.items():
        with pytest.raises(FrameError, match=f"Expected {misfit}.* Start all workers with one model and configuration"):
            end.receive(packet, 0.0)
    assert end.receive(pack(PacketKind.DATA, PacketKey(3, 0, 0), 0, EPOCH + 1, payload(0)[:256]), 0.0) == []
    with pytest.raises(FrameError):  # worker 1 over the connection of worker 0
        end.receive(pack(PacketKind.DATA, PacketKey(3, 0, 0), 1, EPOCH, payload(0)[:256]), 0.0, sender=0)
    assert (end.counters.refused, end.counters.stale, end.oldest_open()) == (9, 1, None)


def test_a_lost_reply_is_answered_with_the_same_bytes():
    end = AggregatorStateMachine(CONFIG, EPOCH)
    packets = [pack(PacketKind.DATA, PacketKey(3, 1, 0), worker, EPOCH, payload(1)) for worker in range(2)]
    assert end.receive(packets[0], 0.0) == []
    ((to, result),) = end.receive(packets[1], 0.0)
    assert to == EVERYONE
    ((again_to, again),) = end.receive(packets[1], 0.0)
    ((asked_to, asked),) = end.receive(pack(PacketKind.ASK, PacketKey(3, 1, 0), 0, EPOCH), 0.0)
    assert (again_to, asked_to) == (1, 0)
    assert result.tobytes() == again.tobytes() == asked.tobytes()
    assert (end.counters.taken, end.counters.duplicates, end.counters.sent_again) == (2, 1, 2)


def test_a_contribution_is_sent_again_with_the_same_bytes():
    worker = WorkerStateMachine(CONFIG, 1)
    worker.submit(3, 1, payload(1), np.empty(3, np.float32), FrameFlags.USED, 100.0)
    assert list(worker.poll(0.0)) == []  # nobody has answered yet
    assert list(worker.joined(EPOCH, 0.0)) == []
    (first,) = worker.poll(0.0)
    (again,) = worker.joined(EPOCH, 0.0)
    assert first.tobytes() == again.tobytes()


def test_a_worker_that_is_far_behind_gets_obsolete():
    end = AggregatorStateMachine(CONFIG, EPOCH)
    for round_ in (3, 4):
        for worker in range(2):
            end.receive(pack(PacketKind.DATA, PacketKey(round_, 1, 0), worker, EPOCH, payload(1)), 0.0)
    ((to, packet),) = end.receive(pack(PacketKind.DATA, PacketKey(2, 1, 0), 1, EPOCH, payload(1)), 0.0)
    assert (to, unpack(packet).kind) == (1, PacketKind.OBSOLETE)


def test_a_later_round_does_not_discard_the_current_one():
    end = AggregatorStateMachine(CONFIG, EPOCH)
    end.receive(pack(PacketKind.DATA, PacketKey(3, 1, 0), 0, EPOCH, payload(1)), 0.0)
    with pytest.raises(FrameError, match="while round 3 is not complete"):
        end.receive(pack(PacketKind.DATA, PacketKey(4, 1, 0), 1, EPOCH, payload(1)), 0.0)


def filling():
    """A configuration whose first stream is filled after a second, a server, and its worker 0 over a connection."""
    config = replace(CONFIG, fill_seconds=1.0)
    worker = WorkerStateMachine(config, 0)
    list(worker.joined(EPOCH, 0.0))
    out = np.full(config.streams[0].size, 7, config.result_dtype(0))
    body = np.zeros(config.payload_bytes(0, config.streams[0].size), np.uint8)
    request = worker.submit(3, 0, body, out, FrameFlags.USED, 100.0)
    return AggregatorStateMachine(config, EPOCH), worker, request, out


def test_a_worker_fills_what_is_late_and_a_later_result_changes_nothing():
    server, worker, request, out = filling()
    sent = list(worker.poll(2.0))
    assert worker.deadline() == 3.0 and worker.fill(2.9) == [] and (out == 7).all()
    assert worker.fill(3.0) == [request]
    assert not out.any() and request.reply().filled.all() and not request.reply().counts.any()
    for packet in sent:
        other = pack(PacketKind.DATA, unpack(packet).key, 1, EPOCH, unpack(packet).body)
        messages = server.receive(packet, 3.0) + server.receive(other, 3.0)
        (result,) = [each.packet for each in messages if unpack(each.packet).kind is PacketKind.RESULT]
        assert worker.receive(result, 3.1) == ([], [])
    assert not out.any() and worker.counters.filled == worker.counters.duplicates == len(sent)


def test_a_result_that_the_server_no_longer_has_is_filled_at_once():
    server, worker, request, _ = filling()
    sent = list(worker.poll(0.0))
    later = [pack(PacketKind.DATA, unpack(each).key._replace(round=4), 1, EPOCH, unpack(each).body) for each in sent]
    done = []
    for early, late in zip(sent, later, strict=True):
        server.receive(early, 0.0)
        assert all(unpack(each.packet).kind is not PacketKind.WANTED for each in server.receive(late, 0.1))
        ((_, obsolete),) = server.receive(early, 0.2)
        done += worker.receive(obsolete, 0.2)[0]
    assert done == [request] and server.counters.abandoned == len(sent)
    assert server.oldest_open() is None, "nobody waits for long"


def test_bitmaps_and_lists_of_keys():
    assert workers_of(np.array([0b101, 0, 0, 1], np.uint8), 32).nonzero()[0].tolist() == [0, 2, 24]
    keys = [PacketKey(1 << 63, 5, 6), PacketKey(0, 0, (1 << 32) - 1)]
    assert keys_of(np.frombuffer(keys_to(keys), np.uint8)) == keys
    with pytest.raises(FrameError):
        keys_of(np.zeros(15, np.uint8))
