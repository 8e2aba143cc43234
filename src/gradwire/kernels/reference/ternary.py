"""3-value quantization and quartic encoding: q in {-1, 0, 1}, five of them in a byte.

An element becomes 1 or -1 if its magnitude is above M / 2, else 0. This equals rounding x / M to nearest even while
|x| < 3/2 M. NaN becomes 0 and stays in the residual.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 3.1 and 3.2; the step numbers are those of 3.2. Differences: a
comparison instead of a division, so that all backends agree exactly; values beyond M saturate. Step 4 pads with digits
of value 0 rather than the digit 0 (which means -1), so that all-zero input is all ZERO_BYTE, as zero-run encoding
expects. M = 0 quantizes everything to 0.
"""
# Shapes: N elements, W ranks, S = ceil(N/5) bytes; digit k of byte i is element k * S + i

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.layout import (
    NUM_QUARTIC,
    TERNARY_DIGITS,
    ceil_div,
    expect_same_ranks,
    expect_size,
    half_of,
)
from gradwire.kernels.reference.elements import as_float32


def _quantize(values: np.ndarray, M: float) -> np.ndarray:
    if not M > 0:
        return np.zeros(values.size, np.int8)
    return np.where(np.abs(values) > half_of(M), np.sign(values), 0).astype(np.int8)


def pack_ternary(x: np.ndarray, M: float, out: np.ndarray, residual: np.ndarray | None = None) -> None:
    """Quantize x to M * {-1, 0, 1} and pack it into `out`, uint8[S].

    Args:
        x: Gradient.
        M: Scale, at least 0, used as float32.
        out: uint8[S].
        residual: float32[N], receives x - M * q. May be the same array as x, or None.
    """
    size = ceil_div(x.size, TERNARY_DIGITS)
    expect_size("pack_ternary", "out", out, size)
    values, scale = as_float32(x), np.float32(M)
    q = _quantize(values, float(scale))
    digits = np.ones(TERNARY_DIGITS * size, np.uint8)  # steps 3 and 4
    digits[: q.size] = (q + 1).astype(np.uint8)  # steps 1 and 2
    p = digits.reshape(TERNARY_DIGITS, size)  # step 5
    out[:] = p[0] * 81 + p[1] * 27 + p[2] * 9 + p[3] * 3 + p[4]  # step 6
    if residual is not None:
        expect_size("pack_ternary", "residual", residual, x.size)
        with np.errstate(all="ignore"):
            residual[:] = values - np.where(q == 0, np.float32(0), scale * q.astype(np.float32))


def _digits(packed: np.ndarray, size: int) -> tuple[np.ndarray, bool]:
    """Values -1, 0, 1 of the first `size` digits, and whether bytes and padding are canonical."""
    valid = packed < NUM_QUARTIC
    bytes_ = np.where(valid, packed, np.uint8(0)).astype(np.int64)
    digits = np.concatenate([bytes_ // power % 3 for power in (81, 27, 9, 3, 1)])
    canonical = bool(valid.all()) and bool((digits[size:] == 1).all())
    return (digits[:size] - 1).astype(np.float32), canonical


def unpack_ternary(packed: np.ndarray, M: float, out: np.ndarray, accumulate: bool = False) -> bool:
    """Write (or add) M * q to `out`, float32[N].

    Returns:
        Whether every byte is below 243 and all padding digits are 1. If not, `out` is unspecified, but finite for
        finite M.
    """
    expect_size("unpack_ternary", "packed", packed, ceil_div(out.size, TERNARY_DIGITS))
    q, canonical = _digits(packed, out.size)
    with np.errstate(all="ignore"):
        values = np.where(q == 0, np.float32(0), np.float32(M) * q)
        out[:] = out + values if accumulate else values
    return canonical


def unpack_ternary_sum(packed: Sequence[np.ndarray], M: np.ndarray, out: np.ndarray) -> bool:
    """Write the sum over ranks of M[rank] * q, added to 0.0 in rank order.

    Returns:
        Whether the bytes of all ranks are valid, as for `unpack_ternary`.
    """
    expect_same_ranks("unpack_ternary_sum", packed, M)
    out[:] = 0
    canonical = [unpack_ternary(digits, M[rank], out, accumulate=True) for rank, digits in enumerate(packed)]
    return all(canonical)
