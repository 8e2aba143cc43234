"""What cannot be traced raises `TraceError` with the line of the algorithm and advice."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire import lang
from gradwire.lang import (
    TraceError,
    concat,
    exponent,
    mean,
    previous_state,
    random,
    sign,
    trace,
    trit,
    uint1,
    uint8,
    where,
)
from gradwire.lang.ir import Program
from gradwire.lang.operators.base import used_operators

kept: list[Any] = []


def traced(encode: Callable[..., Any], decode: Callable[..., Any] = lambda p: p.q * 1.0, **options: Any) -> Program:
    return trace("test", encode, decode, options)


def positive(g):
    return g.filter(lambda x: x > 0)


def trits(x):
    return x.map(sign, dtype=trit)


def assign_item(g):
    g[0] = 1.0
    return concat(q=g)


def loop(g):
    for _ in g:
        pass
    return concat(q=g)


def decide(g):
    if g.reduce(max) > 0:
        return concat(q=g)
    return concat(q=-g)


# What is wrong: the algorithm, a part of the message, and a part of the advice.
ENCODERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "if": (decide, "Cannot decide a condition", "where(condition, a, b)"),
    "conditional expression": (lambda g: concat(q=g.map(lambda x: 1 if x > 0 else 0)), "condition", "where("),
    "and": (lambda g: concat(q=g.map(lambda x: x > 0 and x < 1, uint1)), "condition", "& | ~ for and, or, not"),
    "chained comparison": (lambda g: concat(q=g.map(lambda x: 0 < x < 1, uint1)), "condition", "& | ~ for and"),
    "min of two": (lambda g: concat(q=min(g, 1.0)), "condition", "minimum and maximum for min and max"),
    "for": (loop, "Cannot loop over symbolic values", "use map for each element, reduce"),
    "sum": (lambda g: concat(q=g / sum(g)), "Cannot loop", "reduce for one number"),
    "len": (lambda g: concat(q=g / len(g)), "Cannot take len()", "use .size"),
    "float": (lambda g: concat(q=g * float(g.reduce(max))), "into a Python number", "gradwire.lang (floor, sqrt"),
    "round": (lambda g: concat(q=round(g)), "into a Python number", "functions of gradwire.lang"),
    "math.floor": (lambda g: concat(q=math.floor(g)), "into a Python number", "instead of those of math"),
    "math.sqrt": (lambda g: concat(q=math.sqrt(g)), "into a Python number", "instead of those of math"),
    "np.floor": (lambda g: concat(q=np.floor(g)), "does not support ufuncs", "what gradwire.lang exports instead"),
    "np.asarray": (lambda g: concat(q=np.asarray(g)), "Cannot use a NumPy or torch function", "gradwire.lang"),
    "np.max": (lambda g: concat(q=g / np.max(g)), "has no 'max'; it has blocks, filter, map", "or reduce"),
    "torch.abs": (lambda g: concat(q=torch.abs(g)), "must be Tensor, not Value", "what gradwire.lang exports"),
    "array": (lambda g: concat(q=g * np.ones(3)), "a symbolic value, got ndarray", "use numbers, options"),
    "text": (lambda g: concat(q=g * "a"), "a symbolic value, got str", "use numbers, options"),
    "infinity": (lambda g: concat(q=g * float("inf")), "Expected a finite number, got inf", "below 3.4e38"),
    "unknown method": (lambda g: concat(q=g.median()), "has no 'median'; it has blocks, filter", "use map with"),
    "map after filter": (lambda g: concat(q=positive(g).map(abs)), "filter has no 'map'", "use .value and .index"),
    "arithmetic on a filter": (lambda g: concat(q=positive(g) * 2), "unsupported operand", "what gradwire.lang export"),
    "a filter is sent": (lambda g: concat(q=positive(g)), "got Filtered", "use .value and .index of it"),
    "blocks are sent": (lambda g: concat(q=g.blocks(64)), "got Blocks", "reduce the blocks"),
    "filter after blocks": (lambda g: concat(q=g.blocks(64).filter(abs)), "blocks has no 'filter'", "compute first"),
    "power": (lambda g: concat(q=g**2), "have no **", "multiply: x * x"),
    "power of two": (lambda g: concat(q=2**g), "have no **", "power(e) is the power of two"),
    "modulo": (lambda g: concat(q=g % 2), "have no %", "a - floor(a / b) * b"),
    "floor division": (lambda g: concat(q=g // 2), "have no //", "floor(a / b)"),
    "xor": (lambda g: concat(q=(g > 0) ^ (g < 1)), "have no ^", "& | ~ between conditions"),
    "matrix product": (lambda g: concat(q=g @ g), "have no @", "map and reduce(sum)"),
    "in": (lambda g: concat(q=where(1 in g, g, 0.0)), "have no in", "filter and count"),
    "assignment": (assign_item, "have no assignment to items", "where(condition, a, b)"),
    "index of elements": (lambda g: concat(q=g * g[0]), "Cannot index elements", "sort or sample first"),
    "reduce with a lambda": (lambda g: concat(q=g * g.reduce(lambda a, b: a + b)), "with <lambda>", "min, max, sum, m"),
    "reduce a scalar": (lambda g: concat(q=g * g.reduce(max).reduce(max)), "cannot reduce scalar", "use the value it"),
    "reduce conditions": (lambda g: concat(q=g * (g > 0).reduce(sum)), "have no order and no sum", "reduce(count)"),
    "reduce after blocks": (lambda g: concat(q=g / (g / g.blocks(64).reduce(max)).reduce(max)), "depends on blocks",
                            "reduce what depends on the gradient"),
    "mean as a function": (lambda g: concat(q=g - mean(g)), "mean is a function for reduce", "x.reduce(mean)"),
    "filter gives a number": (lambda g: concat(q=g * g.filter(abs).reduce(sum)), "return a comparison", "abs(x) >= "),
    "filter gives nothing": (lambda g: concat(q=g.filter(lambda x: None).value), "got None", "return the result"),
    "filter of a list": (lambda g: concat(q=positive(g).value.filter(lambda x: x > 1).value), "only elements",
                         "once, with & between conditions"),
    "map gives nothing": (lambda g: concat(q=g.map(lambda x: None)), "Expected a number, got None", "return the resul"),
    "nothing is returned": (lambda g: None, "encode must return concat(...), got NoneType", "concat(scale=scal"),
    "a value is returned": (lambda g: g, "encode must return concat(...), got Value", "concat(scale=scale"),
    "size of a sample": (lambda g: concat(q=g * g.sample(g.reduce(max))[0]), "count must be known", "from .size"),
    "size of a top": (lambda g: concat(q=positive(g).top(g.reduce(max)).value), "count must be known", "a bound"),
    "size of a filter": (lambda g: concat(q=g.filter(lambda x: x > 0, g.reduce(max)).value), "at_most must", "bound"),
    "size of a top by the state": (lambda g: concat(q=positive(g).top(10 + previous_state()).value),
                                   "count cannot depend on previous_state()", "compute it from .size, step() and opt"),
    "size of a filter by the state": (lambda g: concat(q=g.filter(lambda x: x > 0, previous_state() * 2).value),
                                      "at_most cannot depend on previous_state()", "payload sizes must have a bound"),
    "slots by the state": (lambda g: concat(q=positive(g).hash(where(previous_state() > 0, 3, 9)).value),
                           "slots cannot depend on previous_state()", "payload sizes must have a bound"),
    "size of blocks": (lambda g: concat(q=g / g.blocks(g.size).reduce(max)), "must be an integer", "block=256"),
    "small blocks": (lambda g: concat(q=g / g.blocks(4).reduce(max)), "blocks have 8 to 2^20", "choose another size"),
    "two sizes of blocks": (lambda g: concat(q=g / (g.blocks(64).reduce(max) + g.blocks(128).reduce(max))),
                            "blocks of different sizes", "use one size"),
    "two sizes are sent": (lambda g: concat(a=g.blocks(64).reduce(max), b=g.blocks(128).reduce(max), q=g),
                           "Expected one block size, got [64, 128]", "use one size"),
    "blocks of blocks": (lambda g: concat(q=g.blocks(64).reduce(max).blocks(64)), "into blocks", "divide the gr"),
    "two lists": (lambda g: concat(q=positive(g).value + g.filter(lambda x: x < 0).value), "lists of different origin",
                  "filter once, with | between conditions"),
    "two lists are sent": (lambda g: concat(q=positive(g).value, r=g.filter(lambda x: x < 0).value),
                           "lists of different lengths", "the index and value of one filter"),
    "items and elements": (lambda g: concat(q=g + positive(g).value), "do not line up", "before filter, or reduce"),
    "position is an array": (lambda g: concat(q=g * positive(g).value[g]), "a number for a position", "reduce first"),
    "sort of the gradient": (lambda g: concat(q=g * g.sort()[0]), "expected a list, not elements", "sample or filter"),
    "sort of a map": (lambda g: concat(q=g * (positive(g).value * 2).sort()[0]), "a map of a list", "map the grad"),
    "sample of conditions": (lambda g: concat(q=g * (g > 0).sample(3)[0]), "numbers of elements", "a map of it"),
    "zero runs of bits": (lambda g: concat(q=g.map(dtype=uint1).zero_runs()), "trits of all elements, not uint1 of",
                          "dtype=trit).zero_runs()"),
    "zero runs of a list": (lambda g: concat(q=trits(positive(g).value).zero_runs()), "elements, not trit of items",
                            "dtype=trit).zero_runs()"),
    "zero runs of floats": (lambda g: concat(q=g.zero_runs()), "not float of elements", "dtype=trit).zero_runs()"),
    "zero runs of blocks": (lambda g: concat(q=g.blocks(64).zero_runs()), "blocks has no 'zero_runs'", "compute"),
    "zero runs in arithmetic": (lambda g: concat(q=trits(g).zero_runs() * 2), "Cannot mul the result of zero_runs",
                                "compute first, and pass the result to concat"),
    "zero runs twice": (lambda g: concat(q=trits(g).zero_runs().zero_runs()), "Cannot zero_runs the result of zero",
                        "concat(q=q.zero_runs())"),
    "two fields with zero runs": (lambda g: concat(q=trits(g).zero_runs(), r=trits(-g).zero_runs()),
                                  "Cannot send q and r with zero_runs", "use zero_runs for one of them"),
    "zero runs and a list": (lambda g: concat(q=trits(g).zero_runs(), v=positive(g).value), "together with lists",
                                "send either trits of all elements or the lists"),
    "empty concat": (lambda g: concat(), "names for the values it sends, got none", "concat(scale=scale, q=q)"),
    "concat without names": (lambda g: concat(g), "it sends, got values", "concat(scale=scale, q=q)"),
    "a field called size": (lambda g: concat(size=g), "'size', which is the gradient's", "concat(scale=scale, q=q)"),
    "conditions are sent": (lambda g: concat(q=g > 0), "Cannot send 'q': it is a condition", "map(..., dtype=uint1)"),
    "a condition is sent": (lambda g: concat(s=g.reduce(max) > 0, q=g), "it is a condition", "for a scalar"),
    "a payload is sent": (lambda g: concat(q=concat(q=g)), "got Payload", "results of operators"),
    "conditions as numbers": (lambda g: concat(q=g * (g > 0)), "a condition is not a number", "where(condition, 1.0"),
    "numbers as conditions": (lambda g: concat(q=where(g, 1.0, 2.0)), "a number is not a condition", "compare it"),
    "a number with and": (lambda g: concat(q=((g > 0) & 1).map(dtype=uint1)), "number is not a condition", "Python's"),
    "Python type": (lambda g: concat(q=g.map(dtype=int)), "Expected an element type, got <class 'int'>", "uint1, uint"),
    "cast of a scalar": (lambda g: concat(s=g.reduce(max).map(dtype=uint8), q=g), "are sent as float32", "omit dty"),
    "exponent of a scalar": (lambda g: concat(q=g * exponent(g.reduce(max))), "it is for elements", "in map"),
    "exponent of the size": (lambda g: concat(q=g * exponent(g.size)), "known from length and step alone", "in Python"),
    "over_ranks of elements": (lambda g: concat(q=g * g.over_ranks(max)), "only scalars", "reduce first"),
    "over_ranks of what depends on another": (
        lambda g: concat(q=g * (g * abs(g).reduce(max).over_ranks(max)).reduce(max).over_ranks(max)),
        "cannot depend on another over_ranks", "reduce something else",
    ),
    "over_ranks with mean": (lambda g: concat(q=g * g.reduce(max).over_ranks(mean)), "not mean", "choose one of these"),
    "nothing of the gradient": (lambda g: concat(q=random(shared=True)), "depends on the gradient", "use the argument"),
    "scatter in encode": (lambda g: concat(q=positive(g).value.scatter(positive(g).index)), "cannot use scatter", "in"),
    "an option without default": (lambda g, bits: concat(q=g), "missing 1 required positional argument", "the options"),
}  # fmt: skip

DECODERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "unknown field": (lambda p: p.scale * p.q, "no field 'scale'; it has index, q, s, t, v", "name it in concat"),
    "the gradient": (lambda p: kept[-1] * 1.0, "the gradient of encode", "send what decode needs in concat"),
    "private random": (lambda p: p.q + random(), "private random numbers", "random(low, high, shared=True)"),
    "reduce": (lambda p: p.q / p.q.reduce(max), "element and cannot use reduce", "in encode, and send the result"),
    "length": (lambda p: (p.v / p.v.size).scatter(p.index), "element and cannot use length", "and send the result"),
    "item": (lambda p: (p.v / p.v[0]).scatter(p.index), "element and cannot use item", "and send the result"),
    "after scatter": (lambda p: p.v.scatter(p.index) * 2.0, "the last step of decode, but mul", "scatter the result"),
    "scatter of elements": (lambda p: p.q.scatter(p.q), "positions of one list", "use p.value.scatter(p.index)"),
    "nothing": (lambda p: None, "one value per element, got None", "return p.q.map("),
    "a scalar": (lambda p: p.s * 2.0, "one number per element, got float of scalar", "map a packed field"),
    "a list": (lambda p: p.v, "one number per element, got float of items", "scatter a list"),
    "conditions": (lambda p: p.q > 0, "one number per element, got conditions", "use where"),
    "no argument": (lambda: 1.0, "takes 0 positional arguments but 1 was given", "decode the payload and"),
    "another option": (lambda p, levels: p.q, "missing 1 required positional argument: 'levels'", "that it names"),
    "zero runs": (lambda p: p.t.zero_runs() * p.s, "element and cannot use zero_runs", "do that in encode, and send"),
    "a method": (lambda p: p.q.sum(), "has no 'sum'", "use map with"),
}  # fmt: skip


def everything(g):
    kept.append(g)
    chosen = g.filter(lambda x: x > 0)
    return concat(s=g.reduce(max), q=g, t=trits(g), v=chosen.value, index=chosen.index)


def assert_helpful(error: TraceError, problem: str, remedy: str) -> None:
    message = str(error)
    assert problem in message
    assert error.where is not None and error.where.file == "test_trace.py", message
    assert f"(in test_trace.py:{error.where.line}: " in message
    advice = message.partition(f"{error.where.text}). ")[2]
    assert advice[0].isupper() and advice.endswith("."), message
    assert remedy in advice[0].lower() + advice[1:], message


@pytest.mark.parametrize("case", ENCODERS)
def test_what_an_encoder_cannot_do(case: str) -> None:
    encode, problem, remedy = ENCODERS[case]
    with pytest.raises(TraceError) as caught:
        traced(encode)
    assert_helpful(caught.value, problem, remedy)


@pytest.mark.parametrize("case", DECODERS)
def test_what_a_decoder_cannot_do(case: str) -> None:
    decode, problem, remedy = DECODERS[case]
    with pytest.raises(TraceError) as caught:
        traced(everything, decode)
    assert_helpful(caught.value, problem, remedy)


def test_the_line_is_that_of_the_mistake_and_not_of_the_function() -> None:
    with pytest.raises(TraceError) as caught:
        traced(decide)
    assert caught.value.where.text == "if g.reduce(max) > 0:"
    assert caught.value.where.line == decide.__code__.co_firstlineno + 1


def test_an_error_of_the_users_own_is_left_alone() -> None:
    def encode(g, bits=3):
        if bits == 3:
            raise ValueError("three bits are too odd")

    with pytest.raises(ValueError, match="too odd") as caught:
        traced(encode)
    assert not isinstance(caught.value, TraceError)


def test_outside_of_a_trace_there_is_nothing_to_add_to() -> None:
    traced(everything)
    for call in (random, lambda: kept[-1] + 1, lambda: concat(q=kept[-1])):
        with pytest.raises(TraceError, match="Call this inside a function decorated with") as caught:
            call()
        assert caught.value.where.file == "test_trace.py"


def test_python_s_own_functions_may_be_imported_with_the_language_s() -> None:
    for name in ("abs", "max", "min", "sum"):
        assert getattr(lang, name) is getattr(builtins, name)
    traced(lambda g: concat(top=lang.abs(g).reduce(lang.max), q=g.map(dtype=uint8)))


def test_an_option_without_a_default_is_refused_when_it_is_decorated() -> None:
    with pytest.raises(TraceError, match=r"'levels' has no default.*in test_trace.py:.*Give it one") as caught:

        @gw.compressor
        def no_default(g, levels):
            return concat(q=g)

    assert isinstance(caught.value, TypeError)
    assert "no_default" in caught.value.where.text


def test_a_compressor_without_a_decoder_says_so() -> None:
    @gw.compressor
    def half_done(g):
        return concat(q=g)

    with pytest.raises(TypeError, match=r"Decorate one with @half_done.decode"):
        half_done()


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    program = traced(lambda g: concat(q=g * np.float32(2) + np.float64(3) * g - torch.tensor(1.5)))
    values = [node.attrs["value"] for node in program.encode_nodes() if node.op == "constant"]
    assert sorted(values) == [1.5, 2, 3]


def test_equal_applications_are_one_node_and_random_numbers_are_not() -> None:
    once = traced(lambda g: concat(q=(g - g.reduce(min)) / (g.reduce(max) - g.reduce(min))))
    assert [node.op for node in once.encode_nodes()].count("reduce") == 2
    twice = traced(lambda g: concat(q=g + random() - random()))
    assert [node.op for node in twice.encode_nodes()].count("random") == 2


def test_lines_of_logic_are_counted_without_docstrings_and_comments() -> None:
    def encode(g, bits=2):
        """Two lines
        of documentation."""
        # A comment.
        low = g.reduce(min)

        return concat(
            low=low,
            q=g.map(lambda x: x - low),
        )

    program = traced(encode, lambda p: p.q + p.low)
    assert program.num_encode_lines == 6
    assert program.functions == 2
    assert used_operators(program) == ["concat", "extract", "map", "reduce"]
