"""What workers and parameter servers agree on before the first push, as strict JSON. Nothing is unpickled.

The first worker to join sets the configuration, and all others must bring the same. A server takes no shape, count or
compressor from any later frame.
"""

# Shapes: T = tensors of one server, n = workers.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.registry import compressor_of
from gradwire.core.errors import FrameError, GradwireError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.wire.json_message import dump, load

VERSION = 2
MAX_JOIN_BYTES = 16 << 20
"""Maximum size of a JOIN or a WELCOME: room for some hundred thousand tensors."""
MAX_GROUPS_BYTES = 1 << 20
MAX_TEXT = 256
"""Maximum characters of a compressor's specification. Its options are Python literals, which may be nested."""
MAX_DIMENSIONS = 16
MAX_STALENESS = 32
"""Largest staleness. A server keeps up to this number of gradients per worker beyond those of the open step."""
LATE = ("keep", "drop")
_ONE_VERSION = "Run one gradwire version on all machines."
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_TYPES}
Groups = tuple[Mapping[str, Any], ...]
"""Hyperparameters of each parameter group: numbers, flags, strings, and lists of them."""


@dataclass(frozen=True)
class ParameterConfig:
    """How one parameter is kept and encoded.

    Attributes:
        name: Name of the parameter; part of the random streams.
        shape: Shape of the parameter.
        dtype: Name of the element type.
        push: Specification of the gradients' compressor.
        pull: Specification of the updates' compressor.
        group: Index of the parameter group in the optimizer.
        push_feedback: Whether workers keep a residual of what they push.
        pull_feedback: Whether later updates make up for the error of earlier ones.
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
    def push_compressor(self) -> Compressor:
        return compressor_of(self.push)

    @cached_property
    def pull_compressor(self) -> Compressor:
        return compressor_of(self.pull)


@dataclass(frozen=True)
class TrainingConfig:
    """What one server and all workers agree on.

    Attributes:
        workers: Number of workers; their ids are 0 to n - 1.
        backups: Number of workers that may miss a step without holding it up.
        seed: Seed of the random streams.
        optimizer: Name of a class in `torch.optim`, or import path of another class that the server allows.
        tensors: Parameters of this server, by tensor id.
        staleness: Number of steps that a worker may be ahead of the slowest counted one.
        late: What a worker does with a gradient whose step was closed without it: ``"keep"`` or ``"drop"``.
    """

    workers: int
    backups: int
    seed: int
    optimizer: str
    tensors: tuple[ParameterConfig, ...]
    staleness: int = 0
    late: str = "keep"

    @cached_property
    def kinds(self) -> frozenset[tuple[int, int, str]]:
        """Distinct combinations of parameter group, number of dimensions and element type."""
        return frozenset((each.group, len(each.shape), each.dtype) for each in self.tensors)

    @property
    def needed(self) -> int:
        """Number of workers that close a step."""
        return self.workers - self.backups

    def difference(self, other: TrainingConfig) -> str:
        """The first field in which this differs from `other`, with both values."""
        mine, theirs = self.to_json(), other.to_json()
        numbers = ("number of parameters", len(mine["tensors"]), len(theirs["tensors"]))
        parameters = [("parameter", *pair) for pair in zip(mine.pop("tensors"), theirs.pop("tensors"))]
        fields = [(name, mine[name], theirs[name]) for name in mine]
        found = next(each for each in [*fields, *parameters, numbers] if each[1] != each[2])
        return "{} {!r}, where others have {!r}".format(*found)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> TrainingConfig:
        """Parse what `to_json` has made.

        Raises:
            FrameError: A field is missing, unknown or of the wrong type, or a compressor is unknown.
        """
        try:
            fields = dict(_expect(data, dict))
            if (version := fields.pop("version")) != VERSION:
                raise ValueError(f"version {version}, not {VERSION}")
            tensors = tuple(_parameter_config(each) for each in _expect(fields.pop("tensors"), list))
            config = cls(tensors=tensors, **fields)
            for number in (config.workers, config.backups, config.seed, fields["staleness"]):
                _expect(number, int)
            if not 0 <= config.staleness <= MAX_STALENESS or fields["late"] not in LATE:
                raise ValueError(f"staleness {config.staleness}, late {config.late!r:.60}")
            if not 0 <= config.backups < config.workers <= 1 << 15:
                raise ValueError(f"{config.backups} backups of {config.workers} workers")
            _expect(config.optimizer, str)
            if len({each.name for each in tensors}) != len(tensors):
                raise ValueError("a name twice")
        except (GradwireError, KeyError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise FrameError(f"The training configuration is invalid: {error!r}. {_ONE_VERSION}") from error
        return config


@dataclass(frozen=True)
class TrainingJoin:
    """First message of a worker on each connection.

    Attributes:
        config: What the worker expects.
        groups: Hyperparameters of its optimizer.
        incarnation: Random number of the worker's process. A process that another one has replaced is turned away.
        versions: Newest version of each tensor that the worker has received; None if it has no values from the server.
    """

    config: TrainingConfig
    groups: Groups
    incarnation: int
    versions: tuple[int, ...] | None = None

    def to_bytes(self) -> bytes:
        return dump(
            {
                "agreement": self.config.to_json(),
                "incarnation": self.incarnation,
                "versions": None if self.versions is None else list(self.versions),
                "groups": list(map(dict, self.groups)),
            }
        )

    @classmethod
    def from_bytes(cls, body: bytes) -> TrainingJoin:
        """Parse what `to_bytes` has made.

        Raises:
            FrameError: The bytes are something else.
        """
        data = load(body)
        try:
            versions = None if data["versions"] is None else _numbers(data["versions"])
            config = TrainingConfig.from_json(data["agreement"])
            if versions is not None and len(versions) != len(config.tensors):
                raise ValueError(f"{len(versions)} versions of {len(config.tensors)} tensors")
            join = cls(config, check_groups(data["groups"]), _expect(data["incarnation"], int), versions)
            if any(not 0 <= each.group < len(join.groups) for each in config.tensors):
                raise ValueError("a tensor of no parameter group")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, FrameError):
                raise
            raise FrameError(f"Not a worker's join message: {error!r}. {_ONE_VERSION}") from error
        return join


@dataclass(frozen=True)
class TrainingWelcome:
    """Answer of a server to a worker's first message.

    Attributes:
        initialize: Whether the server has no values yet, so that this worker sends its own.
        versions: Version of each tensor.
        pushed: Last staleness + 1 steps for which the server has taken this worker's gradient, by tensor id, one tensor
            after the other; -1 for none.
        counted: Last staleness + 1 steps in which the server has counted this worker's gradient, in the same form.
    """

    initialize: bool
    versions: tuple[int, ...]
    pushed: tuple[int, ...]
    counted: tuple[int, ...]

    def steps_pushed(self, tensor: int) -> frozenset[int]:
        """Steps of `pushed` of one tensor."""
        return frozenset(self._of(self.pushed, tensor))

    def steps_counted(self, tensor: int) -> frozenset[int]:
        """Steps of `counted` of one tensor."""
        return frozenset(self._of(self.counted, tensor))

    def _of(self, steps: tuple[int, ...], tensor: int) -> tuple[int, ...]:
        size = len(steps) // len(self.versions)
        return steps[tensor * size : (tensor + 1) * size]

    def to_bytes(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_bytes(cls, body: bytes, num_tensors: int, staleness: int = 0) -> TrainingWelcome:
        """Parse what `to_bytes` has made.

        Raises:
            FrameError: The bytes are something else, or about another number of tensors.
        """
        data = load(body)
        try:
            numbers = [_numbers(data[key]) for key in ("versions", "pushed", "counted")]
            if [len(row) for row in numbers] != [num_tensors, *[num_tensors * (staleness + 1)] * 2]:
                raise ValueError(f"other than {num_tensors} tensors")
            return cls(_expect(data["initialize"], bool), *numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"Not a parameter server's welcome: {error!r}. {_ONE_VERSION}") from error


def encode_groups(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """Hyperparameters as JSON."""
    return dump(list(map(dict, groups)))


def decode_groups(body: bytes) -> Groups:
    """Hyperparameters from JSON.

    Raises:
        FrameError: They are not plain values by name.
    """
    return check_groups(load(body))


def check_groups(data: Any) -> Groups:
    """Hyperparameters from lists and dictionaries.

    Raises:
        FrameError: They are not plain values by name.
    """
    try:
        groups = tuple(dict(_expect(group, dict)) for group in _expect(data, list))
        if not all(_plain(value) for group in groups for value in group.values()):
            raise ValueError("a value that is not plain")
    except (TypeError, ValueError) as error:
        raise FrameError(f"Not hyperparameters by name: {error!r}.") from error
    return groups


def _plain(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(each is None or isinstance(each, bool | int | float | str) for each in values)


def _parameter_config(data: Any) -> ParameterConfig:
    fields = dict(_expect(data, dict))
    fields["shape"] = _numbers(fields["shape"])
    config = ParameterConfig(**fields)
    for text in (config.name, config.dtype, config.push, config.pull):
        _expect(text, str)
    if max(len(config.push), len(config.pull)) > MAX_TEXT:
        raise ValueError(f"a compressor of more than {MAX_TEXT} characters")
    for flag in (config.push_feedback, config.pull_feedback):
        _expect(flag, bool)
    _expect(config.group, int)
    sizes = [max(1, size) for size in config.shape]  # the other sizes of an empty tensor may be too large
    fits = len(sizes) <= MAX_DIMENSIONS and math.prod(sizes) < 1 << 48
    if config.dtype not in _DTYPES or not fits or -1 in config.shape:
        raise ValueError(f"{config.name!r} of {config.dtype} and shape {config.shape}")
    _ = config.push_compressor, config.pull_compressor  # refuses unknown compressors now
    return config


def _numbers(data: Any) -> tuple[int, ...]:
    numbers = tuple(_expect(number, int) for number in _expect(data, list))
    if any(not -1 <= number < 1 << 62 for number in numbers):
        raise ValueError("a number out of range")
    return numbers


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60}, which is no {kind.__name__}")
    return value
