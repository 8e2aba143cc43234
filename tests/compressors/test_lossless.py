"""Lossless compression: every bit kept, never much longer than the elements, one encoding per tensor."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.support.float_packing import HEADER_BYTES
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, OptionTypeError, PayloadError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.prefix_code import SERIAL_BYTES, PrefixCode
from tests.contracts.compressor_cases import bits, context, heavy_tailed, normal, with_body

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def every_kind_of_float(dtype: torch.dtype) -> torch.Tensor:
    """Both zeros, subnormal and normal numbers, infinities, NaNs with every kind of payload, and random bits."""
    if dtype != torch.float32:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    rng = np.random.default_rng(0)
    edges = np.arange(0, 1 << 32, (1 << 18) - 1, np.uint64).astype(np.uint32)
    nans = rng.integers(0x7F800001, 0x80000000, 300, np.uint32) | rng.integers(0, 2, 300, np.uint32) << 31
    return torch.from_numpy(np.concatenate([edges, nans, rng.integers(1, 1 << 23, 300, np.uint32)]).view(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("surroundings", ["alone", "among zeros"])
def test_all_bits_of_every_kind_of_float_come_back(dtype, surroundings) -> None:
    codec, grad = compressors.make("lossless"), every_kind_of_float(dtype)
    if surroundings == "among zeros":  # so that the chunks are packed, and not stored
        grad = torch.cat([torch.zeros(16, 2048, dtype=dtype), grad[:: len(grad) // 8000][:8000].view(16, 500)], 1)
    payload = codec.encode(grad, context(grad))
    assert payload.nonfinite
    assert bits(codec.decode(payload, context(grad))) == bits(grad)
    if surroundings == "among zeros":
        assert payload.body.nbytes < grad.nbytes


@pytest.mark.parametrize("dtype", list(ELEMENT_TYPES), ids=str)
def test_noise_takes_a_header_more_than_it_has(dtype) -> None:
    codec = compressors.make("lossless")
    for size in (0, 1, 100, 40_000):
        noise = torch.empty(size, dtype=dtype)
        as_array(noise).view(np.uint8)[:] = np.random.default_rng(size).integers(0, 256, noise.nbytes, np.uint8)
        body = codec.encode(noise, context(noise)).body
        assert body.nbytes <= codec.max_encoded_bytes(TensorSpec.of(noise)) == noise.nbytes + HEADER_BYTES


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 26.95), (torch.bfloat16, 10.95), (torch.float16, 13.95)])
def test_a_gaussian_takes_under_three_bits_an_exponent_whatever_its_scale(dtype, most) -> None:
    codec = compressors.make("lossless")
    for scale in (1.0, 0.03) if dtype == torch.float16 else (1e-20, 1.0, 1e20):
        grad = (normal(40_000) * scale).to(dtype)
        assert 8 * codec.encode(grad, context(grad)).body.nbytes / grad.numel() < most


def test_the_default_code_fits_gradients_of_zeros_too() -> None:
    codec, grad = compressors.make("lossless"), torch.zeros(40_000)
    assert codec.encode(grad, context(grad)).body.nbytes < grad.nbytes / 7


def test_another_table_is_agreed_on_as_an_option() -> None:
    grad = heavy_tailed(30_000)
    counts = np.zeros(257, np.int64)
    kernels.exponent_counts(grad.numpy(), counts)
    text = PrefixCode.of(counts).to_bytes().hex()
    default, fitted = compressors.make("lossless"), compressors.make("lossless", table=text)
    payload = fitted.encode(grad, context(grad))
    assert payload.body.nbytes < default.encode(grad, context(grad)).body.nbytes
    assert torch.equal(fitted.decode(payload, context(grad)), grad)
    with pytest.raises(PayloadError, match="words of the table"):
        default.decode(payload, context(grad))


@pytest.mark.parametrize("table", ["00", "xyz", "ff" * 129, "00" * 129])
def test_a_table_that_is_no_code_is_refused_with_advice(table) -> None:
    with pytest.raises(OptionError, match=r"Pass PrefixCode.of\(counts\).to_bytes\(\).hex\(\)"):
        compressors.make("lossless", table=table)
    with pytest.raises(OptionTypeError, match="table must be a string"):
        compressors.make("lossless", table=b"")


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [(0, 0, "a block that begins with"), (2, 2, "stored or packed"), (3, 3, "elements of torch.float32"),
     (4, 1, "words of the table")],
)  # fmt: skip
def test_a_header_of_something_else_is_refused(at, value, said) -> None:
    codec, grad = compressors.make("lossless"), normal(100)
    payload = codec.encode(grad, context(grad))
    body = bytearray(bytes(payload.body))
    body[at] = value
    with pytest.raises(PayloadError, match=said):
        codec.decode(with_body(payload, bytes(body)), context(grad))


def test_a_stored_block_that_could_be_packed_and_bytes_that_are_too_many_or_too_few_are_refused() -> None:
    codec, grad = compressors.make("lossless"), normal(1000)
    payload = codec.encode(grad, context(grad))
    header = bytearray(bytes(payload.body[:HEADER_BYTES]))
    header[2] = 0
    with pytest.raises(PayloadError, match="elements that are packed, since that is shorter"):
        codec.decode(with_body(payload, bytes(header) + grad.numpy().tobytes()), context(grad))
    for body in (bytes(payload.body) + b"\0", bytes(payload.body[:-1]), bytes(payload.body[:7]), b""):
        with pytest.raises(PayloadError):
            codec.decode(with_body(payload, body), context(grad))


def test_a_chunk_table_that_claims_more_than_there_is_costs_nothing() -> None:
    codec, grad = compressors.make("lossless"), normal(40_000)
    payload, ctx = codec.encode(grad, context(grad)), context(grad)
    body = bytearray(bytes(payload.body))
    body[HEADER_BYTES : HEADER_BYTES + 4] = (1 << 30 | (1 << 30) - 1).to_bytes(4, "little")
    bomb, out = with_body(payload, bytes(body)), torch.empty(40_000)
    with pytest.raises(PayloadError):
        codec.decode(bomb, ctx, out=out)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            codec.decode(bomb, ctx, out=out)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_sends_the_bits_that_none_would_send(dtype) -> None:
    grad = (heavy_tailed(5000) * 1e-3).to(dtype)
    exact, plain = compressors.make("lossless"), compressors.make("none")
    for scale in (1.0, 1 / 3, 0.25):
        found, expected = (
            codec.decode(codec.encode(grad, context(grad), scale=scale), context(grad)) for codec in (exact, plain)
        )
        assert bits(found) == bits(expected)


# -- tables of their own ---------------------------------------------------------------------------------------------


def at_step(step: int) -> Context:
    return Context("w", step=step, spec=TensorSpec((20_000,)))


def test_zeros_keep_a_short_word_although_the_mean_has_none() -> None:
    state = compressors.make("lossless", refresh=1).next_state(np.full(20_000, 3, np.float32), at_step(1))
    assert PrefixCode.from_bytes(state[SERIAL_BYTES:].tobytes()).lengths[0] <= 4


@pytest.mark.parametrize("step", [0, 2, 3])
def test_candidates_are_made_at_the_steps_that_are_for_it(step: int) -> None:
    codec, mean = compressors.make("lossless", refresh=3), np.full(20_000, 3, np.float32)
    assert codec.next_state(mean, at_step(step)) is None
    assert codec.next_state(mean, at_step(4)).size == 2 * SERIAL_BYTES
    assert compressors.make("lossless", refresh=0).next_state(mean, at_step(1)) is None


def payload_bytes(grad: torch.Tensor, state: np.ndarray | None) -> int:
    return int(compressors.make("lossless").encode(grad, context(grad, state=state)).body.nbytes)


def test_a_candidate_is_used_only_if_it_is_better_at_the_next_step_too() -> None:
    codec, usual, odd = compressors.make("lossless"), normal(20_000), torch.full((20_000,), 3.0)
    plain = payload_bytes(usual, None)
    candidate = codec.next_state(odd.numpy(), at_step(1))
    assert payload_bytes(odd, candidate) == payload_bytes(odd, None)  # not in use yet
    kept = codec.next_state(usual.numpy(), replace(at_step(2), state=candidate))
    assert kept.size == SERIAL_BYTES
    assert payload_bytes(usual, kept) == plain
    assert codec.next_state(usual.numpy(), replace(at_step(3), state=kept)) is None
    used = codec.next_state(odd.numpy(), replace(at_step(2), state=candidate))
    assert payload_bytes(odd, used) < 0.95 * payload_bytes(odd, None)


def test_a_step_that_is_almost_all_zeros_decides_nothing() -> None:
    codec = compressors.make("lossless")
    candidate = codec.next_state(np.full(20_000, 3, np.float32), at_step(1))
    assert codec.next_state(np.zeros(20_000, np.float32), replace(at_step(2), state=candidate)) is None


def test_a_table_a_step() -> None:
    codec, odd = compressors.make("lossless", refresh=1), torch.full((20_000,), 3.0)
    first = codec.next_state(odd.numpy(), at_step(1))
    second = codec.next_state(normal(20_000).numpy(), replace(at_step(2), state=first))  # the first one is no good
    assert payload_bytes(odd, second) == payload_bytes(odd, None)
    third = codec.next_state(odd.numpy(), replace(at_step(2), state=first))
    assert third.size == SERIAL_BYTES  # nothing is better than the table in use


@pytest.mark.parametrize("state", [np.zeros(129, np.uint8), np.zeros(4, np.uint8), np.ones(8, np.float32)])
def test_a_state_that_is_no_table_is_ignored(state: np.ndarray) -> None:
    grad = normal(1000)
    plain = compressors.make("lossless").encode(grad, context(grad))
    assert compressors.make("lossless").encode(grad, context(grad, state=state)).body.tobytes() == plain.body.tobytes()
