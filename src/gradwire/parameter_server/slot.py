"""The worker's end: one parameter's pushes, residual and pulls, sans-IO.

A gradient is pushed for the step that its parameter's version names, and its residual is staged until the update of
that step says who was counted. Who was not, because it came late, adds what it pushed back to its residual: a gradient
is counted once or kept, never both, never neither; but a step that is not finite is dropped with its gradients.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 2.1 and 3, figure 3: steps 1 to 4, a and b. Differences: an update
names the workers counted in it. The backup workers of section 2.1 drop what comes late; here it stays in the residual.
"""

# Shapes: N = elements of the parameter.

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.compressors.base.registry import code
from gradwire.core.errors import FrameError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec, as_array, as_tensor
from gradwire.parameter_server.session import TrainingConfig
from gradwire.parameter_server.update import (
    PULL_STAGE,
    add_change,
    change_spec,
    counted_bytes,
    pull_context,
    push_context,
    split_update,
)
from gradwire.wire.frame import FrameFlags, FrameKind, Header, describe, without_seal
from gradwire.wire.payload import Payload

_EMPTY = np.empty(0, np.uint8)
Frame = tuple[Header, np.ndarray]


@dataclass
class _Push:
    """A push whose update has not come yet.

    Attributes:
        header: of its frame.
        payload: what was encoded; None where there was nothing to encode.
        residual: float32[N], what the payload does not carry; None without feedback, or without a payload.
    """

    header: Header
    payload: Payload | None
    residual: np.ndarray | None

    @property
    def frame(self) -> Frame:
        return self.header, _EMPTY if self.payload is None else self.payload.body


class ParameterSlot:
    """One parameter at one worker. One thread at a time.

    Args:
        tensor: its id at its server.
        agreement: what was agreed with the server.
        worker: id of this worker.
        epoch: of the job.

    Attributes:
        tensor: its id.
        terms: what was agreed about it.
        version: updates in the values that `apply` has written last; -1 before there are values.
        known: updates that have arrived, applied or not; -1 before there are values.
        residual: float32[N], what earlier pushes have kept back; None for nothing.
    """

    def __init__(self, tensor: int, agreement: TrainingConfig, worker: int, epoch: int) -> None:
        self.terms = agreement.tensors[tensor]
        self.version = self.known = -1
        self.residual: np.ndarray | None = None
        self.tensor = tensor
        self._agreement = agreement
        self._worker = worker
        self._epoch = epoch
        self._push: _Push | None = None
        self._spare: np.ndarray | None = None  # a residual's memory, for the next one
        self._pushed_before = -1
        self._arrived: deque[tuple[Header, np.ndarray, int]] = deque()

    # -- push ------------------------------------------------------------------------------------------------

    def push(self, grad: torch.Tensor | None, step: int) -> Frame | None:
        """Encode a gradient for a step.

        Args:
            grad: the gradient; None where the parameter was not used.
            step: the updates in the values that it was computed with.

        Returns:
            The frame to send. None where that step has been closed, or has a push of an earlier life of this worker:
            the gradient is in the residual then.
        """
        assert self._push is None, "one push a step"
        if self.known > step or self._pushed_before == step:
            if grad is not None:
                self._keep(grad)
            return None
        flags = FrameFlags.PRESENT if grad is None else FrameFlags.PRESENT | FrameFlags.USED
        payload, residual = self._encode(grad, step)
        if payload is not None and payload.nonfinite:
            flags |= FrameFlags.NONFINITE
        spec = self.terms.spec
        header = Header(
            FrameKind.PAYLOAD, code(self.terms.pushes.name), flags, self._worker, dtype=ELEMENT_TYPES[spec.dtype],
            epoch=self._epoch, round=step, tensor=self.tensor, count=0 if payload is None else spec.numel,
        )  # fmt: skip
        self._push = _Push(header, payload, residual)
        return self._push.frame

    def unanswered(self) -> Frame | None:
        """The push whose update has not come: what goes again over a new connection, byte for byte."""
        return None if self._push is None else self._push.frame

    def pushed_before(self, step: int) -> None:
        """Learn that this worker has pushed for `step`, in an earlier life or over an earlier connection."""
        self._pushed_before = step

    def first_values(self, values: torch.Tensor) -> Frame:
        """The values that all workers begin with, which worker 0 sends."""
        self.version = self.known = 0
        spec = self.terms.spec
        header = Header(
            FrameKind.MODEL, sender=self._worker, dtype=ELEMENT_TYPES[spec.dtype], epoch=self._epoch,
            tensor=self.tensor, count=spec.numel,
        )  # fmt: skip
        return header, body_of(values)

    def _encode(self, grad: torch.Tensor | None, step: int) -> tuple[Payload | None, np.ndarray | None]:
        if grad is None:  # what is kept waits until the parameter is used: the optimizer may leave it alone now
            return None, None
        grad = grad.detach().cpu()
        compressor = self.terms.pushes
        ctx = push_context(self._agreement, self.tensor, self._worker, step)
        if self.terms.push_feedback:
            residual = np.empty(grad.numel(), np.float32) if self._spare is None else self._spare
            self._spare = None
            return compressor.encode(grad, ctx, residual_in=self.residual, residual_out=residual), residual
        if self.residual is not None:  # of a step that did not count this worker
            grad = grad + as_tensor(self.residual, change_spec(self.terms.spec)).to(grad.dtype)
        return compressor.encode(grad, ctx), None

    def _settle(self, push: _Push, *, counted: bool, dropped: bool) -> None:
        """Learn whether a push was counted, or dropped with its step."""
        self._push = None
        if push.payload is None:
            return
        if dropped or push.payload.nonfinite:  # it was counted by nobody, and has no part in what is kept
            self._spare = push.residual
            return
        self.residual, self._spare = push.residual, self.residual if push.residual is not None else None
        if not counted:
            ctx = push_context(self._agreement, self.tensor, self._worker, push.header.round)
            self._keep(self.terms.pushes.decode(push.payload, ctx))

    def _keep(self, grad: torch.Tensor) -> None:
        values = as_array(grad.detach().to("cpu", torch.float32))
        with np.errstate(over="ignore"):
            kept = values.copy() if self.residual is None else self.residual + values
        if np.isfinite(kept).all():
            self.residual = kept

    # -- pull ------------------------------------------------------------------------------------------------

    def admit(self, header: Header) -> None:
        """Check the header of an update, or of values, before its body is allocated.

        Raises:
            FrameError: it is not of this parameter, or not the one that is due.
        """
        spec = self.terms.spec
        is_update = header.kind is FrameKind.DELTA
        expected = Header(
            header.kind, code(self.terms.pulls.name) if is_update else 0, header.flags, header.sender, PULL_STAGE,
            ELEMENT_TYPES[spec.dtype], self._epoch, header.round, self.tensor, count=spec.numel,
        )  # fmt: skip
        if header.kind not in (FrameKind.DELTA, FrameKind.MODEL) or without_seal(header) != expected:
            raise FrameError(f"Expected an update of {self.terms.name!r}, got {header}.")
        if is_update:
            most = counted_bytes(self._agreement.workers) + self.terms.pulls.max_encoded_bytes(change_spec(spec))
            due = header.round == self.known and header.length <= most
        else:
            due = header.round >= self.known and header.length == spec.nbytes
        if not due:
            raise FrameError(
                f"Expected update {self.known} of {self.terms.name!r}, got {header.length} bytes (in "
                f"{describe(header)})."
            )

    def receive(self, header: Header, body: np.ndarray, last_counted: int = -1) -> None:
        """Take an admitted update; or values, in place of updates that were missed.

        Args:
            header: of the frame.
            body: of the frame.
            last_counted: with values, the last step in them that counted this worker.
        """
        if header.kind is FrameKind.MODEL:
            self._arrived.clear()
        self._arrived.append((header, body, last_counted))
        self.known = header.round + (header.kind is FrameKind.DELTA)

    def apply(self, values: torch.Tensor, version: int) -> None:
        """Bring the parameter's values up to `version`, in place.

        Raises:
            PayloadError: an update does not decode.
        """
        while self._arrived and (self.version < version or self._arrived[0][0].kind is FrameKind.MODEL):
            header, body, last_counted = self._arrived.popleft()
            last_taken = self._pushed_before  # by the server, into a step: one that closes counts it, or drops it
            if header.kind is FrameKind.MODEL:
                with torch.no_grad():
                    values.copy_(values_of(body, self.terms.spec))
                self.version = header.round
            else:
                named, payload = split_update(header, body, self._agreement.workers)
                if payload is not None:
                    ctx = pull_context(self._agreement, self.tensor, self.version)
                    add_change(self.terms.pulls, payload, ctx, values)
                last_taken = self.version if self._worker in named else -1
                last_counted = -1 if payload is None else last_taken
                self.version += 1
            if self._push is not None and self._push.header.round < self.version:
                counted = last_counted == self._push.header.round
                dropped = last_taken == self._push.header.round and not counted
                self._settle(self._push, counted=counted, dropped=dropped)


def values_of(body: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """The values in the body of a MODEL frame of the right length."""
    values = torch.empty(spec.shape, dtype=spec.dtype)
    values.reshape(-1).view(torch.uint8).numpy()[:] = body
    return values


def body_of(values: torch.Tensor) -> np.ndarray:
    """uint8: the body of a MODEL frame."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
