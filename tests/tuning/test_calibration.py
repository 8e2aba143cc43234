"""Samples that codecs are measured with."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.tuning.calibration import CalibrationSample
from gradwire.tuning.measure_codec import measure_codec

SIZES = (1 << 12, 1 << 14)


def test_gcomp_is_measured_with_a_tensor_of_which_the_optimizer_is_known() -> None:
    own = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    numbers = torch.tensor([1, 0, 0, 0, 1e-3, 0, 1, 0], dtype=torch.float32)
    sample = CalibrationSample(
        torch.randn(500), own, {"parameter": torch.ones(10_000), "numbers": numbers, "loss_scale": torch.ones(())}
    )
    gcomp, lossless = gw.make("gcomp"), gw.make("lossless")
    assert sample.of(gcomp)[0] is own
    assert sample.of(lossless)[0].numel() == 500
    assert CalibrationSample(torch.randn(500)).of(gcomp)[1] == {}
    packed = []
    for compressor in (gcomp, lossless):
        gradient, aux = sample.of(compressor)
        found = measure_codec(compressor, SIZES, 0.01, world_size=4, gradient=gradient, aux=aux)
        packed.append(found.payload_bytes(SIZES[-1]) / SIZES[-1])
    assert packed[0] < 2.2
    assert packed[1] == pytest.approx(3.4, abs=0.15)


@pytest.mark.parametrize(
    ("method", "extreme"),
    [("fp16", 1e5), *((each, torch.inf) for each in ("fp16", "int8", "int8shared", "thc", "threelc", "powersgd"))],
)
def test_codecs_are_measured_with_other_numbers_where_they_cannot_send_the_gradient(method: str, extreme: float) -> None:
    gradient = torch.randn(SIZES[-1], generator=torch.Generator().manual_seed(0))
    gradient[7] = extreme
    usual, found = (measure_codec(gw.make(method), SIZES, 0.01, gradient=grad) for grad in (None, gradient))
    assert found.payload_bytes(SIZES[-1]) == pytest.approx(usual.payload_bytes(SIZES[-1]), rel=0.5)
