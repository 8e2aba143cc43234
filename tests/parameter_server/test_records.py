"""A file of records: an end that a crash has left is not read, damage ahead of whole records is refused."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradwire.core.errors import StateError
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.records import HEAD_BYTES, NOTHING, SEAL_BYTES, RecordFile
from gradwire.wire.frame import HEADER_BYTES, MAGIC, FrameKind, Header

SIZES = (0, 40, 110)
RECORDS = [(Header(FrameKind.PAYLOAD, sender=at), np.full(size, at, np.uint8)) for at, size in enumerate(SIZES)]
ENDS = np.cumsum([HEAD_BYTES, *(SEAL_BYTES + HEADER_BYTES + size for size in SIZES)]).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    made = StateFolder(tmp_path)
    yield made
    made.close()


@pytest.fixture
def whole(folder: StateFolder) -> bytes:
    """A file with all records."""
    return write(folder, "records")


def write(folder: StateFolder, name: str, records: list[tuple[Header, np.ndarray]] = RECORDS) -> bytes:
    file = RecordFile.create(folder, name, NOTHING)
    for record in records:
        file.append(*record)
    file.close()
    return (folder.path / name).read_bytes()


def read(folder: StateFolder, content: bytes) -> int:
    """How many records a file of this content gives. Reading changes nothing; what is appended follows them."""
    path = folder.path / "records"
    path.write_bytes(content)
    file = RecordFile(folder, "records")
    found = list(file.read())
    for (at, header, body), begin, (sent, sent_body) in zip(found, ENDS, RECORDS):
        assert (at, header.sender, body.tobytes()) == (begin, sent.sender, sent_body.tobytes())
    end = ENDS[len(found)]
    assert (file.num_bytes, file.num_left) == (end, len(content) - end)
    assert path.read_bytes() == content
    file.append(*RECORDS[1])
    file.close()
    assert path.read_bytes()[:end] == content[:end]
    again = RecordFile(folder, "records")
    assert [header.sender for _, header, _ in again.read()] == [*range(len(found)), 1]
    assert again.num_left == 0
    again.close()
    return len(found)


def whole_records(content: bytes, whole: bytes) -> int:
    return sum(content[:end] == whole[:end] for end in ENDS) - 1


def test_a_file_may_end_anywhere(folder: StateFolder, whole: bytes) -> None:
    for num_bytes in range(HEAD_BYTES, len(whole) + 1):
        assert read(folder, whole[:num_bytes]) == whole_records(whole[:num_bytes], whole)


@pytest.mark.parametrize("zeros", [1, HEADER_BYTES, 5000])
def test_a_file_may_end_in_zeros(folder: StateFolder, whole: bytes, zeros: int) -> None:
    """As after a power failure, when the length of a file was written and its last blocks were not."""
    for num_bytes in [*range(HEAD_BYTES, len(whole), 7), len(whole)]:
        content = whole[:num_bytes] + bytes(zeros)
        assert read(folder, content) == whole_records(content, whole)


def test_a_file_may_end_in_garbage(folder: StateFolder, whole: bytes) -> None:
    for tail in (MAGIC * 50, b"\xff" * 500, whole[HEAD_BYTES : HEAD_BYTES + HEADER_BYTES] * 3):
        assert read(folder, whole + tail) == len(RECORDS)


def test_records_of_another_file_are_not_taken(folder: StateFolder, whole: bytes) -> None:
    """Blocks of a deleted journal may come back at the end of a new one: at the same place, with the same content."""
    other = write(folder, "other")
    for end in ENDS:
        assert read(folder, whole[:end] + other[end:]) == ENDS.index(end)
        assert read(folder, whole[:end] + other[HEAD_BYTES:]) == ENDS.index(end)


def test_records_that_were_cut_off_do_not_come_back(folder: StateFolder, whole: bytes) -> None:
    """The third record stood behind another second one."""
    path = folder.path / "records"
    path.write_bytes(whole[: ENDS[1] + 1])
    file = RecordFile(folder, "records")
    list(file.read())
    file.append(RECORDS[1][0], np.full(SIZES[1], 7, np.uint8))
    file.close()
    content = path.read_bytes()
    assert len(content) == ENDS[2]
    path.write_bytes(content + whole[ENDS[2] :])
    file = RecordFile(folder, "records")
    assert [body.tobytes() for _, _, body in file.read()] == [b"", b"\x07" * SIZES[1]]
    assert file.num_left == len(whole) - ENDS[2]
    file.close()


def test_damage_ahead_of_whole_records_is_refused_and_changes_nothing(folder: StateFolder, whole: bytes) -> None:
    path = folder.path / "records"
    for at in range(HEAD_BYTES, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        if at >= ENDS[2]:
            assert read(folder, bytes(damaged)) == 2
            continue
        path.write_bytes(damaged)
        begin = ENDS[whole_records(bytes(damaged), whole)]
        file = RecordFile(folder, "records")
        with pytest.raises(StateError, match=rf"damaged at byte {begin} of {len(whole)}, and complete") as raised:
            list(file.read())
        file.close()
        assert str(path) in str(raised.value)
        assert "network" not in str(raised.value)
        assert path.read_bytes() == damaged


def test_the_command_that_an_error_gives_goes_back_to_the_state_before_the_damage(
    folder: StateFolder, whole: bytes
) -> None:
    damaged = bytearray(whole)
    damaged[ENDS[1] + 5] ^= 1
    path = folder.path / "records"
    path.write_bytes(damaged)
    file = RecordFile(folder, "records")
    with pytest.raises(StateError) as raised:
        list(file.read())
    file.close()
    command = str(raised.value).rpartition("run: ")[2]
    subprocess.run(shlex.split(command), check=True)
    assert read(folder, path.read_bytes()) == 1


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES - 1])
def test_a_beginning_that_is_cut_off_is_refused(folder: StateFolder, whole: bytes, size: int) -> None:
    (folder.path / "records").write_bytes(whole[:size])
    with pytest.raises(StateError, match="records is damaged at its beginning, or was written by another version"):
        RecordFile(folder, "records")


def test_a_beginning_with_a_wrong_bit_is_refused(folder: StateFolder, whole: bytes) -> None:
    for at in range(HEAD_BYTES):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (folder.path / "records").write_bytes(damaged)
        with pytest.raises(StateError, match="records is damaged at its beginning"):
            RecordFile(folder, "records")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read, as Linux has one")
def test_a_file_that_cannot_be_read_is_named(folder: StateFolder) -> None:
    (folder.path / "records").symlink_to("/proc/self/mem")
    with pytest.raises(StateError, match=r"records cannot be read \(.*Input/output error.*Restore"):
        RecordFile(folder, "records")


def test_a_full_disk_is_an_error_and_leaves_whole_records(folder: StateFolder) -> None:
    """The limit on the size of a file fails a write in its middle, as a full disk does."""
    file = RecordFile.create(folder, "records", NOTHING)
    body = np.zeros(300, np.uint8)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for _ in range(2):
            file.append(RECORDS[0][0], body)
        with pytest.raises(OSError, match="File too large"):
            file.append(RECORDS[0][0], body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.close()
    file = RecordFile(folder, "records")
    assert len(list(file.read())) == 2
    assert file.num_bytes + file.num_left == os.stat(file.path).st_size == 1000
    file.close()
