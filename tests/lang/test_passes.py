"""The steps of scheduled programs, and what is fused."""

from __future__ import annotations

import pytest

from gradwire.lang import concat, floor, int8, mean, norm, passes, uint1
from gradwire.lang.ir import ELEMENTS, Program
from gradwire.lang.passes import Assign, Step, SubtractItems, Sweep, schedule
from tests.lang import algorithms
from tests.lang.test_trace import traced


def described(step: Step) -> str:
    """A step in one line: operators and fields of a sweep, blocks in brackets; + adds the residual, - writes it."""
    if isinstance(step, Assign):
        return f"= {step.node.op}"
    if isinstance(step, SubtractItems):
        return "- items"
    blocks = [f"[{node.attrs.get('function', node.op)}]" for node in step.block_nodes]
    sinks = [node.attrs.get("function", node.op) for node in step.sinks]
    words = ["+"] * step.compensates + blocks + sinks + [each.name for each in step.packs] + ["-"] * step.residual
    return " ".join([("elements" if step.space == ELEMENTS else "list") + ":", *words])


def steps(program: Program) -> list[str]:
    """The schedule without the arithmetic between sweeps."""
    arithmetic = ("= add", "= sub", "= mul", "= div", "= narrow", "= sqrt", "= maximum", "= ceil")
    return [line for line in map(described, schedule(program)) if line not in arithmetic]


SCHEDULES = {
    "between": ["elements: + min max", "elements: q -"],
    "two_means": ["elements: + mean mean", "elements: sign -"],
    "ternary": ["elements: + max", "elements: q -"],
    "block_scales": ["elements: + [max] [div] scale q -"],
    "block_norms": ["elements: + [norm] [count] s unused q n -"],
    "shorter_floats": ["elements: + h b -"],
    "exponents": ["elements: + e minus -"],
    "first_few": ["elements: + filter", "list: value index", "- items"],
    "signs_of_large": ["elements: + max", "elements: filter", "list: mean count", "list: up index", "- items"],
    "sampled": [
        "= sample", "= sort", "= length", "= item", "elements: + filter", "= top", "list: value index", "- items",
    ],
    "shared_scale": ["elements: + max", "= over_ranks", "elements: q -"],
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    assert steps(algorithms.program(name)) == SCHEDULES[name]


def test_reductions_that_can_be_known_together_share_a_sweep() -> None:
    program = traced(lambda g: concat(a=g.reduce(min), b=abs(g).reduce(mean), c=g.reduce(norm), q=g))
    assert steps(program) == ["elements: + min mean norm", "elements: q -"]


def test_a_reduction_that_needs_another_has_the_next_sweep_and_is_joined_there() -> None:
    def encode(g):
        low, high = g.reduce(min), g.reduce(max)
        least = (g - low).reduce(mean)
        most = (g - high).reduce(norm)
        return concat(a=least, b=most, q=g)

    assert steps(traced(encode)) == ["elements: + min max", "elements: mean norm", "elements: q -"]


def test_the_residual_is_written_where_the_payload_is_packed() -> None:
    for name in algorithms.names():
        program = algorithms.program(name)
        found = schedule(program)
        if program.output.op == "scatter":
            assert isinstance(found[-1], SubtractItems)
            continue
        over_elements = [step for step in found if isinstance(step, Sweep) and step.space == ELEMENTS]
        assert [step.residual for step in over_elements] == [False] * (len(over_elements) - 1) + [True]
        assert over_elements[-1].packs or over_elements[-1].block_nodes


def test_the_old_residual_is_added_once_and_first() -> None:
    for name in algorithms.names():
        sweeps = [step for step in schedule(algorithms.program(name)) if isinstance(step, Sweep)]
        assert [step.compensates for step in sweeps] == [True] + [False] * (len(sweeps) - 1)


def test_what_has_no_array_still_has_a_sweep_for_the_residual() -> None:
    def encode(g):
        return concat(scale=abs(g).reduce(max))

    assert steps(traced(encode, lambda p: p.size * 0.0 + p.scale * algorithms.random(shared=True))) == [
        "elements: + max", "elements: -"
    ]  # fmt: skip


def test_before_the_passes_each_operator_has_a_sweep_of_its_own() -> None:
    def encode(g, block=64):
        scale = g.blocks(block).reduce(max)
        sign = g.map(lambda x: x > 0, dtype=uint1)
        return concat(scale=scale, sign=sign, q=g.map(lambda x: floor(x / scale), dtype=int8))

    program = traced(encode, lambda p: p.q * p.scale, block=64)
    assert [described(step) for step in passes.lower(program)] == [
        "elements: max", "elements: scale", "elements: q", "elements: sign"
    ]  # fmt: skip
    assert steps(program) == ["elements: + [max] scale q sign -"]
