"""A worker's line to one parameter server, which outlives the connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from gradwire.core.errors import FrameError, PeerFailedError, PeerTimeoutError, SyncError
from gradwire.net.address import serve_command
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.parameter_server.session import (
    MAX_JOIN_BYTES,
    Groups,
    TrainingConfig,
    TrainingJoin,
    TrainingWelcome,
    groups_to,
)
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, describe

logger = logging.getLogger("gradwire")
NOTICE_SECONDS = 10.0  # a wait that is longer is told of, once


class ServerConnection:
    """A worker's line to one server: the connection, and a slot for each parameter there.

    Frames come on the hub's thread, pushes on the coder's, pulls on that of the training loop.

    Args:
        address: host and port of the server.
        agreement: what this worker expects.
        worker: its id.
        job: name of the job.
        incarnation: grows with each start of this worker's process.
        timeout: how long the server may be silent, or not be there.
        stall_timeout: how long one update may take to come, whether the server is there or not.
        groups: hyper-parameters to begin with.
        values: gives a parameter's values by its name.
        key_file: see `job_key`.
        insecure: see `job_key`.

    Attributes:
        slots: in the order of the agreement.
        received_bytes: of frames, headers included.
        finished: the server has ended in good order: enough workers have finished, and it takes no more.
    """

    def __init__(
        self, address: tuple[str, int], agreement: TrainingConfig, worker: int, job: str, incarnation: int,
        timeout: timedelta, stall_timeout: timedelta, *, groups: Groups, values: Callable[[str], torch.Tensor],
        key_file: str | Path | None, insecure: bool,
    ) -> None:  # fmt: skip
        self.agreement = agreement
        self.address = f"{address[0]}:{address[1]}"
        self._epoch = job_epoch(job)
        self.slots = [ParameterSlot(tensor, agreement, worker, self._epoch) for tensor in range(len(agreement.tensors))]
        self.received_bytes = 0
        self._worker = worker
        self._server = agreement.workers
        self._incarnation = incarnation
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._told = groups
        self._telling = threading.Lock()
        self.finished = False
        self._values = values
        self._welcome: TrainingWelcome | None = None
        self._error: SyncError | None = None
        self._lost_at: float | None = time.monotonic()
        self._lost_by: SyncError | None = None
        self._noticed = False
        self._changed = threading.Condition()
        self._guards = [threading.Lock() for _ in self.slots]
        member = GroupMember(job, worker, agreement.workers + 1, self._epoch)
        key = job_key(address[0], job, file=key_file, insecure=insecure)
        self._start_with = serve_command("--parameters", agreement.workers, address, job)
        call = (self._server, address)
        self._hub = ReconnectingEndpoint(member, key, self, timeout=timeout, call=call, start_with=self._start_with)

    @property
    def sent_bytes(self) -> int:
        """Of frames, headers included."""
        return self._hub.sent_bytes

    def start(self) -> None:
        """Begin to call the server."""
        self._hub.start()

    def wait_for_values(self) -> None:
        """Wait until all parameters have values, this worker's own or the server's."""
        self._wait(lambda: all(slot.known >= 0 for slot in self.slots), "the model")
        if any(slot.known < 0 for slot in self.slots):
            raise SyncError(
                f"Expected the model from the parameter server at {self.address}, got its goodbye: the job has "
                "finished. Do: start the server again, with the same --state to train further."
            )

    def push(self, slot: ParameterSlot, grad: torch.Tensor | None, step: int) -> None:
        """Encode a gradient and send it; before the server has welcomed this worker, it goes when it has."""
        if self.finished:
            return
        with self._guards[slot.tensor]:
            frame = slot.push(grad, step)
            if frame is not None and self._welcome is not None:
                self._hub.send(self._server, *frame)

    def tell(self, groups: Groups) -> None:
        """Send hyper-parameters that hold for the pushes that follow."""
        with self._telling:
            self._told = groups
            if self._welcome is not None:
                self._send_told()

    def pull(self, slot: ParameterSlot, values: torch.Tensor, version: int) -> None:
        """Bring values up to `version` in place, once that has come; as far as there is, of a server that has ended."""
        self._wait(lambda: slot.known >= version, f"update {version} of {slot.terms.name!r}")
        with self._guards[slot.tensor]:
            slot.apply(values, version)

    def close(self, reason: str = "") -> None:
        """Say goodbye, or why not. Idempotent."""
        self._hub.close(reason)

    # -- on the hub's thread ---------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        if header.kind is FrameKind.WELCOME:
            if header.length > MAX_JOIN_BYTES:
                raise FrameError(f"Expected a WELCOME of at most {MAX_JOIN_BYTES} bytes, got {header.length}.")
            return
        if header.tensor >= len(self.slots) or self._welcome is None:
            raise FrameError(f"Expected one of {len(self.slots)} parameters, got {describe(header)}.")
        self.slots[header.tensor].admit(header)

    def joined(self, peer: int) -> None:
        with self._changed:
            self._welcome = None
            self._lost_at = None
            versions = tuple(slot.known for slot in self.slots)
        known = None if -1 in versions else versions
        said = TrainingJoin(self.agreement, self._told, self._incarnation, known).to_bytes()
        header = Header(FrameKind.JOIN, sender=self._worker, epoch=self._epoch)
        self._hub.send(self._server, header, np.frombuffer(said, np.uint8))

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self.received_bytes += HEADER_BYTES + body.nbytes
        if header.kind is FrameKind.WELCOME:
            self._be_welcome(self._read_welcome(body))
        else:
            assert self._welcome is not None, "admitted"
            with self._guards[header.tensor]:
                self.slots[header.tensor].receive(header, body, self._welcome.counted[header.tensor])
        with self._changed:
            self._changed.notify_all()

    def left(self, peer: int, error: SyncError | None) -> None:
        with self._changed:
            self._lost_at = time.monotonic()
            self._welcome = None
            self.finished = self.finished or error is None
            if isinstance(error, PeerFailedError):
                self._error = self._error or SyncError(f"The parameter server at {self.address} has ended: {error}")
            elif error is not None:
                self._lost_by = error
                limit = f"{self._timeout.total_seconds():g} s"
                logger.warning("The parameter server at %s is called again for %s. %s", self.address, limit, error)
            self._changed.notify_all()

    def failed(self, error: SyncError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _read_welcome(self, body: np.ndarray) -> TrainingWelcome:
        """Where the server stands; an answer that makes no sense is its last, as the next would make no more."""
        try:
            return TrainingWelcome.from_bytes(body.tobytes(), len(self.slots))
        except FrameError as error:
            self._error = self._error or SyncError(
                f"The parameter server at {self.address} gave an answer that this worker cannot read: {error}"
            )
            self._hub.close(str(error))
            raise

    def _be_welcome(self, welcome: TrainingWelcome) -> None:
        """Send what the server has not had: first values, then hyper-parameters, then the pushes of their step."""
        if welcome.initialize:
            for slot, guard in zip(self.slots, self._guards):
                with guard:
                    self._hub.send(self._server, *slot.first_values(self._values(slot.terms.name)))
        with self._telling:
            self._send_told()
            self._welcome = welcome  # from here on other threads send, too
        for tensor, slot in enumerate(self.slots):
            with self._guards[tensor]:
                slot.pushed_before(welcome.pushed[tensor])
                frame = slot.unanswered()
            if frame is not None and frame[0].round == welcome.versions[tensor]:
                self._hub.send(self._server, *frame)

    def _send_told(self) -> None:
        header = Header(FrameKind.GROUPS, sender=self._worker, epoch=self._epoch)
        self._hub.send(self._server, header, np.frombuffer(groups_to(self._told), np.uint8))

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if ready():
            return
        self._hub.check_process()
        began = time.monotonic()
        with self._changed:
            while not ready() and not self.finished:
                if self._error is not None:
                    raise self._error
                lost = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
                if lost > self._timeout.total_seconds() and self._lost_by is None:
                    raise PeerTimeoutError(
                        f"No parameter server has answered at {self.address} for {self._timeout.total_seconds():g} s "
                        f"({self._hub.problem}). Start it with: {self._start_with}",
                        phase=what,
                    )
                if lost > self._timeout.total_seconds():
                    said = "; ".join(str(each) for each in (self._lost_by, self._hub.problem) if each)
                    raise PeerTimeoutError(
                        f"Expected {what} from the parameter server at {self.address}, got no connection for "
                        f"{self._timeout.total_seconds():g} s ({said or 'it was lost'}). Look at its log.",
                        phase=what,
                    )
                if time.monotonic() - began > self._stall_timeout.total_seconds():
                    raise PeerTimeoutError(
                        f"Expected {what} from the parameter server at {self.address} within "
                        f"{self._stall_timeout.total_seconds():g} s, got nothing, though it is there. Do: look at its "
                        "log and those of the other workers; pass a longer stall_timeout= if steps may take so long.",
                        phase=what,
                    )
                if lost == 0 and time.monotonic() - began > NOTICE_SECONDS and not self._noticed:
                    self._noticed = True
                    logger.warning(
                        "Waiting for %s. The parameter server at %s is there: it waits for other workers, or for one "
                        "that has not started.", what, self.address,
                    )  # fmt: skip
                self._changed.wait(0.25)
