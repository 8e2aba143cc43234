"""The contract of a compressor.

A compressor turns a gradient into a payload and back. It declares its algebra as data, so that the layers
above need no knowledge of any algorithm: whether it is unbiased, whether it contracts, whether its payloads
can be added as they are, which reductions over ranks it needs first, and how many bytes it can take at most.

`encode` and `decode` are all that an algorithm must write. Everything else has a default that is right for
every algorithm and is overridden where one sweep over memory can do the work of several.
"""

# Shapes: N = elements of the tensor or range, W = ranks.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.payload import Payload

Reduction = Literal["sum", "max", "min"]
FeedbackName = Literal["none", "error"]


@dataclass(frozen=True)
class Stat:
    """One tensor that must be reduced over all ranks before `encode`.

    Attributes:
        values: float32, 1-D; its length depends on the spec alone, so that every rank expects the same.
        reduction: how ranks combine.
    """

    values: np.ndarray
    reduction: Reduction


class Compressor(ABC):
    """Base class of all compressors. Instances are immutable: options are given to the constructor.

    Attributes:
        name: the name under which it is registered.
        unbiased: whether the mean of decode(encode(g)) over the private stream is g.
        exact: whether decode(encode(g)) is g, bit for bit, at the tensor's own element type.
        summable: whether payloads can be lifted to lanes that add: integers, or float32 where every rank takes the sum
            from the one that formed it or adds in rank order.
        needs_stats: whether `stats` gives anything.
        canonical: whether two different payloads of a spec never decode to the same bits: the decoder takes
            no bytes but those that the encoder writes for what they mean.
        votes: whether ranks must count alike where their payloads are merged: who merges them encodes its own gradient,
            too, in place of adding it as it is.
        whole: whether tensors are never cut into ranges: contexts then have the tensor's own shape.
        remembers: whether encodes make use of what `remember` gave in the step before.
        needs_optimizer: whether contexts must have slices of parameters and optimizer state in `aux`.
        default_feedback: the residual policy that the algorithm needs: ``"none"`` or ``"error"``.
    """

    name: ClassVar[str]
    unbiased: bool = False
    exact: bool = False
    canonical: bool = False
    summable: bool = False
    needs_stats: bool = False
    votes: bool = False
    whole: bool = False
    remembers: bool = False
    needs_optimizer: bool = False
    default_feedback: FeedbackName = "error"

    # -- algebra ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """The options this instance was made with, by name: together with `name` its whole identity."""
        return {}

    def agreed(self, world_size: int) -> dict[str, Any]:
        """What ranks must have alike beside name and options, such as a table that is found: plain data, compared."""
        return {}

    def contraction(self, spec: TensorSpec) -> float | None:
        """The δ of ‖g − decode(encode(g))‖² ≤ (1 − δ)‖g‖² for every g of this spec, or None."""
        return None

    def variance(self, spec: TensorSpec) -> float | None:
        """The ω of E‖g − decode(encode(g))‖² ≤ ω‖g‖² for every g of this spec, the bias included; or None.

        No element decodes to more than 1 + ω times the largest magnitude of g: to more than twice that only where an
        ω above 1 is declared.
        """
        return None

    @abstractmethod
    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """The most bytes that a body of this spec can take. Receivers size their buffers by it."""

    # -- encode and decode -----------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """What must be reduced over ranks before `encode` (the preliminary round). Its bytes count.

        Args:
            grad: what will be encoded: with feedback, the compensated gradient.
            ctx: that of the encode to come.
            scale: the scale of `encode_compensated`, where that is called without feedback.

        Returns:
            The values to reduce. A non-finite gradient shows as +inf in them, which survives any maximum or
            sum.
        """
        return []

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """Length and reduction of each entry of `stats`, from the spec alone."""
        return []

    @abstractmethod
    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> Payload:
        """Encode `grad`.

        Args:
            grad: any shape, any element type of `ELEMENT_TYPES`, any strides.
            ctx: see `Context`. Randomness depends on nothing else.
            stats: the reduced values of `stats`, in its order. Where the compressor needs stats and none are
                given, the tensor's own are used and travel in the payload, so that `decode` needs none
                either.
            residual: float32, N elements. Where given, it receives grad − decode(payload), in the same sweep
                where the algorithm can; it may be the memory of `grad` itself.

        Returns:
            The payload. Where `grad` holds a NaN or an infinity, the payload is marked non-finite, carries no
            values and decodes to NaN everywhere (exact compressors carry the values as they are, and the
            mark); the content of `residual` is then undefined.
        """

    @abstractmethod
    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode a payload of this compressor.

        Args:
            payload: bytes from anywhere; nothing in them is trusted.
            ctx: the receiver's own context; `ctx.spec` (or `out`) fixes shape and element type.
            out: contiguous CPU tensor to write to; float32 where `accumulate` is set.
            accumulate: add to `out` in place of overwriting.
            stats: the reduced values, where `encode` had them.

        Raises:
            PayloadError: the bytes are not a payload of that spec. `out` may then hold anything.
        """

    # -- with a residual, many at once, sums -----------------------------------------------------------------

    def encode_compensated(
        self,
        grad: torch.Tensor,
        ctx: Context,
        work: np.ndarray | None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        stats: Sequence[np.ndarray] = (),
    ) -> Payload:
        """Compensate and encode in one call: what the synchroniser does with each gradient.

        Encodes scale · grad + residual and leaves in `work` what the payload does not carry: the new
        residual.

        Args:
            work: float32, N elements; the new residual on return. May be the same memory as `residual`. None
                without feedback: then `residual` must be None too, and what the payload loses is lost.
            scale: 1/W where the payload shall add up to a mean.
            residual: float32, N elements, or None for zero.
            stats: the reduced `stats` of scale · grad + residual. With feedback, a caller whose compressor
                needs stats compensates into `work` itself and calls `encode(work, ..., residual=work)`.
        """
        if work is None:
            assert residual is None, "a residual without a place for the next one would be lost"
            if scale == 1.0:
                return self.encode(grad, ctx, stats)
            scaled = np.empty(grad.numel(), np.float32)
            kernels.cast(as_array(grad), scaled, scale)
            return self.encode(torch.from_numpy(scaled).view(grad.shape), ctx, stats)
        kernels.compensate(as_array(grad), scale, residual, work)
        return self.encode(torch.from_numpy(work).view(grad.shape), ctx, stats, residual=work)

    def encode_many(
        self,
        grads: Sequence[torch.Tensor],
        ctxs: Sequence[Context],
        residuals: Sequence[np.ndarray | None] = (),
    ) -> list[Payload]:
        """Encode several tensors in one call."""
        residuals = residuals or [None] * len(grads)
        return [self.encode(grad, ctx, (), res) for grad, ctx, res in zip(grads, ctxs, residuals, strict=True)]

    def decode_sum(
        self,
        payloads: Sequence[Payload],
        ctxs: Sequence[Context],
        out: torch.Tensor,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode the payloads of several ranks into float32 `out`: their sum, from 0.0, in their order."""
        out.zero_()
        for payload, ctx in zip(payloads, ctxs, strict=True):
            self.decode(payload, ctx, out=out, accumulate=True, stats=stats)
        return out

    # -- summable compressors only ---------------------------------------------------------------------------

    def lane_dtype(self, world_size: int) -> np.dtype:
        """The narrowest integer type whose lanes hold the sum over `world_size` ranks without overflow, or float32."""
        raise NotImplementedError(f"{self!r} is not summable")

    def partial_lane_dtype(self, num_added: int, world_size: int) -> np.dtype:
        """The same for the sum of `num_added` of their payloads: what travels between the hops of a ring."""
        return self.lane_dtype(world_size)

    def lane_bound(self, world_size: int) -> int:
        """The largest magnitude that one payload adds to a lane of integers, where `world_size` ranks add theirs."""
        raise NotImplementedError(f"{self!r} does not add integers")

    def num_lanes(self, spec: TensorSpec) -> int:
        """How many lanes a tensor of this spec takes."""
        raise NotImplementedError(f"{self!r} is not summable")

    def lift(self, payload: Payload, ctx: Context, lanes: np.ndarray, accumulate: bool = False) -> np.ndarray:
        """Write (or add) a payload's values to `lanes`. Raises `PayloadError` as `decode` does."""
        raise NotImplementedError(f"{self!r} is not summable")

    def lower(
        self, lanes: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Turn lanes that hold the sum over `count` ranks into the decoded *sum*, written to `out`.

        The divisor is the caller's: payloads of scaled gradients add up to a mean by themselves.
        """
        raise NotImplementedError(f"{self!r} is not summable")

    def carry(self, lanes: np.ndarray, ctx: Context) -> np.ndarray | None:
        """What of the summed lanes comes back at the next step, float32, as ``aux["carried"]`` of its contexts.

        All ranks hold the same. It is committed, rolled back and saved with the residuals. There is none at first,
        and it may be that of other options: a hint and no more.
        """
        return None

    def remember(self, payload: Payload, ctx: Context, size: int) -> float:
        """What the next encode of the same elements gets in a float32 ``aux["remembered"]``, 0 for nothing.

        It is each rank's own, is committed, rolled back and saved with the residuals, and a hint and no more.
        """
        return 0.0

    # -- helpers for implementations -------------------------------------------------------------------------

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(self.options.items()))
        return f"{self.name}({options})"

    def _output(self, ctx: Context, out: torch.Tensor | None) -> torch.Tensor:
        """The tensor to decode into: `out` after a check against the context, or a fresh one."""
        if out is None:
            if ctx.spec is None:
                raise ValueError(
                    "Expected ctx.spec or out= in decode, got neither. Do: Context(..., spec=TensorSpec.of(grad))."
                )
            return torch.empty(ctx.spec.shape, dtype=ctx.spec.dtype)
        if ctx.spec is not None and out.numel() != ctx.spec.numel:
            raise ValueError(
                f"Expected out of {ctx.spec.numel} elements, got {out.numel()}. Do: pass out of ctx.spec's shape."
            )
        if not out.is_contiguous():
            raise ValueError("Expected a contiguous out, got a strided one. Do: decode without out= and copy into it.")
        return out

    def _expect_bytes(self, payload: Payload, expected: int) -> np.ndarray:
        if payload.body.nbytes != expected:
            raise PayloadError(f"Expected a {self.name} payload of {expected} bytes, got {payload.body.nbytes}.")
        return payload.body
