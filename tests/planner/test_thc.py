"""THC under the planner: taken where the network is the bottleneck, left out where computing is (THC's figure 12)."""

import pytest

from gradwire.compressors.base.registry import compressor_of
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, fidelity, plan
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.table import PlanTable
from gradwire.simulate import models

RANKS, ELEMENTS = 4, 1 << 20
# Forward and backward of a batch of 32 on a V100, in float32.
COMPUTE = {"resnet50": (0.030, 0.055), "vgg19": (0.050, 0.100)}


def kernel(nbytes: float) -> LinearCost:
    """A kernel on that device: 10 us to launch, and what it moves at 700 GB/s, for each element."""
    return LinearCost(10e-6, nbytes / 700e9)


def described(rate: float) -> Costs:
    """Four such devices behind links of `rate` bits a second."""
    thc, spec = compressor_of("thc"), TensorSpec((ELEMENTS,))
    norms = 4 * sum(length for length, _ in thc.stats_spec(spec)) / ELEMENTS
    codec = CodecCosts(
        encode=kernel(4 + 4 + 0.5),  # the compensated gradient, the residual, the indices
        decode=kernel(0.5 + 4),
        merge=kernel(0.5 + 8),
        payload_bytes=LinearCost(0.0, thc.max_encoded_bytes(spec) / ELEMENTS - norms),
        stats=kernel(12),
        stats_bytes=LinearCost(4.0, norms),
        accumulate=kernel(0.5 + 2),
        finalize=kernel(1 + 4),
        accumulator_bytes=LinearCost(1.0, thc.accumulator_dtype(RANKS).itemsize),
    )
    dense = CodecCosts(kernel(8), kernel(8), kernel(12), LinearCost(0.0, 4.0))
    return Costs(RANKS, (LinkCosts(20e-6, 8 / rate),), {"none": dense, "thc": codec}, add=kernel(12), task=2e-6)


def planned(model: str, rate: float) -> PlanTable:
    forward, backward = COMPUTE[model]
    tensors = [PlannedTensor(tensor.name, tensor.shape, ready=share * backward)
               for tensor, share in models.get(model).backward()]  # fmt: skip
    methods = [method for method in fidelity.methods("balanced") if method.spec in ("none", "thc")]
    return plan(tensors, described(rate), methods, backward=backward, rest=forward)


@pytest.mark.parametrize("rate", [25e9, 100e9])
def test_a_compute_bound_model_stays_dense(rate: float) -> None:
    """The backward of ResNet50 hides what a dense all-reduce takes: there is nothing that THC could save."""
    table = planned("resnet50", rate)
    assert not table.compresses
    assert table.step < 1.05 * sum(COMPUTE["resnet50"])


def test_a_network_bound_model_takes_thc_and_so_does_any_model_on_a_slow_link() -> None:
    for model, rate in (("vgg19", 25e9), ("resnet50", 1e9)):
        table = planned(model, rate)
        assert {row.spec for row in table.rows} == {"none", "thc"}
        assert table.step < 0.8 * min(table.dense_step, table.native_step)
