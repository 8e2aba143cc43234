"""The contract of `gradwire.compressors.base`, for every registered compressor and its option sets.

The checks are those of `gradwire.testing`, which users run on their own compressors. A few tests are for single
compressors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.testing import CHECKS, Check
from gradwire.testing.cases import context, normal, rounds_at_random, with_body
from gradwire.testing.robustness import take_or_refuse
from tests.contracts.compressor_cases import CASES, marks

PAIRS = [(codec, check) for check in CHECKS for codec in CASES if check.applies(codec)]
PARAMETERS = [pytest.param(codec, check, marks=marks(codec), id=f"{check.name}-{codec!r}") for codec, check in PAIRS]


def test_every_registered_compressor_is_in_the_suite() -> None:
    assert {codec.name for codec in CASES} >= set(compressors.names())


def test_every_check_applies_to_some_compressor() -> None:
    assert {check.name for check in CHECKS} - {check.name for _, check in PAIRS} <= {
        "generated-code-for-gpus-gives-what-the-oracle-gives"  # tests/lang/test_triton.py has it where there is no GPU
    }


@pytest.mark.parametrize(("codec", "check"), PARAMETERS)
def test_contract(codec: Compressor, check: Check) -> None:
    check.function(codec)


@pytest.mark.parametrize("block", [64, 128])
def test_a_range_draws_what_the_whole_would_draw_there(block: int) -> None:
    codec, grad = compressors.make("int8", block=block), normal(1024)
    whole = codec.decode(codec.encode(grad, context(grad)), context(grad))
    for start in range(0, 1024, 256):
        part = grad[start : start + 256]
        ctx = context(part, offset=start)
        assert torch.equal(codec.decode(codec.encode(part, ctx), ctx), whole[start : start + 256])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_an_element_beyond_the_16_bit_range_is_marked(name: str) -> None:
    limit = 65504.0 if name == "fp16" else 3.3895314e38
    codec = compressors.make(name)
    grad = torch.tensor([1.0, limit, -limit])
    assert not codec.encode(grad, context(grad)).nonfinite
    assert codec.encode(grad * 1.003, context(grad)).nonfinite
    assert not codec.encode(grad * 1.003, context(grad), scale=0.5).nonfinite


def test_a_gradient_is_scaled_before_the_cast_where_the_hook_of_torch_casts_first() -> None:
    codec, grad = compressors.make("fp16"), torch.tensor([1e5])
    assert grad.half().div_(4).isinf()
    payload = codec.encode(grad, context(grad), scale=0.25)
    assert not payload.nonfinite
    torch.testing.assert_close(codec.decode(payload, context(grad)), grad / 4, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("name", ["none", "lossless", "gcomp"])
def test_a_float64_beyond_float32_is_finite_and_keeps_its_bits(name: str) -> None:
    codec, grad = compressors.make(name), torch.tensor([1e39, -1.0], dtype=torch.float64)
    payload = codec.encode(grad, context(grad))
    assert not payload.nonfinite
    assert torch.equal(codec.decode(payload, context(grad)), grad)
    assert codec.encode(grad * torch.inf, context(grad)).nonfinite


def draws_nothing(codec: Compressor) -> bool:
    """Whether the bytes of one of our own compressors follow from the gradient alone."""
    if isinstance(codec, TracedCompressor):
        return {"random", "sample", "hash", "step"}.isdisjoint(node.op for node in codec.program.encode_nodes())
    return not rounds_at_random(codec) and codec.name != "powersgd"


@pytest.mark.parametrize(
    "codec", [pytest.param(each, marks=marks(each), id=repr(each)) for each in CASES if draws_nothing(each)]
)
def test_where_nothing_is_drawn_another_context_gives_the_same_bytes(codec: Compressor) -> None:
    grad = normal(600)
    bodies = {
        codec.encode(grad, context(grad, **other)).body.tobytes()
        for other in ({}, {"step": 4}, {"rank": 1}, {"seed": 8}, {"stage": 1}, {"name": "fc.bias"})
    }
    assert len(bodies) == 1


def side_values(codec: Compressor) -> list[int]:
    """Offsets of float32 numbers in the body of a tensor that must be finite: scalars, and values that come first."""
    if isinstance(codec, TracedCompressor):
        return [4 * place for place in range(sum(not field.is_array for field in codec.program.fields))]
    return [0] if codec.name in ("int8shared", "powersgd", "thc", "threelc", "topk", "uthc") else []


WITH_SIDE_VALUES = [pytest.param(each, marks=marks(each), id=repr(each)) for each in CASES if side_values(each)]


@pytest.mark.parametrize("codec", WITH_SIDE_VALUES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_side_values_are_refused(codec: Compressor, bad: float) -> None:
    payload = codec.encode(normal(40), context(normal(40)))
    for at in side_values(codec):
        body = bytearray(bytes(payload.body))
        body[at : at + 4] = np.float32(bad).tobytes()
        assert take_or_refuse(codec, with_body(payload, bytes(body)), 40) is None, at


def test_a_negative_magnitude_is_refused() -> None:
    codec = compressors.make("threelc")
    payload = codec.encode(normal(40), context(normal(40)))
    assert take_or_refuse(codec, with_body(payload, np.float32(-1).tobytes() + bytes(payload.body)[4:]), 40) is None
