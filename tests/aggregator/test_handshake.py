"""First words are read back as they were said; what is none of them is one error, and no other."""

from __future__ import annotations

import json

import pytest

from gradwire.aggregator.handshake import MAX_JOIN_BYTES, AggregatorJoin, AggregatorWelcome, check_size
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.core.errors import FrameError, OptionError
from tests.schedules import jobs

JOIN = AggregatorJoin(jobs.terms(), 5, 1 << 63, 0, 300.0, ("127.0.0.1", 5000))


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(JOIN.to_bytes()), **fields}).encode()


@pytest.mark.parametrize("host", ["127.0.0.1", "fd00::1"])
def test_first_words_come_back_as_they_were_said(host):
    join = AggregatorJoin(jobs.terms(), 5, 1 << 63, 0, 300.0, (host, 5000))
    assert AggregatorJoin.from_bytes(join.to_bytes()) == join
    for welcome in (AggregatorWelcome(7), AggregatorWelcome(7, 5000), AggregatorWelcome(7, 5000, ("239.1.2.3", 6000))):
        assert AggregatorWelcome.from_bytes(welcome.to_bytes()) == welcome


@pytest.mark.parametrize(
    "fields",
    [
        {"stall_seconds": 10**400}, {"stall_seconds": float("nan")}, {"stall_seconds": 0}, {"stall_seconds": []},
        {"address": ["a\0", 5]}, {"address": ["a.example", 5]}, {"address": ["fe80::1%a\0", 5]},
        {"address": ["127.0.0.1", 1 << 16]}, {"address": 5}, {"life": -1}, {"epoch": 1 << 64}, {"session": 1.0},
        {"more": 1}, {"terms": {**jobs.terms().to_json(), "fraction": 10**400}},
    ],
    ids=lambda fields: f"{fields!r:.40}",
)  # fmt: skip
def test_what_are_no_first_words_is_one_error(fields):
    with pytest.raises(FrameError):
        AggregatorJoin.from_bytes(changed(**fields))


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"null", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_nonsense_is_one_error(body):
    for words in (AggregatorJoin, AggregatorWelcome):
        with pytest.raises(FrameError):
            words.from_bytes(body)


def test_terms_that_a_server_would_refuse_for_their_length_are_refused_with_advice():
    many = SessionConfig(2, (jobs.WIDE,), (Stream(Operation.SUM, 1 << 40),) * (1 << 20))
    with pytest.raises(OptionError, match="fewer, larger tensors"):
        check_size(many)
    check_size(jobs.terms())
    assert len(JOIN.to_bytes()) < MAX_JOIN_BYTES
