"""Whole models: what a plan promises over rates and levels, and that the search gets as far with many tensors."""

import itertools

import pytest

from gradwire.planner import PlannedTensor, plan
from gradwire.simulate import models
from tests.planner.machines import METHODS, costs

RATES = (1e7, 1e9, 1e11)
BACKWARD = 0.2
NOISE = 1.02  # the search is greedy: two plans that ought to be equal may differ by so much


def gradients(name):
    return [PlannedTensor(tensor.name, tensor.shape, ready=share * BACKWARD)
            for tensor, share in models.get(name).backward()]  # fmt: skip


@pytest.mark.parametrize("name", ["resnet50", pytest.param("bert-large", marks=pytest.mark.ci)])
def test_over_all_rates_no_plan_is_above_dense_and_none_gains_from_a_slower_link(name):
    tensors = gradients(name)
    tables = [plan(tensors, costs(8, rate), METHODS, rest=0.1) for rate in RATES]
    for table in tables:
        assert table.ideal_step * (1 - 1e-9) <= table.step <= min(table.dense_step, table.native_step)
        assert len(table.rows) == len(tensors)
    for slower, faster in itertools.pairwise(tables):
        assert faster.step <= slower.step * NOISE
        assert faster.dense_step <= slower.dense_step * NOISE
    assert tables[0].compresses
    assert not tables[-1].compresses


@pytest.mark.parametrize("name", [pytest.param("vgg19", marks=pytest.mark.ci), "lstm"])
def test_more_methods_to_choose_from_make_no_step_longer(name):
    tensors, job = gradients(name), costs(8, 1e9)
    steps = [plan(tensors, job, METHODS[:count], rest=0.1).step for count in range(len(METHODS) + 1)]
    for fewer, more in itertools.pairwise(steps):
        assert more <= fewer * NOISE


def test_a_plan_depends_on_its_arguments_alone():
    tensors = gradients("resnet50")
    job = costs(8, 1e9)
    assert plan(tensors, job, METHODS).to_json() == plan(list(reversed(tensors)), job, METHODS).to_json()
