from __future__ import annotations

import copy
import hashlib
import hmac
import pickle
from dataclasses import replace

import numpy as np
import pytest

from gradwire.core.errors import FrameError
from gradwire.wire.frame import (
    HEADER_BYTES,
    TAGGED_VERSION,
    FrameKind,
    Header,
    Outgoing,
    prefix_bytes,
    unpack,
    verify_tag,
    without_seal,
)
from gradwire.wire.mac import TAG_BYTES, FrameMac

from . import golden

MAC = FrameMac(bytes([7]) * 32)


def check(frame: bytes, number: int = 1, mac: FrameMac = MAC) -> tuple[Header, bytes]:
    prefix, body = frame[: prefix_bytes(mac)], np.frombuffer(frame, np.uint8)[prefix_bytes(mac) :]
    header = unpack(prefix, TAGGED_VERSION)
    if body.nbytes != header.length:
        raise FrameError("another length")
    verify_tag(mac, number, prefix, header, body)
    return header, body.tobytes()


def test_the_wire_format_does_not_change():
    assert golden.tagged() == golden.read("tagged")
    header, body = check(golden.read("tagged"))
    assert (without_seal(header), body) == golden.TAGGED


def test_the_tag_is_that_of_the_rfc():
    frame = golden.read("tagged")
    header, tag, body = frame[:HEADER_BYTES], frame[HEADER_BYTES : HEADER_BYTES + TAG_BYTES], frame[88:]
    assert tag == hmac.new(bytes([7]) * 32, (1).to_bytes(8, "little") + header + body, hashlib.sha256).digest()[:16]


def test_every_flipped_bit_is_found():
    good = golden.read("tagged")
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            check(bytes(bad))


def test_number_and_key_are_part_of_it():
    for other in ({"number": 0}, {"number": 2}, {"number": 1 << 63}, {"mac": FrameMac(bytes(32))}):
        with pytest.raises(FrameError, match=r"tag of frame \d+ of this connection is wrong .* check the network"):
            check(golden.read("tagged"), **other)


def test_a_frame_without_a_tag_is_refused_where_one_is_due():
    with pytest.raises(FrameError, match=r"Expected frame version 2, got 1\. Run one gradwire version"):
        unpack(golden.read("payload"), TAGGED_VERSION)
    with pytest.raises(FrameError, match="Expected frame version 1, got 2"):
        unpack(golden.read("tagged"))


def test_a_frame_has_a_checksum_or_a_tag():
    frame = bytearray(golden.read("tagged"))
    frame[64] = 1
    with pytest.raises(FrameError, match="reserved"):
        unpack(frame, TAGGED_VERSION)


def test_an_empty_body_has_a_tag():
    frame = Outgoing(Header(FrameKind.BYE, sender=1), np.empty(0, np.uint8))
    frame.protect(MAC, 3)
    assert without_seal(check(frame.seal(), 3)[0]) == replace(Header(FrameKind.BYE, sender=1))


def test_the_key_shows_itself_nowhere():
    key = b"0123456789abcdefghijklmnopqrstuv"
    mac = FrameMac(key)
    assert "0123" not in f"{mac!r} {mac}"
    for leak in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            leak(mac)
