"""The decorator's own options: what it cannot mean is refused where it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gradwire as gw
from gradwire.compressors import names
from gradwire.compressors.base import registry
from gradwire.core.errors import GradwireError, OptionError, UnknownNameError
from gradwire.lang import concat, uint8


@pytest.fixture
def declared() -> Iterator[Any]:
    """Declares a compressor with these options, for one test."""
    known = set(names())

    def declare(**declarations: Any) -> Any:
        @gw.compressor("declared", **declarations)
        def algorithm(g: Any, block: int = 64, ratio: float = 0.5) -> Any:
            return concat(q=g.map(dtype=uint8))

        @algorithm.decode
        def _(p: Any) -> Any:
            return p.q * 1.0

        return algorithm

    yield declare
    for name in set(names()) - known:
        registry.unregister(name)


@pytest.mark.parametrize(
    ("option", "value", "error", "advice"),
    [
        ("feedback", "decay", UnknownNameError, "feedback of declared 'decay'.*Known: error, none"),
        ("feedback", None, UnknownNameError, "feedback of declared None.*Known: error, none"),
        ("feedback", lambda **_: "decay", UnknownNameError, "feedback of declared 'decay'.*Known: error, none"),
        (
            "feedback",
            lambda bits: "error",
            TypeError,
            r"feedback\(.*but missing .* 'bits'.*\*\*_ for the options",
        ),
        ("unbiased", "yes", TypeError, "unbiased of declared must be True or False, not 'yes'"),
        ("unbiased", lambda ratio, **_: ratio, TypeError, "unbiased of declared must be True or False, not 0.5"),
        ("encode_own_before_merge", 1, TypeError, "encode_own_before_merge must be True or False, not 1"),
        ("contraction", 0.5, TypeError, "must be a function of size, block, ratio, not 0.5"),
        ("contraction", lambda size: 1.0, TypeError, r"as contraction\(size, block=64, ratio=0.5\), but got an"),
        ("next_state", lambda body: 1.0, TypeError, r"next_state\(body, size, step, block=64.*but too many"),
        ("variance", lambda size, **_: 1.0, OptionError, "declared biased. Pass unbiased=True"),
        (
            "decay",
            0.9,
            UnknownNameError,
            "option of gradwire.compressor 'decay'.*Known: contraction, encode_own_before_merge, feedback, name",
        ),
    ],
)
def test_what_an_option_cannot_be(declared, option, value, error, advice) -> None:
    with pytest.raises(error, match=advice) as caught:
        declared(**{option: value})
    assert isinstance(caught.value, GradwireError)  # which the command line prints without a traceback


def test_a_name_is_a_string() -> None:
    with pytest.raises(TypeError, match=r'not 3\. Write @gradwire\.compressor\("name"\)'):
        gw.compressor(3)


def test_every_option_that_there_is_may_be_given(declared) -> None:
    algorithm = declared(
        feedback=lambda ratio, **_: "error" if ratio < 1 else "none",
        unbiased=lambda ratio, **_: ratio == 1,
        contraction=lambda size, block, ratio: ratio,
        variance=lambda size, **_: 0.0,
        encode_own_before_merge=True,
        next_state=lambda body, size, step, **_: 1.0,
    )
    codec = algorithm(ratio=1)
    assert (codec.default_feedback, codec.unbiased, codec.encode_own_before_merge) == ("none", True, True)
    assert algorithm().default_feedback == "error"


def test_what_a_function_declares_is_looked_at_with_every_set_of_options(declared) -> None:
    algorithm = declared(feedback=lambda block, **_: "error" if block < 128 else "decay")
    with pytest.raises(UnknownNameError, match="Known: error, none"):
        algorithm(block=128)
