"""A job of the harness whose server keeps its state in a folder."""

from __future__ import annotations

from pathlib import Path

from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from tests.parameter_server.harness import EPOCH, Job, make_config


class Recorded(Job):
    """A job whose server keeps a journal."""

    def __init__(self, folder: Path, checkpoint_bytes: int, **options) -> None:
        super().__init__(make_config(workers=2, **options))
        self.folder = folder
        self.checkpoint_bytes = checkpoint_bytes
        self.open()

    def open(self) -> None:
        self.shard = ParameterShard()
        self.machine = ServerStateMachine(2, EPOCH, self.shard)
        self.journal = Journal(self.folder, self.machine, self.checkpoint_bytes)
        self.journal.restore()

    def deliver(self, worker) -> None:
        header, body = worker.outbox[0]
        super().deliver(worker)
        self.journal.note(header, body)

    def kill(self) -> None:
        """As kill -9 does: nothing more is written, nothing under way arrives."""
        self.journal.close(checkpoint=False)
        for worker in self.workers:
            worker.inbox.clear()
            worker.outbox.clear()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
