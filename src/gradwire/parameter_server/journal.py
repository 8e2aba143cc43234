"""The state of a parameter server on disk: a checkpoint, and a journal of the frames since.

The journal replays the frames that `ServerStateMachine` has received, in order, and the same frames lead to the same
bits. A server that was killed therefore continues where it was, and workers send again what it has not answered. A push
is applied once: either it is in the journal, or it is sent again.

Guarantees: killing the process loses nothing. A power failure may lose the last seconds of the journal, which the
workers then notice. Any other damage is an error that names the file. A server that is started and receives no frame
changes no file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradwire.core.errors import DisagreementError, FrameError, StateError
from gradwire.parameter_server.checkpoint import Checkpoint, require_safetensors
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.records import RecordFile
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.wire.frame import FrameKind, Header

_PREFIX = "journal-"


class Journal:
    """Checkpoint and journal of one server. Locks the folder until `close`.

    Args:
        folder: Folder of the files; created if missing.
        machine: State machine of the server.
        checkpoint_bytes: Size of the journal at which a checkpoint replaces it.

    Raises:
        OptionError: safetensors is not installed.
        StateError: Another server uses the folder.
    """

    def __init__(self, folder: Path, machine: ServerStateMachine, checkpoint_bytes: int = 1 << 28) -> None:
        require_safetensors()
        self._folder = StateFolder(folder)
        self._checkpoint = Checkpoint(self._folder, machine)
        self._machine = machine
        self._checkpoint_bytes = checkpoint_bytes
        self._number = 0  # of the journal that follows the latest checkpoint
        self._file: RecordFile | None = None
        self._left: list[int] = []  # workers that were present when the previous server ended

    def restore(self) -> None:
        """Restore the state machine from the files. An empty folder leaves it as it is.

        Raises:
            StateError: A file is damaged or missing, or does not fit this server.
        """
        try:
            self._number = self._checkpoint.load() if self._checkpoint.path.exists() else 0
            self._check_journals()
            self._file = RecordFile(self._folder, self._name(self._number))
            for at, header, body in self._file.read():
                self._replay(at, header, body)
        except BaseException:
            self.close(checkpoint=False)
            raise
        self._left = sorted(self._machine.present)
        for worker in self._left:
            self._machine.leave(worker)

    def note(self, header: Header, body: np.ndarray) -> None:
        """Append a frame that the state machine has accepted."""
        assert self._file is not None, "restored first"
        for worker in self._left:  # only now, since a server that receives no frame changes no file
            self._file.append(*_leave(worker, finished=False))
        self._left = []
        self._file.append(header, body)
        if self._file.num_bytes >= self._checkpoint_bytes and self._machine.initialized:
            self.checkpoint()

    def note_leave(self, worker: int, *, finished: bool) -> None:
        """Append that a worker has left."""
        self.note(*_leave(worker, finished=finished))

    def checkpoint(self) -> None:
        """Write the whole state and begin a new journal."""
        assert self._file is not None, "restored first"
        (self._folder.path / self._name(self._number + 1)).unlink(
            missing_ok=True
        )  # of a server that was killed at this point
        fresh = RecordFile(self._folder, self._name(self._number + 1))
        try:
            self._folder.sync()
            self._checkpoint.save(self._number + 1)  # from here on, the new journal is the valid one
        except BaseException:
            fresh.close()
            raise
        self._file.close()
        self._file = fresh
        self._number += 1
        self._left = []
        for number, path in self._journals().items():
            if number < self._number:
                path.unlink()

    def close(self, *, checkpoint: bool) -> None:
        """Close the files and unlock the folder. Idempotent.

        Args:
            checkpoint: Whether to write the whole state first. Pass False after an exception: it may have come in the
                middle of a step, so that the state in memory is not consistent.
        """
        try:
            if checkpoint and self._file is not None and self._machine.initialized:
                self.checkpoint()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._folder.close()

    # -- the files -------------------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"{_PREFIX}{number}"

    def _journals(self) -> dict[int, Path]:
        """Paths of the journals by number."""
        paths = {path.name.removeprefix(_PREFIX): path for path in self._folder.path.glob(f"{_PREFIX}*")}
        return {int(number): path for number, path in paths.items() if number.isdecimal()}

    def _check_journals(self) -> None:
        journals, checkpoint = self._journals(), self._checkpoint.path
        there = self._number in journals
        for number, path in journals.items():
            if number > self._number and (
                path.stat().st_size or not there
            ):  # an empty one was begun, but its checkpoint was not finished
                raise StateError(
                    f"The checkpoint {checkpoint} is missing, or older than the journal {path}. {_RESTORE}"
                )
        if checkpoint.exists() and not there:
            missing = self._folder.path / self._name(self._number)
            raise StateError(f"The journal {missing} is missing: the steps after the checkpoint are lost. {_RESTORE}")

    def _replay(self, at: int, header: Header, body: np.ndarray) -> None:
        try:
            if header.kind is FrameKind.BYE:
                self._machine.leave(header.sender, finished=bool(header.count))
            else:
                self._machine.receive(header.sender, header, body)
        except (FrameError, DisagreementError) as error:
            assert self._file is not None, "its record was read"
            raise StateError(
                f"The record at byte {at} of {self._file.path} does not fit this server: {error} Start the server with "
                "the options of the previous one, or give it another folder."
            ) from error
        self._machine.rejected.clear()


def _leave(worker: int, *, finished: bool) -> tuple[Header, np.ndarray]:
    return Header(FrameKind.BYE, sender=worker, count=finished), np.empty(0, np.uint8)


_RESTORE = "Restore the folder from a copy, or start the job again in an empty one."
