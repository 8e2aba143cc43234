"""A parameter server's memory on disk: a checkpoint, and every frame since that has changed the state.

The journal repeats what `ServerEnd` was told, in its order, and the same frames lead to the same bits; so a server that
was killed goes on where it was, and workers send again what it has not answered. Nothing is applied twice: a push that
is in the journal is known, one that is not is sent again.

Guarantees: a kill of the process loses nothing (the system writes what the process has handed it); an outage of the
machine may lose the journal's last seconds, which workers that are ahead then say. A frame that was cut off at the
journal's end is dropped. No pickle is read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from gradwire.core.errors import FrameError, OptionError
from gradwire.protocol.parameters.agreement import Agreement, groups_to
from gradwire.protocol.parameters.server import Push, Round, ServerEnd
from gradwire.server.shard import Shard
from gradwire.wire.frame import HEADER_BYTES, FrameFlags, FrameKind, Header, seal, unpack, verify

VERSION = 2
_CHECKPOINT = "checkpoint.safetensors"


class Journal:
    """Checkpoint and journal of one server.

    Args:
        folder: where they are; made if missing.
        end: the server's end, whose state is kept.
        shard: its parameters, whose state is kept.
        checkpoint_bytes: how long the journal grows before a checkpoint takes its place.

    Raises:
        OptionError: safetensors is not installed.
    """

    def __init__(self, folder: Path, end: ServerEnd, shard: Shard, checkpoint_bytes: int = 1 << 28) -> None:
        try:
            import safetensors.torch  # noqa: F401
        except ImportError as error:
            raise OptionError("Expected safetensors for a server that keeps state. Do: pip install safetensors.") from (
                error
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._end = end
        self._shard = shard
        self._checkpoint_bytes = checkpoint_bytes
        self._number = 0  # of the journal that belongs to the latest checkpoint
        self._file: BinaryIO | None = None

    def restore(self) -> None:
        """Bring end and shard to where they were; an empty folder is where nothing was.

        Raises:
            FrameError: the files are not a server's.
        """
        if (self._folder / _CHECKPOINT).exists():
            self._load(self._folder / _CHECKPOINT)
        path = self._path(self._number)
        kept = self._replay(path) if path.exists() else 0
        self._file = path.open("ab")
        self._file.truncate(kept)
        self._file.seek(kept)
        for worker in sorted(self._end.present):  # whoever was there has lost its connection
            self._end.leave(worker)
            self.note_leave(worker, finished=False)

    def note(self, header: Header, body: np.ndarray) -> None:
        """Write down a frame that the end has taken."""
        assert self._file is not None, "restored first"
        self._file.write(seal(header, body))
        self._file.write(body.data)
        self._file.flush()  # to the system, which outlives the process
        if self._file.tell() >= self._checkpoint_bytes and self._end.initialised:
            self.checkpoint()

    def note_leave(self, worker: int, *, finished: bool) -> None:
        """Write down that a worker has left: it is waited for no more."""
        header = Header(FrameKind.BYE, sender=worker, count=finished)
        self.note(header, np.empty(0, np.uint8))

    def checkpoint(self) -> None:
        """Write the whole state, and begin a new journal."""
        from safetensors.torch import save_file

        assert self._file is not None, "restored first"
        tensors, said = self._state()
        self._number += 1
        said["journal"] = self._number
        path = self._folder / _CHECKPOINT
        fresh = path.with_suffix(".new")
        save_file(tensors, fresh, {"gradwire": json.dumps(said)})
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        old, self._file = self._file, self._path(self._number).open("wb")
        fresh.replace(path)  # from here on the new journal counts
        old.close()
        self._path(self._number - 1).unlink(missing_ok=True)

    def close(self, *, checkpoint: bool) -> None:
        """Close the file. Idempotent.

        Args:
            checkpoint: whether to write a last checkpoint first. Not after an exception, which may have come in the
                middle of a step: memory is not to be trusted then, and what was written down is.
        """
        if self._file is not None:
            if checkpoint and self._end.initialised:
                self.checkpoint()
            self._file.close()
            self._file = None

    # -- the journal -----------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / f"journal-{number}"

    def _replay(self, path: Path) -> int:
        """Tell the end again what it was told; returns the bytes of whole frames."""
        with path.open("rb") as file:
            whole = 0
            while len(head := file.read(HEADER_BYTES)) == HEADER_BYTES:
                header = unpack(head)
                left = path.stat().st_size - file.tell()
                if header.length > left:
                    break
                body = np.frombuffer(bytearray(file.read(header.length)), np.uint8)
                verify(header, body)
                if header.kind is FrameKind.BYE:
                    self._end.leave(header.sender, finished=bool(header.count))
                else:
                    self._end.receive(header.sender, header, body)
                self._end.turned_away.clear()
                whole = file.tell()
            return whole

    # -- the checkpoint --------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        end, shard = self._end, self._shard
        assert end.agreement is not None, "initialised"
        tensors: dict[str, torch.Tensor] = {}
        rounds, optimizers = [], []
        told: dict[bytes, int] = {}  # hyper-parameters, in the order of their numbers
        for tensor, round_ in enumerate(end.rounds):
            tensors[f"parameter.{tensor}"] = shard.parameters[tensor].detach()
            tensors[f"view.{tensor}"] = shard.views[tensor]
            tensors[f"pushed.{tensor}"] = torch.from_numpy(round_.pushed)
            tensors[f"counted.{tensor}"] = torch.from_numpy(round_.counted)
            for worker, push in round_.pushes.items():
                tensors[f"push.{tensor}.{worker}"] = torch.from_numpy(push.body.copy())
            pushes = {
                str(worker): [int(push.flags), told.setdefault(groups_to(push.groups), len(told))]
                for worker, push in round_.pushes.items()
            }
            rounds.append({"version": round_.version, "pushes": pushes})
            plain: dict[str, Any] = {}
            for key, value in self._optimizer_state(tensor).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{tensor}.{key}"] = value.contiguous()
                else:
                    plain[key] = value
            optimizers.append(plain if tensor in shard.optimizers else None)
        over = len(end.finished) == end.workers  # whoever starts again after that trains further
        said = {
            "version": VERSION,
            "agreement": end.agreement.to_json(),
            "present": sorted(end.present),
            "finished": [] if over else sorted(end.finished),
            "told": [json.loads(groups) for groups in told],
            "rounds": rounds,
            "optimizers": optimizers,
            "groups": {str(worker): list(map(dict, groups)) for worker, groups in end.groups.items()},
            "incarnations": {str(worker): number for worker, number in end.incarnations.items()},
        }
        return tensors, said

    def _optimizer_state(self, tensor: int) -> dict[str, Any]:
        optimizer = self._shard.optimizers.get(tensor)
        return {} if optimizer is None else dict(optimizer.state[self._shard.parameters[tensor]])

    def _load(self, path: Path) -> None:
        from safetensors import safe_open

        end, shard = self._end, self._shard
        with safe_open(path, "pt") as file:
            said = json.loads(file.metadata()["gradwire"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if said.get("version") != VERSION:
            raise FrameError(
                f"Expected a state of version {VERSION} in {path}, got {said.get('version')}. Do: go on with the "
                "gradwire version that wrote it, or start anew in another folder."
            )
        end.agreement = shard.agreement = Agreement.from_json(said["agreement"])
        if end.agreement.workers != end.workers:
            raise FrameError(f"Expected a state of {end.workers} workers in {path}, got {end.agreement.workers}.")
        end.groups = {int(worker): tuple(groups) for worker, groups in said["groups"].items()}
        end.incarnations = {int(worker): number for worker, number in said["incarnations"].items()}
        end.initialised = True
        end.present.update(said["present"])
        end.finished.update(said["finished"])
        self._number = said["journal"]
        end.rounds = []
        for tensor, kept in enumerate(said["rounds"]):
            round_ = Round(end.workers, kept["version"])
            round_.pushed = tensors[f"pushed.{tensor}"].numpy().copy()
            round_.counted = tensors[f"counted.{tensor}"].numpy().copy()
            for worker, (flags, number) in kept["pushes"].items():
                body = tensors[f"push.{tensor}.{worker}"].numpy().copy()
                round_.pushes[int(worker)] = Push(FrameFlags(flags), body, tuple(said["told"][number]))
            end.rounds.append(round_)
            shard.parameters[tensor] = torch.nn.Parameter(tensors[f"parameter.{tensor}"])
            shard.views[tensor] = tensors[f"view.{tensor}"]
            if said["optimizers"][tensor] is not None:
                self._load_optimizer(tensor, said["optimizers"][tensor], tensors)

    def _load_optimizer(self, tensor: int, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        prefix = f"optimizer.{tensor}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        groups = self._end.groups[min(self._end.groups)]
        optimizer = self._shard.optimizer(tensor, groups)
        optimizer.state[self._shard.parameters[tensor]] = {**plain, **state}
