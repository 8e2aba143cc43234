"""3LC in the language: three values {-M, 0, M} per element, five of them in a byte, optionally with zero runs.

M is `sparsity` times the largest magnitude; elements of a magnitude above M / 2 are sent as plus or minus M. Biased; a
contraction with δ ≥ s (2 - s) / N, so it needs error feedback.

The values are those of `threelc`, which is written by hand and decodes faster; this one also runs on GPUs. Payloads of
up to 5,120 elements are the same, bit for bit. In larger ones, the five digits of a byte come from one chunk of 5,120
elements instead of the five fifths of the tensor, so that one sweep packs them and writes the residual.

With `fit`, the same elements are sent with the value that leaves the least error: their mean magnitude m, not M. M
overstates each of them, for s = 1.9 by 90 to 100 % of its size: the residual is then almost as large, has the opposite
sign, and is sent back later.

Body: M (or m) as float32, then the trits, shortened (option `zero_run`) by zero-run encoding.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3. Differences: the option `fit`. M = 0 (all elements zero) is
defined, and decodes to zeros. M is at most the largest float32, and is the largest magnitude itself if s times that
cannot be told from twice (subnormal numbers), so that the largest element is never rounded to zero. Trits are planar in
chunks, and the last byte is filled up with zeros instead of -1. Zero runs are off by default, so that payloads have a
fixed size.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import apply, concat, mean, sign, trit, where


@compressor(contraction=lambda size, sparsity, zero_run, fit: (1 if fit else sparsity * (2 - sparsity)) / max(1, size))
def ternary(g: Any, sparsity: float = 1.0, zero_run: bool = False, fit: bool = False) -> Any:
    """Three values per element, five of them in a byte, runs of zeros in one if wanted: 3LC in the language.

    Args:
        g: Gradient.
        sparsity: Sparsity multiplier s, 1 <= s < 2; a larger one sends fewer elements.
        zero_run: Whether zero-run encoding follows. Payloads then vary in size, and are never longer.
        fit: Whether elements are sent as plus or minus their mean magnitude instead of M, which learns better the
            larger s is, and takes one more sweep.
    """
    largest = abs(g).reduce(max)
    M = apply("narrow", options.real("sparsity", sparsity, 1.0, 2.0, high_open=True) * largest)
    M = where(largest > M - largest, M, largest)
    # |x| > M / 2, exactly: half of a subnormal may not be a float32, but this difference is one whenever it matters.
    q = g.map(lambda x: where(abs(x) > M - abs(x), sign(x), 0.0), dtype=trit)
    sent = abs(g).filter(lambda x: x > M - x).reduce(mean) if fit else M
    return concat(M=sent, q=q.zero_runs() if zero_run else q)


@ternary.decode
def _(p: Any) -> Any:
    return p.q * p.M
