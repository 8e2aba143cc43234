"""JSON messages: round trips, and bytes that are refused."""

from __future__ import annotations

import pytest

from gradwire.core.errors import FrameError
from gradwire.wire.json_message import MAX_DEPTH, dump, load

DEEPEST = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH


def test_a_message_survives() -> None:
    data = {"b": [1, 2.5, None], "a": {"text": "é"}}
    assert load(dump(data)) == data
    assert dump(load(DEEPEST)) == DEEPEST


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"", "Not JSON"), (b"\xff", "Not JSON"), (b"[" * 100_000, "Not JSON"), (b"[" + DEEPEST + b"]", "8 levels")],
    ids=["empty", "no text", "recursion", "too deep"],
)
def test_what_is_not_a_message_raises_frame_error(body: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        load(body)
