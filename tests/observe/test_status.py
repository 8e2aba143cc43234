"""The format of a status: everything comes back, and no bytes lead to anything but a status or one typed error."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import StatusError
from gradwire.observe import status as statuses
from gradwire.observe.status import LinkStatus, RankStatus, TensorStatus, decode, encode, printable
from tests.observe.statuses import blocked, status


def document(**fields: Any) -> bytes:
    return json.dumps(json.loads(encode(status())) | fields).encode()


@pytest.mark.parametrize("found", [status(), blocked(1, 0, 9.0), status(auto=None, residual_norm=None, step_age=None)])
def test_every_field_comes_back(found: RankStatus) -> None:
    assert decode(encode(found)) == found


def test_numbers_that_are_not_finite_are_unknown() -> None:
    found = replace(status(), residual_norm=math.nan, step_age=math.inf)
    assert decode(encode(found)) == replace(found, residual_norm=None, step_age=None)


@pytest.mark.parametrize("norm", [0.0, 5e-324, 1e19, 1e4 * torch.finfo(torch.float32).max])
def test_the_norm_of_any_float32_residual_comes_back(norm: float) -> None:
    found = status(residual_norm=norm, tensors=(TensorStatus("fc.weight", "threelc ring", 1, 0.0, 0.0, norm),))
    assert decode(encode(found)) == found


def test_a_large_job_fits() -> None:
    text = "\N{SNOWMAN}" * 10_000
    links = tuple(LinkStatus(peer) for peer in range(1, 5000))
    found = status(world_size=5000, links=links, notes=(text,) * 1000, method=text)
    data = encode(found)
    assert len(data) <= statuses.MAX_BYTES
    assert decode(data).step == found.step


@given(st.binary(max_size=200))
def test_any_bytes_are_a_typed_error(data: bytes) -> None:
    with pytest.raises(StatusError):
        decode(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(encode(status())))), JSON)
def test_any_value_in_a_field_is_a_status_or_a_typed_error(name: str, value: Any) -> None:
    with contextlib.suppress(StatusError):
        found = decode(document(**{name: value}))
        assert 0 <= found.rank < found.world_size
        assert found.latest.seconds < math.inf


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * 100_000, "Not JSON"),
        (b'{"version":1,"a":' + b"[" * 20 + b"]" * 20 + b"}", "levels"),
        (b" " * (statuses.MAX_BYTES + 1), "more than 262144 bytes"),
        (b"[]", "not a JSON object"),
        (b'{"version":2}', "Another version of gradwire"),
        (b'{"version":1}', "lacks fields of status"),
        (document(step=1 << 63), "Its step has another form"),
        (document(step=True), "Its step has another form"),
        (document(seconds=float("inf")), "Its seconds has another form"),
        (document(seconds=float("nan")), "Its seconds has another form"),
        (document(rank=2), "It is of rank 2 of 2."),
        (document(history=[0.1] * 257), "Its history has another form"),
        (document(links=[{}]), "lacks fields of status.links"),
        (document(process=7), "Its process has another form"),
        (document(step=int("9" * 400)), "Its step has another form"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, said: str) -> None:
    with pytest.raises(StatusError, match=said):
        decode(data)


def test_fields_of_later_releases_are_left_out() -> None:
    assert decode(document(weather="fine")) == status()


def test_a_terminal_obeys_no_text() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2Jline\nother\r\x9b31m\u202eevil\ud800\x00"
    found = decode(document(script=hostile, notes=[hostile], links=[]))
    assert found.script == found.notes[0] == printable(hostile)
    assert found.script.isprintable() and "\\x1b]0;owned" in found.script and "\\n" in found.script
    found.script.encode()


def test_long_texts_are_cut() -> None:
    assert len(decode(document(script="x" * 10_000)).script) == statuses.MAX_TEXT
