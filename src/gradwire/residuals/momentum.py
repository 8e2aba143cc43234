"""Momentum correction: momentum is accumulated before sparsification, of each rank's own gradient.

Where most of a gradient waits in the residual, momentum in the optimizer is that of what has been sent: a delayed
gradient enters it all at once and keeps the discount of none of the steps that it waited. Here each rank accumulates
its velocity u = m u + g / W, the residual accumulates velocities in place of gradients, and the optimizer runs without
momentum. Where everything is sent at once that is momentum SGD.

Options: `momentum`, m; `nesterov`; `masking`, which stops the velocity of an element where it has just been sent, so
that stale momentum does not drive it past its mark (momentum factor masking); `clip`, the largest norm of a tensor's
gradient over all ranks, of which each rank's own may have 1 / sqrt(W), 0 for none.

What is exact or unbiased keeps nothing back: its velocity is sent as it is, without residual and masking.

Guarantees that velocities are staged, committed, rolled back, saved and resized with the residuals. Sparsified tensors
travel by all-gather: where sums are encoded anew, no rank knows what of its own was sent. Costs a velocity beside each
residual (8 bytes an element) and, with masking, a decode of the rank's own payload.

Source: DGC (Lin et al. 2018), sections 3.2 and 3.3, algorithm 4. Differences: gradients are clipped tensor by tensor as
backward yields them, as in the authors' code, not by a norm over the whole model. Weight decay stays in the optimizer,
outside of the momentum: 1 / (1 - m) times the factor pulls as before.
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
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.policies import ErrorFeedback, register
from gradwire.residuals.transaction import ResidualKey, Residuals
from gradwire.wire.payload import Payload


class MomentumCorrection(ErrorFeedback):
    """Momentum before sparsification; see the module.

    Args:
        momentum: m, from 0 to 1.
        nesterov: contribute g / W + m u in place of u.
        masking: stop the velocity where an element has been sent.
        clip: largest norm of a tensor's gradient over all ranks; 0 for none.
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
        """Take the momentum out of a `torch.optim.SGD`, or of several: it is 0 there from now on, and this policy's.

        Raises:
            OptionError: another optimizer, several momenta, dampening, or steps that were taken already.
            OptionTypeError: no optimizer.
        """
        optimizers = optimizers_of(optimizer)
        groups = [group for each in optimizers for group in each.param_groups]
        found = {(group.get("momentum"), group.get("nesterov"), group.get("dampening")) for group in groups}
        momentum, nesterov, dampening = found.pop()
        if not all(isinstance(each, torch.optim.SGD) for each in optimizers) or found or dampening:
            kinds = " and ".join(type(each).__name__ for each in optimizers)
            raise OptionError(
                f"Expected torch.optim.SGD with one momentum and no dampening, got {kinds} with "
                f"{sorted({str(group.get('momentum')) for group in groups})}. Do: give all groups one momentum, or "
                "make MomentumCorrection(momentum) and an optimizer without momentum yourself."
            )
        states = [state for each in optimizers for state in each.state.values()]
        if any(state.get("momentum_buffer") is not None for state in states):
            raise OptionError(
                "Expected an optimizer that has taken no step, got one with momentum buffers. Do: take its momentum "
                "before the first step, or before a checkpoint is loaded."
            )
        for group in groups:
            group.update(momentum=0, nesterov=False)
        return cls(float(momentum or 0), nesterov=bool(nesterov), **others)

    @property
    def options(self) -> dict[str, Any]:
        """Options by name."""
        return {key: getattr(self, key) for key in ("clip", "masking", "momentum", "nesterov")}

    def own(
        self, grad: torch.Tensor, ctx: Context, residuals: Residuals, key: ResidualKey, scale: float
    ) -> tuple[torch.Tensor, float]:
        """The rank's velocity, which is staged, in place of its gradient."""
        scale *= self._clipping(grad, ctx.world_size)
        place = replace(key, role="velocity")
        before = residuals.source(place)
        velocity = residuals.stage(place)
        if before is not None:
            np.multiply(before, np.float32(self.momentum), out=velocity)
        kernels.compensate(as_array(grad), scale, None if before is None else velocity, velocity)
        if not self.nesterov:
            return torch.from_numpy(velocity), 1.0
        ahead = np.float32(self.momentum) * velocity
        kernels.compensate(as_array(grad), scale, ahead, ahead)
        return torch.from_numpy(ahead), 1.0

    def _clipping(self, grad: torch.Tensor, world_size: int) -> float:
        if not self.clip:
            return 1.0
        norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
        most = self.clip / math.sqrt(world_size)
        return most / norm if most < norm < math.inf else 1.0

    def encode(
        self,
        compressor: Compressor,
        grad: torch.Tensor,
        ctx: Context,
        residuals: Residuals,
        key: ResidualKey,
        *,
        scale: float = 1.0,
        stats: Sequence[np.ndarray] = (),
    ) -> Payload:
        """Encode what `own` gave and the residual, and mask the velocity: not where nothing is kept back."""
        keeps = not (compressor.exact or compressor.unbiased)
        if not keeps and residuals.source(key) is None:
            return compressor.encode(grad, ctx, stats, scale=scale)
        payload = super().encode(compressor, grad, ctx, residuals, key, scale=scale, stats=stats)
        if self.masking and key.role == "local" and keeps and not payload.nonfinite:
            sent = compressor.decode(payload, ctx, out=torch.empty(key.range.count), stats=stats)
            velocity = residuals.stage(replace(key, role="velocity"))
            np.copyto(velocity, np.float32(0), where=as_array(sent) != 0)
        return payload


register(MomentumCorrection)
