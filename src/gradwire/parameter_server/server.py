"""The server's end, without I/O: which pushes make a step, and who gets the update.

Each parameter has its own steps (fine-grained barriers). A step is closed when enough workers have pushed. Its update
goes to all workers, and later pushes for it are not counted. With a staleness of N, a worker may push for up to N steps
after the open one; steps are closed in order. Everything that changes the state arrives as a frame, in an order that a
journal can repeat.

Guarantees: a push is counted in one update at most, and the update names the workers that were counted. A step whose
pushes add up to a NaN or an infinity is dropped with them, and its update says so. A worker that has missed
`MAX_MISSES` updates of a parameter in a row is waited for. A worker that sends an invalid frame loses its connection,
and no other worker is affected.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 2.1; stale-synchronous barriers: Ho et al. 2013. Differences: a
late worker learns that it was late, and keeps its gradient unless the job says ``late="drop"``. A straggler is not left
out forever. A step counts one gradient per worker, where TensorFlow counts gradients whoever has computed them. With a
staleness, the optimizer still steps on averages over workers, and a worker sees its own gradients with those of all.
"""

# Shapes: T = tensors, n = workers.

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradwire.core.errors import FrameError, PayloadError
from gradwire.parameter_server.round import Push, Round
from gradwire.parameter_server.session import (
    MAX_GROUPS_BYTES,
    MAX_JOIN_BYTES,
    Groups,
    TrainingConfig,
    TrainingJoin,
    TrainingWelcome,
    decode_groups,
)
from gradwire.parameter_server.shard import ParameterShard
from gradwire.parameter_server.shared_updates import SharedUpdates, Update
from gradwire.parameter_server.update import frame_header, join_update
from gradwire.wire.frame import FrameFlags, FrameKind, Header, describe, without_seal
from gradwire.wire.payload import Payload

MAX_INCARNATIONS = 1024
"""Number of processes of a worker that are remembered."""
Message = tuple[int, Header, np.ndarray]
"""A worker, and the header and body of a frame for it."""


class ServerStateMachine:
    """State of one server's conversations with all workers.

    Args:
        workers: Number of workers. The server has the rank after theirs.
        epoch: Number of the job in its frames.
        shard: Parameters of this server.

    Attributes:
        config: Configuration that worker 0 has brought, with the first values; None until then.
        present: Workers that have joined and not left.
        shard: Parameters of this server.
        updates: Newest updates, for workers that come back.
        rounds: Version and open step of each parameter, by tensor id.
        groups: Latest hyperparameters of each worker.
        incarnations: Random numbers of each worker's processes, in the order in which they have joined. All but the
            last are turned away. No clock decides which process is newer.
        initialized: Whether all parameters have values.
        finished: Workers that have said goodbye; all of them when the job has ended.
        rejected: Workers whose connection must be closed, with the reason. Whoever closes it removes the entry.
    """

    def __init__(self, workers: int, epoch: int, shard: ParameterShard) -> None:
        self.config: TrainingConfig | None = None
        self.present: set[int] = set()
        self.rounds: list[Round] = []
        self.groups: dict[int, Groups] = {}
        self.incarnations: dict[int, list[int]] = {}
        self.initialized = False
        self.finished: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.workers = workers
        self.shard = shard
        self.updates = SharedUpdates()
        self._epoch = epoch
        self._without_values: set[int] = set()  # tensors
        self._waiting: dict[int, TrainingJoin] = {}  # workers that joined before there were values

    # -- frames ----------------------------------------------------------------------------------------------

    def admit(self, worker: int, header: Header) -> None:
        """Check a header before its body is allocated. Other threads may call this.

        Raises:
            FrameError: This worker may not send such a frame now.
        """
        kind = header.kind
        if kind is FrameKind.JOIN or kind is FrameKind.GROUPS:
            most = MAX_JOIN_BYTES if kind is FrameKind.JOIN else MAX_GROUPS_BYTES
            if header.length > most or without_seal(header) != self._plain(kind, worker):
                raise FrameError(f"Expected {kind.name} of at most {most} bytes, got {header}.")
            return
        if self.config is None or header.tensor >= len(self.config.tensors):
            raise FrameError(f"No tensor of this server: {describe(header)}.")
        parameter = self.config.tensors[header.tensor]
        spec = parameter.spec
        if kind is FrameKind.MODEL:
            count, most, fits = spec.numel, spec.nbytes, header.length == spec.nbytes
        elif kind is FrameKind.PAYLOAD:
            count = header.count
            most = parameter.push_compressor.max_encoded_bytes(spec)
            fits = header.length <= most if count == spec.numel else header.length == count == 0
            fits = fits and (header.length == 0 or FrameFlags.USED in header.flags)
        else:
            raise FrameError(f"Worker {worker} sent something other than a push: {describe(header)}.")
        expected = frame_header(
            self.config, header.tensor, self._epoch, kind, worker, header.round, header.flags, count
        )
        if not fits or without_seal(header) != expected:
            raise FrameError(f"Expected {parameter.name!r} in at most {most} bytes, got {header}.")

    def receive(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        """Take an admitted frame and return the frames to send.

        Raises:
            FrameError: The frame does not decode, is not due, or is of another configuration or of a replaced process.
                Nothing has changed. The worker must be turned away.
        """
        if header.kind is FrameKind.JOIN:
            if worker in self.present:
                raise FrameError(f"A connection has one JOIN, but worker {worker} sent a second one.")
            return self._join(worker, TrainingJoin.from_bytes(body.tobytes()))
        if worker not in self.present:
            raise FrameError(f"Worker {worker} must join first, but sent {describe(header)}.")
        if header.kind is FrameKind.GROUPS:
            return self._take_groups(worker, decode_groups(body.tobytes()))
        if header.kind is FrameKind.MODEL:
            return self._take_values(worker, header, body)
        return self._take_push(worker, header, body)

    def leave(self, worker: int, *, finished: bool = False) -> list[Message]:
        """Note that a worker's connection is gone, and return the frames to send.

        Args:
            worker: Id of the worker.
            finished: Whether the worker has said goodbye.
        """
        if finished and worker in self.present:
            self.finished.add(worker)
        self.present.discard(worker)
        self._waiting.pop(worker, None)
        # Steps may have waited only for this worker, because it had missed too much.
        return [message for tensor in range(len(self.rounds)) for message in self._close_if_due(tensor)]

    def finish(self) -> None:
        """End the job, also for workers that have batches left."""
        self.finished.update(range(self.workers))

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return len(self.finished) == self.workers

    def missing(self) -> list[int]:
        """Absent workers, if no step can be closed without them; otherwise empty."""
        absent = [worker for worker in range(self.workers) if worker not in self.present]
        needed = self.workers if self.config is None or not self.initialized else self.config.needed
        return absent if self.workers - len(absent) < needed else []

    # -- joining ---------------------------------------------------------------------------------------------

    def _join(self, worker: int, join: TrainingJoin) -> list[Message]:
        self._check_join(worker, join)
        if worker == 0 and not self.initialized:
            self._begin(join.config)
        processes = self.incarnations.setdefault(worker, [])
        if join.incarnation not in processes:
            processes.append(join.incarnation)
            del processes[:-MAX_INCARNATIONS]
        if not self.initialized or worker not in self.groups:
            self.groups[worker] = join.groups  # a worker that returns later sends them again before its next push
        self.present.add(worker)
        self.finished.discard(worker)
        if self.initialized or worker == 0:
            return self._welcome(worker, join)
        self._waiting[worker] = join
        return []

    def _check_join(self, worker: int, join: TrainingJoin) -> None:
        if join.config.workers != self.workers:
            raise FrameError(
                f"Worker {worker} expects {join.config.workers} workers, but this server was started for "
                f"{self.workers}. Start both with the same number."
            )
        settled = self.initialized or (worker > 0 and 0 in self.present)  # the model is that of worker 0
        if settled and self.config is not None and self.config != join.config:
            raise _other_config(worker, join.config, self.config)
        if join.incarnation in self.incarnations.get(worker, [])[:-1]:
            raise FrameError(f"This process of worker {worker} has been replaced by a newer one.")
        rounds = self.rounds or [Round(self.workers) for _ in join.config.tensors]
        for parameter, round_, version in zip(join.config.tensors, rounds, join.versions or ()):
            if version > round_.version:
                raise FrameError(
                    f"Worker {worker} has version {version} of {parameter.name!r}, but this server only has "
                    f"{round_.version}: it was started from an older state. Restart all workers from one checkpoint."
                )
        self.shard.check(join.config, join.groups)

    def _begin(self, config: TrainingConfig) -> None:
        """Take the configuration of worker 0, which brings the values, and reject waiting workers with another."""
        if self.config != config:
            self.groups.pop(0, None)
        self.config = self.shard.config = config
        self.rounds = [Round(self.workers, staleness=config.staleness) for _ in config.tensors]
        self.updates = SharedUpdates()
        self._without_values = set(range(len(config.tensors)))
        for worker, join in list(self._waiting.items()):
            if join.config != config:
                self.rejected[worker] = str(_other_config(worker, join.config, config))
                self.present.discard(worker)
                del self._waiting[worker], self.groups[worker]

    def _welcome(self, worker: int, join: TrainingJoin) -> list[Message]:
        welcome = TrainingWelcome(
            not self.initialized,
            tuple(round_.version for round_ in self.rounds),
            tuple(int(step) for round_ in self.rounds for step in round_.last_pushed[worker]),
            tuple(int(step) for round_ in self.rounds for step in round_.last_counted[worker]),
        )
        body = np.frombuffer(welcome.to_bytes(), np.uint8)
        messages: list[Message] = [(worker, self._plain(FrameKind.WELCOME, self.workers), body)]
        if self.initialized:
            for tensor, round_ in enumerate(self.rounds):
                known = None if join.versions is None else join.versions[tensor]
                if known != round_.version:
                    messages += [(worker, *frame) for frame in self._missed(tensor, known)]
        return messages

    def _missed(self, tensor: int, known: int | None) -> list[Update]:
        """The updates that a worker with the version `known` has missed, or values if that takes fewer bytes."""
        updates = [] if known is None else self.updates.since(tensor, known)
        header = self._header(FrameKind.MODEL, tensor, self.rounds[tensor].version)
        return updates or [(header, self.shard.values(tensor))]

    def _take_values(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        if worker != 0 or self.initialized or header.round:
            raise FrameError(f"Worker {worker} sent values that are not due: {describe(header)}.")
        self.shard.put(header.tensor, body)
        self._without_values.discard(header.tensor)
        if self._without_values:
            return []
        self.initialized = True
        waiting, self._waiting = self._waiting, {}
        return [message for worker, join in waiting.items() for message in self._welcome(worker, join)]

    def _take_groups(self, worker: int, groups: Groups) -> list[Message]:
        if len(groups) != len(self.groups[worker]):
            raise FrameError(
                f"Worker {worker} had {len(self.groups[worker])} parameter groups, and now has {len(groups)}."
            )
        assert self.config is not None, "joined"
        self.shard.check(self.config, groups)
        self.groups[worker] = groups
        return []

    # -- steps -----------------------------------------------------------------------------------------------

    def _take_push(self, worker: int, header: Header, body: np.ndarray) -> list[Message]:
        assert self.config is not None, "joined"
        round_ = self.rounds[header.tensor]
        latest = round_.version + self.config.staleness
        if not self.initialized or header.round > latest:
            raise FrameError(f"A push for step {latest} at most is due, not {describe(header)}.")
        if header.round < round_.version or round_.has(worker, header.round):
            return []  # late, as the update has told the worker; or sent again over a new connection
        round_.add(worker, header.round, Push(header.flags, body, self.groups[worker]))
        return self._close_if_due(header.tensor)

    def _close_if_due(self, tensor: int) -> list[Message]:
        assert self.config is not None, "joined"
        round_, messages, version = self.rounds[tensor], list[Message](), -1
        while round_.version > version and round_.due(self.config.needed, self.present):
            version = round_.version
            messages += self._close(tensor, round_)  # with a staleness, the next step may be due as well
        return messages

    def _close(self, tensor: int, round_: Round) -> list[Message]:
        assert self.config is not None, "joined"
        finite = {worker: push for worker, push in sorted(round_.pushes.items()) if push.finite}
        payloads = {worker: Payload(push.body) if push.body.nbytes else None for worker, push in finite.items()}
        used = any(FrameFlags.USED in push.flags for push in finite.values())
        groups = round_.pushes[min(finite or round_.pushes)].groups
        try:
            payload = self.shard.update(tensor, round_.version, payloads, groups, used)
        except PayloadError as error:
            self._reject(tensor, round_, payloads, error)
            return []
        if payload is None:
            flags = FrameFlags.DROPPED
        else:
            flags = FrameFlags.NONFINITE if payload.nonfinite else FrameFlags.NONE
        header = self._header(FrameKind.DELTA, tensor, round_.version, flags)
        body = join_update(finite, self.workers, payload)
        self.updates.add((header, body), self.config.tensors[tensor].spec.nbytes)
        round_.close([] if payload is None else list(finite))
        return [(worker, header, body) for worker in sorted(self.present) if worker not in self._waiting]

    def _reject(self, tensor: int, round_: Round, payloads: Mapping[int, Payload | None], error: PayloadError) -> None:
        """Take back the pushes that do not decode and reject their workers. The step stays open."""
        for worker, payload in payloads.items():
            if payload is not None and not self.shard.decodes(tensor, round_.version, worker, payload):
                round_.take_back(worker)
                self.rejected[worker] = str(error)

    # -- headers ---------------------------------------------------------------------------------------------

    def _plain(self, kind: FrameKind, sender: int) -> Header:
        return Header(kind, sender=sender, epoch=self._epoch)

    def _header(self, kind: FrameKind, tensor: int, step: int, flags: FrameFlags = FrameFlags.NONE) -> Header:
        assert self.config is not None, "joined"
        return frame_header(self.config, tensor, self._epoch, kind, self.workers, step, flags)


def _other_config(worker: int, config: TrainingConfig, expected: TrainingConfig) -> FrameError:
    return FrameError(
        f"Worker {worker} has {config.difference(expected)}. Build the same model, optimizer and options on all "
        "workers."
    )
