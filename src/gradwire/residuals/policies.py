"""Residual policies: how a gradient is compensated before it is encoded, and what is kept afterward.

- ``none`` encodes the gradient alone.
- ``error`` adds the residual of earlier encodes (error feedback).
- ``momentum`` also keeps a velocity; see `gradwire.residuals.momentum`.

As text, a policy is its name and the options that differ from their defaults: ``momentum:clip=1.0:momentum=0.95``.

Source: Karimireddy et al. 2019, algorithm 2. Differences: a residual is a gradient, without the learning rate. It is
staged, and replaces the one before only when the step commits.
"""
# Shapes: N = elements of the range

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import Compressor, Stat
from gradwire.compressors.base.registry import parse_option
from gradwire.core.context import Context
from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.wire.payload import Payload


class EncodeInput(NamedTuple):
    """The input of one encode: `scale · grad`, and where its residual is.

    Attributes:
        compressor: Compressor that encodes.
        grad: Gradient of this rank, or an aggregate of decoded payloads.
        ctx: Context of the encode.
        residuals: Residuals of this rank.
        key: Key of the residual.
        scale: 1/W for a rank's own gradient; 1 for an aggregate, which is in units of the mean already.
    """

    compressor: Compressor
    grad: torch.Tensor
    ctx: Context
    residuals: Residuals
    key: ResidualKey
    scale: float = 1.0


class Policy(ABC):
    """Compensation of gradients. One instance serves all tensors; its state is in `Residuals`."""

    name: ClassVar[str]
    has_velocity: ClassVar[bool] = False

    @property
    def options(self) -> dict[str, Any]:
        """Options by name."""
        return {}

    def __str__(self) -> str:
        default = type(self)().options
        changed = {key: value for key, value in sorted(self.options.items()) if value != default[key]}
        return ":".join([self.name, *(f"{key}={value}" for key, value in changed.items())])

    def keeps_residuals(self, compressor: Compressor) -> bool:
        """Whether this policy keeps what a compressor leaves out."""
        return True

    def is_compiled(self, compressor: Compressor) -> bool:
        """Whether the compiled calls for fusion groups do all that this policy does; see `gradwire.sync.batch`."""
        return False

    def factor(self, gradient: torch.Tensor, world_size: int, loss_scale: float) -> float:
        """Return the factor of a rank's own gradient in this step.

        Args:
            gradient: All of it; `contribution` sees a range.
            world_size: Number of ranks.
            loss_scale: Factor by which all gradients are scaled.
        """
        return 1.0

    def contribution(self, own: EncodeInput) -> EncodeInput:
        """Return what stands for a rank's own gradient in this step. Called once per step and range."""
        return own

    @abstractmethod
    def encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        """Compensate `source`, encode it, and stage what the payload does not carry.

        Args:
            source: Result of `contribution`, or an aggregate.
            stats: Reduced preliminary round, if the compressor needs one; see `stats`.
        """

    @abstractmethod
    def stats(self, source: EncodeInput) -> list[Stat]:
        """Return the statistics of what `encode` will encode, for compressors with `needs_stats`.

        Call `encode` with the same input and the reduced values afterward, or roll back.
        """

    def restore_late(self, source: EncodeInput, sent: np.ndarray, late: np.ndarray) -> None:
        """Keep elements that `encode` sent in this step and that arrived too late to count.

        Args:
            source: Input of `encode`.
            sent: Decoded payload, float32[N].
            late: True for each element to keep, bool[N].
        """
        source.residuals.stage(source.key)[late] += sent[late]


class NoFeedback(Policy):
    """Encodes the gradient alone: for compressors that are exact or unbiased."""

    name: ClassVar[str] = "none"

    def keeps_residuals(self, compressor: Compressor) -> bool:
        return False

    def is_compiled(self, compressor: Compressor) -> bool:
        return True

    def encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        return source.compressor.encode(source.grad, source.ctx, stats, scale=source.scale)

    def stats(self, source: EncodeInput) -> list[Stat]:
        return source.compressor.stats(source.grad, source.ctx, source.scale)

    def restore_late(self, source: EncodeInput, sent: np.ndarray, late: np.ndarray) -> None:
        """Keep the gradient of these elements, which are added to the next one."""
        kept = source.residuals.stage(source.key)
        kept.fill(0)
        kept[late] = np.float32(source.scale) * source.grad.detach().float().numpy()[late]


class ErrorFeedback(Policy):
    """Encodes the gradient plus its residual, in one sweep if the compressor can: for biased compressors."""

    name: ClassVar[str] = "error"

    def is_compiled(self, compressor: Compressor) -> bool:
        return True

    def encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        compressor, grad, ctx, residuals, key, scale = source
        if stats:
            compensated = residuals.stage(key)  # by `stats`
            return compressor.encode(torch.from_numpy(compensated), ctx, stats, residual_out=compensated)
        before = residuals.source(key)
        return compressor.encode(grad, ctx, scale=scale, residual_in=before, residual_out=residuals.stage(key))

    def stats(self, source: EncodeInput) -> list[Stat]:
        compressor, grad, ctx, residuals, key, scale = source
        before = residuals.source(key)
        compensated = residuals.stage(key)
        kernels.compensate(as_array(grad), scale, before, compensated)
        return compressor.stats(torch.from_numpy(compensated), ctx)


class Flush(ErrorFeedback):
    """Encodes the gradient plus what another policy has left of it, and keeps nothing.

    Where the compressor is unbiased, so is what is sent. Error feedback would not end here: a compressor that is
    unbiased need not be a contraction, and then its residuals grow from step to step.
    """

    name: ClassVar[str] = "flush"

    def keeps_residuals(self, compressor: Compressor) -> bool:
        return False

    def is_compiled(self, compressor: Compressor) -> bool:
        return False

    def encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        compressor, grad, ctx, residuals, key, scale = source
        if compressor.exact:  # what is left is zero, or what 16 bits cannot hold
            return super().encode(source, stats)
        before = None if stats else residuals.source(key)
        compensated = residuals.stage(key)
        if not stats:  # otherwise, `stats` has compensated
            kernels.compensate(as_array(grad), scale, before, compensated)
        payload = compressor.encode(torch.from_numpy(compensated), ctx, stats)
        compensated.fill(0)
        return payload


FLUSH = Flush()  # not registered: a plan cannot ask for it
_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (NoFeedback, ErrorFeedback)}


def register(policy: type[Policy]) -> None:
    """Register a policy under its name."""
    _POLICIES[policy.name] = policy


@functools.cache
def get(text: str) -> Policy:
    """Return the policy that a text names.

    Raises:
        UnknownNameError: No such policy or option. The message lists the known ones.
        OptionError, TypeError: An option without a value, out of range, or of the wrong type.
    """
    name, *given = text.split(":")
    if name not in _POLICIES:
        raise UnknownNameError("feedback policy", name, _POLICIES)
    known, options = _POLICIES[name]().options, dict(parse_option(each, text) for each in given)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of {name}", option, known)
    return _POLICIES[name](**options)
