from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from gradwire.core.errors import FrameError, PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.wire.frame import HEADER_BYTES, FrameKind

from .memory import MemoryNetwork
from .recorder import body, header, start, until

SHORT = timedelta(seconds=0.4)


def test_frames_arrive_whole_and_in_order():
    with MemoryNetwork(3) as network:
        recorders = [start(transport) for transport in network.transports]
        sizes = [0, 1, 71, 72, 73, 65_536, 300_000, 5]
        for sender in (0, 2):
            for index, size in enumerate(sizes):
                transport = network.transports[sender]
                transport.send(1, header(transport, tensor=index), body(size, index))
        seen = {0: 0, 2: 0}
        for _ in range(2 * len(sizes)):
            peer, got, content = recorders[1].frame()
            assert got.tensor == seen[peer]
            np.testing.assert_array_equal(content, body(sizes[got.tensor], got.tensor))
            seen[peer] += 1
        total = sum(sizes) + HEADER_BYTES * len(sizes)
        assert network.transports[0].sent_bytes == [0, total, 0]
        assert network.transports[1].received_bytes == [total, 0, total]


def test_a_killed_rank_is_lost_to_the_others_and_calls_nobody_back():
    with MemoryNetwork(3) as network:
        recorders = [start(transport) for transport in network.transports]
        network.kill(2)
        failures = [recorders[rank].failure() for rank in (0, 1)]
        # Either learns it from the connection, or from the other rank that learned it first.
        assert all(isinstance(error, (PeerLostError, PeerFailedError)) and error.rank == 2 for error in failures)
        assert any(isinstance(error, PeerLostError) for error in failures)
        assert recorders[2].failures.empty()


def test_a_frozen_rank_times_out_and_is_fenced_when_it_wakes():
    with MemoryNetwork(2, timeout=SHORT) as network:
        recorders = [start(transport) for transport in network.transports]
        network.freeze(1)
        error = recorders[0].failure()
        assert isinstance(error, PeerTimeoutError)
        assert error.rank == 1
        network.thaw(1)
        assert isinstance(recorders[1].failure(), PeerFailedError)
        assert recorders[1].frames.empty()


def test_idle_ranks_keep_each_other_alive():
    with MemoryNetwork(2, timeout=SHORT) as network:
        recorders = [start(transport) for transport in network.transports]
        transport = network.transports[0]
        until(lambda: transport.control_bytes[1] > 20 * HEADER_BYTES)  # heartbeats over several timeouts
        assert recorders[0].failures.empty()
        assert recorders[1].failures.empty()


def test_abort_tells_the_reason():
    with MemoryNetwork(2) as network:
        recorders = [start(transport) for transport in network.transports]
        network.transports[0].abort("shape of layer 3 differs")
        error = recorders[1].failure()
        assert isinstance(error, PeerFailedError)
        assert error.rank == 0
        assert "shape of layer 3 differs" in str(error)
        assert recorders[0].failures.empty()


def test_abort_may_blame_another_rank():
    with MemoryNetwork(3) as network:
        recorders = [start(transport) for transport in network.transports]
        network.transports[0].abort("rank 2 sent nonsense", blame=2)
        assert [recorders[rank].failure().rank for rank in (1, 2)] == [2, 2]


def test_a_refused_frame_fails_both_ends_and_names_the_sender():
    def refuse(peer, got):
        raise FrameError(f"Expected tensor 0, got {got.tensor}.")

    with MemoryNetwork(2) as network:
        sender, receiver = network.transports
        sender_side = start(sender)
        receiver_side = start(receiver, admit=refuse)
        sender.send(1, header(sender, tensor=7), body(10))
        error = receiver_side.failure()
        assert type(error) is SyncError
        assert error.rank == 0
        assert "Expected tensor 0, got 7." in str(error)
        assert isinstance(sender_side.failure(), PeerFailedError)


def test_goodbye_is_no_failure_but_sending_after_it_is():
    with MemoryNetwork(2) as network:
        recorders = [start(transport) for transport in network.transports]
        sender = network.transports[0]
        network.transports[1].send(0, header(network.transports[1]), body(9))
        network.transports[1].close()
        assert recorders[0].frame()[0] == 1
        assert recorders[0].failures.empty()
        until(lambda: sender.departed(1))
        sender.send(1, header(sender), body(3))
        assert "has left the group" in str(recorders[0].failure())


@pytest.mark.parametrize(
    ("peer", "fields", "advice"),
    [
        (0, {}, "Pass another rank"),
        (2, {}, "Pass another rank"),
        (1, {"kind": FrameKind.BYE}, "Control frames are the transport's"),
        (1, {"sender": 1}, "Fill both in from the transport"),
        (1, {"epoch": 1}, "Fill both in from the transport"),
    ],
)
def test_a_header_that_is_not_the_callers_is_refused_at_once(peer, fields, advice):
    with MemoryNetwork(2) as network:
        transport = network.transports[0]
        with pytest.raises(ValueError, match=advice):
            transport.send(peer, header(transport, **fields), body(1))
