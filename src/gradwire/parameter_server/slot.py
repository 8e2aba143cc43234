"""The worker's end of one parameter, without I/O: pushes, residual and pulls.

A gradient is pushed for the step that follows the parameter's version. Its residual is staged until the update of that
step names the workers that were counted. A worker that came late adds its gradient to its residual. A gradient is
therefore either counted once or kept. The gradients of a step that is not finite are dropped.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 2.1 and 3, figure 3: steps 1 to 4, a and b. Differences: an update
names the workers that were counted. In section 2.1, a late gradient of a backup worker is lost; here the residual
keeps it.
"""

# Shapes: N = elements of the parameter.

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gradwire.core.errors import FrameError
from gradwire.core.spec import TensorSpec, as_array, as_tensor
from gradwire.parameter_server.session import TrainingConfig
from gradwire.parameter_server.update import (
    add_change,
    change_spec,
    counted_bytes,
    frame_header,
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
        header: Header of the frame.
        payload: Encoded gradient; None if the parameter was not used.
        residual: What the payload does not carry, float32[N]; None without feedback or payload.
    """

    header: Header
    payload: Payload | None
    residual: np.ndarray | None

    @property
    def frame(self) -> Frame:
        return self.header, _EMPTY if self.payload is None else self.payload.body


class ParameterSlot:
    """One parameter at one worker. Use it from one thread at a time.

    Args:
        tensor: Id of the parameter at its server.
        training: Configuration that was agreed with the server.
        worker: Id of this worker.
        epoch: Number of the job in its frames.

    Attributes:
        tensor: Id of the parameter at its server.
        config: Configuration of the parameter.
        version: Version of the values that `apply` has last written; -1 before there are values.
        newest: Newest version that has arrived; -1 before there are values.
        residual: What earlier pushes did not carry, float32[N]; None for nothing.
    """

    def __init__(self, tensor: int, training: TrainingConfig, worker: int, epoch: int) -> None:
        self.config = training.tensors[tensor]
        self.version = self.newest = -1
        self.residual: np.ndarray | None = None
        self.tensor = tensor
        self._training = training
        self._worker = worker
        self._push: _Push | None = None
        self._spare: np.ndarray | None = None  # memory of a residual, for the next one
        self._pushed_before = -1
        self._arrived: deque[tuple[Header, np.ndarray, int]] = deque()
        self._header = partial(frame_header, training, tensor, epoch)

    # -- push ------------------------------------------------------------------------------------------------

    def push(self, grad: torch.Tensor | None, step: int) -> Frame | None:
        """Encode a gradient for a step.

        Args:
            grad: Gradient of the parameter; None if it was not used.
            step: Version of the values that the gradient was computed with.

        Returns:
            The frame to send. None if the step is closed, or has a push of an earlier process of this worker: the
            gradient is then added to the residual.
        """
        assert self._push is None, "one push a step"
        if self.newest > step or self._pushed_before == step:
            if grad is not None:
                self._add_to_residual(grad)
            return None
        flags = FrameFlags.PRESENT if grad is None else FrameFlags.PRESENT | FrameFlags.USED
        payload, residual = self._encode(grad, step)
        if payload is not None and payload.nonfinite:
            flags |= FrameFlags.NONFINITE
        header = self._header(FrameKind.PAYLOAD, self._worker, step, flags, 0 if payload is None else None)
        self._push = _Push(header, payload, residual)
        return self._push.frame

    def unanswered(self) -> Frame | None:
        """The push whose update has not come. It is sent again over a new connection, byte for byte."""
        return None if self._push is None else self._push.frame

    def pushed_before(self, step: int) -> None:
        """Note that the server has a push of this worker for `step`, from an earlier process or connection."""
        self._pushed_before = step

    def first_values(self, values: torch.Tensor) -> Frame:
        """The frame of the initial values, which worker 0 sends."""
        self.version = self.newest = 0
        return self._header(FrameKind.MODEL, self._worker), body_of(values)

    def _encode(self, grad: torch.Tensor | None, step: int) -> tuple[Payload | None, np.ndarray | None]:
        if grad is None:  # the residual waits until the parameter is used: now, the optimizer may skip it
            return None, None
        grad = grad.detach().cpu()
        compressor = self.config.push_compressor
        ctx = push_context(self._training, self.tensor, self._worker, step)
        if self.config.push_feedback:
            residual = np.empty(grad.numel(), np.float32) if self._spare is None else self._spare
            self._spare = None
            return compressor.encode(grad, ctx, residual_in=self.residual, residual_out=residual), residual
        if self.residual is not None:  # a gradient that was not counted
            grad = grad + as_tensor(self.residual, change_spec(self.config.spec)).to(grad.dtype)
        return compressor.encode(grad, ctx), None

    def _settle(self, push: _Push, *, counted: bool, dropped: bool) -> None:
        """Commit or undo a push, now that its step is closed."""
        self._push = None
        if push.payload is None:
            return
        if dropped or push.payload.nonfinite:
            self._spare = push.residual
            return
        self.residual, self._spare = push.residual, self.residual if push.residual is not None else None
        if not counted:
            ctx = push_context(self._training, self.tensor, self._worker, push.header.round)
            self._add_to_residual(self.config.push_compressor.decode(push.payload, ctx))

    def _add_to_residual(self, grad: torch.Tensor) -> None:
        values = as_array(grad.detach().to("cpu", torch.float32))
        with np.errstate(over="ignore"):
            total = values.copy() if self.residual is None else self.residual + values
        if np.isfinite(total).all():
            self.residual = total

    # -- pull ------------------------------------------------------------------------------------------------

    def admit(self, header: Header) -> None:
        """Check the header of an update or of values before its body is allocated.

        Raises:
            FrameError: It is for another parameter or version.
        """
        spec, compressor = self.config.spec, self.config.pull_compressor
        is_update = header.kind is FrameKind.DELTA
        expected = self._header(header.kind, self._training.workers, header.round, header.flags)
        if header.kind not in (FrameKind.DELTA, FrameKind.MODEL) or without_seal(header) != expected:
            raise FrameError(f"Expected an update of {self.config.name!r}, got {header}.")
        if is_update:
            most = counted_bytes(self._training.workers) + compressor.max_encoded_bytes(change_spec(spec))
            due = header.round == self.newest and header.length <= most
        else:
            due = header.round >= self.newest and header.length == spec.nbytes
        if not due:
            raise FrameError(
                f"Expected update {self.newest} of {self.config.name!r}, got {header.length} bytes (in "
                f"{describe(header)})."
            )

    def receive(self, header: Header, body: np.ndarray, last_counted: int = -1) -> None:
        """Take an admitted update, or values that replace missed updates.

        Args:
            header: Header of the frame.
            body: Body of the frame.
            last_counted: For values, the last step that counted this worker.
        """
        if header.kind is FrameKind.MODEL:
            self._arrived.clear()
        self._arrived.append((header, body, last_counted))
        self.newest = header.round + (header.kind is FrameKind.DELTA)

    def apply(self, values: torch.Tensor, version: int) -> None:
        """Bring the parameter's values up to `version`, in place.

        Raises:
            PayloadError: An update does not decode.
        """
        while self._arrived and (self.version < version or self._arrived[0][0].kind is FrameKind.MODEL):
            header, body, last_counted = self._arrived.popleft()
            last_taken = self._pushed_before  # when its step closes, a push is counted or dropped
            if header.kind is FrameKind.MODEL:
                with torch.no_grad():
                    values.copy_(values_of(body, self.config.spec))
                self.version = header.round
            else:
                named, payload = split_update(header, body, self._training.workers)
                if payload is not None:
                    ctx = pull_context(self._training, self.tensor, self.version)
                    add_change(self.config.pull_compressor, payload, ctx, values)
                last_taken = self.version if self._worker in named else -1
                last_counted = -1 if payload is None else last_taken
                self.version += 1
            if self._push is not None and self._push.header.round < self.version:
                counted = last_counted == self._push.header.round
                dropped = last_taken == self._push.header.round and not counted
                self._settle(self._push, counted=counted, dropped=dropped)


def values_of(body: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Values from the body of a MODEL frame, which has the right length."""
    values = torch.empty(spec.shape, dtype=spec.dtype)
    values.reshape(-1).view(torch.uint8).numpy()[:] = body
    return values


def body_of(values: torch.Tensor) -> np.ndarray:
    """The body of a MODEL frame (uint8)."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
