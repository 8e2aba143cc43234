"""A worker's conversation with one parameter server. It outlives the connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from gradwire.core.errors import FrameError, PeerTimeoutError, SyncError
from gradwire.net.client import GRACE_SECONDS, Client, ConnectionOptions
from gradwire.parameter_server.session import MAX_JOIN_BYTES, Groups, TrainingJoin, TrainingWelcome, encode_groups
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, describe

logger = logging.getLogger("gradwire")
NOTICE_SECONDS = 10.0
"""A longer wait is logged, once."""


class ServerConnection(Client):
    """The connection to one server, with a slot for each parameter there.

    Frames arrive on the endpoint's thread. The encoder thread pushes, and the training loop pulls.

    Args:
        address: Host and port of the server.
        join: First message to the server.
        worker: Id of this worker.
        job: Name of the job.
        options: Key and timeouts.
        values: Values of the parameters by name, for a server that has none.

    Attributes:
        slots: Slots of the parameters, by tensor id.
        received_bytes: Bytes of frames received so far, headers included.
        finished: Whether the server has ended in good order. It accepts no more pushes.
    """

    kind = "parameter server"
    serve_option = "--parameters"

    def __init__(
        self, address: tuple[str, int], join: TrainingJoin, worker: int, job: str, options: ConnectionOptions,
        values: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        config = join.config
        super().__init__(address, worker, config.workers, job, options)
        self.received_bytes = 0
        self.finished = False
        self.slots = [ParameterSlot(tensor, config, worker, self._epoch) for tensor in range(len(config.tensors))]
        self._locks = [threading.Lock() for _ in self.slots]
        self._values = values
        self._join = join
        self._join_lock = threading.Lock()
        self._groups_due = False
        self._welcomed = 0  # number of the last connection with a WELCOME
        self._awaited: Callable[[], bool] | None = None
        self._welcome: TrainingWelcome | None = None
        self._noticed = self._closed = False
        self._newest = -1

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent so far, headers included."""
        return self._endpoint.sent_bytes

    def start(self) -> None:
        """Begin to call the server."""
        self._endpoint.start()

    def wait_for_values(self) -> None:
        """Wait until all parameters have values, from this worker or from the server."""
        self._wait(lambda: all(slot.newest >= 0 for slot in self.slots), "the model")
        if any(slot.newest < 0 for slot in self.slots):
            raise SyncError(
                f"The job has finished: the {self._server_name} said goodbye and sent no model. Start the server "
                "again, with the same --state to train further."
            )

    def push(self, slot: ParameterSlot, grad: torch.Tensor | None, step: int) -> None:
        """Encode a gradient and send it, now or when the server has welcomed this worker."""
        if self.finished:
            return
        with self._locks[slot.tensor]:
            frame = slot.push(grad, step)
            if frame is not None:
                self._send_after_groups(frame)

    def send_groups(self, groups: Groups) -> None:
        """Send the hyperparameters of the pushes that follow, together with the next one."""
        with self._join_lock:
            self._join = replace(self._join, groups=groups)
            self._groups_due = True

    def pull(self, slot: ParameterSlot, values: torch.Tensor, version: int, *, staleness: int = 0) -> None:
        """Bring values up to `version`, in place. Waits for it, or for one that is `staleness` updates older.

        A finished server's last version is enough.
        """
        oldest = version - staleness
        self._endpoint.check_process()  # another thread of the parent may have held the lock
        self._wait(lambda: slot.newest >= oldest, f"update {oldest} of {slot.config.name!r}")
        with self._locks[slot.tensor]:
            slot.apply(values, version)

    def check(self) -> None:
        """Raise the error that has ended this connection for good, if there is one. A forked child has none at all."""
        self._endpoint.check_process()
        if self._error is not None:
            raise self._error

    def close(self, reason: str = "") -> None:
        """Say goodbye, or give the reason for leaving early. Idempotent."""
        if not self._endpoint.forked and not self._closed:
            self._closed = True
            if self._lost_by is not None and not self.finished:
                self._wait_for_goodbye()
        self._endpoint.close(reason)

    # -- on the endpoint's thread ----------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        if header.kind is FrameKind.WELCOME:
            if header.length > MAX_JOIN_BYTES:
                raise FrameError(f"A WELCOME has at most {MAX_JOIN_BYTES} bytes, not {header.length}.")
            return
        if header.tensor >= len(self.slots) or self._welcome is None:
            raise FrameError(f"No parameter of this worker, or no WELCOME yet: {describe(header)}.")
        self.slots[header.tensor].admit(header)

    def joined(self, peer: int) -> None:
        with self._changed:
            self._connected = True
            self._welcome = None
            self._lost_at = None
            versions = tuple(slot.newest for slot in self.slots)
        join = replace(self._join, versions=None if -1 in versions else versions)
        self._send_frame(FrameKind.JOIN, join.to_bytes())

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self.received_bytes += HEADER_BYTES + body.nbytes
        if header.kind is FrameKind.WELCOME:
            self._take_welcome(body)
        else:
            assert self._welcome is not None, "admitted"
            with self._locks[header.tensor]:
                self.slots[header.tensor].receive(header, body, self._welcome.steps_counted(header.tensor))
                self._note_result(self.slots[header.tensor].newest)
        with self._changed:
            if self._awaited is None or self._awaited():
                self._changed.notify_all()

    def _note_result(self, version: int) -> None:
        """Note a parameter's newest version. Only one beyond all before is a result: a server sends values again."""
        if version > self._newest:
            self._newest, self._num_losses = version, 0

    def left(self, peer: int, error: SyncError | None) -> None:
        with self._changed:
            self._welcome = None
            self.finished = self.finished or error is None
            super().left(peer, error)

    def _take_welcome(self, body: np.ndarray) -> None:
        """Send what the server lacks: initial values, then hyperparameters, then the pushes of their step."""
        welcome = self._read_welcome(self._parse_welcome, body)
        if welcome is None:
            self._endpoint.close(str(self._error))
            return
        if welcome.initialize:
            for slot, lock in zip(self.slots, self._locks):
                with lock:
                    self._endpoint.send(self._server, *slot.first_values(self._values[slot.config.name]))
        with self._join_lock:
            self._welcomed = self._endpoint.connection(self._server)  # from here on, other threads send too
            self._groups_due = True
        self._send_after_groups()
        self._welcome = welcome
        for tensor, slot in enumerate(self.slots):
            with self._locks[tensor]:
                slot.pushed_before(welcome.steps_pushed(tensor))
                for header, sent in slot.unanswered():
                    if header.round >= welcome.versions[tensor]:
                        self._send_after_groups((header, sent))

    def _parse_welcome(self, body: bytes) -> TrainingWelcome:
        return TrainingWelcome.from_bytes(body, len(self.slots), self._join.config.staleness)

    def _send_after_groups(self, *frames: tuple[Header, np.ndarray]) -> None:
        """Send hyperparameters that the server does not have yet, and frames, on the connection that has a WELCOME."""
        with self._join_lock:
            groups = [self._frame(FrameKind.GROUPS, encode_groups(self._join.groups))] if self._groups_due else []
            if self._endpoint.send_all(self._server, *groups, *frames, connection=self._welcomed):
                self._groups_due = False

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if ready():
            return
        self._endpoint.check_process()
        began = time.monotonic()
        with self._changed:
            self._awaited = ready  # other frames do not wake this thread: waking takes longer than a small frame
            try:
                while not ready() and not self.finished:
                    self.check()
                    self._check_lost(what)
                    self._check_stalled(time.monotonic() - began, what)
                    self._changed.wait(0.25)
            finally:
                self._awaited = None

    def _check_stalled(self, seconds: float, what: str) -> None:
        limit = self._options.stall_timeout.total_seconds()
        if seconds > limit + GRACE_SECONDS:
            raise PeerTimeoutError(
                f"The {self._server_name} did not send {what} within {limit:g} s, though it is there. Look at its log "
                "and at those of the other workers. If steps may take this long, pass a longer stall_timeout in "
                "ConnectionOptions, and to the server.",
                phase=what,
            )
        if self._lost_at is None and seconds > NOTICE_SECONDS and not self._noticed:
            self._noticed = True
            logger.warning(
                "Waiting for %s. The %s is there: it waits for other workers, or for one that has not started.", what,
                self._server_name,
            )  # fmt: skip
