"""The status of a rank: what `gradwire top` shows of it, as a small JSON file that the rank rewrites while it trains.

Guarantees: `decode` takes any bytes to a status or one typed error. Numbers are finite and in range, lists and texts
bounded, and texts have no character that a terminal would obey.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gradwire.core.errors import FrameError, StatusError
from gradwire.observe.processes import ProcessIdentity
from gradwire.wire import json_message

VERSION = 1
MAX_BYTES = 256 << 10
MAX_ROWS = 256
"""Longest list."""
MAX_TEXT = 400
"""Longest text, in characters. Longer ones are cut."""
_MAX_INT = 1 << 63
_MAX_FLOAT = 1e50  # norms of float32 tensors are below it
T = TypeVar("T")


@dataclass(frozen=True)
class StepStatus:
    """Means over the steps of the latest interval.

    Attributes:
        steps: Number of these steps.
        seconds: Length of a step.
        wait: Seconds in which a step waited after its backward pass for gradwire to average its gradients.
        encode: Seconds of encodes and merges, on threads of gradwire.
        decode: Seconds of decodes, likewise.
        link: Seconds in which frames to a peer were in transit, the mean over peers.
        sent_bytes: Bytes sent.
        dense_bytes: Bytes that an uncompressed ring all-reduce would have sent.
    """

    steps: int = 0
    seconds: float = 0.0
    wait: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    link: float = 0.0
    sent_bytes: float = 0.0
    dense_bytes: float = 0.0


@dataclass(frozen=True)
class LinkStatus:
    """The connection to a peer, as this rank sees it.

    Attributes:
        peer: The other rank.
        sent_bytes: Bytes of frames sent so far.
        received_bytes: Bytes of frames received so far.
        busy: Share of the latest interval in which frames to it were in transit.
        silent_seconds: Time since its last byte; None if unknown.
        gone: Whether it has said goodbye or is lost.
    """

    peer: int
    sent_bytes: int = 0
    received_bytes: int = 0
    busy: float = 0.0
    silent_seconds: float | None = None
    gone: bool = False


@dataclass(frozen=True)
class TensorStatus:
    """A tensor, fusion group or bucket, over the latest interval.

    Attributes:
        name: Its name.
        method: Compressor and strategy.
        elements: Number of elements.
        sent_bytes: Bytes sent in a step.
        ratio: Dense bytes divided by sent bytes.
        residual_norm: 2-norm of its residuals, when they were last looked at; None if they were not.
    """

    name: str
    method: str = ""
    elements: int = 0
    sent_bytes: float = 0.0
    ratio: float = 1.0
    residual_norm: float | None = None


@dataclass(frozen=True)
class CandidateStatus:
    """A candidate of a decision of `auto`, with seconds of a step by it where they are known."""

    name: str
    measured: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class DecisionStatus:
    """A decision of `auto`.

    Attributes:
        step: First step for which it holds.
        reason: Why it was time to decide.
        chosen: Name of the candidate that was chosen.
        candidates: All of them.
        link_bits: Bits per second of the slowest link.
        link_latency: Seconds of its latency.
    """

    step: int
    reason: str = ""
    chosen: str = ""
    candidates: tuple[CandidateStatus, ...] = ()
    link_bits: float = 0.0
    link_latency: float = 0.0


@dataclass(frozen=True)
class AutoStatus:
    """What `auto` does.

    Attributes:
        fidelity: What it may choose from.
        current: Name of the candidate that averages gradients now.
        settled: Whether it has decided, and watches.
        num_decisions: Number of decisions so far.
        decisions: The latest of them, the last one last.
    """

    fidelity: str = ""
    current: str = ""
    settled: bool = False
    num_decisions: int = 0
    decisions: tuple[DecisionStatus, ...] = ()


@dataclass(frozen=True)
class WaitStatus:
    """What a rank has waited for longest.

    Attributes:
        seconds: How long so far.
        tensor: Tensor that it is about.
        phase: Phase of its synchronization.
        peer: Rank that it waits for; None if it is no rank.
    """

    seconds: float
    tensor: str = ""
    phase: str = ""
    peer: int | None = None


@dataclass(frozen=True)
class RankStatus:
    """One rank of a job at one moment.

    Attributes:
        job: Name of the job, the same for all of its ranks, and another one after each start.
        rank: This rank.
        world_size: Number of ranks.
        process: Its process.
        host: Name of its host.
        script: What its process runs.
        method: Compressors that were asked for.
        started: When the module was attached, in seconds since 1970.
        written: When this status was taken.
        interval: Seconds between two statuses.
        step: Steps, continuing from a loaded state.
        num_steps: Steps since the module was attached.
        step_age: Seconds since the latest step began; None before the first one.
        latest: Means over the latest steps.
        history: Seconds of a step in earlier intervals, the latest last.
        seconds: Time since the first step began.
        sent_bytes: Bytes sent since then.
        dense_bytes: Bytes that an uncompressed ring all-reduce would have sent.
        rollbacks: Steps rolled back, because gradients were not finite.
        residual_norm: 2-norm of all residuals after `residual_step`; None if they were not looked at.
        residual_step: Step after which they were last looked at.
        links: Connections to other ranks.
        tensors: Tensors that send most.
        notes: What the user may not expect, with what to do.
        auto: What `auto` does; None without it.
        waiting: What this rank waits for; None if it is not held up.
        error: What has ended synchronization; empty if nothing has.
        end: How the rank has ended: ``"detached"`` or ``"exited"``. Empty while it runs.
    """

    job: str
    rank: int
    world_size: int
    process: ProcessIdentity
    host: str = ""
    script: str = ""
    method: str = ""
    started: float = 0.0
    written: float = 0.0
    interval: float = 0.0
    step: int = 0
    num_steps: int = 0
    step_age: float | None = None
    latest: StepStatus = StepStatus()
    history: tuple[float, ...] = ()
    seconds: float = 0.0
    sent_bytes: int = 0
    dense_bytes: int = 0
    rollbacks: int = 0
    residual_norm: float | None = None
    residual_step: int = 0
    links: tuple[LinkStatus, ...] = ()
    tensors: tuple[TensorStatus, ...] = ()
    notes: tuple[str, ...] = ()
    auto: AutoStatus | None = None
    waiting: WaitStatus | None = None
    error: str = ""
    end: str = ""


def encode(status: RankStatus) -> bytes:
    """Return a status as JSON of at most `MAX_BYTES`. Texts and lists are cut, and numbers that are not finite null."""
    for shown in (status, replace(status, links=(), tensors=(), notes=(), auto=None)):
        data = json.dumps({"version": VERSION, **_bounded(asdict(shown))}, separators=(",", ":")).encode()
        if len(data) <= MAX_BYTES:
            break
    return data


def decode(data: bytes) -> RankStatus:
    """Read untrusted bytes.

    Raises:
        StatusError: They are not a status of this version.
    """
    if len(data) > MAX_BYTES:
        raise StatusError(f"It has more than {MAX_BYTES} bytes.")
    try:
        document = json_message.load(data)
    except FrameError as error:
        raise StatusError(printable(str(error))) from None
    if not isinstance(document, dict):
        raise StatusError("It is not a JSON object.")
    if document.get("version") != VERSION:
        raise StatusError("Another version of gradwire wrote it. Use the same one for gradwire top.")
    status: RankStatus = _build(RankStatus, document, "status")
    if not 0 <= status.rank < status.world_size:
        raise StatusError(f"It is of rank {status.rank} of {status.world_size}.")
    return status


def printable(text: str) -> str:
    """Return a text in which escapes replace the characters that a terminal would obey, and which is cut."""
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(each) for each in value[:MAX_ROWS]]
    if isinstance(value, str):
        return value[:MAX_TEXT]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _build(kind: Any, value: Any, where: str) -> Any:
    """Return a value as the type of a field.

    Raises:
        StatusError: It is something else.
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else _build(kind, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) > MAX_ROWS:
            raise _wrong(where)
        return tuple(_build(get_args(kind)[0], each, where) for each in value)
    if kind in _SCALARS:
        return _SCALARS[kind](value, where)
    if not isinstance(value, dict):
        raise _wrong(where)
    hints = _hints(kind)
    known = {each.name: value[each.name] for each in fields(kind) if each.name in value}
    try:
        return kind(**{name: _build(hints[name], each, f"{where}.{name}") for name, each in known.items()})
    except TypeError:
        raise StatusError(f"It lacks fields of {where}.") from None


def _int(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -_MAX_INT < value < _MAX_INT:
        raise _wrong(where)
    return value


def _float(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_FLOAT:
        raise _wrong(where)
    return float(value)


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where)
    return value


def _str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where)
    return printable(value)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {int: _int, float: _float, bool: _bool, str: _str}


def _wrong(where: str) -> StatusError:
    return StatusError(f"Its {where.removeprefix('status.')} has another form than gradwire writes.")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
