"""A parameter server's whole state in one file: safetensors, with a digest of all that is in it.

Guarantees: what is loaded is what was saved, to the bit, or `StateError`; no pickle is read. The digest guards against
faults, not against whoever can write to the folder.
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
from gradwire.parameter_server.server import Push, Round, ServerStateMachine
from gradwire.parameter_server.session import TrainingConfig, groups_to
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import FrameFlags

VERSION = 3
_DIGEST_BYTES = 16


def require_safetensors() -> None:
    """Raise `OptionError` where safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise OptionError("A server that keeps state needs safetensors. Run: pip install safetensors.") from error


class Checkpoint:
    """The checkpoint of one server.

    Args:
        folder: where it is.
        end: the server's end, whose state is kept.
        shard: its parameters, whose state is kept.
    """

    def __init__(self, folder: StateFolder, end: ServerStateMachine, shard: ParameterShard) -> None:
        self.path = folder.path / "checkpoint.safetensors"
        self._folder = folder
        self._end = end
        self._shard = shard

    def save(self, journal: int) -> None:
        """Write the whole state in place of the one before.

        Args:
            journal: number of the journal that goes on from here.
        """
        from safetensors.torch import save_file

        tensors, said = self._state()
        text = json.dumps({**said, "journal": journal})
        fresh = self.path.with_suffix(".new")
        self._folder.open(fresh.name, "wb").close()  # for its owner alone, before there is anything to read
        save_file(tensors, fresh, {"gradwire": text, "digest": _digest(tensors, text)})
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(self.path)
        self._folder.sync()

    def load(self) -> int:
        """Bring end and shard to the state in the file; returns the number of the journal that goes on from there.

        Raises:
            StateError: the file is damaged, of another version, or of a job with another number of workers.
        """
        tensors, said = _read(self.path)
        end, shard = self._end, self._shard
        try:
            end.agreement = shard.agreement = TrainingConfig.from_json(said["agreement"])
        except FrameError as error:
            raise StateError(f"The checkpoint {self.path} cannot be used here: {error}") from error
        if end.agreement.workers != end.workers:
            raise StateError(
                f"The checkpoint {self.path} is of a job of {end.agreement.workers} workers, and this server is for "
                f"{end.workers}. Start it with --workers {end.agreement.workers}, or give it another folder."
            )
        end.groups = {int(worker): tuple(groups) for worker, groups in said["groups"].items()}
        end.incarnations = {int(worker): number for worker, number in said["incarnations"].items()}
        end.initialized = True
        end.present.update(said["present"])
        end.finished.update(said["finished"])
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
        return int(said["journal"])

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        end, shard = self._end, self._shard
        assert end.agreement is not None, "initialized"
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

    def _load_optimizer(self, tensor: int, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        prefix = f"optimizer.{tensor}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        groups = self._end.groups[min(self._end.groups)]
        optimizer = self._shard.optimizer(tensor, groups)
        optimizer.state[self._shard.parameters[tensor]] = {**plain, **state}


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and words of a file, as they were saved."""
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
            f"The checkpoint {path} has version {version}, and this gradwire reads version {VERSION}. Go on with the "
            "gradwire that wrote it, or start the job again in another folder."
        )
    if _digest(tensors, text) != digest:
        raise _damaged(path, "its digest does not match its content")
    said: dict[str, Any] = json.loads(text)
    return tensors, said


def _digest(tensors: dict[str, torch.Tensor], text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> StateError:
    return StateError(
        f"The checkpoint {path} is damaged, or no checkpoint of a parameter server ({what}). Restore the folder from a "
        "copy, or start the job again in an empty one."
    )
