"""Maps and programs of a session: what is compiled before a session begins serves it."""

from __future__ import annotations

import pytest

from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.kernel_slots import KernelSlots, prepare
from gradwire.core.errors import OptionError

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


def test_too_many_workers_are_refused_before_they_join():
    with pytest.raises(OptionError, match=r"at most 64 workers, not 65\. Serve without --xdp"):
        prepare(65, 1500, "siphash", 7071)
