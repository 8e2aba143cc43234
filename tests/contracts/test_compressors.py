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
from gradwire.testing.cases import context, normal, with_body
from gradwire.testing.robustness import take_or_refuse
from tests.contracts.compressor_cases import CASES, each_case, marks

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


@each_case
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 3.4e38])
def test_bad_side_values_are_refused(codec: Compressor, bad: float) -> None:
    grad = -normal(40).abs() if bad == 3.4e38 else normal(40)
    payload = codec.encode(grad, context(grad))
    side_values = {"int8": [0], "onebit": [0, 4], "threelc": [0], "topk": [0]}
    for at in side_values.get(codec.name, []):
        body = bytearray(bytes(payload.body))
        body[at : at + 4] = np.float32(bad).tobytes()
        # Codecs of the language take any finite value: what they decode to has a bound all the same.
        if isinstance(codec, TracedCompressor) and np.isfinite(bad):
            continue
        in_range = np.isfinite(bad) and (codec.name == "topk" or (codec.name == "threelc" and bad > 0))
        found = take_or_refuse(codec, with_body(payload, bytes(body)), 40)
        if not (in_range and bad < 0) and not (bad > 0 and np.isfinite(bad) and codec.name in ("topk", "threelc")):
            assert found is None
