"""Momentum correction: each rank applies momentum to its own gradient, before sparsification.

With sparsification, most of a gradient waits in the residual. Momentum in the optimizer would see a delayed gradient
all at once, and would not discount it for the steps that it waited. Here, each rank accumulates its velocity
u = m u + g / W, the residual accumulates velocities instead of gradients, and the optimizer runs without momentum. If
everything is sent at once, this is SGD with momentum.

Compressors that are exact or unbiased keep nothing back, so the velocity is sent as it is, without residual or masking.

Guarantees that velocities are staged, committed, rolled back, saved and resized with the residuals. Sparsified tensors
travel by all-gather: if a sum were encoded again, no rank would know which of its elements were sent. Costs one
velocity per residual (8 bytes per element) and, with masking, one decode of the rank's own payload.

Source: DGC (Lin et al. 2018), sections 3.2 and 3.3, algorithm 4. Differences: gradients are clipped per tensor, as in
the authors' code, not by the norm of the whole model, because backward produces them one by one. Weight decay stays in
the optimizer, outside the momentum: multiplied by 1 / (1 - m), it pulls as before. Compressors that are not sparse have
momentum correction too, without masking.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Compressor, options
from gradwire.core import host
from gradwire.core.errors import OptionError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.policies import FLUSH, EncodeInput, ErrorFeedback, register
from gradwire.wire.payload import Payload


class MomentumCorrection(ErrorFeedback):
    """Momentum before sparsification; see `gradwire.residuals.momentum`.

    Args:
        momentum: Momentum factor m, at least 0 and below 1.
        nesterov: Whether to contribute g / W + m u instead of u.
        masking: Whether to reset the velocity of each element that a sparse compressor has just sent, so that stale
            momentum does not overshoot (momentum factor masking). Also of those selected but lost to a collision; see
            `Compressor.loses_selected`. Others, such as `onebit`, send all elements: no momentum would be left.
        clip: Largest norm of a tensor's mean gradient, as if the gradients of ranks were independent: each rank's part
            of it, g / W, may have 1 / sqrt(W) of that norm (DGC, algorithm 4), without the loss scale of a GradScaler
            that `attach` was given. 0 disables clipping.
    """

    name: ClassVar[str] = "momentum"
    has_velocity = True

    def __init__(
        self, momentum: float = 0.9, *, nesterov: bool = False, masking: bool = True, clip: float = 0.0
    ) -> None:
        self.momentum = options.real("momentum", momentum, 0.0, 1.0, high_open=True)
        self.nesterov, self.masking = options.flag("nesterov", nesterov), options.flag("masking", masking)
        self.clip = options.real("clip", clip, 0.0, math.inf, high_open=True)

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **others: Any
    ) -> MomentumCorrection:
        """Move the momentum of one or several `torch.optim.SGD` into a policy. Their own momentum becomes 0.

        Args:
            optimizer: Optimizers that have not taken a step.
            others: Further options of the policy.

        Raises:
            OptionError: Another kind of optimizer, different momenta, none, dampening, or an optimizer that has taken
                steps.
            OptionTypeError: Not an optimizer.
        """
        optimizers = optimizers_of(optimizer)
        groups = [group for each in optimizers for group in each.param_groups]
        found = {(group.get("momentum"), group.get("nesterov"), group.get("dampening")) for group in groups}
        momentum, nesterov, dampening = found.pop()
        if not all(isinstance(each, torch.optim.SGD) for each in optimizers) or found or dampening:
            kinds = " and ".join(type(each).__name__ for each in optimizers)
            momenta = sorted({str(group.get("momentum")) for group in groups})
            raise OptionError(
                "Momentum can only be taken from torch.optim.SGD with one momentum and no dampening. This is "
                f"{kinds} with momentum {', '.join(momenta)}. Give all groups one momentum, or use "
                "MomentumCorrection(momentum) and an optimizer without momentum."
            )
        if not momentum:
            raise OptionError(
                "This optimizer has no momentum. If MomentumCorrection.of() took it before, or it came with the saved "
                "state of such a training, create the optimizer with its momentum, attach, and load its state after "
                "that. Otherwise pass MomentumCorrection(0.9), or leave feedback out."
            )
        states = [state for each in optimizers for state in each.state.values()]
        if any(state.get("momentum_buffer") is not None for state in states):
            raise OptionError(
                "This optimizer has taken steps and holds momentum buffers. Call MomentumCorrection.of() on a new "
                "optimizer, and do not load the state of this one into it: that would bring its momentum back."
            )
        policy = cls(float(momentum), nesterov=bool(nesterov), **others)
        for settings in (*groups, *(each.defaults for each in optimizers)):  # defaults: for groups that are added later
            settings.update(momentum=0, nesterov=False)
        return policy

    @property
    def options(self) -> dict[str, Any]:
        """Options by name."""
        return {key: getattr(self, key) for key in ("clip", "masking", "momentum", "nesterov")}

    def keeps_residuals(self, compressor: Compressor) -> bool:
        return not (compressor.exact or compressor.unbiased)

    def is_compiled(self, compressor: Compressor) -> bool:
        merges = compressor.exact  # only exact ones travel by strategies that do
        return not (merges or self.nesterov or self.clip or self._masks(compressor))

    def _masks(self, compressor: Compressor) -> bool:
        return self.masking and compressor.sparse and self.keeps_residuals(compressor)

    def factor(self, gradient: torch.Tensor, world_size: int, loss_scale: float) -> float:
        if not self.clip:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        most = loss_scale * self.clip * math.sqrt(world_size)  # of g, which is W times its part of the mean
        return most / norm if most < norm < math.inf else 1.0

    def contribution(self, own: EncodeInput) -> EncodeInput:
        """Stage the rank's velocity, and return it in place of its gradient."""
        grad = as_array(own.grad)
        key = replace(own.key, role="velocity")
        before = own.residuals.source(key)
        velocity = own.residuals.stage(key)
        if before is None:
            kernels.compensate(grad, own.scale, None, velocity)
        else:
            kernels.advance_velocity(grad, own.scale, before, self.momentum, velocity)
        if self.nesterov:
            ahead = np.float32(self.momentum) * velocity
            kernels.compensate(grad, own.scale, ahead, ahead)
            velocity = ahead
        return own._replace(grad=torch.from_numpy(velocity), scale=1.0)

    def encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        compressor, _, ctx, residuals, key, _ = source
        if not self.keeps_residuals(compressor):
            left = None if stats else residuals.source(key)  # by another plan
            if not stats and (left is None or not left.any()):
                return compressor.encode(source.grad, ctx, scale=source.scale)
            return FLUSH.encode(source, stats)
        payload = super().encode(source, stats)
        if self._masks(compressor) and key.role == "local" and not payload.nonfinite:
            sent = compressor.decode(payload, ctx, out=host.empty(key.range.count), stats=stats)
            velocity = residuals.stage(replace(key, role="velocity"))
            np.copyto(velocity, np.float32(0), where=self._selected(source, as_array(sent)))
        return payload

    def _selected(self, source: EncodeInput, sent: np.ndarray) -> np.ndarray:
        """Return where elements were selected: those sent, and larger ones that the compressor left behind."""
        selected: np.ndarray = sent != 0
        if source.compressor.loses_selected and selected.any():
            least = np.abs(sent[selected]).min()
            selected |= np.abs(source.residuals.stage(source.key)) > least
        return selected


register(MomentumCorrection)
