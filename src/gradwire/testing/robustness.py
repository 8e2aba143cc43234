"""Untrusted bytes: decoders return a tensor of the expected shape or raise `PayloadError`, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.errors import PayloadError
from gradwire.testing.cases import EMPTY, bits, context, heavy_tailed, normal, with_body
from gradwire.testing.checks import about, check, expect, refusal
from gradwire.wire.payload import Payload

NUM_CASES = 60


def take_or_refuse(
    codec: Compressor, payload: Payload, size: int, stats: Sequence[np.ndarray] = ()
) -> torch.Tensor | None:
    """Decode, and return a tensor of the expected shape, or None if the decoder raises `PayloadError`."""
    ctx = context(torch.empty(size))
    try:
        found = codec.decode(payload, ctx, stats=stats)
    except PayloadError:
        with about("decode refuses these bytes, decode_sum"), refusal(PayloadError):
            codec.decode_sum([payload], [ctx], torch.empty(size), stats=stats)
        return None
    expect(found.shape == (size,), f"expected {size} elements, got {tuple(found.shape)}")
    summed = codec.decode_sum([payload, payload], [ctx, ctx], torch.empty(size), stats=stats)
    codec.decode(payload, ctx, out=torch.zeros(size), accumulate=True, stats=stats)
    expect(summed.shape == (size,), f"expected a sum of {size} elements, got {tuple(summed.shape)}")
    return found


def random_bytes(rng: np.random.Generator, most: int, least: int = 0) -> bytes:
    """Return `least` to `most` bytes: random, all zeros, or all ones."""
    count = int(rng.integers(least, most + 1))
    kind = rng.integers(4)
    return bytes(count) if kind == 0 else b"\xff" * count if kind == 1 else rng.bytes(count)


@check()
def arbitrary_bytes_are_decoded_or_refused(codec: Compressor) -> None:
    """Random bytes of random length, with or without the non-finite mark, for tensors of random size."""
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        body, size = random_bytes(rng, 300), int(rng.integers(261))
        if seed % 3 == 0:  # the right length, so that the values are tested
            body = random_bytes(rng, *2 * (codec.encode(normal(size), context(normal(size))).body.nbytes,))
        payload = with_body(replace(EMPTY, nonfinite=bool(rng.integers(4) == 0)), body)
        with about(f"case {seed}, {len(body)} bytes for {size} elements"):
            take_or_refuse(codec, payload, size)


def damaged(rng: np.random.Generator, body: bytes) -> bytes:
    """Return the bytes with one change: a flip, an insertion, a deletion, an overwrite, an extension, or a cut."""
    kind = rng.choice(["flip", "insert", "delete", "overwrite", "extend", "cut"])
    at = int(rng.integers(max(1, len(body))))
    if kind == "flip" and body:
        return body[:at] + bytes([body[at] ^ 1 << int(rng.integers(8))]) + body[at + 1 :]
    if kind == "overwrite" and body:
        return body[:at] + random_bytes(rng, 4, 1) + body[at + 1 :]
    if kind == "delete":
        return body[:at] + body[at + 1 :]
    if kind == "cut":
        return body[:at]
    return (body if kind == "extend" else body[:at]) + random_bytes(rng, 9, 1) + body[at:]


@check()
def damaged_payloads_are_decoded_or_refused_and_never_mean_the_same(codec: Compressor) -> None:
    """A changed payload never decodes to the same tensor if `unique_encoding` is declared."""
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 201))
        grad = (normal, heavy_tailed, torch.zeros)[seed % 3](size)
        payload = codec.encode(grad, context(grad))
        body = bytes(payload.body)
        other = damaged(rng, body)
        with about(f"case {seed}, {size} elements"):
            found = take_or_refuse(codec, with_body(payload, other), size)
            if found is not None and other != body and codec.unique_encoding:
                same = bits(found) == bits(codec.decode(payload, context(grad)))
                expect(not same, "unique_encoding is declared, but other bytes decode to the same tensor")


@check()
def every_flipped_bit_is_refused_or_changes_the_tensor(codec: Compressor) -> None:
    """A payload with one flipped bit, for each of its bits."""
    grad = heavy_tailed(43)
    payload, ctx = codec.encode(grad, context(grad)), context(grad)
    body = bytes(payload.body)
    expected = bits(codec.decode(with_body(payload, body), ctx))
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        with about(f"bit {bit} of {8 * len(body)} flipped"):
            found = take_or_refuse(codec, with_body(payload, bytes(flipped)), 43)
            same = found is not None and bits(found) == expected
            unique = not (same and codec.unique_encoding)
            expect(unique, "unique_encoding is declared, but other bytes decode to the same tensor")


@check()
def a_bomb_costs_no_more_than_the_expected_tensor(codec: Compressor) -> None:
    """A megabyte of maximal runs for a tensor of ten elements."""
    bomb = with_body(EMPTY, b"\x00\x00\x80\x3f" + b"\xff" * 1_000_000)
    ctx = context(torch.empty(10))
    with refusal(PayloadError):
        codec.decode(bomb, ctx)
    tracemalloc.start()
    try:
        with refusal(PayloadError):
            codec.decode(bomb, ctx)
        found = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expect(found < 64 * 1024, f"expected less than 64 KiB for a tensor of ten elements, got {found} bytes")
