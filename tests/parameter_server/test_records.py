"""A file of records: an end that a crash has left is cut off, damage ahead of whole records is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradwire.core.errors import StateError
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.records import RecordFile
from gradwire.wire.frame import HEADER_BYTES, MAGIC, FrameKind, Header, pack

SIZES = (0, 40, 110)
RECORDS = [(Header(FrameKind.PAYLOAD, sender=at), bytes(range(at, at + 10)) * (size // 10)) for at, size in
           enumerate(SIZES)]  # fmt: skip
WHOLE = b"".join(pack(header, body) for header, body in RECORDS)
ENDS = np.cumsum([0, *(HEADER_BYTES + size for size in SIZES)]).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    made = StateFolder(tmp_path)
    yield made
    made.close()


def read(folder: StateFolder, content: bytes) -> int:
    """How many records a file of this content gives; afterwards they are all that is in it, and one more is taken."""
    path = folder.path / "records"
    path.write_bytes(content)
    file = RecordFile(folder, "records")
    try:
        found = list(file.read())
        for (at, header, body), end, (sent, sent_body) in zip(found, ENDS, RECORDS):
            assert (at, header.sender, body.tobytes()) == (end, sent.sender, sent_body)
        kept = WHOLE[: ENDS[len(found)]]
        assert (path.read_bytes(), file.num_bytes) == (kept, len(kept))
        file.append(RECORDS[0][0], np.empty(0, np.uint8))
        assert path.read_bytes() == kept + WHOLE[: ENDS[1]]
        assert file.num_bytes == len(kept) + ENDS[1]
    finally:
        file.close()
    return len(found)


def whole_records(content: bytes) -> int:
    return sum(content[:end] == WHOLE[:end] for end in ENDS) - 1


def test_a_file_may_end_anywhere(folder: StateFolder) -> None:
    for num_bytes in range(0, len(WHOLE) + 1, 3):
        content = WHOLE[:num_bytes]
        assert read(folder, content) == whole_records(content)


@pytest.mark.parametrize("zeros", [1, HEADER_BYTES, 5000])
def test_a_file_may_end_in_zeros(folder: StateFolder, zeros: int) -> None:
    """As after a loss of power, when the length of a file was written and its last blocks were not."""
    for num_bytes in [*range(0, len(WHOLE), 7), len(WHOLE)]:
        content = WHOLE[:num_bytes] + bytes(zeros)
        assert read(folder, content) == whole_records(content)


@pytest.mark.parametrize(
    "tail", [MAGIC * 50, b"\xff" * 500, WHOLE[: HEADER_BYTES - 1] * 3], ids=["magic", "ones", "heads"]
)
def test_a_file_may_end_in_garbage(folder: StateFolder, tail: bytes) -> None:
    assert read(folder, WHOLE + tail) == len(RECORDS)


def test_the_log_says_what_was_cut_off(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        read(folder, WHOLE)
        assert caplog.messages == []
        read(folder, WHOLE + bytes(123))
    [message] = caplog.messages
    assert str(folder.path / "records") in message
    assert "123 bytes" in message


def test_damage_ahead_of_whole_records_is_refused_and_changes_nothing(folder: StateFolder) -> None:
    path = folder.path / "records"
    for at in range(0, ENDS[2], 3):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        file = RecordFile(folder, "records")
        with pytest.raises(
            StateError, match=rf"damaged at byte {ENDS[whole_records(bytes(damaged))]} of {len(WHOLE)}"
        ) as raised:
            list(file.read())
        file.close()
        assert str(path) in str(raised.value)
        assert "network" not in str(raised.value)
        assert path.read_bytes() == damaged
    for at in range(ENDS[2], len(WHOLE), 3):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << at % 8
        assert read(folder, bytes(damaged)) == 2
