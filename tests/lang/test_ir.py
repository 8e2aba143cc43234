"""Programs: the order of fields and nodes, and names that generated code cannot use."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.lang import bfloat16, float16, int8, interpret, random, trit, uint1, uint4, verify
from gradwire.lang.ir import Field, Program, closure
from tests.lang import algorithms
from tests.lang.targets.test_numba import Compiled, environment, gradient
from tests.lang.test_trace import concat, kept, traced


@pytest.mark.parametrize("name", algorithms.names())
def test_nodes_come_after_their_inputs_and_fields_in_their_order(name: str) -> None:
    program = algorithms.program(name)
    for nodes in (program.encode_nodes(), program.decode_nodes()):
        numbers = [node.number for node in nodes]
        assert numbers == sorted(set(numbers))
        assert all(each in nodes for node in nodes for each in node.inputs)
    # Positions of list items come after all, and are coded.
    packed = [each for each in program.fields if each.coding is None and not each.is_positions]
    widths = [each.dtype.bits if each.is_array else np.inf for each in packed]
    assert widths == sorted(widths, reverse=True)
    assert all(each.coding is None for each in program.fields[:-1])
    assert {node.attrs["field"] for node in program.decode_nodes() if node.op == "extract"} <= {
        each.name for each in program.fields
    }


def test_scalars_travel_first_then_arrays_by_falling_width() -> None:
    program = traced(
        lambda g: concat(
            bit=g.map(lambda x: x > 0, dtype=uint1), level=g.map(dtype=uint4), half=g.map(dtype=float16),
            least=g.reduce(min), trit=g.map(dtype=trit), short=g.map(dtype=bfloat16), byte=g.map(dtype=int8), whole=g,
            largest=g.reduce(max),
        ),
        lambda p: p.whole,
    )  # fmt: skip
    names = [each.name for each in program.fields]
    assert names == ["least", "largest", "whole", "half", "short", "byte", "level", "trit", "bit"]


def test_positions_are_uint32_and_what_was_not_cast_is_float32() -> None:
    program = algorithms.program("sampled")
    assert {each.name: each.dtype.name for each in program.fields} == {"index": "uint32", "value": "float32"}
    assert program.items == program.fields[0].node.space
    assert algorithms.program("between").items is None


def test_an_application_reads_as_one() -> None:
    program = traced(lambda g: concat(q=g * g.reduce(max)))
    reduce = next(node for node in program.encode_nodes() if node.op == "reduce")
    assert repr(reduce) == f"%{reduce.number} = reduce(%1, function=max, block=0) : float of scalar"
    assert closure([reduce])[0].op == "gradient"


NAMES = ("body", "x", "n", "at", "i", "keys", "np", "floor", "grad", "first", "residual_out", "end", "stop", "watch")


@pytest.mark.parametrize("names", [NAMES[:7], NAMES[7:]], ids=["some", "others"])
def test_fields_may_have_the_names_of_generated_variables(names: tuple[str, ...]) -> None:
    def encode(g):
        fields = {name: g.map(lambda x, k=k: x + k, dtype=int8) for k, name in enumerate(names[:3])}
        fields |= {name: g.reduce(max) + k for k, name in enumerate(names[3:])}
        return concat(**fields)

    def decode(p):
        return p.__dict__[names[0]] * p.__dict__[names[3]] + p.__dict__[names[1]] + random(shared=True)

    program = traced(encode, decode)
    assert len({each.variable for each in program.fields}) == len(names)
    assert all(each.variable != each.name for each in program.fields)
    compiled, size = Compiled(program), 1500
    wanted, rest = interpret.encode(program, gradient(size), environment(size))
    found, out = np.empty(size, np.float32), np.empty(size, np.float32)
    assert compiled.encode(gradient(size), rest=found).tobytes() == wanted.tobytes()
    assert found.tobytes() == rest.tobytes()
    assert compiled.decode(wanted, out)
    assert out.tobytes() == interpret.decode(program, wanted, environment(size)).tobytes()


def test_a_program_that_no_trace_makes_is_an_invariant_broken() -> None:
    good = traced(lambda g: concat(s=g.reduce(max), q=g))
    kept.append(good)
    unrounded = tuple(Field(each.name, each.node.inputs[0] if each.name == "s" else each.node) for each in good.fields)
    with pytest.raises(AssertionError, match="enters the payload without being rounded"):
        verify.verify(Program("bad", {}, unrounded, good.output, ()))
