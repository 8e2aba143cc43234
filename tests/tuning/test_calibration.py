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
