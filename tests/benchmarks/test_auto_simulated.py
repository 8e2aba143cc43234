"""`auto` in the simulator decides as in a job, and the verdict counts cells that are too slow."""

from dataclasses import replace

import pytest
from benchmarks.planning import auto_simulated, described
from benchmarks.planning.auto_simulated import NATIVE, NATIVE_FP16

from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import FEW_ENCODES, RankedCompressor
from gradwire.sync.plan import Plan
from gradwire.tuning.candidates import Candidate

MEMORY = LinearCost(1e-6, 1e-9)
HOST = Costs(
    1, (LinkCosts(0.0, 0.0),), {"none": CodecCosts(MEMORY, MEMORY, MEMORY, LinearCost(0.0, 4.0))}, task=5e-6,
    frame=LinearCost(7e-6, 0.0),
)  # fmt: skip
PLAN = Candidate("gradwire, onebit", plan=Plan("onebit"))


def test_what_is_predicted_slower_is_not_tried() -> None:
    simulated = {NATIVE: 1.0, NATIVE_FP16: 0.5, PLAN: 0.4}
    assert auto_simulated.decide({NATIVE: 1.0, NATIVE_FP16: 0.6, PLAN: 0.55}, simulated) is PLAN
    assert auto_simulated.decide({NATIVE: 1.0, NATIVE_FP16: 0.6, PLAN: 1.1}, simulated) is NATIVE_FP16


def test_the_fp16_hook_is_tried_although_it_is_predicted_a_little_slower() -> None:
    """A plan must be 5 % faster than it."""
    found = auto_simulated.decide(
        {NATIVE: 1.0, NATIVE_FP16: 0.6, PLAN: 0.5}, {NATIVE: 1.0, NATIVE_FP16: 0.56, PLAN: 0.55}
    )
    assert found is NATIVE_FP16


def test_a_plan_must_gain_enough_over_dense() -> None:
    assert auto_simulated.decide({NATIVE: 1.0, PLAN: 0.5}, {NATIVE: 1.0, PLAN: 0.97}) is NATIVE
    assert auto_simulated.decide({NATIVE: 1.0, PLAN: 0.5}, {NATIVE: 1.0, PLAN: 1.5}) is NATIVE


def test_the_verdict_counts_cells_below_the_bound() -> None:
    costs, allowed = described.gpu_costs("onebit", host=HOST, ranks=4), [RankedCompressor("onebit", FEW_ENCODES)]
    row = auto_simulated.cell("gpu", costs, allowed, "lstm", 4, 10e9)
    assert row.auto <= row.fp32
    assert row.gain >= auto_simulated.BOUND
    slow = replace(row, gain=0.9, plan_gain=0.8)
    assert "auto: 1 of 2 cells below 0.99 of the better dense step, the least 0.900" in auto_simulated.verdict(
        [row, slow]
    )


@pytest.mark.parametrize(
    ("name", "tensors", "numel", "last"),
    [("text", 19, 6_317_857, "embed.weight"), ("vision", 25, 1_226_826, "stem.weight")],
)
def test_a_workload_has_all_its_gradients_in_the_order_of_a_backward_pass(name, tensors, numel, last) -> None:
    model = auto_simulated.model_of(name)
    ready = [each.ready_seconds for each in model.gradients]
    assert len({each.name for each in model.gradients}) == len(ready) == tensors
    assert sum(each.spec.numel for each in model.gradients) == numel
    assert (model.gradients[0].name, model.gradients[-1].name) == ("head.bias", last)
    assert ready[0] > 0 and ready[-1] <= model.compute.backward_seconds
    assert model.compute.forward_seconds > 0


def test_a_published_model_is_that_of_the_simulator() -> None:
    model = auto_simulated.model_of("vgg19")
    assert sum(each.spec.numel for each in model.gradients) == pytest.approx(143.7e6, rel=0.01)
