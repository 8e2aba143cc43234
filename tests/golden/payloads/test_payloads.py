"""The bytes of every compressor equal the golden files. `golden.py` explains how to update them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.wire.payload import Payload
from tests.contracts.compressor_cases import BACKENDS, use_backend
from tests.golden.payloads import golden

UPDATE = "If the format was meant to change: python -m tests.golden.payloads.golden, and a line in CHANGELOG.md."


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", compressors.names())
def test_payload_bytes_are_golden(name, backend, monkeypatch) -> None:
    use_backend(monkeypatch, backend)
    assert golden.render(name) == (golden.FOLDER / f"{name}.txt").read_text(), UPDATE


@pytest.mark.parametrize("name", compressors.names())
def test_golden_payloads_still_decode(name) -> None:
    bodies = golden.read(name)
    cases = golden.cases(name)
    assert bodies.keys() == cases.keys()
    for title, (codec, given) in cases.items():
        ctx = replace(given, spec=golden.spec(codec))
        found = codec.decode(Payload(np.frombuffer(bodies[title], np.uint8)), ctx)
        assert torch.equal(found, codec.decode(codec.encode(golden.gradient(codec), given), ctx))
