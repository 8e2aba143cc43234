"""3LC against the paper, and edge cases in which our scale differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, PayloadError
from gradwire.kernels import reference as kernels
from tests.contracts.compressor_cases import context, heavy_tailed, with_body


@pytest.mark.parametrize("sparsity", [1.0, 1.5, 1.75, 1.9])
def test_values_are_those_of_equations_1_to_3(sparsity) -> None:
    codec, grad = compressors.make("threelc", sparsity=sparsity), heavy_tailed(1000)
    M = float(np.float32(float(grad.abs().max()) * sparsity))
    expected = M * torch.round(grad.double() / M)
    found = codec.decode(codec.encode(grad, context(grad)), context(grad))
    assert torch.equal(found.double(), expected)


def test_a_scale_counts_as_float32_as_in_a_fusion_group() -> None:
    codec, grad = compressors.make("threelc"), torch.tensor([5.0, 1.0, -3.0])
    third = float(np.float32(1 / 3))
    assert 5 * third != 5 / 3
    one, other = (codec.encode(grad, context(grad), scale=scale) for scale in (1 / 3, third))
    assert one.body.tobytes() == other.body.tobytes()


def test_a_tensor_of_zeros_takes_a_280th() -> None:
    """Section 3.3: all techniques together reach a ratio of 280 on zeros, without the scale's four bytes."""
    codec, grad = compressors.make("threelc"), torch.zeros(280_000)
    assert codec.encode(grad, context(grad)).body.nbytes == 4 + 4 * 280_000 // 280


@pytest.mark.parametrize("largest", [1e-45, 2.8e-45, 4.2e-45, 3e38, 3.4028235e38])
@pytest.mark.parametrize("sparsity", [1.0, 1.5, 1.9999999])
def test_the_largest_element_is_never_rounded_to_zero(largest, sparsity) -> None:
    codec, grad = compressors.make("threelc", sparsity=sparsity), torch.tensor([0.0, -largest, 0.0])
    found = codec.decode(codec.encode(grad, context(grad)), context(grad))
    assert found[1] <= -largest
    assert found.isfinite().all()


def test_bytes_without_meaning_are_refused() -> None:
    plain, runs = compressors.make("threelc", zero_run=False), compressors.make("threelc")
    grad = torch.zeros(12)  # three bytes, three digits of padding
    payload = plain.encode(grad, context(grad))
    scale, zero = np.float32(2).tobytes(), b"\x00" * 4
    for codec, body, reason in (
        (plain, scale + bytes([121, 122, 243]), "bytes below 243"),
        (plain, scale + bytes([122, 121, 122]), "padding of zeros"),
        (plain, scale + bytes([121, 121, 121]), "M above 0 exactly where"),
        (plain, zero + bytes([122, 121, 121]), "M above 0 exactly where"),
        (plain, scale + bytes([122, 121]), "Expected 3 more bytes"),
        (plain, scale + bytes([122, 121, 121, 121]), "Expected the end"),
        (plain, np.float32(-2).tobytes() + bytes([122, 121, 121]), "M of at least 0"),
        (runs, zero + bytes([121, 243]), "zero-run encoding of 3 bytes"),
        (runs, zero + bytes([255]), "zero-run encoding of 3 bytes"),
        (runs, scale + bytes([122, 121, 121]), "zero-run encoding of 3 bytes"),
        (runs, scale[:3], "Expected 4 more bytes"),
    ):
        with pytest.raises(PayloadError, match=reason):
            codec.decode(with_body(payload, body), context(grad))


@pytest.mark.parametrize("zero_run", [True, False])
@pytest.mark.parametrize("size", [1, 70, 139, 140, 141, 281, 10_007])
def test_blocks_are_encoded_by_themselves(size, zero_run) -> None:
    """Values are those of one block. Bytes are those of each block alone, with the common scale."""
    whole, blocks = (compressors.make("threelc", zero_run=zero_run, block=block) for block in (0, 140))
    grad = heavy_tailed(size)
    payload = blocks.encode(grad, context(grad))
    expected = whole.decode(whole.encode(grad, context(grad)), context(grad))
    assert torch.equal(blocks.decode(payload, context(grad)), expected)
    if size <= 140:
        np.testing.assert_array_equal(payload.body, whole.encode(grad, context(grad)).body)
        return
    body = payload.body[4:]
    if zero_run:
        lengths, body = body[: 4 * -(-size // 140)].view("<u4").tolist(), body[4 * -(-size // 140) :]
    else:
        lengths = [-(-min(140, size - start) // 5) for start in range(0, size, 140)]
    M = float(payload.body[:4].view("<f4")[0])
    for start, length in zip(range(0, size, 140), lengths):
        part = np.empty(min(140, size - start), np.float32)
        quartic = np.empty(-(-part.size // 5), np.uint8)
        if zero_run:
            assert kernels.zero_run_decode(body[:length], quartic) == quartic.size
        else:
            quartic = body[:length]
        assert kernels.unpack_ternary(quartic, M, part)
        np.testing.assert_array_equal(part, expected[start : start + 140].numpy())
        body = body[length:]
    assert body.size == 0


def test_zeros_in_blocks_take_a_280th_and_the_table() -> None:
    codec, grad = compressors.make("threelc", block=70_000), torch.zeros(280_000)
    assert codec.encode(grad, context(grad)).body.nbytes == 4 + 4 * 4 + 4 * 280_000 // 280


def test_a_block_ends_runs_evenly() -> None:
    with pytest.raises(OptionError, match=r"multiple of 70 elements, not 100\. Pass 0 for one block, or .* 70000\."):
        compressors.make("threelc", block=100)


def test_a_table_that_lies_is_refused() -> None:
    codec, grad = compressors.make("threelc", block=70), torch.zeros(140)
    payload = codec.encode(grad, context(grad))
    for lengths in ((1, 0), (0, 2), (2, 1), (1 << 31, 1)):
        body = payload.body.copy()
        body[4:12].view("<u4")[:] = lengths
        with pytest.raises(PayloadError):
            codec.decode(with_body(payload, body), context(grad))
