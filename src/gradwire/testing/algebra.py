"""Declared properties: exact, unbiased, variance and contraction."""
# Shapes: N = elements of the tensor

from __future__ import annotations

import math

import torch

from gradwire.compressors.base import Compressor
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.testing.cases import bits, context, heavy_tailed, normal
from gradwire.testing.checks import about, check, expect


@check()
def round_trip_keeps_shape_dtype_and_declared_algebra(codec: Compressor) -> None:
    """decode(encode(g)) has the shape and type of g, is g if `exact`, and is as near as `contraction` declares."""
    for dtype in ELEMENT_TYPES:
        for family in (normal, heavy_tailed):
            with about(f"{family.__name__} elements of {dtype}"):
                _round_trip(codec, family(1500).clamp(-6e4, 6e4).to(dtype).reshape(30, 50))


def _round_trip(codec: Compressor, grad: torch.Tensor) -> None:
    payload = codec.encode(grad, context(grad))
    found = codec.decode(payload, context(grad))
    expect(found.shape == grad.shape, f"expected shape {tuple(grad.shape)}, got {tuple(found.shape)}")
    expect(found.dtype == grad.dtype, f"expected {grad.dtype}, got {found.dtype}")
    if codec.exact:
        expect(bits(found) == bits(grad), "exact is declared, but other bits came out")
    near = codec.decode(payload, context(grad), out=torch.empty(30, 50)).double()
    delta = codec.contraction(TensorSpec.of(grad))
    if delta is not None:
        error, energy = float(((grad.double() - near) ** 2).sum()), float((grad.double() ** 2).sum())
        expect(
            error <= (1 - delta) * energy + 1e-6 * energy,
            f"contraction declares at most {1 - delta:.6g} of the energy as error, got {error / energy:.6g}",
        )


def _is_random(codec: Compressor) -> bool:
    return codec.unbiased and not codec.exact


@check(_is_random)
def unbiased_over_the_private_stream(codec: Compressor) -> None:
    """Hoeffding's bound for each element and for their mean, with at most 2e-6 false alarms per (fixed) seed.

    It is wide where few elements are sent. So the part of the draws along the gradient is compared, too: it must be 1
    within six standard errors.
    """
    grad, draws = heavy_tailed(512).clamp(-3, 3), 400
    ctxs = [context(grad, step=step) for step in range(draws)]
    decoded = torch.stack([codec.decode(codec.encode(grad, ctx), ctx) for ctx in ctxs]).double()
    spread = float((decoded.amax(0) - decoded.amin(0)).max())  # the widest range a draw can take
    error = decoded.mean(0) - grad.double()
    one_element = spread * math.sqrt(math.log(2 * grad.numel() / 1e-6) / (2 * draws))
    all_elements = spread * math.sqrt(math.log(2 / 1e-6) / (2 * draws * grad.numel()))
    worst = float(error.abs().max())
    expect(worst <= one_element, f"unbiased is declared, but the mean of {draws} draws is {worst:.4g} off in an "
           f"element, where chance explains {one_element:.4g}")  # fmt: skip
    mean = abs(float(error.mean()))
    expect(mean <= all_elements, f"unbiased is declared, but draws are {mean:.4g} off on average, where chance "
           f"explains {all_elements:.4g}")  # fmt: skip
    along = decoded @ grad.double() / grad.double().square().sum()
    chance = 6 * float(along.std()) / math.sqrt(draws) + 1e-5
    expect(abs(float(along.mean()) - 1) <= chance, f"unbiased is declared, but draws have {float(along.mean()):.4g} of "
           f"the gradient on average, where chance explains 1 ± {chance:.4g}")  # fmt: skip


@check(lambda codec: bool(codec.variance(TensorSpec((512,)))))
def declared_variance_is_a_bound(codec: Compressor) -> None:
    """The mean error of 200 independent draws is at most the declared variance and six standard errors."""
    for grad in (heavy_tailed(512), normal(512), torch.ones(512)):
        energy = float((grad.double() ** 2).sum())
        ctxs = [context(grad, step=step) for step in range(200)]
        errors = torch.tensor(
            [((codec.decode(codec.encode(grad, ctx), ctx) - grad).double() ** 2).sum() for ctx in ctxs]
        )
        declared = codec.variance(TensorSpec.of(grad))
        assert declared is not None
        slack = 6 * float(errors.std()) / math.sqrt(200)
        most, mean = declared * energy * (1 + 1e-6) + slack, float(errors.mean())
        expect(mean <= most, f"variance declares {declared:.4g} of the energy, got {mean / energy:.4g}")
