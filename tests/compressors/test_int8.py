"""Scales, their limits, and the choice of lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, PayloadError
from tests.contracts.compressor_cases import context, normal, reduced, with_body


def test_each_block_has_the_scale_of_its_largest() -> None:
    codec = compressors.make("int8", block=8, stochastic=False)
    grad = torch.cat([torch.linspace(-1, 1, 8), torch.linspace(-100, 0, 5)])
    payload = codec.encode(grad, context(grad))
    scales, q = payload.body[:8].view(np.float32), payload.body[8:].view(np.int8)
    np.testing.assert_array_equal(scales, np.array([1, 100], np.float32) / np.float32(127))
    assert q[0] == -127 and q[7] == 127 and q[8] == -127 and q[12] == 0


def test_the_largest_float_survives() -> None:
    codec = compressors.make("int8")
    grad = torch.tensor([torch.finfo(torch.float32).max, -1e38])
    assert codec.decode(codec.encode(grad, context(grad)), context(grad)).isfinite().all()


def test_minus_128_is_refused() -> None:
    codec, grad = compressors.make("int8"), normal(4)
    payload = codec.encode(grad, context(grad))
    with pytest.raises(PayloadError, match="integers of at least -127"):
        codec.decode(with_body(payload, bytes(payload.body[:4]) + b"\x80" + bytes(3)), context(grad))


def test_shared_scales_travel_in_no_payload_but_where_there_were_none() -> None:
    codec, grad = compressors.make("int8", block=64, shared=True), normal(200)
    stats = reduced(codec, [grad])
    bare, whole = codec.encode(grad, context(grad), stats), codec.encode(grad, context(grad))
    assert bare.body.nbytes == 200 and whole.body.nbytes == 200 + 4 * 4
    assert torch.equal(codec.decode(bare, context(grad), stats=stats), codec.decode(whole, context(grad)))
    with pytest.raises(PayloadError, match="Expected 216 bytes, got 200"):
        codec.decode(bare, context(grad))
    with pytest.raises(ValueError, match="pass what `stats` gave, reduced over ranks"):
        codec.decode(bare, context(grad), stats=[np.ones(3, np.float32)])


def test_lanes_are_the_narrowest_that_hold_the_sum() -> None:
    codec = compressors.make("int8", shared=True)
    assert codec.lane_dtype(258) == np.int16
    assert codec.lane_dtype(259) == np.int32
    with pytest.raises(OptionError, match="sum in groups of ranks"):
        codec.lane_dtype(2**25)
    with pytest.raises(NotImplementedError, match="Do: shared=True"):
        compressors.make("int8").lane_dtype(2)
