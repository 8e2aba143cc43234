"""The golden frames: bytes of frames that must never change without a new version of the format.

Written by `python -m tests.wire.golden`; a diff in `tests/golden/frames` is a change of the wire format and belongs
in the changelog.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradwire.wire.frame import FrameFlags, FrameKind, Header, Outgoing, pack
from gradwire.wire.mac import FrameMac

FOLDER = Path(__file__).parent.parent / "golden" / "frames"

FRAMES: dict[str, tuple[Header, bytes]] = {
    "payload": (
        Header(
            FrameKind.PAYLOAD,
            compressor=0x0102,
            flags=FrameFlags.PRESENT | FrameFlags.USED,
            sender=3,
            stage=1,
            dtype=1,
            epoch=0x1122334455667788,
            round=1 << 40,
            tensor=7,
            partition=2,
            offset=1 << 33,
            count=100,
        ),
        bytes(range(100)),
    ),
    "group": (Header(FrameKind.PAYLOAD, tensor=1 << 31, count=6, members=0x01020304), bytes(24)),
    "aggregate": (
        Header(FrameKind.AGGREGATE, compressor=9, sender=1, epoch=5, round=6, count=8),
        np.arange(8, dtype="<i2").tobytes(),
    ),
    "stats": (Header(FrameKind.STATS, sender=2, dtype=4, epoch=5, count=1), np.float64(0.5).tobytes()),
    "nonfinite": (Header(FrameKind.PAYLOAD, flags=FrameFlags.NONFINITE, dtype=3, count=4), b""),
    "heartbeat": (Header(FrameKind.HEARTBEAT, sender=65535, epoch=(1 << 64) - 1), b""),
    "abort": (Header(FrameKind.ABORT, sender=4, epoch=5, count=3), "rank 2 is gone — ende".encode()),
    "goaway": (Header(FrameKind.GOAWAY, sender=4, epoch=5), b"stopped by SIGTERM"),
    "bye": (Header(FrameKind.BYE, sender=4, epoch=5), b""),
    "hello": (Header(FrameKind.HELLO, sender=1, epoch=5, count=4), b"\x02\x00" + bytes(32)),
    "challenge": (Header(FrameKind.CHALLENGE, epoch=5, count=4), b"\x01" + bytes(range(32))),
    "proof": (Header(FrameKind.PROOF, epoch=5, count=4), bytes(range(32, 64))),
}


TAGGED = FRAMES["payload"]
"""The second frame of a connection with tags, whose key is 32 bytes of 7."""


def tagged() -> bytes:
    header, body = TAGGED
    frame = Outgoing(header, np.frombuffer(body, np.uint8))
    frame.protect(FrameMac(bytes([7]) * 32), 1)
    return whole(frame)


def whole(frame: Outgoing) -> bytes:
    """The bytes of a frame as they are sent."""
    return frame.seal() + frame.body.tobytes()


def read(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (header, body) in FRAMES.items():
        (FOLDER / f"{name}.bin").write_bytes(pack(header, body))
    (FOLDER / "tagged.bin").write_bytes(tagged())


if __name__ == "__main__":
    main()
