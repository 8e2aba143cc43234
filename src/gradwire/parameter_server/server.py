"""The server's end: which pushes make a step, and who hears of it; sans-IO.

Every parameter has its own steps (fine-grained barriers): one is closed when enough workers have pushed, its update
goes to all, and later pushes for it count no more. Everything that changes this end's state comes in as a frame, in an
order that a journal can repeat.

Guarantees: a worker's push is counted in one update at most; an update names who was counted; a step whose pushes add
up to a NaN or an infinity is dropped with them, and its update says so; a worker that has missed `MAX_MISSES` updates
of a parameter in a row is waited for; what a worker sends out of turn costs that worker its connection and nobody else
anything.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 2.1. Differences: who comes late is told so, and keeps its gradient;
a straggler is not left out for ever.
"""

# Shapes: T = tensors, n = workers.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gradwire.compressors.base.registry import code
from gradwire.core.errors import DisagreementError, FrameError, PayloadError
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.parameter_server.session import (
    MAX_GROUPS_BYTES,
    MAX_JOIN_BYTES,
    Groups,
    TrainingConfig,
    TrainingJoin,
    TrainingWelcome,
    groups_of,
)
from gradwire.parameter_server.update import PULL_STAGE, join_update
from gradwire.wire.frame import FrameFlags, FrameKind, Header, describe, without_seal
from gradwire.wire.payload import Payload

MAX_MISSES = 16
Message = tuple[int, Header, np.ndarray]
"""A worker, and the frame that it gets."""


class ServedModel(Protocol):
    """What keeps the parameters."""

    agreement: TrainingConfig | None

    def check(self, agreement: TrainingConfig, groups: Groups) -> None:
        """Refuse hyper-parameters with which a step would fail.

        Raises:
            FrameError: the optimizer does not take them, or there is no such optimizer.
        """

    def put(self, tensor: int, body: np.ndarray) -> None:
        """Take a parameter's first values."""

    def values(self, tensor: int) -> np.ndarray:
        """uint8: a parameter's values as the workers have them."""

    def update(
        self, tensor: int, step: int, pushes: Mapping[int, Payload | None], groups: Groups, used: bool
    ) -> Payload | None:
        """Average the pushes of the workers counted, let the optimizer step, and encode the change.

        Returns:
            The change; None where the average is not finite, and nothing has changed.

        Raises:
            PayloadError: a push does not decode; nothing has changed then.
        """

    def decodes(self, tensor: int, step: int, worker: int, payload: Payload) -> bool:
        """Whether a push decodes."""


@dataclass(frozen=True)
class Push:
    """A worker's gradient for the step that is open.

    Attributes:
        flags: of its frame.
        body: of its frame.
        groups: the hyper-parameters that its worker had told when it came: those of its step.
    """

    flags: FrameFlags
    body: np.ndarray
    groups: Groups


@dataclass
class Round:
    """Where one parameter stands.

    Args:
        workers: n.

    Attributes:
        version: updates so far, and the step that is open.
        pushes: what has come for it, by worker.
        pushed: int64[n], the last step that each worker has pushed for, or -1.
        counted: int64[n], the last step that each was counted in, or -1.
    """

    workers: int
    version: int = 0
    pushes: dict[int, Push] = field(default_factory=dict)
    pushed: np.ndarray = field(init=False)
    counted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.pushed = np.full(self.workers, -1, np.int64)
        self.counted = np.full(self.workers, -1, np.int64)


class ServerStateMachine:
    """One server's end of the conversations with all workers.

    Args:
        rank: the server's own, above those of the workers.
        workers: how many there are.
        epoch: of the job.
        model: what keeps the parameters.

    Attributes:
        agreement: what the first worker has said; None until then.
        present: workers that have joined and not left.
        rounds: by tensor id.
        groups: the hyper-parameters that each worker has told last.
        incarnations: of the latest process of each worker.
        initialized: whether all parameters have values.
        finished: workers that have said goodbye.
        turned_away: workers whose connection is to be closed, with the reason; emptied by whoever does it.
    """

    def __init__(self, rank: int, workers: int, epoch: int, model: ServedModel) -> None:
        self.agreement: TrainingConfig | None = None
        self.present: set[int] = set()
        self.rounds: list[Round] = []
        self.groups: dict[int, Groups] = {}
        self.incarnations: dict[int, int] = {}
        self.initialized = False
        self.finished: set[int] = set()
        self.turned_away: dict[int, str] = {}
        self._rank = rank
        self.workers = workers
        self._epoch = epoch
        self._model = model
        self._missing_values: set[int] = set()
        self._waiting: dict[int, TrainingJoin] = {}

    # -- frames ----------------------------------------------------------------------------------------------

    def admit(self, worker: int, header: Header) -> None:
        """Check a header before its body is allocated. May be called from another thread than the rest.

        Raises:
            FrameError: it is not one that this worker may send now.
        """
        kind = header.kind
        if kind is FrameKind.JOIN or kind is FrameKind.GROUPS:
            most = MAX_JOIN_BYTES if kind is FrameKind.JOIN else MAX_GROUPS_BYTES
            if header.length > most or without_seal(header) != self._plain(kind, worker):
                raise FrameError(f"Expected {kind.name} of at most {most} bytes, got {header}.")
            return
        agreement = self.agreement
        if agreement is None or header.tensor >= len(agreement.tensors):
            raise FrameError(f"Expected one of the agreed tensors, got another (in {describe(header)}).")
        terms = agreement.tensors[header.tensor]
        if kind is FrameKind.MODEL:
            count, compressor, most, fits = terms.spec.numel, 0, terms.spec.nbytes, header.length == terms.spec.nbytes
        elif kind is FrameKind.PAYLOAD:
            count, compressor = header.count, code(terms.pushes.name)
            most = terms.pushes.max_encoded_bytes(terms.spec)
            fits = header.length <= most if count == terms.spec.numel else header.length == count == 0
            fits = fits and (header.length == 0 or FrameFlags.USED in header.flags)
        else:
            raise FrameError(f"Expected a push of worker {worker}, got {describe(header)}.")
        expected = Header(
            kind, compressor, header.flags, worker, 0, ELEMENT_TYPES[terms.spec.dtype], self._epoch, header.round,
            header.tensor, count=count,
        )  # fmt: skip
        if not fits or without_seal(header) != expected:
            raise FrameError(f"Expected {terms.name!r} in at most {most} bytes, got {header}.")

    def receive(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        """Take an admitted frame and return what is to be sent.

        Raises:
            FrameError: it came out of turn, or does not decode: the worker is to be turned away.
            DisagreementError: the worker expects another job than the others.
        """
        if header.kind is FrameKind.JOIN:
            if worker in self.present:
                raise FrameError(f"Expected one JOIN a connection, got a second of worker {worker}.")
            return self._join(worker, TrainingJoin.from_bytes(body.tobytes()))
        if worker not in self.present:
            raise FrameError(f"Expected worker {worker} to join first, got {describe(header)}.")
        if header.kind is FrameKind.GROUPS:
            return self._take_groups(worker, groups_of(body.tobytes()))
        if header.kind is FrameKind.MODEL:
            return self._take_values(worker, header, body)
        return self._push(worker, header, body)

    def leave(self, worker: int, *, finished: bool = False) -> list[Message]:
        """Note that a worker's connection is gone; `finished` where it had joined and said goodbye."""
        if finished and worker in self.present:
            self.finished.add(worker)
        self.present.discard(worker)
        self._waiting.pop(worker, None)
        # Whoever was waited for because it had missed too much may be the last one missing.
        return [message for tensor in range(len(self.rounds)) for message in self._close_if_due(tensor)]

    def missing(self) -> list[int]:
        """Workers without which no step can be closed, as far as they are not there: empty while enough are."""
        absent = [worker for worker in range(self.workers) if worker not in self.present]
        needed = self.workers if self.agreement is None or not self.initialized else self.agreement.needed
        return absent if self.workers - len(absent) < needed else []

    # -- joining ---------------------------------------------------------------------------------------------

    def _join(self, worker: int, join: TrainingJoin) -> list[Message]:
        if join.agreement.workers != self.workers:
            raise DisagreementError(
                f"Expected {self.workers} workers, as this server was started for, got {join.agreement.workers} from "
                f"worker {worker}. Do: give both the same number."
            )
        if self.agreement is None:
            self._model.check(join.agreement, join.groups)
            self.agreement = self._model.agreement = join.agreement
            self.rounds = [Round(self.workers) for _ in join.agreement.tensors]
            self._missing_values = set(range(len(join.agreement.tensors)))
        elif self.agreement != join.agreement:
            raise DisagreementError(_difference(self.agreement, join.agreement, worker))
        if join.incarnation < self.incarnations.get(worker, 0):
            raise FrameError(f"Expected the latest process of worker {worker}, got an older one: it has been replaced.")
        versions = join.versions or ()
        for terms, round_, version in zip(self.agreement.tensors, self.rounds, versions):
            if version > round_.version:
                raise FrameError(
                    f"Expected at most {round_.version} updates of {terms.name!r}, got {version} at worker {worker}: "
                    "this server was started from an older state. Do: start the job anew from one checkpoint."
                )
        self._model.check(self.agreement, join.groups)
        self.incarnations[worker] = join.incarnation
        self.groups.setdefault(worker, join.groups)  # a worker that returns tells them anew, ahead of its next push
        self.present.add(worker)
        self.finished.discard(worker)
        if self.initialized or worker == 0:
            return self._welcome(worker, join)
        self._waiting[worker] = join  # until there is a model
        return []

    def _welcome(self, worker: int, join: TrainingJoin) -> list[Message]:
        assert self.agreement is not None
        rounds = self.rounds
        welcome = TrainingWelcome(
            not self.initialized,
            tuple(round_.version for round_ in rounds),
            tuple(int(round_.pushed[worker]) for round_ in rounds),
            tuple(int(round_.counted[worker]) for round_ in rounds),
        )
        said = np.frombuffer(welcome.to_bytes(), np.uint8)
        messages: list[Message] = [(worker, self._plain(FrameKind.WELCOME, self._rank), said)]
        if self.initialized:
            for tensor, round_ in enumerate(rounds):
                if join.versions is None or join.versions[tensor] != round_.version:
                    header = self._header(FrameKind.MODEL, tensor, round_.version)
                    messages.append((worker, header, self._model.values(tensor)))
        return messages

    def _take_values(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        if worker != 0 or self.initialized or header.round:
            raise FrameError(f"Expected no values from worker {worker}, got {describe(header)}.")
        self._model.put(header.tensor, body)
        self._missing_values.discard(header.tensor)
        return self._begin() if not self._missing_values else []

    def _begin(self) -> list[Message]:
        self.initialized = True
        waiting, self._waiting = self._waiting, {}
        return [message for worker, join in waiting.items() for message in self._welcome(worker, join)]

    def _take_groups(self, worker: int, groups: Groups) -> list[Message]:
        if len(groups) != len(self.groups[worker]):
            raise FrameError(f"Expected {len(self.groups[worker])} parameter groups, got {len(groups)}.")
        assert self.agreement is not None, "joined"
        self._model.check(self.agreement, groups)
        self.groups[worker] = groups
        return []

    # -- steps -----------------------------------------------------------------------------------------------

    def _push(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        round_ = self.rounds[header.tensor]
        if not self.initialized or header.round > round_.version:
            raise FrameError(f"Expected a push for step {round_.version} at most, got {describe(header)}.")
        if header.round < round_.version or worker in round_.pushes:
            return []  # late, and it has been told; or sent again over a new connection
        round_.pushes[worker] = Push(header.flags, body, self.groups[worker])
        round_.pushed[worker] = header.round
        return self._close_if_due(header.tensor)

    def _close_if_due(self, tensor: int) -> list[Message]:
        assert self.agreement is not None
        round_ = self.rounds[tensor]
        behind = np.flatnonzero(round_.version - 1 - round_.counted >= MAX_MISSES)
        awaited = self.present.intersection(behind.tolist()).difference(round_.pushes)
        if len(round_.pushes) < self.agreement.needed or awaited:
            return []
        return self._close(tensor)

    def _close(self, tensor: int) -> list[Message]:
        assert self.agreement is not None
        round_ = self.rounds[tensor]
        counted = sorted(who for who, push in round_.pushes.items() if not push.flags & FrameFlags.NONFINITE)
        bodies = {who: round_.pushes[who].body for who in counted}
        pushes = {who: Payload(body) if body.nbytes else None for who, body in bodies.items()}
        used = any(round_.pushes[who].flags & FrameFlags.USED for who in counted)
        groups = round_.pushes[min(counted or round_.pushes)].groups
        try:
            payload = self._model.update(tensor, round_.version, pushes, groups, used)
        except PayloadError as error:
            return self._turn_away(tensor, pushes, error)
        if payload is None:
            flags = FrameFlags.DROPPED
        else:
            flags = FrameFlags.NONFINITE if payload.nonfinite else FrameFlags.NONE
            round_.counted[counted] = round_.version
        header = self._header(FrameKind.DELTA, tensor, round_.version, flags)
        body = join_update(counted, self.workers, payload)
        round_.version += 1
        round_.pushes = {}
        return [(worker, header, body) for worker in sorted(self.present) if worker not in self._waiting]

    def _turn_away(self, tensor: int, pushes: Mapping[int, Payload | None], error: PayloadError) -> list[Message]:
        """Take back the pushes that do not decode: they cost their senders the connection; the step stays open."""
        round_ = self.rounds[tensor]
        for worker, payload in pushes.items():
            if payload is not None and not self._model.decodes(tensor, round_.version, worker, payload):
                del round_.pushes[worker]
                round_.pushed[worker] = -1
                self.turned_away[worker] = str(error)
        return []

    # -- headers ---------------------------------------------------------------------------------------------

    def _plain(self, kind: FrameKind, sender: int) -> Header:
        return Header(kind, sender=sender, epoch=self._epoch)

    def _header(self, kind: FrameKind, tensor: int, step: int, flags: FrameFlags = FrameFlags.NONE) -> Header:
        assert self.agreement is not None
        terms = self.agreement.tensors[tensor]
        return Header(
            kind, code(terms.pulls.name) if kind is FrameKind.DELTA else 0, flags, self._rank, PULL_STAGE,
            ELEMENT_TYPES[terms.spec.dtype], self._epoch, step, tensor, count=terms.spec.numel,
        )  # fmt: skip


def _difference(agreed: TrainingConfig, said: TrainingConfig, worker: int) -> str:
    mine, theirs = agreed.to_json(), said.to_json()
    for key in mine:
        if key != "tensors" and mine[key] != theirs[key]:
            return f"Expected {key} {mine[key]!r} as all workers have, got {theirs[key]!r} from worker {worker}."
    for one, other in zip(mine["tensors"], theirs["tensors"]):
        if one != other:
            return f"Expected {one} as all workers have, got {other} from worker {worker}. Do: build one model on all."
    numbers = len(mine["tensors"]), len(theirs["tensors"])
    return f"Expected {numbers[0]} tensors as all workers have, got {numbers[1]} from worker {worker}."
