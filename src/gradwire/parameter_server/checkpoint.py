"""The whole state of a parameter server in a safetensors file, with a digest.

Checkpoints are numbered. Checkpoint N is the state with which journal N begins, and the digest in it names that state:
whoever comes to the same state in another way, such as from the checkpoint before it, finds the same digest.

Guarantees: loading restores the saved state bit for bit or raises `StateError`. Nothing is unpickled. The digest
protects against faults, not against whoever can write to the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradwire.core.errors import FrameError, OptionError, StateError
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.records import DIGEST_BYTES
from gradwire.parameter_server.round import Push, Round
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.session import TrainingConfig
from gradwire.wire.frame import FrameFlags

VERSION = 5


def require_safetensors() -> None:
    """Raise `OptionError` if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise OptionError("A server that keeps state needs safetensors. Run: pip install safetensors.") from error


class DamagedCheckpointError(StateError):
    """A checkpoint is missing or damaged. What to do about it depends on the other files."""


class Checkpoint:
    """The checkpoints of one server.

    Args:
        folder: Folder of the files.
        machine: State machine of the server.
    """

    def __init__(self, folder: StateFolder, machine: ServerStateMachine) -> None:
        self._folder = folder
        self._machine = machine

    @contextmanager
    def save(self, number: int) -> Iterator[bytes]:
        """Write the current state, and yield its digest. The file counts when the block has ended without an error.

        Raises:
            StateError: The file could not be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors, text = self._state(number)
        digest = _digest(tensors, text)
        with self._folder.replace(checkpoint_name(number)) as fresh:
            self._folder.open(fresh, "wb").close()  # private before it has content
            try:
                save_file(tensors, self._folder.path / fresh, {"gradwire": text, "digest": digest.hex()})
            except SafetensorError as error:
                raise StateError(
                    f"The checkpoint could not be written to {self._folder.path}: {error}. Is the disk full? The one "
                    "before is kept: start the server again when there is room."
                ) from error
            yield digest

    def digest(self, number: int) -> bytes:
        """The digest that the current state would have as checkpoint `number`."""
        return _digest(*self._state(number))

    def load(self, number: int) -> bytes:
        """Restore the state from a file, and return its digest.

        Raises:
            DamagedCheckpointError: The file is damaged. Nothing has changed.
            StateError: The file is of another version, or of a job with another number of workers.
        """
        path = self._folder.path / checkpoint_name(number)
        tensors, fields, digest = _read(path)
        if fields["journal"] != number:
            raise DamagedCheckpointError(f"The checkpoint {path} is of journal {fields['journal']}.")
        machine, shard = self._machine, self._machine.shard
        try:
            config = machine.config = shard.config = TrainingConfig.from_json(fields["agreement"])
        except FrameError as error:
            raise StateError(f"The checkpoint {path} cannot be used here: {error}") from error
        if config.workers != machine.workers:
            raise StateError(
                f"The checkpoint {path} is of a job of {config.workers} workers, but this server is for "
                f"{machine.workers}. Start it with --workers {config.workers}, or give it another folder."
            )
        machine.groups = {int(worker): tuple(groups) for worker, groups in fields["groups"].items()}
        machine.incarnations = {int(worker): list(numbers) for worker, numbers in fields["incarnations"].items()}
        machine.initialized = True
        machine.present.update(fields["present"])
        machine.finished.update(fields["finished"])
        machine.rounds = []
        for tensor, kept in enumerate(fields["rounds"]):
            round_ = Round(machine.workers, kept["version"], config.staleness)
            for step, worker, flags, told in kept["pushes"]:
                body = tensors[f"push.{tensor}.{step}.{worker}"].numpy().copy()
                round_.add(worker, step, Push(FrameFlags(flags), body, tuple(fields["told"][told])))
            round_.last_pushed = tensors[f"pushed.{tensor}"].numpy().copy()
            round_.last_counted = tensors[f"counted.{tensor}"].numpy().copy()
            machine.rounds.append(round_)
            shard.parameters[tensor] = torch.nn.Parameter(tensors[f"parameter.{tensor}"])
            shard.replicas[tensor] = tensors[f"view.{tensor}"]
            if fields["optimizers"][tensor] is not None:
                self._load_optimizer(tensor, fields["optimizers"][tensor], tensors)
        return digest

    def _state(self, number: int) -> tuple[dict[str, torch.Tensor], str]:
        """Tensors and other fields of the current state. The same state gives the same, whatever has led to it."""
        machine, shard = self._machine, self._machine.shard
        assert machine.config is not None, "initialized"
        tensors: dict[str, torch.Tensor] = {}
        rounds, optimizers = [], []
        numbers: dict[str, int] = {}  # of hyperparameters, in order
        for tensor, round_ in enumerate(machine.rounds):
            tensors[f"parameter.{tensor}"] = shard.parameters[tensor].detach()
            tensors[f"view.{tensor}"] = shard.replicas[tensor]
            tensors[f"pushed.{tensor}"] = torch.from_numpy(round_.last_pushed)
            tensors[f"counted.{tensor}"] = torch.from_numpy(round_.last_counted)
            pushes = []
            for step, waiting in sorted(round_.waiting.items()):
                for worker, push in sorted(waiting.items()):
                    tensors[f"push.{tensor}.{step}.{worker}"] = torch.from_numpy(push.body.copy())
                    told = numbers.setdefault(_dump(push.groups), len(numbers))
                    pushes.append([step, worker, int(push.flags), told])
            rounds.append({"version": round_.version, "pushes": pushes})
            plain: dict[str, Any] = {}
            for key, value in self._optimizer_state(tensor).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{tensor}.{key}"] = value.contiguous()
                else:
                    plain[key] = value
            optimizers.append(plain if tensor in shard.optimizers else None)
        fields = {
            "version": VERSION,
            "journal": number,
            "agreement": machine.config.to_json(),
            "present": sorted(machine.present),
            "finished": [] if machine.over else sorted(machine.finished),  # whoever starts it again trains further
            "told": [json.loads(groups) for groups in numbers],
            "rounds": rounds,
            "optimizers": optimizers,
            "groups": {str(worker): list(map(dict, groups)) for worker, groups in machine.groups.items()},
            "incarnations": {str(worker): numbers for worker, numbers in machine.incarnations.items()},
        }
        return tensors, _dump(fields)

    def _optimizer_state(self, tensor: int) -> dict[str, Any]:
        shard = self._machine.shard
        return dict(shard.optimizers[tensor].state[shard.parameters[tensor]]) if tensor in shard.optimizers else {}

    def _load_optimizer(self, tensor: int, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        prefix = f"optimizer.{tensor}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        groups = self._machine.groups[min(self._machine.groups)]
        shard = self._machine.shard
        shard.optimizer(tensor, groups).state[shard.parameters[tensor]] = {**plain, **state}


def _dump(data: Any) -> str:
    """The only JSON of these data."""
    return json.dumps(data, sort_keys=True)


def checkpoint_name(number: int) -> str:
    """Name of a checkpoint's file."""
    return f"checkpoint-{number}.safetensors"


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], bytes]:
    """The tensors, fields and digest of a file."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise DamagedCheckpointError(f"The checkpoint {path} is missing.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            text, digest = metadata["gradwire"], metadata["digest"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        found = _digest(tensors, text)
        if found.hex() != digest:
            raise ValueError("its digest does not match its content")
        fields: dict[str, Any] = json.loads(text)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"The checkpoint {path} is damaged, or is no checkpoint of a parameter server ({type(error).__name__}: "
            f"{error})."
        ) from error
    if fields["version"] != VERSION:
        raise StateError(
            f"The checkpoint {path} has version {fields['version']}, but this gradwire reads version {VERSION}. Use "
            "the gradwire that wrote it, or start the job again in another folder."
        )
    return tensors, fields, found


def _digest(tensors: dict[str, torch.Tensor], text: str) -> bytes:
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
