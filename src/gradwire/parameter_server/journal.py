"""The state of a parameter server on disk: checkpoints, and journals of the frames since.

A journal replays the frames that `ServerStateMachine` has received, in order, and the same frames lead to the same
bits. A server that was killed therefore continues where it was, and workers send again what it has not answered. A push
is applied once: either it is in a journal, or it is sent again.

Journal N continues checkpoint N; journal 0 begins without one. The last two generations are kept. If a checkpoint is
damaged or missing, the one before it and the journal between them lead to the same state, which its digest proves.

Guarantees: killing the process loses nothing. A power failure loses nothing with ``fsync="always"``. Otherwise it may
lose the frames since the last checkpoint, which the workers then notice. Any other damage is made up for with a
warning, or is an error that names the file. A server that is started and receives no frame changes no file.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np

from gradwire.core.errors import FrameError, OptionError, StateError
from gradwire.parameter_server.checkpoint import Checkpoint, DamagedCheckpointError, require_safetensors
from gradwire.parameter_server.folder import RESTORE, UNFINISHED, StateFolder
from gradwire.parameter_server.records import NOTHING, RecordFile
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.wire.frame import FrameKind, Header

logger = logging.getLogger("gradwire")
FSYNC = ("always", "checkpoint")
_JOURNALS = r"journal-([0-9]+)"
_CHECKPOINTS = r"checkpoint-([0-9]+)\.safetensors"


class Journal:
    """Checkpoints and journals of one server. Locks the folder until `close`.

    Args:
        folder: Folder of the files; created if missing.
        machine: State machine of the server.
        checkpoint_bytes: Size of a journal at which a checkpoint and a new journal begin.
        fsync: See `ParameterServerOptions.fsync`.

    Raises:
        OptionError: safetensors is not installed, or `fsync` is unknown.
        StateError: Another server uses the folder, or everybody can write to it.
    """

    def __init__(
        self, folder: Path, machine: ServerStateMachine, checkpoint_bytes: int = 1 << 28, fsync: str = "checkpoint"
    ) -> None:
        require_safetensors()
        if fsync not in FSYNC:
            raise OptionError(f"fsync={fsync!r} is unknown. Pass one of {', '.join(map(repr, FSYNC))}.")
        self._folder = StateFolder(folder)
        self._checkpoints = Checkpoint(self._folder, machine)
        self._machine = machine
        self._checkpoint_bytes = checkpoint_bytes
        self._always = fsync == "always"
        self._oldest = 0  # number of the last checkpoint that is known to be good
        self._number = 0  # of the journal in use
        self._file: RecordFile | None = None
        self._damage = ""  # of the newest checkpoint
        self._left: list[int] = []  # workers that were present when the previous server ended

    def restore(self) -> None:
        """Restore the state machine from the files. An empty folder leaves it as it is.

        Raises:
            StateError: A file is damaged or missing and cannot be done without, or does not fit this server.
        """
        try:
            self._replay_all()
        except BaseException:
            self.close(checkpoint=False)
            raise
        self._left = sorted(self._machine.present)
        for worker in self._left:
            self._machine.leave(worker)

    def note(self, header: Header, body: np.ndarray) -> None:
        """Append a frame that the state machine has accepted."""
        assert self._file is not None, "restored first"
        self._note_departed()
        self._file.append(header, body)
        if self._file.num_bytes >= self._checkpoint_bytes and self._machine.initialized:
            self.checkpoint()

    def note_leave(self, worker: int, *, finished: bool) -> None:
        """Append that a worker has left."""
        self.note(*_leave(worker, finished=finished))

    def commit(self) -> None:
        """Write the journal to disk, if that is asked for. Call it before anything that follows from it is sent."""
        assert self._file is not None, "restored first"
        if self._always:
            self._file.sync()

    def checkpoint(self) -> None:
        """Write the whole state and begin a new journal."""
        assert self._file is not None, "restored first"
        self._note_departed()
        if self._machine.over:  # no frame says so if workers have batches left
            self._file.append(*_leave(self._machine.workers, finished=True))
        self._file.sync()  # together with the checkpoint before it, it stands in for the new checkpoint
        number = self._number + 1
        with self._checkpoints.save(number) as digest:
            fresh = RecordFile.create(self._folder, journal_name(number), digest)
        self._file.close()
        self._file, self._number = fresh, number
        self._remove_below(self._oldest)
        self._oldest = number

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

    def _numbers(self, pattern: str) -> set[int]:
        """Numbers of the files whose whole name is of this pattern."""
        found = (re.fullmatch(pattern, path.name) for path in self._folder.path.iterdir())
        return {int(match[1]) for match in found if match}

    def _remove_below(self, number: int) -> None:
        """Remove older files, and those that a killed server has left unfinished."""
        for path in self._folder.path.iterdir():
            match = re.fullmatch(_JOURNALS, path.name) or re.fullmatch(_CHECKPOINTS, path.name)
            if path.suffix == UNFINISHED or (match and int(match[1]) < number):
                path.unlink()

    def _replay_all(self) -> None:
        journals = self._numbers(_JOURNALS)
        numbers = journals | self._numbers(_CHECKPOINTS)
        if not numbers:
            RecordFile.create(self._folder, journal_name(0), NOTHING).close()
            numbers = journals = {0}
        digest = self._load(numbers)
        self._number = max(numbers)
        for number in range(self._oldest, self._number + 1):
            if number not in journals:
                missing = self._folder.path / journal_name(number)
                raise self._unusable(f"The journal {missing} is missing: the steps after its checkpoint are lost.")
            self._replay_journal(number, digest)
        if self._damage:
            logger.warning(
                "%s The same state was made from the files before it, and the next checkpoint replaces it.",
                self._damage,
            )

    def _load(self, numbers: set[int]) -> bytes:
        """Load the newest checkpoint that is whole, and return its digest. Without one, the state stays empty."""
        for number in sorted(numbers - {0}, reverse=True):
            try:
                digest = self._checkpoints.load(number)
            except DamagedCheckpointError as error:
                self._damage = self._damage or str(error)
            else:
                self._oldest = number
                return digest
        return NOTHING

    def _replay_journal(self, number: int, digest: bytes) -> None:
        """Replay one journal.

        Args:
            number: Number of the journal.
            digest: Digest of the loaded checkpoint.
        """
        if self._file is not None:
            self._file.close()
        self._file = file = RecordFile(self._folder, journal_name(number))
        if number > self._oldest:
            if self._machine.over:
                self._machine.finished.clear()  # as in the checkpoint
            digest = self._checkpoints.digest(number) if self._machine.initialized else NOTHING
        if file.follows != digest:
            raise self._unusable(
                f"The journal {file.path} does not continue the state that the files before it lead to. They are from "
                "different runs, or one of them was cut off."
            )
        for at, header, body in file.read(last=number == self._number):
            self._replay(at, header, body)
        if file.num_left and number == self._number:
            logger.warning(
                "The journal %s ends with %d bytes of an incomplete record, as after a crash or a power failure. They "
                "are not used. The state is that of the %d bytes before them.",
                file.path, file.num_left, file.num_bytes,
            )  # fmt: skip

    def _unusable(self, problem: str) -> StateError:
        """The error for files that do not lead to the last state: the damage to the checkpoint, or else `problem`."""
        return StateError(f"{self._damage or problem} {RESTORE}")

    def _note_departed(self) -> None:
        """Append who was present when the previous server ended, since these workers have to join again.

        Only with the first frame, since a server that receives none changes no file.
        """
        assert self._file is not None, "restored first"
        for worker in self._left:
            self._file.append(*_leave(worker, finished=False))
        self._left = []

    def _replay(self, at: int, header: Header, body: np.ndarray) -> None:
        try:
            if header.kind is FrameKind.BYE and header.sender == self._machine.workers:
                self._machine.finish()
            elif header.kind is FrameKind.BYE:
                self._machine.leave(header.sender, finished=bool(header.count))
            else:
                self._machine.receive(header.sender, header, body)
        except FrameError as error:
            assert self._file is not None, "its record was read"
            raise StateError(
                f"The record at byte {at} of {self._file.path} does not fit this server: {error} Start the server with "
                "the options of the previous one, or give it another folder."
            ) from error
        self._machine.rejected.clear()


def journal_name(number: int) -> str:
    """Name of a journal's file."""
    return f"journal-{number}"


def _leave(rank: int, *, finished: bool) -> tuple[Header, np.ndarray]:
    """The record of a worker that has left, or of the server, with which the job ends."""
    return Header(FrameKind.BYE, sender=rank, count=finished), np.empty(0, np.uint8)
