"""Faults at random places, many times over. The long forms run with `make test-long`."""

from __future__ import annotations

import random
import resource
import signal
import threading

import pytest
import torch.distributed as dist

from gradwire.core.errors import PeerFailedError, PeerLostError, SyncError
from gradwire.net.tcp import TcpTransport

from .bare_rank import BareRank
from .recorder import PATIENCE, body, header, start


def cut_at_random(seed: int) -> None:
    """A rank sends frames and ends at a random byte, in a random way."""
    rng = random.Random(seed)
    store, found = dist.HashStore(), []
    thread = threading.Thread(
        target=lambda: found.append(TcpTransport.connect(store, 0, 2, timeout=PATIENCE, name="test"))
    )
    thread.start()
    bare = BareRank(store)
    bare.shake_hands()
    thread.join()
    [transport] = found
    recorder = start(transport)
    sizes = [rng.choice((0, 1, 500, 70_000, 300_000)) for _ in range(6)]
    stream = b"".join(bare.frame(body(size, index).tobytes(), tensor=index) for index, size in enumerate(sizes))
    cut = rng.choice((0, len(stream), rng.randrange(len(stream)), rng.randrange(min(200, len(stream)))))
    bare.socket.sendall(stream[:cut])
    if rng.random() < 0.5:
        bare.reset()
    else:
        bare.socket.close()
    error = recorder.failure()
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    whole = 0
    while not recorder.frames.empty():
        _, got, content = recorder.frame()
        assert got.tensor == whole
        assert content.tobytes() == body(sizes[whole], whole).tobytes()
        whole += 1
    transport.close()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_connection_may_end_at_any_byte(first):
    for seed in range(first, first + 10):
        cut_at_random(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_connection_may_end_at_any_byte_in_a_thousand_ways():
    for seed in range(1000, 2000):
        cut_at_random(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_process_may_be_killed_at_any_byte_two_hundred_times(ranks):
    for seed in range(200):
        rng = random.Random(seed)
        group = ranks(3)
        for _ in range(4):
            group[1].tell("send", rng.choice((0, 2)), rng.choice((10, 100_000, 20_000_000)))
        threading.Event().wait(rng.random() * 0.02)
        group[1].signal(signal.SIGKILL)
        for survivor in (group[0], group[2]):
            failure = survivor.wait("failed")
            assert failure["rank"] == 1, (seed, failure)
            assert failure["type"] in ("PeerLostError", "PeerFailedError"), (seed, failure)
        for rank in group:
            rank.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_over_a_hundred_thousand_frames():
    store, found = dist.HashStore(), {}

    def connect(rank: int) -> None:
        found[rank] = TcpTransport.connect(store, rank, 2, timeout=PATIENCE, name="test")

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorders = [start(found[rank]) for rank in range(2)]

    def rounds(count: int) -> int:
        for index in range(count):
            found[0].send(1, header(found[0], round=index), body(300))
            recorders[1].frame()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(10_000)
    assert rounds(100_000) - before < 4 << 10  # KiB
    for rank in range(2):
        found[rank].close()


def test_a_group_can_be_set_up_again_and_again_in_one_store():
    store = dist.HashStore()
    for turn in range(5):
        found: dict[int, TcpTransport] = {}

        def connect(rank: int, found: dict[int, TcpTransport] = found) -> None:
            found[rank] = TcpTransport.connect(store, rank, 3, timeout=PATIENCE, name="test")

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorders = {rank: start(transport) for rank, transport in found.items()}
        found[turn % 3].abort("next")
        for rank in {0, 1, 2} - {turn % 3}:
            error = recorders[rank].failure()
            assert isinstance(error, (PeerFailedError, SyncError))
            assert error.rank == turn % 3
        for transport in found.values():
            transport.close()
