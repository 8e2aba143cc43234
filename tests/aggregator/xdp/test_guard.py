"""Guards: the programs' checksums and tags are those of the functions they name."""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
import pytest

from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.guard import GUARDS, TABLE_BYTES, checksum_tables
from gradwire.aggregator.xdp.loader import load
from gradwire.aggregator.xdp.maps import ArrayMap
from gradwire.aggregator.xdp.seals import SipHashSender
from gradwire.aggregator.xdp.siphash import siphash
from gradwire.aggregator.xdp.system import ProgramType, run_program

KEY = bytes(range(16))
CHECKSUM_AT = 40
# The authors' vectors for this key and the bytes 0, 1, 2, ...: lengths 0, 1, 7, 8, 15, 63.
VECTORS = {
    0: 0x726FDB47DD0E0E31, 1: 0x74F839C593DC67FD, 7: 0xAB0200F58B01D137, 8: 0x93F5F5799A932462,
    15: 0xA129CA6149BE45E5, 63: 0x958A324CEB064572,
}  # fmt: skip


@pytest.mark.parametrize("length", VECTORS)
def test_siphash_is_that_of_its_authors(length):
    assert siphash(np.arange(length, dtype=np.uint8), np.frombuffer(KEY, np.uint64)) == VECTORS[length]


@pytest.mark.bpf
@pytest.mark.parametrize("length", [44, 60, 300, 556, 1072, 1076])
@pytest.mark.parametrize("name", sorted(GUARDS))
def test_a_program_seals_as_python_does_and_finds_every_flipped_byte(name, length):
    guard, whole = GUARDS[name](), length + GUARDS[name].trailer_bytes
    code = Assembler("xdp")
    packet, end = code.load(code.context, 0, 4).as_pointer(), code.load(code.context, 4, 4).as_pointer()
    room = code.room(8)
    code.store(room, 0, 0, 4)
    table = code.find(1, code.map("table"), room)
    with code.when(table.equals(0)):
        code.leave(1)
    with code.when(packet.at(8 + whole) > end):
        code.leave(1)
    key = tuple(code.number(word) for word in struct.unpack("<QQ", KEY))
    with code.when(code.load(packet, 0).equals(0)):
        code.leave(guard.verify(code, packet.at(8), length, key, table).as_number())
    guard.seal(code, packet.at(8), length, table)
    guard.sign(code, packet.at(8), length, key, code.number(0))
    code.leave(2)
    content = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    content = content[:CHECKSUM_AT] + bytes(4) + content[CHECKSUM_AT + 4 :]
    with ArrayMap("table", TABLE_BYTES, 1) as tables:
        tables.write(0, checksum_tables())
        with load(code, ProgramType.XDP, [tables]) as program:
            sealed = run_program(program, struct.pack("<Q", 1) + content.ljust(whole, b"\0"))[1][8:]
            if name == "crc32c":
                checksum = struct.pack("<I", google_crc32c.value(content))
                assert sealed == content[:CHECKSUM_AT] + checksum + content[CHECKSUM_AT + 4 :]
            else:
                assert sealed == content + SipHashSender(KEY).trailer(np.frombuffer(content, np.uint8))
            assert run_program(program, bytes(8) + sealed)[0] == 1
            for place in range(0, whole, 5):
                damaged = bytearray(sealed)
                damaged[place] ^= 1 << place % 8
                assert run_program(program, bytes(8) + bytes(damaged))[0] == 0
