"""The worker's end of one parameter, without I/O: pushes, residual and pulls.

A gradient is pushed for a step, and waits until the update of that step names the workers that were counted. A worker
that came late adds its gradient to its residual, unless the job says ``late="drop"``. A gradient is therefore either
counted once or kept, or lost and counted as such. The gradients of a step that is not finite are dropped.

A push takes the whole residual with it. When its step is closed, the residual gets back what the push did not carry, or
all that it has taken. Pushes that wait at the same time, as with a staleness, do not depend on each other's outcome.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 2.1 and 3, figure 3: steps 1 to 4, a and b. Differences: an update
names the workers that were counted. In section 2.1, a late gradient of a backup worker is lost; here, that is optional.
With a staleness of S, the error of a push reaches a push S + 1 steps later, and not the next one.
"""

# Shapes: N = elements of the parameter.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gradwire.core import host
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
        taken: Residual before this push, float32[N]; None for nothing.
        left: What the payload does not carry, float32[N]; None without feedback or payload.
    """

    header: Header
    payload: Payload | None
    taken: np.ndarray | None
    left: np.ndarray | None

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
        num_gradients: Number of gradients so far.
        num_late: Number of those whose step was closed without them.
    """

    def __init__(self, tensor: int, training: TrainingConfig, worker: int, epoch: int) -> None:
        self.config = training.tensors[tensor]
        self.version = self.newest = -1
        self.residual: np.ndarray | None = None
        self.tensor = tensor
        self._training = training
        self._worker = worker
        self.num_gradients = self.num_late = 0
        self._waiting: deque[_Push] = deque()  # oldest first, one for each step at most
        self._spare: np.ndarray | None = None  # memory of a residual, for the next one
        self._pushed_before: Collection[int] = ()
        self._arrived: deque[tuple[Header, np.ndarray, Collection[int]]] = deque()
        self._header = partial(frame_header, training, tensor, epoch)

    # -- push ------------------------------------------------------------------------------------------------

    def push(self, grad: torch.Tensor | None, step: int) -> Frame | None:
        """Encode a gradient for a step.

        Args:
            grad: Gradient of the parameter; None if it was not used.
            step: The step. The gradient was computed with values of this version, or of one that is older by the
                staleness at most.

        Returns:
            The frame to send. None if the step is closed, or has a push of an earlier process of this worker: the
            gradient is late then.
        """
        assert len(self._waiting) <= self._training.staleness, "values are brought up to date before"
        self.num_gradients += grad is not None
        if self.newest > step or step in self._pushed_before:
            if grad is not None:
                late: torch.Tensor = grad
                self._take_late(lambda: late)
            return None
        flags = FrameFlags.PRESENT if grad is None else FrameFlags.PRESENT | FrameFlags.USED
        payload, taken, left = self._encode(grad, step)
        if payload is not None and payload.nonfinite:
            flags |= FrameFlags.NONFINITE
        header = self._header(FrameKind.PAYLOAD, self._worker, step, flags, 0 if payload is None else None)
        self._waiting.append(_Push(header, payload, taken, left))
        return self._waiting[-1].frame

    def unanswered(self) -> list[Frame]:
        """The pushes whose update has not come. They are sent again over a new connection, byte for byte."""
        return [push.frame for push in self._waiting]

    def pushed_before(self, steps: Collection[int]) -> None:
        """Note the steps that the server has a push of this worker for, from an earlier process or connection."""
        self._pushed_before = steps

    def has_pushed_since(self, step: int) -> bool:
        """Whether the server has a push of this worker for a step from `step` on, by what it said in its welcome."""
        return any(each >= step for each in self._pushed_before)

    def first_values(self, values: torch.Tensor) -> Frame:
        """The frame of the initial values, which worker 0 sends."""
        self.version = self.newest = 0
        return self._header(FrameKind.MODEL, self._worker), body_of(values)

    def _encode(
        self, grad: torch.Tensor | None, step: int
    ) -> tuple[Payload | None, np.ndarray | None, np.ndarray | None]:
        if grad is None:  # the residual waits until the parameter is used: now, the optimizer may skip it
            return None, None, None
        grad = grad.detach().cpu()
        compressor = self.config.push_compressor
        ctx = push_context(self._training, self.tensor, self._worker, step)
        taken, self.residual = self.residual, None
        if self.config.push_feedback:
            left = np.empty(grad.numel(), np.float32) if self._spare is None else self._spare
            self._spare = None
            return compressor.encode(grad, ctx, residual_in=taken, residual_out=left), taken, left
        if taken is not None:  # a gradient that was not counted
            grad = grad + as_tensor(taken, change_spec(self.config.spec)).to(grad.dtype)
        return compressor.encode(grad, ctx), taken, None

    def _settle(self, push: _Push, *, counted: bool, dropped: bool) -> None:
        """Commit or undo a push, now that its step is closed."""
        payload = push.payload
        if payload is None:
            return
        undone = dropped or payload.nonfinite
        self._give_back(push.taken if undone else push.left)
        self._spare = push.left if undone else push.taken
        if not undone and not counted:
            ctx = push_context(self._training, self.tensor, self._worker, push.header.round)
            self._take_late(lambda: self.config.push_compressor.decode(payload, ctx))

    def _give_back(self, values: np.ndarray | None) -> None:
        """Add values that were finite to the residual. The residual may take over their memory."""
        if values is None or self.residual is None:
            self.residual = self.residual if values is None else values
        else:
            self._add_to_residual(torch.from_numpy(values))

    def _take_late(self, grad: Callable[[], torch.Tensor]) -> None:
        """Keep a gradient whose step was closed without it, or count it as lost."""
        self.num_late += 1
        if self._training.late == "keep":
            self._add_to_residual(grad())

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

    def receive(self, header: Header, body: np.ndarray, counted: Collection[int] = ()) -> None:
        """Take an admitted update, or values that replace missed updates.

        Args:
            header: Header of the frame.
            body: Body of the frame.
            counted: For values, the last steps that counted this worker.
        """
        if header.kind is FrameKind.MODEL:
            self._arrived.clear()
        self._arrived.append((header, body, counted))
        self.newest = header.round + (header.kind is FrameKind.DELTA)

    def apply(self, values: torch.Tensor, version: int) -> None:
        """Bring the parameter's values up to `version`, in place, or to the newest one that has arrived.

        Raises:
            PayloadError: An update does not decode.
        """
        while self._arrived and (self.version < version or self._arrived[0][0].kind is FrameKind.MODEL):
            header, body, counted = self._arrived.popleft()
            taken = self._pushed_before  # when its step closes, a push is counted or dropped
            if header.kind is FrameKind.MODEL:
                with torch.no_grad():
                    values.copy_(values_of(body, self.config.spec))
                self.version = header.round
            else:
                named, payload = split_update(header, body, self._training.workers)
                if payload is not None:
                    ctx = pull_context(self._training, self.tensor, self.version)
                    add_change(self.config.pull_compressor, payload, ctx, values)
                taken = (self.version,) if self._worker in named else ()
                counted = () if payload is None else taken
                self.version += 1
            while self._waiting and (step := self._waiting[0].header.round) < self.version:
                dropped = step in taken and step not in counted
                self._settle(self._waiting.popleft(), counted=step in counted, dropped=dropped)


def values_of(body: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Values from the body of a MODEL frame, which has the right length."""
    values = host.empty(spec.shape, spec.dtype)
    values.reshape(-1).view(torch.uint8).numpy()[:] = body
    return values


def body_of(values: torch.Tensor) -> np.ndarray:
    """The body of a MODEL frame (uint8)."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
