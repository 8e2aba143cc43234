"""3LC without zero runs: three values {-M, 0, M} an element, five of them in a byte.

M is `sparsity` times the largest magnitude; what is above M / 2 is sent as plus or minus M. Biased; a contraction with
delta >= s (2 - s) / N, so it needs error feedback. Payloads cannot be summed. Body: M as float32, then the trits.

The values are those of `threelc`, which shortens runs of zero bytes besides and is written by hand, for its zero runs
and its sum over ranks are faster so. This one is of a fixed size, and runs on the GPU where the tensor lies.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 3.1 and 3.2. Differences: M = 0 (all elements zero) is defined, and
decodes to zeros. M is at most the largest float32, and falls back to the largest magnitude where s times it cannot be
told from twice (subnormals), so that the largest element is never rounded to zero. Trits are planar in chunks, and the
last byte is filled up with zeros, not with -1.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

from typing import Any

from gradwire.compressors import options
from gradwire.compressors.traced import compressor
from gradwire.lang import apply, concat, sign, trit, where


@compressor(contraction=lambda size, sparsity: sparsity * (2 - sparsity) / max(1, size))
def ternary(g: Any, sparsity: float = 1.0) -> Any:
    """Three values an element, five of them in a byte: 3LC without zero runs.

    Args:
        g: the gradient.
        sparsity: the sparsity multiplier s, 1 <= s < 2; a larger one sends fewer elements.
    """
    largest = abs(g).reduce(max)
    M = apply("narrow", options.real("sparsity", sparsity, 1.0, 2.0, high_open=True) * largest)
    M = where(largest > M - largest, M, largest)
    # |x| > M / 2, exactly: half of a subnormal need not be a float32, but this difference is one wherever it matters.
    q = g.map(lambda x: where(abs(x) > M - abs(x), sign(x), 0.0), dtype=trit)
    return concat(M=M, q=q)


@ternary.decode
def _(p: Any) -> Any:
    return p.q * p.M
