"""The whole state of a parameter server in one safetensors file, with a digest.

Guarantees: loading restores the saved state bit for bit or raises `StateError`. Nothing is unpickled. The digest
protects against faults, not against whoever can write to the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from gradwire.core.errors import FrameError, OptionError, StateError
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.round import Push, Round
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.session import TrainingConfig, encode_groups
from gradwire.wire.frame import FrameFlags

VERSION = 3
_DIGEST_BYTES = 16


def require_safetensors() -> None:
    """Raise `OptionError` if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise OptionError("A server that keeps state needs safetensors. Run: pip install safetensors.") from error


class Checkpoint:
    """The checkpoint of one server.

    Args:
        folder: Folder of the file.
        machine: State machine of the server.
    """

    def __init__(self, folder: StateFolder, machine: ServerStateMachine) -> None:
        self.path = folder.path / "checkpoint.safetensors"
        self._folder = folder
        self._machine = machine

    def save(self, journal: int) -> None:
        """Replace the file by the current state.

        Args:
            journal: Number of the journal that continues from here.
        """
        from safetensors.torch import save_file

        tensors, fields = self._state()
        text = json.dumps({**fields, "journal": journal})
        fresh = self.path.with_suffix(".new")
        self._folder.open(fresh.name, "wb").close()  # private before it has content
        save_file(tensors, fresh, {"gradwire": text, "digest": _digest(tensors, text)})
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(self.path)
        self._folder.sync()

    def load(self) -> int:
        """Restore the state from the file, and return the number of the journal that continues from there.

        Raises:
            StateError: The file is damaged, of another version, or of a job with another number of workers.
        """
        tensors, fields = _read(self.path)
        machine, shard = self._machine, self._machine.shard
        try:
            config = machine.config = shard.config = TrainingConfig.from_json(fields["agreement"])
        except FrameError as error:
            raise StateError(f"The checkpoint {self.path} cannot be used here: {error}") from error
        if config.workers != machine.workers:
            raise StateError(
                f"The checkpoint {self.path} is of a job of {config.workers} workers, but this server is for "
                f"{machine.workers}. Start it with --workers {config.workers}, or give it another folder."
            )
        machine.groups = {int(worker): tuple(groups) for worker, groups in fields["groups"].items()}
        machine.incarnations = {int(worker): number for worker, number in fields["incarnations"].items()}
        machine.initialized = True
        machine.present.update(fields["present"])
        machine.finished.update(fields["finished"])
        machine.rounds = []
        for tensor, kept in enumerate(fields["rounds"]):
            round_ = Round(machine.workers, kept["version"])
            round_.pushed = tensors[f"pushed.{tensor}"].numpy().copy()
            round_.counted = tensors[f"counted.{tensor}"].numpy().copy()
            for worker, (flags, number) in kept["pushes"].items():
                body = tensors[f"push.{tensor}.{worker}"].numpy().copy()
                round_.pushes[int(worker)] = Push(FrameFlags(flags), body, tuple(fields["told"][number]))
            machine.rounds.append(round_)
            shard.parameters[tensor] = torch.nn.Parameter(tensors[f"parameter.{tensor}"])
            shard.replicas[tensor] = tensors[f"view.{tensor}"]
            if fields["optimizers"][tensor] is not None:
                self._load_optimizer(tensor, fields["optimizers"][tensor], tensors)
        return int(fields["journal"])

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        machine, shard = self._machine, self._machine.shard
        assert machine.config is not None, "initialized"
        tensors: dict[str, torch.Tensor] = {}
        rounds, optimizers = [], []
        numbers: dict[bytes, int] = {}  # of hyperparameters, in order
        for tensor, round_ in enumerate(machine.rounds):
            tensors[f"parameter.{tensor}"] = shard.parameters[tensor].detach()
            tensors[f"view.{tensor}"] = shard.replicas[tensor]
            tensors[f"pushed.{tensor}"] = torch.from_numpy(round_.pushed)
            tensors[f"counted.{tensor}"] = torch.from_numpy(round_.counted)
            for worker, push in round_.pushes.items():
                tensors[f"push.{tensor}.{worker}"] = torch.from_numpy(push.body.copy())
            pushes = {
                str(worker): [int(push.flags), numbers.setdefault(encode_groups(push.groups), len(numbers))]
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
        over = len(machine.finished) == machine.workers  # a server that is started again trains further
        fields = {
            "version": VERSION,
            "agreement": machine.config.to_json(),
            "present": sorted(machine.present),
            "finished": [] if over else sorted(machine.finished),
            "told": [json.loads(groups) for groups in numbers],
            "rounds": rounds,
            "optimizers": optimizers,
            "groups": {str(worker): list(map(dict, groups)) for worker, groups in machine.groups.items()},
            "incarnations": {str(worker): number for worker, number in machine.incarnations.items()},
        }
        return tensors, fields

    def _optimizer_state(self, tensor: int) -> dict[str, Any]:
        shard = self._machine.shard
        return dict(shard.optimizers[tensor].state[shard.parameters[tensor]]) if tensor in shard.optimizers else {}

    def _load_optimizer(self, tensor: int, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        prefix = f"optimizer.{tensor}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        groups = self._machine.groups[min(self._machine.groups)]
        shard = self._machine.shard
        shard.optimizer(tensor, groups).state[shard.parameters[tensor]] = {**plain, **state}


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and fields of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            text, digest = metadata["gradwire"], metadata.get("digest")
            version = json.loads(text)["version"]
            tensors = {key: file.get_tensor(key) for key in file.keys()} if version == VERSION else {}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if version != VERSION:
        raise StateError(
            f"The checkpoint {path} has version {version}, but this gradwire reads version {VERSION}. Use the gradwire "
            "that wrote it, or start the job again in another folder."
        )
    if _digest(tensors, text) != digest:
        raise _damaged(path, "its digest does not match its content")
    fields: dict[str, Any] = json.loads(text)
    return tensors, fields


def _digest(tensors: dict[str, torch.Tensor], text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> StateError:
    return StateError(
        f"The checkpoint {path} is damaged, or is no checkpoint of a parameter server ({what}). Restore the folder "
        "from a copy, or start the job again in an empty one."
    )
