"""The checks themselves: each finds a compressor that breaks its rule, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.base import StatefulCompressor
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec
from gradwire.testing import CHECKS, run
from gradwire.wire.payload import Payload
from tests.contracts.compressor_cases import Halving

BY_NAME = {check.name: check for check in CHECKS}


class Faulty(Halving):
    """Halving, with one method or attribute replaced."""


def faulty(**replaced: Any) -> Faulty:
    codec = Faulty()
    for name, value in replaced.items():
        bound = value.__get__(codec) if callable(value) else value
        setattr(codec, name, bound)
    return codec


def encode(change: Callable[..., Payload]) -> Callable[..., Payload]:
    """An encoder that changes the payloads of Halving."""

    def method(self: Faulty, grad: torch.Tensor, ctx: Any, stats: Any = (), **compensation: Any) -> Payload:
        payload = Halving.encode(self, grad, ctx, stats, **compensation)
        return change(payload, grad, ctx, compensation.get("residual_out"))

    return method


def decode(change: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def method(self: Faulty, payload: Payload, ctx: Any, out: Any = None, accumulate: bool = False, stats: Any = ()):
        return change(lambda: Halving.decode(self, payload, ctx, out, accumulate, stats), payload, ctx, out)

    return method


def _calls() -> Callable[..., Payload]:
    """Adds a byte at each call."""
    bodies: list[bytes] = []

    def change(payload: Payload, *_: Any) -> Payload:
        bodies.append(b"")
        return Payload(np.concatenate([payload.body, np.zeros(len(bodies), np.uint8)]), payload.nonfinite)

    return change


def _forget_residual(payload: Payload, grad: torch.Tensor, ctx: Any, residual: np.ndarray | None) -> Payload:
    if residual is not None:
        residual[:] = 0
    return payload


def _ignore_size(call: Callable[[], torch.Tensor], payload: Payload, ctx: Any, out: Any) -> torch.Tensor:
    try:
        return call()
    except PayloadError:
        return torch.zeros(3)


def _copy(call: Callable[[], torch.Tensor], *_: Any) -> torch.Tensor:
    return call().clone()


# Check that must fail, compressor, and part of the message.
FAULTS: list[tuple[str, Faulty, str]] = [
    ("round-trip-keeps-shape-dtype-and-declared-algebra", faulty(contraction=lambda self, spec: 0.9), "contraction"),
    ("round-trip-keeps-shape-dtype-and-declared-algebra", faulty(exact=True), "exact is declared"),
    ("unbiased-over-the-private-stream", faulty(unbiased=True), "unbiased is declared"),
    ("declared-variance-is-a-bound", faulty(variance=lambda self, spec: 0.1), "variance declares 0.1"),
    ("gradient-is-what-was-sent-plus-the-residual", faulty(encode=encode(_forget_residual)), "are not sent + residual"),
    ("scatter-reduce-of-three-ranks-loses-nothing-in-300-steps", faulty(encode=encode(_forget_residual)), "differ"),
    ("same-bytes-twice-and-on-every-backend", faulty(encode=encode(_calls())), ""),
    ("randomness-depends-on-the-context-alone", faulty(unbiased=True), "gave the same bytes"),
    ("max-encoded-bytes-is-a-bound", faulty(max_encoded_bytes=lambda self, spec: 3 * spec.numel), "at most 3 bytes"),
    ("edge-tensors-decode-to-something-finite-and-near", faulty(decode=decode(lambda call, *_: call() * 9)), "declare"),
    ("a-non-finite-gradient-marks-the-payload",
     faulty(encode=encode(lambda payload, *_: Payload(payload.body))), "the payload is not marked"),
    ("one-non-finite-rank-shows-in-the-sum", faulty(decode_sum=lambda self, payloads, ctxs, out, stats=(): out.zero_()),
     "not NaN"),
    ("decode-sum-is-decoding-one-after-the-other",
     faulty(decode_sum=lambda self, payloads, ctxs, out, stats=(): out.zero_()), "differs from decoding"),
    ("decode-writes-to-out-and-adds-to-out", faulty(decode=decode(_copy)), "does not return out"),
    ("unusable-out-is-refused-with-advice",
     faulty(_output=lambda self, ctx, out: torch.empty(ctx.spec.shape) if ctx.spec else torch.empty(1)), "Expected"),
    ("arbitrary-bytes-are-decoded-or-refused", faulty(decode=decode(_ignore_size)), "elements, got (3,)"),
    ("a-bomb-costs-no-more-than-the-expected-tensor", faulty(decode=decode(_ignore_size)), "no PayloadError"),
    ("every-flipped-bit-is-refused-or-changes-the-tensor",
     faulty(unique_encoding=True, decode=decode(lambda call, *_: call().round())), "unique_encoding is declared"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "codec", "said"), FAULTS, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(FAULTS)])
def test_a_faulty_codec_is_found(name: str, codec: Faulty, said: str) -> None:
    (outcome,) = run(codec, [BY_NAME[name]])
    assert isinstance(outcome.error, AssertionError)
    assert said in str(outcome.error)
    assert str(outcome.error)


def test_a_wrong_factor_of_a_few_elements_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = compressors.make("randomk:ratio=0.01")
    check = BY_NAME["unbiased-over-the-private-stream"]
    (outcome,) = run(codec, [check])
    assert outcome.error is None
    right = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *arguments, **options: right(*arguments, **options).mul_(2))
    (outcome,) = run(codec, [check])
    assert "of the gradient on average" in str(outcome.error)


def test_a_sum_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = compressors.make("int8shared")
    monkeypatch.setattr(codec, "finalize", lambda total, world_size, ctx, stats, out: out.zero_())
    monkeypatch.setattr(codec, "decode_sum", lambda payloads, ctxs, out, stats=(): out.zero_())
    (outcome,) = run(codec, [BY_NAME["finalized-sum-is-the-sum-of-decodes"]])
    assert "does not point where the mean" in str(outcome.error)


class Forgetful(Halving, StatefulCompressor):
    """Halving, with a state that it trusts, and returns in float64."""

    state_source = "payload"

    def encode(self, grad: torch.Tensor, ctx: Any, *arguments: Any, **compensation: Any) -> Payload:
        nonfinite = ctx.state is not None and ctx.state.size != 2
        return replace(Halving.encode(self, grad, ctx, *arguments, **compensation), nonfinite=nonfinite)

    def decode(self, payload: Payload, ctx: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        values = Halving.decode(self, replace(payload, nonfinite=False), ctx, *arguments, **options)
        return values.fill_(torch.nan) if payload.nonfinite else values

    def next_state(self, source: Payload, ctx: Any) -> np.ndarray:
        return np.zeros(2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a-state-is-a-row-of-numbers-that-the-next-step-takes", "expected float32 or uint8, got float64"),
        ("a-state-of-something-else-is-ignored", "values that are not finite"),
    ],
)
def test_a_faulty_state_is_found(name: str, said: str) -> None:
    (outcome,) = run(Forgetful(), [BY_NAME[name]])
    assert said in str(outcome.error)


def test_generated_code_that_differs_from_the_oracle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = compressors.make("minmax")
    from gradwire.lang import interpret

    right = interpret.encode

    def other(*args: Any) -> Any:
        found = right(*args)
        return found and (found[0] ^ 1, found[1])

    monkeypatch.setattr(interpret, "encode", other)
    (outcome,) = run(codec, [BY_NAME["generated-code-for-the-cpu-gives-what-the-oracle-gives"]])
    assert "the payload differs from the oracle's in" in str(outcome.error)


def test_checks_have_a_summary_and_take_their_codecs_only() -> None:
    assert len(BY_NAME) == len(CHECKS)
    assert all(check.summary for check in CHECKS)
    names = {outcome.check.name for outcome in run(Halving())}
    assert "accumulators-never-overflow" not in names
    assert "max-encoded-bytes-is-a-bound" in names
    assert Halving().max_encoded_bytes(TensorSpec((3,))) == 12
