"""Load any element type as float32, and round float32 back to it.

Rounds to nearest even in every type; NaN stays NaN. Unlike a direct conversion, float64 to a 16-bit type rounds twice,
through float32, as all kernels do.
"""

from __future__ import annotations

import numpy as np

ELEMENT_DTYPES = (np.float32, np.float64, np.float16, np.uint16)


def as_float32(x: np.ndarray) -> np.ndarray:
    """The values of x as float32. uint16 holds the bits of bfloat16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if x.dtype not in (np.float32, np.float64, np.float16):
        raise TypeError(f"Expected float32, float64, float16 or uint16 (bfloat16 bits), got {x.dtype} (in a kernel).")
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def from_float32(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32 `values` to nearest even in the type of `out`."""
    if out.dtype != np.uint16:
        with np.errstate(all="ignore"):
            out[:] = values
        return
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding could turn a NaN into infinity: truncate it instead, and set the quiet bit so that it stays a NaN.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    out[:] = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
