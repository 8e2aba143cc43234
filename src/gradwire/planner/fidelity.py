"""What a user allows `auto` to do to gradients: four levels, and the methods that each adds to the one before.

The figures are those of the training benchmark (README, *Results*; validation loss after 32 steps against DDP's), the
algebra is the compressor's own. Ratios and sparsities beyond these are for people who have tried them on their model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core.errors import UnknownNameError

EVERYWHERE = ("scatter_reduce", "ring", "allgather")
# A ring encodes an aggregate anew at each of its W − 1 hops, so that biases and variances add up: not for these.
FEW_ENCODES = ("scatter_reduce", "allgather")

# What batches of small tensors may be cast to, where a level allows it, the one to prefer first. bf16 reaches as far as
# float32: in fp16 one value above 65504, or a loss scale that makes it so, costs all ranks the step, and what is below
# 2^-25 is lost without a residual. Most such tensors are biases and normalization, whose gradients vary most in scale.
CASTS = ("bf16", "fp16")


class RankedCompressor(NamedTuple):
    """A compressor that may be chosen.

    Attributes:
        spec: as `gradwire.compressors.base.registry.compressor_of` reads it.
        strategies: by which it may travel, the one to prefer among equals first.
    """

    spec: str
    strategies: tuple[str, ...]


DENSE = RankedCompressor(DENSE_NAME, ("ring", "scatter_reduce", "allgather"))

# Each level from the most to the least faithful, which is also the order of preference among equally fast methods.
LEVELS: dict[str, tuple[RankedCompressor, ...]] = {
    # The bits of the sum, but for the order of additions.
    "exact": (DENSE, RankedCompressor("lossless", EVERYWHERE)),
    # What a step does to parameters stays as it is to the last bit or two (gcomp, where the optimizer is known). Then
    # rounding of a value to 16 bits: +0.0 % by DDP's fp16 hook. fp16 keeps 11 bits and bf16 8, with float32's range;
    # both re-encode without harm on a ring, because rounding what is rounded loses little more.
    "near-lossless": (
        RankedCompressor("gcomp", EVERYWHERE),
        RankedCompressor("fp16", EVERYWHERE),
        RankedCompressor("bf16", EVERYWHERE),
    ),
    # Unbiased with small variance (int8: +0.0 %), or biased with a residual that sends later what is left out, at a
    # contraction that does not grow with the tensor: threelc with s = 1 (+0.4 %), onebit (+0.3 %); thc keeps back
    # only what it cuts, 1/32 of coordinates (+0.0 % after 120 steps, benchmarks/results/thc-lab.csv).
    "balanced": (
        RankedCompressor("int8", FEW_ENCODES),
        RankedCompressor("int8shared", EVERYWHERE),  # integers: a ring only adds them
        RankedCompressor("thc", EVERYWHERE),  # likewise
        RankedCompressor("threelc", FEW_ENCODES),
        RankedCompressor("onebit", FEW_ENCODES),
    ),
    # Most of a gradient waits in the residual for many steps: topk at 1 % (+1.7 %), threelc with s = 1.75 (+15.6 %
    # after 32 steps), dgc at 0.1 % (less still each step; its accuracy needs the published warm-up), dragonn at 63 % of
    # that, for less work where choosing elements needs prefix sums.
    "aggressive": (
        RankedCompressor("topk", FEW_ENCODES),
        RankedCompressor("threelc:sparsity=1.75", FEW_ENCODES),
        RankedCompressor("dgc", FEW_ENCODES),
        RankedCompressor("dragonn", FEW_ENCODES),
    ),
}


def methods(fidelity: str, optimizer: bool = False) -> list[RankedCompressor]:
    """What a level allows, the most faithful first.

    Args:
        fidelity: the level.
        optimizer: whether the gradients' optimizer is known, which some methods need.

    Raises:
        UnknownNameError: no such level.
    """
    if fidelity not in LEVELS:
        raise UnknownNameError("fidelity", fidelity, LEVELS)
    names = list(LEVELS)
    allowed = [method for name in names[: names.index(fidelity) + 1] for method in LEVELS[name]]
    return [method for method in allowed if optimizer or not compressor_of(method.spec).needs_optimizer]


def batch_cast(allowed: Iterable[RankedCompressor]) -> str | None:
    """What batches of small tensors may be cast to under these methods; None where they stay as they are."""
    specs = {method.spec for method in allowed}
    return next((spec for spec in CASTS if spec in specs), None)


def strategies(spec: str) -> tuple[str, ...]:
    """By which strategies a compressor may travel, whether a level names it or not."""
    known: Sequence[RankedCompressor] = [method for level in LEVELS.values() for method in level]
    return next((method.strategies for method in known if method.spec == spec), FEW_ENCODES)
