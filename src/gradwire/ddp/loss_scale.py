"""The loss scale of the residuals of an attached module, which is that of the gradients they belong to."""

from __future__ import annotations

import torch

from gradwire.ddp.optimizers import Optimizers
from gradwire.sync.synchronizer import Synchronizer


class LossScale:
    """Rescales residuals when the loss scale changes.

    Args:
        synchronizer: Synchronizer of the module's gradients.
        optimizers: Optimizers of the module.
        scaler: GradScaler of its gradients. None if `attach` was given none.

    Attributes:
        of_residuals: Loss scale of the residuals, as far as backward passes and loaded states tell. None if they do
            not.
    """

    def __init__(self, synchronizer: Synchronizer, optimizers: Optimizers, scaler: torch.amp.GradScaler | None) -> None:
        self.of_residuals: float | None = None
        self._synchronizer = synchronizer
        self._optimizers = optimizers
        self._scaler = scaler

    def begin_backward(self) -> None:
        """Rescale residuals to the loss scale of this backward pass.

        A GradScaler lowers its scale when it skips a step. The gradients of its optimizer count as thrown away then,
        also if those that are not finite are of parameters which gradwire does not average.
        """
        before = self.of_residuals
        if self._scaler is None and before is None:
            return
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if before is not None and scale < before:
            for names in self._optimizers.waiting:
                self._synchronizer.rollback(names)
        if before is not None and scale != before:
            self._synchronizer.rescale(scale / before)
        self.of_residuals = self._synchronizer.residuals.loss_scale = scale
        for each in self._optimizers.states:
            each.loss_scale = scale

    def to_save(self) -> float | None:
        """Return the loss scale of the residuals. None if it is not known."""
        if self._scaler is None and self._optimizers.have_scaler:  # `attach` was not given it
            return None
        return 1.0 if self.of_residuals is None and self._optimizers else self.of_residuals
