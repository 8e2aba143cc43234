"""The prefix codes that `lossless` and `gcomp` begin with, made from gradients of the text workload.

Measured on `gradwire.bench.text` (6.3 million parameters, its own optimizer, rank 0 of 4, seed 0): the gradients of
matrices at steps 1, 3, 7, 15, 31 and 39, each exponent by its distance from the mean of its chunk. Their entropy is 2.8
to 3.4 bits per matrix; that of a Gaussian would be 2.5. Far from the mean, the share halves from one exponent to the
next, as for any smooth density at 0. Zeros had a share of 0.001; they are given 1/16, so that tensors with many zeros,
such as embeddings, shrink well, at a cost of a tenth of a bit per element elsewhere.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from gradwire.kernels.float_format import FORMATS
from gradwire.kernels.prefix_code import NUM_SYMBOLS, PrefixCode

# Shares, in millionths, of exponents from 17 below the mean to 9 above.
_BELOW = 17
_SHARES = (
    2, 5, 11, 21, 42, 86, 168, 339, 683, 1361, 2728, 5456, 10916, 21662, 42158, 77735, 129418,
    183416, 197980, 133961, 45023, 6315, 415, 57, 22, 7, 1,
)  # fmt: skip
_SHARE_OF_ZERO = sum(_SHARES) // 15
_SHARE_OF_SUBNORMAL = 115  # of float16, with gradients scaled by 1024


@functools.cache
def code(dtype: torch.dtype) -> PrefixCode:
    """Default code of an element type; float64, which is not packed, has that of float32."""
    half = dtype == torch.float16
    form = FORMATS[np.dtype(np.float16 if half else np.float32)]
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    for away, share in enumerate(_SHARES, -_BELOW):
        counts[form.center + away] = share
    counts[0] = _SHARE_OF_ZERO
    if half:
        counts[form.special] = _SHARE_OF_SUBNORMAL
    return PrefixCode.of(counts)
