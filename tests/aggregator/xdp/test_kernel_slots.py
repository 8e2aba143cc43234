"""Maps and programs of a session: what is compiled before a session begins serves it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from gradwire.aggregator.datagram_keys import WorkerDatagrams
from gradwire.aggregator.packet import PacketKey, PacketKind, pack, unpack
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp import server
from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.kernel_slots import KernelSlots, prepare
from gradwire.aggregator.xdp.server import KernelStateMachine
from gradwire.aggregator.xdp.system import run_program
from gradwire.core.errors import OptionError
from tests.schedules.kernel import begun, framed, host_of, keys_of

NARROW, WIDE = (IndexTable(4, tuple(range(16)), bits) for bits in (8, 16))
SUMS = Stream(Operation.SUM, 30_000, 0), Stream(Operation.SUM, 30_000, 1)


def config(*streams: Stream, mtu: int = 1500, **options: object) -> SessionConfig:
    return SessionConfig(4, (NARROW, WIDE), streams, mtu=mtu, **options)


@pytest.mark.bpf
@pytest.mark.parametrize("streams", [SUMS, SUMS[:1], SUMS[1:], (Stream(Operation.MAXIMUM, 5),)])
def test_a_session_of_the_interfaces_mtu_compiles_nothing(streams, monkeypatch):
    prepared = prepare(4, 1500, "siphash", 7071)
    monkeypatch.setattr(Assembler, "compile", lambda self: pytest.fail(f"compiles {self.section}"))
    slots = KernelSlots(config(*streams), "siphash", 7071, prepared)
    assert slots.layout is prepared
    slots.close()


@pytest.mark.bpf
@pytest.mark.parametrize("other", [config(*SUMS, mtu=9000), config(*SUMS, fraction=0.75)])
def test_other_sessions_have_programs_of_their_own(other):
    slots = KernelSlots(other, "siphash", 7071, prepare(4, 1500, "siphash", 7071))
    assert slots.layout != prepare(4, 1500, "siphash", 7071)
    assert {other.packet_size(stream) for stream, count in enumerate(slots.streams) if count} <= {
        elements for _, elements in slots.layout.sizes
    }
    slots.close()


@pytest.mark.bpf
def test_a_worker_that_has_sent_nothing_is_asked_for_what_may_have_been_answered_until_it_sends(monkeypatch):
    slots = begun(config(SUMS[0]), "crc32c", epoch=9)
    machine = KernelStateMachine(slots.config, 9, slots)
    machine.resumed = True
    for worker in range(4):
        address = ".".join(map(str, host_of(worker))), 5000 + worker
        made = WorkerDatagrams.join(worker, address, address[0], lambda use: bytes(32))
        machine.take_worker(made, keys_of(worker, 9), "crc32c")

    def contribute(worker: int, *packets: int) -> None:
        for packet in packets:
            contribution = pack(PacketKind.DATA, PacketKey(3, 0, packet), worker, 9, bytes(512))
            run_program(slots.program, framed(bytes(contribution), worker))

    def asked() -> set[tuple[int, int]]:
        questions = [(worker, unpack(packet)) for worker, packet in machine.questions()]
        assert all((each.kind, each.key.round) == (PacketKind.WANTED, 3) for _, each in questions)
        found = {(worker, each.key.packet) for worker, each in questions}
        assert len(found) == len(questions)
        return found

    assert asked() == set()
    contribute(0, 5, 7)
    assert asked() == {(worker, packet) for worker in (1, 2, 3) for packet in (5, 7)}
    assert asked() == {(1, 5), (2, 5), (3, 5)}, "again, but no more than one packet"
    contribute(1, 7)
    contribute(2, 5)
    contribute(0, 4)
    assert asked() == {(1, 4), (1, 5), (2, 4), (3, 4), (3, 5)}, "perhaps before the program reached workers 1 and 2"
    contribute(0, 2)
    monkeypatch.setattr(server, "_MOST_QUESTIONS", 1)
    assert asked() == {(3, 5)}, "the program asks the others"
    contribute(3, 7)
    assert asked() == {(3, 5)}
    assert asked() == {(3, 2)}, "a few at a time"
    assert asked() == set()


def test_too_many_workers_are_refused_before_they_join():
    with pytest.raises(OptionError, match=r"at most 64 workers, not 65\. Serve without --xdp"):
        prepare(65, 1500, "siphash", 7071)


@pytest.mark.bpf
def test_the_server_looks_for_open_slots_while_the_kernel_writes():
    session = config(Stream(Operation.SUM, 4_000_000, 0))
    slots, ended = KernelSlots(session, "siphash", 7071), threading.Event()
    machine, began = KernelStateMachine(session, 1, slots), slots.began.view.view(np.uint64)[:, 0]

    def write() -> None:
        times = np.arange(began.size, dtype=np.uint64)
        while not ended.is_set():
            np.copyto(began, times)
            began.fill(0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert machine.oldest_open() is None  # no packet has come
    finally:
        ended.set()
        writer.join()
        slots.close()
