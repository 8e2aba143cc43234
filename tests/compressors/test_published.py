"""The published algorithms in the language: compiled code against the oracle, and their lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.spec import as_array
from gradwire.lang import interpret
from tests.compressors.harness import traced
from tests.contracts.compressor_cases import CASES, EDGE_TENSORS, context

TRACED = [codec for codec in CASES if isinstance(codec, TracedCompressor)]


def num_lines(codec: TracedCompressor) -> int:
    """Encoder and decoder with their signatures and decorators, without documentation."""
    return codec.program.num_encode_lines + codec.program.num_decode_lines


@pytest.mark.parametrize("codec", TRACED, ids=repr)
def test_compiled_code_gives_the_bytes_residuals_and_tensors_of_the_oracle(codec) -> None:
    for make in EDGE_TENSORS.values():
        grad = make()
        ctx, residual = context(grad), np.empty(grad.numel(), np.float32)
        payload = codec.encode(grad, ctx, residual_out=residual)
        env = interpret.Environment(grad.numel(), ctx.shared_key, ctx.private_key, ctx.offset, ctx.step)
        wanted = interpret.encode(codec.program, as_array(grad), env)
        assert wanted is not None
        assert bytes(payload.body) == bytes(wanted[0])
        assert residual.tobytes() == wanted[1].tobytes()
        found = np.empty(grad.numel(), np.float32)
        codec.decode(payload, ctx, out=torch.from_numpy(found).view(grad.shape))
        np.testing.assert_array_equal(found, interpret.decode(codec.program, payload.body, env))


@pytest.mark.parametrize("codec", TRACED, ids=repr)
def test_no_algorithm_has_more_than_29_lines(codec) -> None:
    """As in table 5 of HiPress, whose longest is GradDrop with 29."""
    assert 3 < num_lines(codec) <= 29


def test_the_five_of_hipress_average_at_most_23_lines() -> None:
    assert np.mean([num_lines(traced(name)) for name in ("onebit", "tbq", "minmax", "dgc", "graddrop")]) <= 23


def test_all_of_the_papers_are_there() -> None:
    names = "onebit mqe1bit tbq minmax terngrad dgc graddrop adacomp qsgd signsgd natural randomk threshold"
    assert {codec.name for codec in TRACED} >= set(names.split())
    assert set(names.split()) <= set(compressors.names())
