"""What workers and parameter servers agree on before the first push, and how it is told: strict JSON, never pickle.

The first worker to join says it; every other must say the same. A server takes no shape, count or compressor from any
later frame.
"""

# Shapes: T = tensors of one server, n = workers.

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.registry import compressor_of
from gradwire.core.errors import FrameError, GradwireError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec

VERSION = 1
MAX_JOIN_BYTES = 16 << 20
"""Of the JSON of a JOIN or a WELCOME: room for some hundred thousand tensors."""
MAX_GROUPS_BYTES = 1 << 20
MAX_TEXT = 256
"""Characters of a compressor as text: its options are read as Python literals, which may be nested."""
MAX_DIMENSIONS = 16
_MAX_DEPTH = 8
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_TYPES}
Groups = tuple[Mapping[str, Any], ...]
"""The hyper-parameters of each parameter group: plain numbers, flags, texts and lists of them."""


@dataclass(frozen=True)
class ParameterConfig:
    """How one parameter is kept and travels.

    Attributes:
        name: its name; part of the random streams.
        shape: its shape.
        dtype: name of its element type.
        push: the compressor of its gradients, as text.
        pull: the compressor of its changes, as text.
        group: index of its parameter group in the optimizer.
        push_feedback: whether what a push loses is added to the next gradient.
        pull_feedback: whether what a pull loses is made up for by later ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    push: str
    pull: str
    group: int
    push_feedback: bool
    pull_feedback: bool

    @cached_property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, _DTYPES[self.dtype])

    @cached_property
    def pushes(self) -> Compressor:
        return compressor_of(self.push)

    @cached_property
    def pulls(self) -> Compressor:
        return compressor_of(self.pull)


@dataclass(frozen=True)
class TrainingConfig:
    """What one server and all workers agree on.

    Attributes:
        workers: how many there are; their ids are 0 to n - 1.
        backups: so many may miss a step without holding it up.
        seed: of the random streams.
        optimizer: name of a class in `torch.optim`, or import path of another that the server allows.
        tensors: the server's, by tensor id.
    """

    workers: int
    backups: int
    seed: int
    optimizer: str
    tensors: tuple[ParameterConfig, ...]

    @cached_property
    def sorts(self) -> frozenset[tuple[int, int, str]]:
        """Parameter group, number of dimensions and element type of the tensors, each combination once."""
        return frozenset((terms.group, len(terms.shape), terms.dtype) for terms in self.tensors)

    @property
    def needed(self) -> int:
        """How many workers close a step."""
        return self.workers - self.backups

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, said: Any) -> TrainingConfig:
        """The agreement that a worker has said.

        Raises:
            FrameError: it is not one: a missing or unknown field, a wrong type, an unknown compressor.
        """
        try:
            fields = dict(_typed(said, dict))
            if (version := fields.pop("version")) != VERSION:
                raise ValueError(f"version {version}, not {VERSION}")
            tensors = tuple(_terms(each) for each in _typed(fields.pop("tensors"), list))
            found = cls(tensors=tensors, **fields)
            for number in (found.workers, found.backups, found.seed):
                _typed(number, int)
            if not 0 <= found.backups < found.workers <= 1 << 15:
                raise ValueError(f"{found.backups} backups of {found.workers} workers")
            _typed(found.optimizer, str)
            if len({terms.name for terms in tensors}) != len(tensors):
                raise ValueError("a name twice")
        except (GradwireError, KeyError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise FrameError(
                f"Expected the terms of a parameter server, got {error!r}. Run one gradwire version."
            ) from (error)
        return found


@dataclass(frozen=True)
class TrainingJoin:
    """What a worker says first on each connection.

    Attributes:
        agreement: what it expects.
        groups: hyper-parameters of its optimizer.
        incarnation: grows with each start of a worker's process: an older one is turned away.
        versions: updates that it has applied, or has received and will apply, by tensor id; None where it has no model
            of the server's yet.
    """

    agreement: TrainingConfig
    groups: Groups
    incarnation: int
    versions: tuple[int, ...] | None = None

    def to_bytes(self) -> bytes:
        versions = None if self.versions is None else list(self.versions)
        said = {"incarnation": self.incarnation, "versions": versions, "groups": list(map(dict, self.groups))}
        return _dump({"agreement": self.agreement.to_json(), **said})

    @classmethod
    def from_bytes(cls, body: bytes) -> TrainingJoin:
        """Raises `FrameError` where the bytes are not a worker's first words."""
        said = _load(body)
        try:
            versions = None if said["versions"] is None else _numbers(said["versions"])
            agreement = TrainingConfig.from_json(said["agreement"])
            if versions is not None and len(versions) != len(agreement.tensors):
                raise ValueError(f"{len(versions)} versions of {len(agreement.tensors)} tensors")
            found = cls(agreement, groups_from(said["groups"]), _typed(said["incarnation"], int), versions)
            if any(not 0 <= terms.group < len(found.groups) for terms in agreement.tensors):
                raise ValueError("a tensor of no parameter group")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, FrameError):
                raise
            raise FrameError(f"Expected a worker's first words, got {error!r}. Run one gradwire version.") from error
        return found


@dataclass(frozen=True)
class TrainingWelcome:
    """What a server answers.

    Attributes:
        initialize: the server has no model: this worker is to send its own.
        versions: updates of each tensor so far.
        pushed: the last step for which it has this worker's gradient, by tensor id, or -1.
        counted: the last step in which it has counted this worker's gradient, or -1.
    """

    initialize: bool
    versions: tuple[int, ...]
    pushed: tuple[int, ...]
    counted: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return _dump(asdict(self))

    @classmethod
    def from_bytes(cls, body: bytes, num_tensors: int) -> TrainingWelcome:
        """Raises `FrameError` where the bytes are not a server's answer about so many tensors."""
        said = _load(body)
        try:
            numbers = [_numbers(said[key]) for key in ("versions", "pushed", "counted")]
            if any(len(row) != num_tensors for row in numbers):
                raise ValueError(f"other than {num_tensors} tensors")
            return cls(_typed(said["initialize"], bool), *numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"Expected a parameter server's answer, got {error!r}. Run one gradwire version.") from (
                error
            )


def groups_to(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """Hyper-parameters as JSON."""
    return _dump(list(map(dict, groups)))


def groups_of(body: bytes) -> Groups:
    """Hyper-parameters from JSON.

    Raises:
        FrameError: they are not plain values by name.
    """
    return groups_from(_load(body))


def groups_from(said: Any) -> Groups:
    """Hyper-parameters from plain data; raises `FrameError` where they are something else."""
    try:
        groups = tuple(dict(_typed(group, dict)) for group in _typed(said, list))
        if not all(_plain(value) for group in groups for value in group.values()):
            raise ValueError("a value that is not plain")
    except (TypeError, ValueError) as error:
        raise FrameError(f"Expected hyper-parameters by name, got {error!r}.") from error
    return groups


def _plain(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(each is None or isinstance(each, bool | int | float | str) for each in values)


def _terms(said: Any) -> ParameterConfig:
    fields = dict(_typed(said, dict))
    fields["shape"] = _numbers(fields["shape"])
    found = ParameterConfig(**fields)
    for text in (found.name, found.dtype, found.push, found.pull):
        _typed(text, str)
    if max(len(found.push), len(found.pull)) > MAX_TEXT:
        raise ValueError(f"a compressor of more than {MAX_TEXT} characters")
    for flag in (found.push_feedback, found.pull_feedback):
        _typed(flag, bool)
    _typed(found.group, int)
    sizes = [max(1, size) for size in found.shape]  # an empty tensor may have other sizes that do not fit
    fits = len(sizes) <= MAX_DIMENSIONS and math.prod(sizes) < 1 << 48
    if found.dtype not in _DTYPES or not fits or -1 in found.shape:
        raise ValueError(f"{found.name!r} of {found.dtype} and shape {found.shape}")
    _ = found.pushes, found.pulls  # looked up now: an unknown compressor is refused here
    return found


def _numbers(said: Any) -> tuple[int, ...]:
    found = tuple(_typed(number, int) for number in _typed(said, list))
    if any(not -1 <= number < 1 << 62 for number in found):
        raise ValueError("a number out of range")
    return found


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} where {kind.__name__} is due")
    return value


def _dump(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":"), sort_keys=True).encode()


def _load(body: bytes) -> Any:
    try:
        said = json.loads(body.decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FrameError(f"Expected JSON, got {error}.") from error
    level = [said]
    for _ in range(_MAX_DEPTH):
        held = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in held for value in values]
    if level:
        raise FrameError(f"Expected JSON of at most {_MAX_DEPTH} levels, got more.")
    return said
