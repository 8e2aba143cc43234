"""PowerSGD: a matrix as the product of two thin factors, found by one step of a power iteration with a warm start.

The gradient of a parameter of shape (n, ...) is a matrix M with n rows, with short side A and long side B. A step:

1. P = M Q, summed over ranks in the preliminary round.
2. P̂ = P with orthonormal columns, the same bits on every rank.
3. Q = Mᵀ P̂, the payload. Payloads add up; P̂ (ΣQ)ᵀ is the mean.
4. The summed Q is the state with which the next step starts.

Biased, with error feedback. Exact for matrices of rank up to r. If the factors take as many bytes as the matrix, as for
all vectors, the elements travel as float32, which also add up.

Whoever forms P̂ or P̂ (ΣQ)ᵀ has the same bits to start from, and adds and multiplies in a fixed order, so that replicas
stay equal across machines of different kinds.

Body: P̂ᵀ, r rows of A float32, unless it was shared; Qᵀ, r rows of B float32. Or N float32.

Source: Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2. Differences: a residual is M − P̂ Qᵀ with the rank's own Q
instead of the mean Q. The sum over ranks is the same, and with it every P, Q and update, but residuals do not drift
apart if ranks see different data. A tall matrix is transposed, so that the shorter factor is the one that goes to all
ranks. Q is drawn from a uniform distribution, and its columns are normalized before use, which changes no P̂. A column
of P that depends on earlier ones is dropped, and its column of Q is drawn again at the next step, so that a gradient of
zeros does no harm. Not every rank finds P̂: the owner of a matrix does, for all ranks, unless all payloads go to all
ranks (`allgather`). Not written in `gradwire.lang`, which has no matrices.
"""
# Shapes: M[n, m] the gradient, N = n m, A = min(n, m), B = max(n, m), r = rank, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Reduction, Stat, StatefulCompressor, StateSource, SummableCompressor, options
from gradwire.compressors.base.array import ArrayCompressor, EncodeArguments, expect, expect_bytes, start_residual
from gradwire.compressors.base.registry import register
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

_MAX = float(np.finfo(np.float32).max)
EXACT_TO = _MAX * 2.0**-26
"""Less than half a unit in the last place of the largest float: adding it to a finite float gives a finite one."""


@register
class PowerSGD(ArrayCompressor, SummableCompressor, StatefulCompressor):
    """Low rank: a matrix as the product of two thin factors, by a power iteration over the steps.

    Args:
        rank: Number of columns of the factors, from 1 to 1024.
    """

    name: ClassVar[str] = "powersgd"
    requires_full_tensor = True
    stats_at_owner = True
    has_finite_sums = True
    state_source: ClassVar[StateSource] = "accumulator"

    def __init__(self, rank: int = 4) -> None:
        self.rank = options.integer("rank", rank, 1, 1024)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"rank": self.rank}

    def contraction(self, spec: TensorSpec) -> float | None:
        """1 for a tensor that is sent whole; otherwise None, since it depends on the matrix."""
        return None if self.is_cut(spec) else 1.0

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Size of both factors, or of the elements."""
        return 4 * self.rank * sum(_matrix_sides(spec)) if self.is_cut(spec) else 4 * spec.numel

    # -- preliminary round -----------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """Pᵀ, which is summed."""
        ctx = self._with_shape(ctx, grad)
        assert ctx.spec is not None
        ((length, reduction),) = self.stats_spec(ctx.spec)
        x = as_array(grad)
        if not length:
            return [Stat(np.empty(0, np.float32), reduction)]
        p = self._project(_as_float32(x), ctx, scale).reshape(-1)
        if kernels.count_nonfinite(p):  # then an element of x is not, or all are as large as floats can be
            p.fill(np.inf)
        return [Stat(p, reduction)]

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """The shorter factor, if the tensor is cut to a rank."""
        return [(self.rank * min(_matrix_sides(spec)) if self.is_cut(spec) else 0, "sum")]

    def finish_stats(self, reduced: Sequence[np.ndarray], spec: TensorSpec) -> Sequence[np.ndarray]:
        """P̂ᵀ from the reduced Pᵀ."""
        (p,) = self._check_stats(reduced, spec)
        return [orthonormal(p.reshape(self.rank, -1)).reshape(-1)] if p.size and np.isfinite(p).all() else reduced

    # -- encode and decode -----------------------------------------------------------------------------------

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        assert ctx.spec is not None
        stats, residual_out = args.stats, args.residual_out
        if not all(np.isfinite(entry).all() for entry in stats):
            return None
        if not self.is_cut(ctx.spec):
            if args.abs_max is None and kernels.count_nonfinite(x):
                return None
            body = np.empty(4 * x.size, np.uint8)
            kernels.cast(x, body.view(np.float32), args.scale)
            if residual_out is not None:
                residual_out.fill(0)
            return body
        values = _as_float32(x)
        p = self._basis(stats, ctx.spec) if stats else orthonormal(self._project(values, ctx, 1.0))
        q = _longer_factor(values, p, ctx.spec, args.scale)
        if q is None:
            return None
        if residual_out is not None:
            start_residual(x, residual_out)
            largest = _expand(p, q, ctx.spec, residual_out, -1.0)
            if largest > EXACT_TO and kernels.count_nonfinite(residual_out):
                return None  # elements near 3e38: all ranks skip the step, and nothing is lost
        return np.concatenate([factor.reshape(-1).view(np.uint8) for factor in ((q,) if stats else (p, q))])

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        assert ctx.spec is not None
        short, _ = _matrix_sides(ctx.spec)
        num_basis = 0 if stats or not self.is_cut(ctx.spec) else self.rank * short
        expect_bytes(body, 4 * (num_basis + self.accumulator_size(ctx.spec)), self.name)
        values = Reader(body).array(np.float32, body.nbytes // 4)
        _expect_finite(values)
        if not self.is_cut(ctx.spec):
            kernels.accumulate(values, out) if accumulate else np.copyto(out, values)
            return
        p = self._basis(stats, ctx.spec) if stats else values[:num_basis].reshape(self.rank, short)
        _expand(p, values[num_basis:].reshape(self.rank, -1), ctx.spec, out, float(accumulate))

    # -- accumulator and state -------------------------------------------------------------------------------

    def accumulator_dtype(self, world_size: int, num_payloads: int | None = None) -> np.dtype:
        """float32."""
        return np.dtype(np.float32)

    def accumulator_size(self, spec: TensorSpec) -> int:
        """Size of the longer factor, or of the tensor."""
        return self.rank * max(_matrix_sides(spec)) if self.is_cut(spec) else spec.numel

    def accumulate(self, payload: Payload, ctx: Context, accumulator: np.ndarray) -> None:
        """Add the values of a payload that was encoded with a shared P̂."""
        values = Reader(self._expect_summable(payload, accumulator.nbytes)).array(np.float32, accumulator.size)
        _expect_finite(values)
        with np.errstate(over="ignore"):  # `finalize` cuts sums to what is finite
            accumulator += values

    def finalize(
        self, accumulator: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply the shared P̂ by the summed Q."""
        ctx = self._with_shape(ctx, out)
        assert ctx.spec is not None
        accumulator = _cut_to_finite(accumulator)
        if self.is_cut(ctx.spec):
            _expand(self._basis(stats, ctx.spec), accumulator.reshape(self.rank, -1), ctx.spec, as_array(out), 0.0)
        else:
            np.copyto(as_array(out), accumulator)
        return out

    def next_state(self, source: np.ndarray, ctx: Context) -> np.ndarray | None:
        """The summed Q."""
        return _cut_to_finite(source) if ctx.spec is not None and self.is_cut(ctx.spec) else None

    # -- helpers ---------------------------------------------------------------------------------------------

    def is_cut(self, spec: TensorSpec) -> bool:
        """Whether the factors take fewer bytes than the matrix."""
        return self.rank * sum(_matrix_sides(spec)) < spec.numel

    def _project(self, x: np.ndarray, ctx: Context, scale: float) -> np.ndarray:
        """Pᵀ, scaled, and divided by √B lest it overflow: float32[r, A]."""
        assert ctx.spec is not None
        long = max(_matrix_sides(ctx.spec))
        return _product(x, self.start(ctx, long, scale / long**0.5), ctx.spec, long=False)

    def start(self, ctx: Context, long: int, scale: float = 1.0) -> np.ndarray:
        """Qᵀ of the previous step with rows of length `scale`, or random rows without one: float32[r, B]."""
        rows = np.zeros((self.rank, long), np.float32)
        state = ctx.state
        if state is not None and state.dtype == np.float32 and state.size % long == 0:  # may be of another rank
            kept = state.reshape(-1, long)[: self.rank]
            rows[: len(kept)] = kept
        unit = np.empty_like(rows)
        if kernels.normalize_rows(rows.reshape(-1), self.rank, scale, unit.reshape(-1)):
            words = np.empty(rows.size, np.uint32)
            kernels.random32(ctx.shared_key, 0, words)
            drawn = words.reshape(rows.shape) / 2.0**31 - 1
            rows = np.where(unit.any(1, keepdims=True), rows, drawn.astype(np.float32))
            kernels.normalize_rows(rows.reshape(-1), self.rank, scale, unit.reshape(-1))
        return unit

    def _basis(self, stats: Sequence[np.ndarray], spec: TensorSpec) -> np.ndarray:
        """P̂ᵀ that all ranks share: float32[r, A]."""
        (p,) = self._check_stats(stats, spec)
        return p.reshape(self.rank, -1)


def orthonormal(rows: np.ndarray) -> np.ndarray:
    """Orthonormal rows of the same span, by repeated Gram-Schmidt: float32[r, A]. Dependent rows become zero.

    In float64, with sums in the order of the elements and exactly rounded square roots, so that all machines get the
    same bits.
    """
    basis = rows.astype(np.float64)
    kernels.orthonormalize(basis.reshape(-1), len(rows))
    return basis.astype(np.float32)


def _product(x: np.ndarray, factor: np.ndarray, spec: TensorSpec, long: bool) -> np.ndarray:
    """Mᵀ times the shorter factor, which gives the longer (`long`), or M times the longer one: float32[r, A or B]."""
    rows, columns = matrix(spec)
    found = np.empty((len(factor), max(rows, columns) if long else min(rows, columns)), np.float32)
    product = kernels.column_products if (rows <= columns) == long else kernels.row_products
    product(x, factor.reshape(-1), len(factor), found.reshape(-1))
    return found


def _longer_factor(x: np.ndarray, p: np.ndarray, spec: TensorSpec, scale: float) -> np.ndarray | None:
    """Qᵀ, scaled and cut to finite values: float32[r, B]. None if an element of x is not finite."""
    q = _product(x, p, spec, long=True)
    if kernels.count_nonfinite(q.reshape(-1)):
        if kernels.count_nonfinite(x):
            return None
        wide = x.reshape(matrix(spec))  # a sum of finite elements is beyond float32
        exact = p.astype(np.float64) @ (wide if wide.shape[0] == p.shape[1] else wide.T)
        q = np.clip(exact, -_MAX, _MAX).astype(np.float32)
    if scale != 1:
        q *= np.float32(scale)
    return q


def _expand(p: np.ndarray, q: np.ndarray, spec: TensorSpec, out: np.ndarray, scale: float) -> float:
    """Add scale · P̂ Qᵀ to `out`, or with a scale of 0 write P̂ Qᵀ to it, cut to finite values.

    Returns a bound of the magnitudes in P̂ Qᵀ.
    """
    rows, columns = matrix(spec)
    left, right = (p, q) if rows <= columns else (q, p)
    bound = len(p) * float(kernels.abs_max(p.reshape(-1))) * float(kernels.abs_max(q.reshape(-1)))
    if bound <= _MAX / 2:
        kernels.outer_sum(left.reshape(-1), right.reshape(-1), len(p), scale, out)
        return bound
    total = sum(np.multiply.outer(column, row) for column, row in zip(left.astype(np.float64), right, strict=True))
    finite = np.clip(total, -_MAX, _MAX).astype(np.float32).reshape(-1)
    with np.errstate(over="ignore"):
        out[:] = finite if scale == 0 else out + np.float32(scale) * finite
    return bound


def _cut_to_finite(accumulator: np.ndarray) -> np.ndarray:
    """The same sums, where those beyond float32 are the largest float: a sum of finite values may overflow."""
    if kernels.count_nonfinite(accumulator) == 0:
        return accumulator
    expect(not np.isnan(accumulator).any(), "numbers", "NaN", PowerSGD.name)
    cut: np.ndarray = np.clip(accumulator, -_MAX, _MAX)
    return cut


def _expect_finite(values: np.ndarray) -> None:
    expect(kernels.count_nonfinite(values) == 0, "finite values", "others", PowerSGD.name)


def matrix(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: its first dimension, and all others."""
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    return rows, spec.numel // max(1, rows)


def _matrix_sides(spec: TensorSpec) -> tuple[int, int]:
    """Shorter and longer side of the matrix."""
    rows, columns = matrix(spec)
    return min(rows, columns), max(rows, columns)


def _as_float32(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.float32:
        return x
    values = np.empty(x.size, np.float32)
    kernels.cast(x, values)
    return values
