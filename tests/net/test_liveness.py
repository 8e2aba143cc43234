from __future__ import annotations

import inspect
from datetime import timedelta

import pytest

from gradwire.cli.serve import serve
from gradwire.net.client import ConnectionOptions
from gradwire.net.liveness import STALL_TIMEOUT, Liveness
from gradwire.parameter_server.process import ParameterServerOptions
from gradwire.sync.options import SyncOptions

TIMEOUT = timedelta(seconds=8)


def test_a_heartbeat_is_due_after_a_quarter_of_the_deadline_without_a_send():
    liveness = Liveness(TIMEOUT, now=100.0)
    assert not liveness.heartbeat_due(101.9)
    assert liveness.heartbeat_due(102.0)
    liveness.sent(102.0)
    assert not liveness.heartbeat_due(103.9)
    assert liveness.heartbeat_due(104.0)


def test_a_peer_is_silent_after_the_whole_deadline():
    liveness = Liveness(TIMEOUT, now=100.0)
    assert not liveness.silent(107.9)
    assert liveness.silent(108.0)
    liveness.heard(107.0)
    assert not liveness.silent(114.9)
    assert liveness.silent(115.0)


def test_time_in_which_this_process_was_held_up_is_no_silence_of_its_peer():
    liveness = Liveness(TIMEOUT, now=100.0)
    liveness.held_up(1.9)  # less than between two heartbeats, as on any busy machine
    assert liveness.silent(108.0)
    liveness.held_up(20.0)
    assert not liveness.silent(127.9)
    assert liveness.silent(128.0)


def test_nothing_turns_true_before_the_next_deadline():
    liveness = Liveness(TIMEOUT, now=100.0)
    assert liveness.next_deadline() == 102.0
    liveness.sent(107.0)
    assert liveness.next_deadline() == 108.0


def test_two_ends_that_keep_their_deadlines_never_give_each_other_up():
    ends = [Liveness(TIMEOUT, 0.0), Liveness(TIMEOUT, 0.0)]
    now, beats = 0.0, 0
    while now < 1000:
        now = min(end.next_deadline() for end in ends)
        for mine, other in (ends, ends[::-1]):
            assert not mine.silent(now)
            if mine.heartbeat_due(now):
                mine.sent(now)
                other.heard(now)
                beats += 1
    assert beats <= 2 * 1000 / 2 + 2  # no more than one an interval


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_is_positive(seconds):
    with pytest.raises(ValueError, match="positive timeout"):
        Liveness(timedelta(seconds=seconds), 0.0)


def test_by_default_a_live_process_may_evaluate_for_ten_minutes_wherever_others_wait_for_it():
    assert STALL_TIMEOUT.total_seconds() > 600
    command = inspect.signature(serve).parameters["stall_timeout"].default
    defaults = SyncOptions(), ConnectionOptions(), ParameterServerOptions(1)
    assert {each.stall_timeout for each in defaults} | {timedelta(seconds=command)} == {STALL_TIMEOUT}
