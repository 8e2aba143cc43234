"""Pseudocode 1 in the kernel: what the server without I/O answers, and what only a kernel can get wrong."""

from __future__ import annotations

import contextlib
import random
import struct
import threading

import numpy as np
import pytest

from gradwire.aggregator.packet import SERVER, PacketKey, PacketKind, pack, unpack
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp import seals
from gradwire.aggregator.xdp.copies import CONTINUE
from gradwire.aggregator.xdp.copies import DROP as DROP_COPY
from gradwire.aggregator.xdp.kernel_slots import KernelSlots
from gradwire.aggregator.xdp.layout import ANSWER, MARK
from gradwire.aggregator.xdp.program import DROP, PASS, SEND_BACK
from gradwire.aggregator.xdp.server import KernelStateMachine
from gradwire.aggregator.xdp.system import run_in_traffic_control, run_program
from gradwire.core.errors import OptionError, SyncError
from gradwire.kernels import reference
from tests.schedules import campaign
from tests.schedules.kernel import Sealer, begun, framed, kernel_config, keys_of

EPOCH = 9
FIRST = PacketKey(0, 0, 0)
REDIRECTED = 4  # the verdict that the kernel's function for it returns


def slots_for(world_size: int, guard: str = "crc32c", **options: object) -> KernelSlots:
    return begun(kernel_config(world_size, **options), guard, EPOCH)


def contribution(worker: int, key: PacketKey = FIRST, body: bytes = bytes(512), **options) -> bytes:
    return bytes(pack(PacketKind.DATA, key, worker, EPOCH, body, **options))


@pytest.mark.bpf
def test_the_kernel_answers_as_the_server_does_under_faults():
    for seed in range(5):
        campaign.schedule(seed, xdp=True)


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("world_size", "width", "mtu", "elements"),
    [(3, 8, 0, 1024), (21, 16, 0, 1024), (64, 16, 1500, 512), (5, 8, 9000, 2048), (64, 16, 9000, 2048)],
)
def test_sums_are_those_of_the_reference(world_size, width, mtu, elements):
    table = IndexTable(4, tuple(range(16)), width)
    config = SessionConfig(world_size, (table,), (Stream(Operation.SUM, elements),), max(1024, elements), mtu=mtu)
    assert config.packet_size(0) == elements
    slots = begun(config, "crc32c", EPOCH)
    draw, total = np.random.default_rng(world_size), np.zeros(elements, config.result_dtype(0))
    for worker in range(world_size):
        body = draw.integers(0, 256, elements // 2, np.uint8)
        reference.lookup_indices(body, 4, table.array, total, accumulate=True)
        verdict, _, answer = run_program(slots.program, framed(contribution(worker, body=body.tobytes()), worker))
        assert (verdict, bool(answer)) == ((SEND_BACK, False) if worker < world_size - 1 else (PASS, True))
    to, wanted, _, slot, buffer, kind, _ = ANSWER.unpack(answer)
    assert (to, wanted, slot, kind) == ((1 << world_size) - 1, 0, 0, 0)
    result = unpack(slots.result(slot, buffer))
    assert result.num_added == world_size
    assert result.body[len(result.body) - total.nbytes :].tobytes() == total.tobytes()


@pytest.mark.bpf
@pytest.mark.parametrize("guard", ["crc32c", "siphash"])
def test_a_packet_from_another_address_is_not_answered(guard):
    slots, sealer = slots_for(3, guard), Sealer(3, guard, EPOCH)
    other_host, other_port = (framed(sealer.sealed(0, contribution(0)), source) for source in (1, 0))
    for frame in (other_host, other_port[:35] + b"\1" + other_port[36:]):
        assert run_program(slots.program, frame)[0] == DROP
    assert (slots.counted().refused, slots.counted().taken) == (2, 0)
    assert run_program(slots.program, framed(sealer.sealed(0, contribution(0)), 0))[0] == SEND_BACK


@pytest.mark.bpf
def test_a_worker_cannot_write_as_another():
    slots, sealer = slots_for(3, "siphash"), Sealer(3, "siphash", EPOCH)
    as_worker_0 = [sealer.sealed(1, contribution(0)), sealer.sealed(2, contribution(0)), contribution(0) + bytes(16)]
    as_worker_0.append(Sealer(3, "siphash", EPOCH + 1).sealed(0, contribution(0)))
    for datagram in as_worker_0:
        assert run_program(slots.program, framed(datagram, 0))[0] == DROP
    assert (slots.counted().forged, slots.counted().taken) == (4, 0)


@pytest.mark.bpf
def test_a_packet_whose_number_was_used_gets_no_answer():
    slots, sealer = slots_for(2, "siphash"), Sealer(2, "siphash", EPOCH)
    recorded = [framed(sealer.sealed(worker, contribution(worker)), worker) for worker in (0, 1)]
    recorded.append(framed(sealer.sealed(0, pack(PacketKind.ASK, FIRST, 0, EPOCH)), 0))
    first = [run_program(slots.program, frame)[0] for frame in recorded]
    assert first == [SEND_BACK, PASS, PASS]  # held, the result for both, and again for the one that asks
    state = slots.slots.read(0)
    for frame in 20 * recorded:
        assert run_program(slots.program, frame) == (DROP, frame, b"")
    assert (slots.counted().replayed, slots.counted().received) == (60, 3)
    assert slots.slots.read(0) == state
    repeated = framed(sealer.sealed(0, contribution(0)), 0)  # a worker that repeats itself uses another number
    assert run_program(slots.program, repeated)[0] == PASS
    assert slots.counted().duplicates == 1


@pytest.mark.bpf
def test_numbers_are_taken_as_python_takes_them():
    slots, receiver = slots_for(2, "siphash"), seals.ends("siphash", *reversed(keys_of(0, EPOCH)))[1]
    sender, rng = seals.SipHashSender(keys_of(0, EPOCH).from_worker), random.Random(4)
    ask, highest = np.frombuffer(pack(PacketKind.ASK, FIRST, 0, EPOCH), np.uint8), 0
    for _ in range(4000):
        number = max(0, highest + rng.choice((-9000, -4096, -4095, -4094, -64, -2, -1, 0, 1, 2, 63, 64, 4095, 8200)))
        highest = max(highest, number)
        sender._num_sent = number
        datagram = ask.tobytes() + sender.trailer(ask)
        before = slots.counted().received
        run_program(slots.program, framed(datagram, 0))
        is_taken = receiver.open(memoryview(bytearray(datagram))) is not None
        assert slots.counted().received - before == is_taken
    assert slots.counted().replayed == receiver.replayed
    assert 1000 < receiver.replayed < 3000


@pytest.mark.bpf
@pytest.mark.parametrize("body_bytes", [0, 16, 1028])
def test_a_copy_is_signed_for_its_worker_alone(body_bytes):
    slots, sealer = slots_for(2, "siphash"), Sealer(2, "siphash", EPOCH)
    packet = bytes(pack(PacketKind.RESULT, FIRST, SERVER, EPOCH, bytes(range(4)) * (body_bytes // 4)))
    blank = framed(packet + bytes(16), 0)
    for worker in (1, 1, 0):
        verdict, left = run_in_traffic_control(slots.signer, blank, mark=MARK + worker)
        assert verdict == CONTINUE
        assert left[:-16] == blank[:-16]
        assert sealer.opened(1 - worker, left[42:]) is None
        assert sealer.opened(worker, left[42:]) == packet
        assert sealer.opened(worker, left[42:]) is None
    assert run_in_traffic_control(slots.signer, blank, mark=0) == (CONTINUE, blank)
    assert run_in_traffic_control(slots.signer, blank[:-1], mark=MARK)[0] == DROP_COPY


@pytest.mark.bpf
@pytest.mark.parametrize("guard", ["crc32c", "siphash"])
def test_a_result_for_all_is_redirected_to_the_driver_and_one_for_a_worker_is_not(guard):
    verdicts, answers = [], []
    for broadcast in (False, True):
        with contextlib.closing(KernelSlots(kernel_config(2), guard, 7071, broadcast=broadcast)) as slots:
            slots.begin(EPOCH)
            for worker in (0, 1):
                slots.join(worker, (f"10.77.1.{worker + 1}", 5000 + worker), *keys_of(worker, EPOCH))
            slots.send_through(1)
            sealer = Sealer(2, guard, EPOCH)
            frames = [framed(sealer.sealed(worker, contribution(worker)), worker) for worker in (0, 1)]
            frames.append(framed(sealer.sealed(0, contribution(0)), 0))
            found = [run_program(slots.program, frame) for frame in frames]
            verdicts.append([verdict for verdict, _, _ in found])
            answers.append([answer for _, _, answer in found])
    assert verdicts == [[SEND_BACK, PASS, PASS], [SEND_BACK, REDIRECTED, PASS]]
    assert answers[0] == answers[1]


@pytest.mark.bpf
def test_an_answer_that_cannot_be_passed_on_is_counted_and_ends_the_job_with_advice():
    """As with a driver that keeps no metadata: here a packet has so much already that there is no room for more."""
    slots = slots_for(2)
    machine = KernelStateMachine(slots.config, EPOCH, slots)
    assert run_program(slots.program, framed(contribution(0), 0))[0] == SEND_BACK
    machine.check("eth0")
    assert run_program(slots.program, framed(contribution(1), 1), metadata=bytes(200))[0] == DROP
    assert (slots.num_stuck(), slots.counted().taken) == (1, 2)
    with pytest.raises(SyncError, match=r"lost \(1 so far\), because the driver of eth0 .* with --xdp-mode generic"):
        machine.check("eth0")


@pytest.mark.bpf
def test_what_may_not_be_sent_changes_nothing():
    slots = slots_for(3)
    ask = PacketKind.ASK
    refused = [
        contribution(3),
        contribution(0, PacketKey((1 << 64) - 1, 0, 0)),
        bytes(pack(PacketKind.RESULT, PacketKey(0, 0, 0), 0, EPOCH, bytes(512))),
        bytes(pack(ask, PacketKey(0, 0, 0), 0, EPOCH, bytes(512))),
        bytes(pack(ask, PacketKey(0, 0, 0), 0, EPOCH, flags=1)),
    ]
    before = slots.slots.read(0)
    for packet in refused:
        assert run_program(slots.program, framed(packet, 0))[0] == DROP
    assert slots.counted().refused == len(refused)
    stale = bytes(pack(PacketKind.DATA, PacketKey(0, 0, 0), 0, EPOCH + 1, bytes(512)))
    assert run_program(slots.program, framed(stale, 0))[0] == DROP
    assert (slots.counted().stale, slots.slots.read(0)) == (1, before)


@pytest.mark.bpf
def test_what_is_not_for_the_program_passes_as_it_came():
    slots = slots_for(3)
    good = framed(contribution(0), 0)
    maximum = struct.pack("<3f", 1, 2, 3)
    for frame in (
        framed(contribution(0), 0, port=7072),
        framed(contribution(0, PacketKey(0, 2, 0), maximum), 0),  # a maximum
        framed(contribution(0, PacketKey(0, 0, 1), bytes(38)), 0),  # the short last packet
        framed(contribution(0, PacketKey(0, 9, 0)), 0),  # no such stream
        good[:12] + b"\x86\xdd" + good[14:],  # IPv6
        good[:14] + b"\x46" + good[15:],  # with options
        good[:20] + b"\x20\x00" + good[22:],  # a fragment
        good[:23] + b"\x06" + good[24:],  # TCP
        good[:100],
        bytes(60),
    ):
        assert run_program(slots.program, frame) == (PASS, frame, b"")
    assert slots.counted().received == 0


@pytest.mark.bpf
def test_a_body_of_another_streams_length_passes_as_it_came():
    slots = slots_for(4)  # 1,024 elements a packet in stream 0, and 512 in stream 1
    for stream, other, own in ((0, 256, 512), (1, 512, 256)):
        key = PacketKey(0, stream, 0)
        strange = framed(contribution(0, key, bytes(other)), 0)
        assert run_program(slots.program, strange) == (PASS, strange, b"")
        assert run_program(slots.program, framed(contribution(0, key, bytes(own)), 0))[0] == SEND_BACK
    assert slots.counted().received == 2


@pytest.mark.bpf
@pytest.mark.parametrize("guard", ["crc32c", "siphash"])
def test_processors_at_one_slot_lose_nothing(guard):
    """Two threads send the packets of four workers each to the same slots at once."""
    rounds, packets = 60, 2
    config = SessionConfig(8, (IndexTable(4, tuple(range(16)), 8),), (Stream(Operation.SUM, 1024 * packets, 0),), 1024)
    slots, sealer = begun(config, guard, EPOCH), Sealer(8, guard, EPOCH)
    body = np.random.default_rng(0).integers(0, 256, 512, np.uint8)
    total = np.zeros(1024, np.uint8)
    reference.lookup_indices(body, 4, config.tables[0].array, total)
    together, answers = threading.Barrier(2, timeout=60), []

    def send(workers: range) -> None:
        for round_ in range(rounds):
            frames = [
                framed(
                    sealer.sealed(worker, contribution(worker, PacketKey(round_, 0, packet), body.tobytes())), worker
                )
                for packet in range(packets)
                for worker in workers
            ]
            together.wait()
            for frame in frames:
                answers.append(run_program(slots.program, frame, repeat=1)[2])
            together.wait()
            if workers.start:
                continue
            for packet in range(packets):
                done = [ANSWER.unpack(each) for each in answers if each and ANSWER.unpack(each)[3] == packet]
                assert len(done) == 1, "one processor answers a round"
                sealed = slots.result(packet, done[0][4])
                assert sealed[48 : 48 + 1024] == (8 * total).tobytes()
            answers.clear()

    failed = []

    def run(workers: range) -> None:
        try:
            send(workers)
        except Exception as error:
            failed.append(error)
            together.abort()

    threads = [threading.Thread(target=run, args=(range(first, first + 4),)) for first in (0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failed
    assert slots.counted().taken == 8 * rounds * packets


def test_more_workers_than_a_bitmap_has_bits_are_refused():
    config = SessionConfig(65, (IndexTable(4, tuple(range(16)), 16),), (Stream(Operation.SUM, 1024, 0),), 1024)
    with pytest.raises(OptionError, match=r"at most 64 workers, not 65\. Serve without --xdp"):
        KernelSlots(config, "crc32c", 7071)
