"""Programs in the kernel: what is compiled runs, and what the kernel refuses is said in words."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import pytest

from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.loader import available, interface_index, load
from gradwire.aggregator.xdp.maps import ArrayMap, CounterMap, SharedMap
from gradwire.aggregator.xdp.system import ProgramType, run_program
from gradwire.core.errors import OptionError

DROP, PASS, LOCK, UNLOCK = 1, 2, 93, 94
AS_NOBODY = """
import os
from gradwire.aggregator.xdp.maps import ArrayMap
os.setgid(65534), os.setuid(65534)
ArrayMap("tried", 8, 1)
"""


def packet_of(code: Assembler, num_bytes: int) -> Register:
    """Append the check of a packet's length, and return its pointer."""
    packet, end = code.load(code.context, 0, 4).as_pointer(), code.load(code.context, 4, 4).as_pointer()
    with code.when(packet.at(num_bytes) > end):
        code.leave(DROP)
    return packet


@pytest.mark.bpf
def test_a_program_reads_packets_and_writes_maps():
    code = Assembler("xdp")
    packet, key = packet_of(code, 64), code.room(8)
    code.store(key, 0, 3, 4)
    value = code.find(1, code.map("sums"), key)
    with code.when(value.equals(0)):
        code.leave(DROP)
    with code.loop(16, 0, 1) as loop:
        total, product = loop.carried
        word = code.load(packet.at(loop.index * 4), 0, 4)
        loop.carry(total + word, (word & 1).differs(0).otherwise(product * 3, product))
    code.store(value, 0, loop.results[0])
    code.store(value, 8, loop.results[1])
    code.store(packet, 0, code.swapped(code.number(0x0102), 2), 2)
    code.leave(PASS)
    sums = ArrayMap("sums", 16, 4)
    given = b"".join(number.to_bytes(4, "little") for number in range(16))
    with sums, load(code, ProgramType.XDP, [sums]) as program:
        assert run_program(program, given) == (PASS, b"\1\2" + given[2:], b"")
        assert run_program(program, given[:60])[0] == DROP
        assert sums.read(3) == sum(range(16)).to_bytes(8, "little") + (3**8).to_bytes(8, "little")
        assert sums.read(0) == bytes(16)


@pytest.mark.bpf
def test_memory_and_counters_are_shared():
    code = Assembler("xdp")
    key = code.room(8)
    code.store(key, 0, 0, 4)
    for name in ("seen", "counted"):
        value = code.find(1, code.map(name), key)
        with code.when(value.equals(0)):
            code.leave(DROP)
        code.increase(value, 8)
    code.leave(PASS)
    with SharedMap("seen", 16, 2) as seen, CounterMap("counted", 2) as counted:
        with load(code, ProgramType.XDP, [seen, counted]) as program:
            run_program(program, bytes(64), repeat=5)
        assert counted.totals() == [0, 5]
        assert seen.view.view("<u8").tolist() == [[0, 5], [0, 0]]
        counted.clear()
        assert counted.totals() == [0, 0]


@pytest.mark.bpf
def test_a_program_that_the_verifier_refuses_is_an_error_with_its_words():
    code = Assembler("xdp")
    code.leave(code.load(code.load(code.context, 0, 4).as_pointer(), 0, 8))  # reads without looking at the end
    with pytest.raises(OptionError, match=r"Update the kernel .* or serve without --xdp\. It said: .*invalid access"):
        load(code, ProgramType.XDP, ())


@pytest.mark.bpf
def test_a_map_beyond_all_memory_is_an_error_with_advice():
    with pytest.raises(OptionError, match="Send fewer tensors through the aggregator"):
        ArrayMap("slots", 1 << 20, 1 << 31)


@pytest.mark.bpf
def test_without_rights_the_error_names_the_capabilities():
    if os.getuid():
        pytest.fail("this test gives rights up, so it needs them")
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, timeout=60)
    assert "RightsError" in done.stderr
    assert "as root or with the capabilities CAP_BPF and CAP_NET_ADMIN, or serve without --xdp" in done.stderr


def test_other_machines_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(OptionError, match=r"--xdp needs Linux on x86_64, .* is linux on s390x\. Serve without --xdp\."):
        ArrayMap("tried", 8, 1)
    assert "s390x" in str(available())


def test_an_unknown_interface_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"no network interface 'eth77'\. Pass one of .*lo.* to --xdp"):
        interface_index("eth77")


@pytest.mark.bpf
def test_a_lock_keeps_processors_apart():
    """Two threads add 1 in the kernel, with much between reading and writing; without the lock, sums are lost."""
    code, runs = Assembler("xdp"), 400_000
    key = code.room(8)
    code.store(key, 0, 0, 4)
    value = code.find(1, code.map("sum"), key)
    with code.when(value.equals(0)):
        code.leave(DROP)
    code.call(LOCK, value)
    before = code.load(value, 8)
    with code.loop(300, 0) as loop:  # writes, so that nothing can be moved or left out
        code.store(value, 16, loop.carried[0])
        loop.carry(loop.carried[0] + before)
    code.store(value, 8, before + 1)
    code.call(UNLOCK, value)
    code.leave(PASS)
    with ArrayMap("sum", 24, 1, locked=True) as total, load(code, ProgramType.XDP, [total]) as program:
        threads = [
            threading.Thread(target=run_program, args=(program, bytes(64)), kwargs={"repeat": runs}) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = int.from_bytes(total.read(0)[8:16], "little")
    assert found == 2 * runs
