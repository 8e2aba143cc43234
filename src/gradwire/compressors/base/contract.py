"""The contract of a compressor.

A compressor turns a gradient into a payload, and a payload back into a gradient. It declares what holds for it as
data, so that the synchronizer and the planner need no knowledge of any algorithm. An algorithm implements
`max_encoded_bytes`, `encode` and `decode`; all other methods have defaults.

Two subclasses of `Compressor` add abilities:

- `SummableCompressor`: payloads add up without being decoded. Its subclass `LookupCompressor` sends indices into a
  table, which an aggregation server can add.
- `StatefulCompressor`: something of one step is used in the next.
"""
# Shapes: N = elements of the tensor or range, W = ranks, G = blocks, P = elements of whole blocks

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from gradwire.core import buffers, host
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.payload import Payload

Reduction = Literal["sum", "max", "min"]
FeedbackName = Literal["none", "error"]
StateSource = Literal["payload", "accumulator", "mean"]
_ANY = TensorSpec((1,))


@dataclass(frozen=True)
class Stat:
    """One tensor that must be reduced over all ranks before `encode`.

    Attributes:
        values: Array of one dimension, float32. Its length depends on the spec alone, so that every rank expects it.
        reduction: How the values of all ranks are combined.
    """

    values: np.ndarray
    reduction: Reduction


class Compiled(NamedTuple):
    """A compressor as compiled functions, with which many small tensors are encoded or decoded in one call.

    Attributes:
        encode: Kernel with the signature of generated code, see `gradwire.lang.targets.numba`.
        decode_sum: Kernel likewise.
        static: Returns the static values, float64[S], for a number of elements and a step.
        scratch_bytes: Returns the bytes of scratch memory for a number of elements and of payloads.
        uses_step: Whether static values change from step to step.
        uses_keys: Whether the functions draw random numbers.
    """

    encode: Any
    decode_sum: Any
    static: Callable[[int, int], np.ndarray]
    scratch_bytes: Callable[[int, int], int]
    uses_step: bool = False
    uses_keys: bool = False


class Compressor(ABC):
    """Base class of all compressors. Instances are immutable; options are arguments of the constructor.

    Attributes:
        name: Name in the registry.
        unbiased: If true, the expected value of decode(encode(g)) over the private random stream is g.
        exact: If true, decode(encode(g)) is g, bit for bit, in the tensor's own element type.
        dense: If true, a payload is the memory of the tensor: nothing is encoded.
        elementwise: If true, each element is encoded by itself, so that several tensors can be encoded as one.
        sparse: If true, payloads list (position, value) pairs, and all other elements decode to zero.
        unique_encoding: If true, different payloads never decode to the same tensor: the decoder rejects all bytes that
            the encoder would not write.
        encode_own_before_merge: If true, the merging rank also encodes its own gradient, so that all ranks carry equal
            weight.
        loses_selected: If true, elements larger than the smallest one sent may stay behind, such as those that lose
            their slot of a hash table. Momentum's factor masking treats them like the ones sent.
        requires_full_tensor: If true, tensors are never cut into ranges, and contexts have the tensor's shape.
        stats_at_owner: If true, the owner of a range reduces the statistics of all ranks, since they grow with the
            tensor. If false, every rank sends them to all others and reduces them itself.
        needs_optimizer: If true, `Context.aux` must hold slices of the parameter and the optimizer state.
        range_alignment: Ranges of a tensor begin at multiples of this many elements, a power of two, so that strategies
            with other ranges cut the tensor into the same blocks.
        default_feedback: Residual policy that the algorithm needs, ``"none"`` or ``"error"``.
    """

    name: ClassVar[str]
    unbiased: bool = False
    exact: bool = False
    dense: bool = False
    elementwise: bool = False
    sparse: bool = False
    unique_encoding: bool = False
    encode_own_before_merge: bool = False
    loses_selected: bool = False
    requires_full_tensor: bool = False
    stats_at_owner: bool = False
    needs_optimizer: bool = False
    range_alignment: int = 1
    default_feedback: FeedbackName = "error"

    # -- declarations ----------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """Options of this instance by name. Name and options together identify a compressor."""
        return {}

    def derived_config(self, world_size: int) -> dict[str, Any]:
        """Values derived from the options that ranks compare before training, such as a lookup table; plain data."""
        return {}

    def contraction(self, spec: TensorSpec) -> float | None:
        """The δ of ‖g − decode(encode(g))‖² ≤ (1 − δ)‖g‖² for every g of this spec, or None.

        The bound does not cover elements so small that float32 arithmetic turns them into 0; see each compressor.
        """
        return None

    def variance(self, spec: TensorSpec) -> float | None:
        """The ω of E‖g − decode(encode(g))‖² ≤ ω‖g‖² for every g of this spec, or None. ω includes the bias.

        Small elements are excepted as in `contraction`. No element decodes to more than max(2, 1 + ω) times the largest
        magnitude of g.
        """
        return None

    @abstractmethod
    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Largest size of a payload of this spec. Receivers allocate their buffers by it."""

    # -- preliminary round -----------------------------------------------------------------------------------

    @property
    def needs_stats(self) -> bool:
        """Whether ranks reduce `stats` before they encode."""
        return bool(self.stats_spec(_ANY))

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """Return what must be reduced over ranks before `encode`: the preliminary round.

        Args:
            grad: Gradient to be encoded; with feedback, the compensated gradient.
            ctx: Context of the `encode` call that follows.
            scale: Factor of the gradient, as for `encode`.

        Returns:
            Values to reduce. For a gradient that is not finite they contain +inf, which survives every maximum and sum.
        """
        return []

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """Length and reduction of each entry of `stats`."""
        return []

    def finish_stats(self, reduced: Sequence[np.ndarray], spec: TensorSpec) -> Sequence[np.ndarray]:
        """Return what `encode`, `decode` and `finalize` take as `stats`: by default, the reduced values themselves.

        Called once per step on each rank, or on the owner only (`stats_at_owner`), for what would otherwise be computed
        from the reduced values several times. Entries keep their lengths, and those that are not finite stay so.
        """
        return reduced

    # -- encode and decode -----------------------------------------------------------------------------------

    @abstractmethod
    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        *,
        scale: float = 1.0,
        residual_in: np.ndarray | None = None,
        residual_out: np.ndarray | None = None,
    ) -> Payload:
        """Encode x = scale · grad + residual_in.

        Args:
            grad: Gradient of any shape, strides and element type in `ELEMENT_TYPES`.
            ctx: Name, step, rank and seed, on which all randomness depends.
            stats: Result of `finish_stats` for the reduced values of `stats`, in its order. If the compressor needs
                stats and none are given, it uses the tensor's own and writes them to the payload.
            scale: Factor of the gradient; 1/W makes the sum over ranks a mean.
            residual_in: Error of earlier encodes, float32[N], or None for zeros. Requires `residual_out`.
            residual_out: float32[N] that receives x − decode(payload), or None to drop it. May share its memory with
                `grad` or `residual_in`.

        Returns:
            The payload. If x contains NaN or infinity, the payload is marked as non-finite, carries no values, and
            decodes to NaN; exact compressors carry the values and the mark. The contents of `residual_out` are then
            undefined.
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
            payload: Untrusted bytes.
            ctx: The receiver's own context. Shape and element type come from `ctx.spec`, or from `out`.
            out: Contiguous tensor to write to; float32 if `accumulate` is set.
            accumulate: If true, add to `out` instead of overwriting it.
            stats: Those that `encode` was given, if any.

        Raises:
            PayloadError: The bytes are not a payload of this spec. The contents of `out` are then undefined.
        """

    def decode_sum(
        self, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, stats: Sequence[np.ndarray] = ()
    ) -> torch.Tensor:
        """Write the sum of several decoded payloads, added to 0.0 in their order, to float32 `out`."""
        out.zero_()
        for payload, ctx in zip(payloads, ctxs, strict=True):
            self.decode(payload, ctx, out=out, accumulate=True, stats=stats)
        return out

    def pairs(
        self, payload: Payload, ctx: Context, size: int, stats: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a payload made here lists: ascending positions, and the float32 values that they decode to.

        Args:
            payload: Payload with values, of a compressor that is `sparse`.
            ctx: Context of the encode.
            size: Number of elements.
            stats: As for `decode`.
        """
        dense = torch.from_numpy(buffers.empty(size, np.float32))
        self.decode(payload, ctx, dense, stats=stats)
        found = np.flatnonzero(dense.numpy())
        return found, dense.numpy()[found]

    def decodes_with_aux(self, payload: Payload) -> bool:
        """Whether a payload, of untrusted bytes, needs `Context.aux` to be decoded.

        If the receiver's own differs from the sender's, `decode` raises `StateMismatchError`.
        """
        return False

    def compiled(self) -> Compiled | None:
        """Return compiled functions for many small tensors at once; None if each must be encoded by itself."""
        return None

    # -- helpers for implementations -------------------------------------------------------------------------

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(self.options.items()))
        return f"{self.name}({options})"

    def _output(self, ctx: Context, out: torch.Tensor | None) -> torch.Tensor:
        """The tensor to decode into: `out` after a check against the context, or a new one."""
        if out is None:
            if ctx.spec is None:
                raise ValueError(
                    "decode needs a shape, and has neither ctx.spec nor out=. Pass spec=TensorSpec.of(grad) to Context."
                )
            return host.empty(ctx.spec.shape, ctx.spec.dtype)
        if ctx.spec is not None and out.numel() != ctx.spec.numel:
            raise ValueError(
                f"out has {out.numel()} elements, but ctx.spec has {ctx.spec.numel}. Pass an out of that shape."
            )
        if not out.is_contiguous():
            raise ValueError("out must be contiguous. Decode without out= and copy the result into the strided tensor.")
        return out

    def _expect_bytes(self, payload: Payload, expected: int) -> np.ndarray:
        if payload.body.nbytes != expected:
            raise PayloadError(f"Expected a {self.name} payload of {expected} bytes, got {payload.body.nbytes}.")
        return payload.body

    def _check_stats(self, stats: Sequence[np.ndarray], spec: TensorSpec) -> Sequence[np.ndarray]:
        """Return reduced stats if they have the shapes of `stats_spec`, and raise `ValueError` otherwise."""
        lengths, shapes = [length for length, _ in self.stats_spec(spec)], [values.shape for values in stats]
        if shapes != [(length,) for length in lengths]:
            raise ValueError(
                f"stats must have entries of {lengths} values, not of shapes {shapes}. Pass the result of `stats`, "
                "reduced over ranks."
            )
        return stats


def compensate(
    grad: torch.Tensor, scale: float, residual_in: np.ndarray | None, residual_out: np.ndarray | None
) -> torch.Tensor:
    """Write scale · grad + residual_in to float32 `residual_out`, and return it in the shape of the gradient."""
    assert residual_out is not None, "without residual_out, the error of this encode would be lost"
    kernels.compensate(as_array(grad), scale, residual_in, residual_out)
    return torch.from_numpy(residual_out).view(grad.shape)


class SummableCompressor(Compressor):
    """A compressor whose payloads add up without being decoded.

    Each payload is added to an accumulator: an array of integers, or of float32 if all ranks take the sum from one rank
    or add in rank order. Accumulators add up element by element, and `finalize` decodes the sum of all of them once.

    Attributes:
        has_finite_sums: If true, `finalize` writes only finite values, even if a sum in the accumulator has overflowed.
    """

    has_finite_sums: ClassVar[bool] = False

    @abstractmethod
    def accumulator_dtype(self, world_size: int, num_payloads: int | None = None) -> np.dtype:
        """Narrowest element type that holds the sum of `num_payloads` payloads (default: of all ranks) exactly."""

    @abstractmethod
    def accumulator_size(self, spec: TensorSpec) -> int:
        """Number of elements in the accumulator of a tensor."""

    def max_contribution(self, world_size: int) -> int | None:
        """Largest magnitude that one payload adds to an integer accumulator; None for float32."""
        return None

    @abstractmethod
    def accumulate(self, payload: Payload, ctx: Context, accumulator: np.ndarray) -> None:
        """Add a payload that was encoded with reduced stats to an accumulator.

        Raises:
            PayloadError: See `decode`.
        """

    @abstractmethod
    def finalize(
        self, accumulator: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Decode the sum of the payloads of `count` ranks, and write it to float32 `out`.

        The result is a sum: gradients that were scaled by 1/W add up to their mean.
        """

    def _expect_summable(self, payload: Payload, num_bytes: int) -> np.ndarray:
        """Return the body of a payload to accumulate."""
        if payload.nonfinite:
            raise PayloadError(f"A {self.name} payload that is marked as non-finite has no values to add.")
        return self._expect_bytes(payload, num_bytes)


class LookupTable(NamedTuple):
    """Integers that indices stand for.

    Attributes:
        values: uint32[2^bits], ascending from 0.
        bits: Bits of an index.
    """

    values: np.ndarray
    bits: int

    @property
    def granularity(self) -> int:
        """Largest value."""
        return int(self.values[-1])


class LookupCompressor(SummableCompressor):
    """A summable compressor that sends packed indices into a lookup table, block by block.

    An aggregation server looks the indices up and adds the integers, without any knowledge of the algorithm. Its sums
    may be of different ranks in different blocks.

    Attributes:
        block: Elements of a block.
    """

    block: int

    @property
    @abstractmethod
    def has_independent_blocks(self) -> bool:
        """Whether each block decodes by itself, so that different blocks may be sums of different ranks."""

    @abstractmethod
    def lookup_table(self, world_size: int) -> LookupTable:
        """Table for this number of ranks, the same on all of them."""

    @abstractmethod
    def finalize_blocks(
        self,
        sums: np.ndarray,
        num_added: int | np.ndarray,
        ctx: Context,
        stats: Sequence[np.ndarray],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Decode sums that were added elsewhere, and write the result to `out`.

        Args:
            sums: Sums of table values, integers[P].
            num_added: Number of payloads in the sums, for all blocks or for each, int[G].
            ctx: See `decode`.
            stats: Reduced values.
            out: float32[N].
        """


class StatefulCompressor(Compressor):
    """A compressor with one array of state per tensor range, kept from step to step.

    The state is in `ctx.state` of every encode and decode of the range; None at first. It is staged, committed, rolled
    back and saved together with the residuals. A state is a hint: it may be lost when ranges change, and may have been
    left by another compressor or other options, so a state that does not fit must be ignored.

    Attributes:
        state_source: Source of the next state: ``"payload"``, this rank's own payload of the range, so that ranks have
            different states; ``"accumulator"``, the summed accumulator, or ``"mean"``, the averaged gradient, so that
            the state is the same on all ranks.
    """

    state_source: ClassVar[StateSource]

    @abstractmethod
    def next_state(self, source: Any, ctx: Context) -> np.ndarray | None:
        """Compute the state of the next step.

        Args:
            source: What `state_source` names: a `Payload`, or an array.
            ctx: Context of the encode, or of the range that was averaged.

        Returns:
            Array of one dimension, float32 or uint8, which nobody writes to afterwards; None to keep the present state.
        """
