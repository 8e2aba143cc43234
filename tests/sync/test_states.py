"""States computed from the mean: the tables of lossless, which change in the same step on all ranks and are saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.contracts.compressor_cases import bits
from tests.sync.harness import ranks

SHAPES = {"embedding": (400, 100), "layer": (40, 30)}
REFRESH = 3


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return gradients in which nine of ten rows of the embedding are zeros."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    embedding = torch.randn(SHAPES["embedding"], generator=generator)
    embedding *= torch.rand(400, 1, generator=generator) < 0.1
    return {"embedding": embedding, "layer": torch.randn(SHAPES["layer"], generator=generator)}


def train(one: Synchronizer, steps: range) -> list[dict[str, Any]]:
    """Return the means of each step, and the bytes that this rank sent."""
    sent: list[int] = []
    one.events.listen(lambda event: sent.append(event.nbytes) if event.kind == "send" else None)
    found = []
    for step in steps:
        grads = gradients(one.rank, step)
        one.begin_step()
        sent.clear()
        one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
        one.commit()
        found.append({"means": grads, "bytes": sum(sent)})
    return found


def tables_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the table of each tensor. All of them travel unsplit."""
    return {name: table for name, ranges in state["residuals"].get("states", {}).items() for table in ranges.values()}


def resume(one: Synchronizer, states: list[dict[str, Any]]) -> None:
    one.register({name: gw.TensorSpec(shape) for name, shape in SHAPES.items()})
    one.load_state_dict(states[one.rank])


def plan(strategy: str = "scatter_reduce", refresh: int = REFRESH) -> Plan:
    return Plan(gw.make("lossless", refresh=refresh), min_elements=0, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce", "allgather", "hierarchical"])
def test_tensors_get_a_table_of_their_own_at_the_same_step_and_means_stay_exact(strategy: str) -> None:
    with ranks(3, plan(strategy)) as group, ranks(3, plan(strategy, refresh=0)) as fixed:
        found = group.each(lambda one: train(one, range(6)))
        plain = fixed.each(lambda one: train(one, range(6)))
        saved = group.each(lambda one: tables_of(one.state_dict()))
    for each, other in zip(found, plain, strict=True):
        for mine, theirs in zip(each, other, strict=True):
            assert all(bits(mine["means"][name]) == bits(theirs["means"][name]) for name in SHAPES)
    mine, theirs = ([sum(each[step]["bytes"] for each in ranks_) for step in range(6)] for ranks_ in (found, plain))
    assert mine[:2] == theirs[:2]  # the first step yields tables, and the second confirms them
    assert all(one < 0.98 * other for one, other in zip(mine[2:], theirs[2:], strict=True))
    assert list(saved[0]) == list(SHAPES)
    assert all(torch.equal(state[name], saved[0][name]) for state in saved for name in SHAPES)


def test_a_resumed_job_goes_on_bit_for_bit() -> None:
    with ranks(2, plan()) as group:
        group.each(lambda one: train(one, range(1)))
        states = group.each(Synchronizer.state_dict)
        expected = group.each(lambda one: train(one, range(1, 5)))
    with ranks(2, plan()) as group:
        group.each(lambda one: resume(one, states))
        found = group.each(lambda one: train(one, range(1, 5)))
    for mine, theirs in zip(found, expected, strict=True):
        assert [step["bytes"] for step in mine] == [step["bytes"] for step in theirs]


def test_ranks_that_join_take_the_tables_of_the_others() -> None:
    with ranks(2, plan()) as group:
        states = group.each(lambda one: (train(one, range(2)), one.state_dict())[1])
    resized = gw.resize_state(states, 3)
    assert all(torch.equal(tables_of(state)["embedding"], tables_of(states[0])["embedding"]) for state in resized)
    with ranks(3, plan()) as group:
        group.each(lambda one: resume(one, resized))
        means = group.each(lambda one: train(one, range(2, 3))[0]["means"]["embedding"])
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_a_rank_with_another_table_gets_a_typed_error() -> None:
    with ranks(2, plan()) as group:
        states = group.each(lambda one: (train(one, range(2)), one.state_dict())[1])
    del states[1]["residuals"]["states"]
    with ranks(2, plan(), timeout=2.0) as group:
        group.each(lambda one: resume(one, states))
        outcomes = group.outcomes(lambda one: train(one, range(2, 3)))
    assert any("words of the table" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)


@pytest.mark.parametrize("what", ["nonfinite", "mostly zeros"])
def test_a_mean_that_is_nonfinite_or_mostly_zeros_gives_no_table(what: str) -> None:
    def take_step(one: Synchronizer) -> list[str]:
        grads = gradients(one.rank, 0)
        if what == "nonfinite":
            grads["embedding"][0, 0] = torch.inf
        else:
            row = grads["layer"].reshape(-1)[:100].clone()
            grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            grads["embedding"][0] = row
        one.begin_step()
        one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
        one.commit()
        return list(tables_of(one.state_dict()))

    with ranks(2, plan()) as group:
        assert group.each(take_step) == [[], []]


def test_a_second_submission_in_a_step_is_not_counted() -> None:
    def tables(one: Synchronizer, times: int) -> dict[str, torch.Tensor]:
        one.begin_step()
        for again in range(times):
            one.submit([GradientSlice(name, grad) for name, grad in gradients(one.rank, again).items()])
        one.commit()
        found: dict[str, torch.Tensor] = tables_of(one.state_dict())
        return found

    with ranks(2, plan()) as group:
        twice = group.each(lambda one: tables(one, 2))
    with ranks(2, plan()) as group:
        once = group.each(lambda one: tables(one, 1))
    assert all(torch.equal(found[name], once[0][name]) for found in twice for name in SHAPES)


def test_ranges_of_a_tensor_count_as_well() -> None:
    def in_ranges(one: Synchronizer) -> torch.Tensor:
        grad = gradients(one.rank, 0)["embedding"].reshape(-1)
        one.register({"embedding": gw.TensorSpec(SHAPES["embedding"], torch.float32)})
        one.begin_step()
        one.submit([GradientSlice("embedding", grad[:16_384])])
        one.commit()
        table: torch.Tensor = tables_of(one.state_dict())["embedding"]
        return table

    with ranks(2, plan()) as group:
        first, second = group.each(in_ranges)
    assert torch.equal(first, second)
