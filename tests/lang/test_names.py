"""Fields as variables of generated code: neither they nor names derived from them collide with other names."""

from __future__ import annotations

import keyword

import pytest

from gradwire.lang.ir import RESERVED, Field
from gradwire.lang.targets.numba import runtime
from tests.lang import algorithms


@pytest.mark.parametrize("name", ["largest", "magnitude", "pack", "q", "end", "lambda", "np", "segment", "sum"])
def test_no_variable_is_a_word_of_generated_code(name) -> None:
    node = algorithms.program("ternary").fields[0].node
    variable = Field(name, node).variable
    assert variable.rstrip("_") == name
    assert not keyword.iskeyword(variable)
    for suffix in ("", "_at", "_bytes", "_in", "_out", "_of", "_levels", "_next", "_mask", "_largest", "_all"):
        assert variable + suffix not in {*runtime.__all__, *RESERVED}
