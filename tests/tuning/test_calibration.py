"""Samples that codecs are measured with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import gradwire as gw
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, LinearCost
from gradwire.tuning.calibration import Calibration, CalibrationSample
from gradwire.tuning.candidates import native_step
from gradwire.tuning.measure_codec import measure_codec
from gradwire.tuning.step_clock import BucketTiming, Timing

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
def test_a_gradient_that_a_codec_cannot_send_is_none_to_measure_it_with(method: str, extreme: float) -> None:
    gradient = torch.randn(SIZES[-1], generator=torch.Generator().manual_seed(0))
    gradient[7] = extreme
    usual, found = (measure_codec(gw.make(method), SIZES, 0.01, gradient=grad) for grad in (None, gradient))
    assert found.payload_bytes(SIZES[-1]) == pytest.approx(usual.payload_bytes(SIZES[-1]), rel=0.5)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_ddps_all_reduce_is_predicted_as_it_was_measured_on_nodes_too(ranks_per_node: int) -> None:
    """On a ring, one message in `ranks_per_node` leaves a node, whose link all ranks of the node share."""
    within = LinkCosts(1e-5, 1e-10) if ranks_per_node > 1 else None
    per_byte = ranks_per_node * 8e-9  # as it is measured: while all ranks of the node send
    dense = {"none": CodecCosts(FREE, FREE, FREE, LinearCost(0, 4))}
    costs = Costs(8, (LinkCosts(1e-4, per_byte),), dense, ranks_per_node=ranks_per_node, within=within)
    busy = 2 * 7 / 8 * 100e6 * 8e-9
    timing = Timing(busy, 0.0, busy, busy, 0.0, 0.0, 0.0, (BucketTiming(("w",), 100_000_000, 0.0),), 8)
    calibration = Calibration(SimpleNamespace(world_size=8), 1 << 20)  # type: ignore[arg-type]
    native = calibration._native_hop(costs, timing)
    assert native is not None
    known = Costs(8, costs.links, dense, native, ranks_per_node=ranks_per_node, within=within)
    assert native_step(timing, known) == pytest.approx(busy, rel=0.01)
    assert native_step(timing, known, "fp16") == pytest.approx(busy / 2, rel=0.02)
