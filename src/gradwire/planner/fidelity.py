"""Levels of fidelity: how much `auto` may change gradients, and the methods that each level adds to the one before.

Figures are validation losses relative to DDP fp32 of the same seeds, after 3,000 steps of a ResNet with momentum 0.9
(`benchmarks/accuracy/README.md`). The methods of `balanced` end no higher than DDP in the mean of three seeds. A model
of characters is trained without momentum, also with three seeds: there they end within 0.1 %, on a larger one threelc
0.4 ± 0.4 % above. int8shared is not trained. Stronger ratios and sparsities than those of `aggressive` are for
users who have tried them on their model.

Momentum in an optimizer sees what a residual has gathered as one late gradient. A method may belong to its level only
with momentum correction (`gradwire.residuals.momentum`), or where the optimizer has no momentum. Otherwise it counts to
the next level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core.errors import UnknownNameError
from gradwire.sync.plan import ENCODED_ONCE
from gradwire.sync.plan_entry import MIN_ELEMENTS, min_elements_of

EVERYWHERE = ("scatter_reduce", "ring", "allgather")
# A ring encodes an aggregate again at each of its W − 1 hops. For most methods bias and variance add up.
FEW_ENCODES = ("scatter_reduce", "allgather")
# Payloads that list positions and values can also be added exactly by owners.
LISTED = (*FEW_ENCODES, "sparse_reduce")

# Casts for batches of small tensors, the preferred one first. bf16 has the range of float32. In fp16, one value above
# 65504, or a loss scale that makes one, costs all ranks the step, and values below 2^-25 are lost without a residual.
# Most small tensors are biases and normalization, whose gradients vary most in scale.
CASTS = ("bf16", "fp16")


class RankedCompressor(NamedTuple):
    """A compressor to choose from.

    Attributes:
        spec: Argument of `gradwire.compressors.base.registry.compressor_of`.
        strategies: Strategies that suit it, the preferred one first.
        min_elements: Size below which it does not compress a tensor, unless the user says another one.
        suffers_from_momentum: Whether it counts to the next level where the optimizer applies momentum.
    """

    spec: str
    strategies: tuple[str, ...]
    min_elements: int = MIN_ELEMENTS
    suffers_from_momentum: bool = False

    @classmethod
    def of(cls, spec: str, strategies: tuple[str, ...]) -> RankedCompressor:
        """A compressor with its own smallest size.

        Raises:
            UnknownNameError, OptionError: See `compressor_of`.
        """
        return cls(spec, strategies, min_elements_of(compressor_of(spec)))

    def with_momentum_correction(self) -> RankedCompressor:
        """The same with the strategies that momentum correction allows; there may be none."""
        if compressor_of(self.spec).exact:
            return self
        return self._replace(strategies=tuple(each for each in self.strategies if each in ENCODED_ONCE))


DENSE = RankedCompressor(DENSE_NAME, ("ring", "scatter_reduce", "allgather"))

# From the highest to the lowest fidelity, which is also the order of preference among equally fast methods.
LEVELS: dict[str, tuple[RankedCompressor, ...]] = {
    # The bits of the sum, except for the order of additions.
    "exact": (DENSE, RankedCompressor("lossless", EVERYWHERE)),
    # gcomp, if the optimizer is known: a step changes parameters by the same amount, to the last bit or two. Then
    # rounding to 16 bits: -0.2 % by DDP's fp16 hook, -1.0 % by its bf16 hook. fp16 keeps 11 bits, bf16 8 with the range
    # of float32. Both can be encoded again on a ring, because rounding a rounded value loses little.
    "near-lossless": (
        RankedCompressor("gcomp", EVERYWHERE),
        RankedCompressor("fp16", EVERYWHERE),
        RankedCompressor("bf16", EVERYWHERE),
    ),
    # Unbiased with small variance: int8 (-0.9 %). thc holds back only what it clips, 1/32 of the coordinates (-0.5 %).
    # threelc with s = 1 is biased, with a residual and a contraction that does not depend on the tensor's size: -0.6 %
    # with momentum correction, +2.4 % without.
    "balanced": (
        RankedCompressor("int8", FEW_ENCODES),
        RankedCompressor("int8shared", EVERYWHERE),  # integers: a ring only adds them
        RankedCompressor("thc", EVERYWHERE),  # likewise
        RankedCompressor("threelc", FEW_ENCODES, suffers_from_momentum=True),
    ),
    # More of a gradient stays in the residual, and for more steps. Ordered by the mean over three models. In brackets
    # the ResNet with momentum correction, and the smaller and the larger model of characters: topk at 1 % (+1.8 %,
    # +0.4 %, +0.3 %), onebit (+1.5 %, +0.5 %, +0.8 %; +5.1 % without correction), powersgd with rank 4 (+2.9 % without
    # correction, +0.9 %, +0.9 %), dgc at 0.1 % (+2.4 %, +5.4 %, +4.0 %), dragonn at 63 % of that, with less work where
    # selecting elements needs prefix sums (+2.0 %, +5.9 %, +4.9 %). The last two had the published warm-up, and have
    # none under `auto`, which was not trained. threelc with s = 1.75 was 1.1 ± 1.4 points of accuracy below floats
    # after 20 epochs of a ResNet (benchmarks/results/threelc-epochs.csv).
    "aggressive": (
        RankedCompressor("topk", LISTED),
        RankedCompressor("onebit", FEW_ENCODES),
        RankedCompressor("powersgd", EVERYWHERE),  # factors only add up, on a ring as well
        RankedCompressor("dgc", LISTED),
        RankedCompressor("dragonn", LISTED),
        RankedCompressor("threelc:sparsity=1.75", FEW_ENCODES),
    ),
}


def methods(fidelity: str, optimizer: bool = False, momentum: bool = True) -> list[RankedCompressor]:
    """Return the methods of a level, the highest fidelity first.

    Args:
        fidelity: Level of fidelity.
        optimizer: Whether the optimizer is known, which some methods need.
        momentum: Whether the optimizer applies momentum to the averaged gradients, as far as one knows.

    Raises:
        UnknownNameError: The level does not exist.
    """
    if fidelity not in LEVELS:
        raise UnknownNameError("fidelity", fidelity, LEVELS)
    names = list(LEVELS)
    allowed = [
        RankedCompressor.of(method.spec, method.strategies)
        for name in names[: names.index(fidelity) + 1]
        for method in LEVELS[name]
        if not (momentum and method.suffers_from_momentum and name == fidelity)
    ]
    return [method for method in allowed if optimizer or not compressor_of(method.spec).needs_optimizer]


def batch_cast(allowed: Iterable[RankedCompressor]) -> str | None:
    """Return the cast for batches of small tensors; None if these methods have none."""
    specs = {method.spec for method in allowed}
    return next((spec for spec in CASTS if spec in specs), None)


def strategies(spec: str) -> tuple[str, ...]:
    """Return the strategies that suit a compressor, whether a level names it or not."""
    known: Sequence[RankedCompressor] = [method for level in LEVELS.values() for method in level]
    usual = LISTED if compressor_of(spec).sparse else FEW_ENCODES
    return next((method.strategies for method in known if method.spec == spec), usual)
