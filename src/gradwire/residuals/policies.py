"""Residual policies: how a gradient is compensated before it is encoded, and what is kept afterwards.

A policy sees the gradient and the residual, and hands the compensated gradient to the compressor. `none`
encodes the gradient alone, `error` adds what earlier encodes kept back, `momentum` (see `gradwire.residuals.momentum`)
has a velocity besides. As text a policy is its name, with those options that are not the default:
``momentum:momentum=0.95:clip=1.0``.

Source: error feedback as in Karimireddy et al. 2019, algorithm 2. Differences: the learning rate is not part
of it, the residual is a gradient; and it is staged, not replaced, until the step commits.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Compressor, Stat
from gradwire.compressors.base.registry import parse_option
from gradwire.core.context import Context
from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.transaction import ResidualKey, Residuals
from gradwire.wire.payload import Payload


class Policy(ABC):
    """How gradients are compensated. One instance serves all tensors; state lives in `Residuals`."""

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

    def own(
        self, grad: torch.Tensor, ctx: Context, residuals: Residuals, key: ResidualKey, scale: float
    ) -> tuple[torch.Tensor, float]:
        """What this rank contributes in place of scale · grad, its own gradient, and the scale of that: once a step."""
        return grad, scale

    @abstractmethod
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
        """Compensate scale · grad, encode it, and stage what the payload does not carry.

        Args:
            compressor: what encodes.
            grad: what `own` gave, or an aggregate of decoded payloads.
            ctx: context of the encode.
            residuals: state of this rank.
            key: whose residual this is.
            scale: 1/W for a rank's own gradient, 1 for an aggregate that is in mean units already.
            stats: the reduced preliminary round, where the compressor needs one; see `stats`.
        """

    @abstractmethod
    def stats(
        self,
        compressor: Compressor,
        grad: torch.Tensor,
        ctx: Context,
        residuals: Residuals,
        key: ResidualKey,
        *,
        scale: float = 1.0,
    ) -> list[Stat]:
        """Statistics of what `encode` will encode, for compressors with `needs_stats`.

        Must be followed by `encode` with the same arguments and the reduced values, or by a rollback.
        """

    def take_back(
        self,
        residuals: Residuals,
        key: ResidualKey,
        grad: torch.Tensor,
        scale: float,
        sent: np.ndarray,
        late: np.ndarray,
    ) -> None:
        """Keep what `encode` has sent in this step of some elements, for it came too late to count.

        Args:
            residuals: state of this rank.
            key: whose residual this is.
            grad: as given to `encode`.
            scale: as given to `encode`.
            sent: what the payload decodes to, float32[N].
            late: of which elements, bool[N].
        """
        residuals.stage(key)[late] += sent[late]


class NoFeedback(Policy):
    """Encodes the gradient alone: for compressors that are exact or unbiased."""

    name: ClassVar[str] = "none"

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
        """Encode scale · grad; residuals are not looked at."""
        return compressor.encode(grad, ctx, stats, scale=scale)

    def stats(
        self,
        compressor: Compressor,
        grad: torch.Tensor,
        ctx: Context,
        residuals: Residuals,
        key: ResidualKey,
        *,
        scale: float = 1.0,
    ) -> list[Stat]:
        """Statistics of scale · grad."""
        return compressor.stats(grad, ctx, scale)

    def take_back(
        self,
        residuals: Residuals,
        key: ResidualKey,
        grad: torch.Tensor,
        scale: float,
        sent: np.ndarray,
        late: np.ndarray,
    ) -> None:
        """Keep the gradient of these elements: the next encode of them then has feedback."""
        kept = residuals.stage(key)
        kept.fill(0)
        kept[late] = np.float32(scale) * grad.detach().float().numpy()[late]


class ErrorFeedback(Policy):
    """Encodes the gradient plus what earlier encodes kept back: for biased compressors."""

    name: ClassVar[str] = "error"

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
        """Encode scale · grad + residual and stage the rest, in one sweep where the compressor can."""
        if stats:
            compensated = residuals.stage(key)  # by `stats`
            return compressor.encode(torch.from_numpy(compensated), ctx, stats, residual_out=compensated)
        before = residuals.source(key)
        return compressor.encode(grad, ctx, scale=scale, residual_in=before, residual_out=residuals.stage(key))

    def stats(
        self,
        compressor: Compressor,
        grad: torch.Tensor,
        ctx: Context,
        residuals: Residuals,
        key: ResidualKey,
        *,
        scale: float = 1.0,
    ) -> list[Stat]:
        """Statistics of scale · grad + residual, which is staged."""
        before = residuals.source(key)
        compensated = residuals.stage(key)
        kernels.compensate(as_array(grad), scale, before, compensated)
        return compressor.stats(torch.from_numpy(compensated), ctx)


_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (NoFeedback, ErrorFeedback)}


def register(policy: type[Policy]) -> None:
    """Make a policy known under its name."""
    _POLICIES[policy.name] = policy


@functools.cache
def get(text: str) -> Policy:
    """Return the policy that a text names.

    Raises:
        UnknownNameError: there is none, or it has no such option; the message lists the known ones.
        OptionError, TypeError: an option without a value, out of range, or of another type.
    """
    name, *given = text.split(":")
    if name not in _POLICIES:
        raise UnknownNameError("feedback policy", name, _POLICIES)
    known, options = _POLICIES[name]().options, dict(parse_option(each, text) for each in given)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of {name}", option, known)
    return _POLICIES[name](**options)


def names() -> list[str]:
    """The names of all policies."""
    return sorted(_POLICIES)
