"""A parameter server's memory on disk: a checkpoint, and every frame since that has changed the state.

The journal repeats what `ServerStateMachine` was told, in the same order, and the same frames lead to the same bits. A
server that was killed therefore goes on where it was, and workers send again what it has not answered. Nothing is
applied twice: a push that is in the journal is known, and one that is not is sent again.

Guarantees: a kill of the process loses nothing (the system writes what the process has handed it); an outage of the
machine may lose the journal's last seconds, which workers that are ahead then say. Any other damage is an error that
names the file. A server that is started and takes no frame changes nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradwire.core.errors import DisagreementError, FrameError, StateError
from gradwire.parameter_server.checkpoint import Checkpoint, require_safetensors
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.records import RecordFile
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import FrameKind, Header

_PREFIX = "journal-"


class Journal:
    """Checkpoint and journal of one server. Holds the folder until `close`.

    Args:
        folder: where they are; made if missing.
        end: the server's end, whose state is kept.
        shard: its parameters, whose state is kept.
        checkpoint_bytes: how long the journal grows before a checkpoint takes its place.

    Raises:
        OptionError: safetensors is not installed.
        StateError: another server holds the folder.
    """

    def __init__(
        self, folder: Path, end: ServerStateMachine, shard: ParameterShard, checkpoint_bytes: int = 1 << 28
    ) -> None:
        require_safetensors()
        self._folder = StateFolder(folder)
        self._checkpoint = Checkpoint(self._folder, end, shard)
        self._end = end
        self._checkpoint_bytes = checkpoint_bytes
        self._number = 0  # of the journal that belongs to the latest checkpoint
        self._file: RecordFile | None = None
        self._left: list[int] = []  # workers that were there when the server before this one ended

    def restore(self) -> None:
        """Bring end and shard to where they were; an empty folder is where nothing was.

        Raises:
            StateError: a file is damaged or missing, or does not fit this server.
        """
        try:
            self._number = self._checkpoint.load() if self._checkpoint.path.exists() else 0
            self._check_journals()
            self._file = RecordFile(self._folder, self._name(self._number))
            for at, header, body in self._file.read():
                self._repeat(at, header, body)
        except BaseException:
            self.close(checkpoint=False)
            raise
        self._left = sorted(self._end.present)
        for worker in self._left:
            self._end.leave(worker)

    def note(self, header: Header, body: np.ndarray) -> None:
        """Write down a frame that the end has taken."""
        assert self._file is not None, "restored first"
        for worker in self._left:  # not before: until it takes a frame, this server leaves the files as they are
            self._file.append(*_leave(worker, finished=False))
        self._left = []
        self._file.append(header, body)
        if self._file.num_bytes >= self._checkpoint_bytes and self._end.initialized:
            self.checkpoint()

    def note_leave(self, worker: int, *, finished: bool) -> None:
        """Write down that a worker has left: it is waited for no more."""
        self.note(*_leave(worker, finished=finished))

    def checkpoint(self) -> None:
        """Write the whole state, and begin a new journal."""
        assert self._file is not None, "restored first"
        (self._folder.path / self._name(self._number + 1)).unlink(missing_ok=True)  # of a server killed in here
        fresh = RecordFile(self._folder, self._name(self._number + 1))
        try:
            self._folder.sync()
            self._checkpoint.save(self._number + 1)  # from here on the new journal counts
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
        """Close the files, and let another server have the folder. Idempotent.

        Args:
            checkpoint: whether to write the whole state first. Not after an exception, which may have come in the
                middle of a step: memory is not to be trusted then, and what was written down is.
        """
        try:
            if checkpoint and self._file is not None and self._end.initialized:
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
        """The journals that there are, by their numbers."""
        found = {path.name.removeprefix(_PREFIX): path for path in self._folder.path.glob(f"{_PREFIX}*")}
        return {int(number): path for number, path in found.items() if number.isdecimal()}

    def _check_journals(self) -> None:
        journals, checkpoint = self._journals(), self._checkpoint.path
        there = self._number in journals
        for number, path in journals.items():
            if number > self._number and (path.stat().st_size or not there):  # an empty one was begun and not needed
                raise StateError(f"The checkpoint {checkpoint} is missing, or older than the journal {path}. {_DO}")
        if checkpoint.exists() and not there:
            missing = self._folder.path / self._name(self._number)
            raise StateError(f"The journal {missing} is missing, so what came after the checkpoint is lost. {_DO}")

    def _repeat(self, at: int, header: Header, body: np.ndarray) -> None:
        """Tell the end again what it was told."""
        try:
            if header.kind is FrameKind.BYE:
                self._end.leave(header.sender, finished=bool(header.count))
            else:
                self._end.receive(header.sender, header, body)
        except (FrameError, DisagreementError) as error:
            assert self._file is not None, "its record was read"
            raise StateError(
                f"The record at byte {at} of {self._file.path} does not fit this server: {error} Start the server as "
                "the one before it was started, or give it another folder."
            ) from error
        self._end.turned_away.clear()


def _leave(worker: int, *, finished: bool) -> tuple[Header, np.ndarray]:
    return Header(FrameKind.BYE, sender=worker, count=finished), np.empty(0, np.uint8)


_DO = "Restore the folder from a copy, or start the job again in an empty one."
