"""What is asked for, and when: by hand, where the schedules only see the end."""

from __future__ import annotations

import random

from gradwire.aggregator.packet import PacketKey
from gradwire.aggregator.polling import ResultPolling

KEYS = [PacketKey(0, 0, place) for place in range(64)]
TRIP = 0.002


def held() -> ResultPolling:
    made = ResultPolling(random.Random(0))
    for key in KEYS:
        made.add(key, 0.0)
    return made


def asked_until(end: float, waiting: ResultPolling, now: float = 0.0) -> list[tuple[float, PacketKey]]:
    """What is asked for while nothing comes, or the server says each time that it still waits."""
    asked = []
    while now < end:
        for key in waiting.due(now, TRIP):
            asked.append((now, key))
            waiting.add(key, now + 0.001)
        now += 0.002
    return asked


def test_one_at_a_time_is_asked_for_ever_more_rarely_while_the_server_waits():
    times = [time for time, _ in asked_until(10.0, held())]
    assert 3 <= len(times) <= 8
    assert len(set(times)) == len(times)


def test_results_that_come_one_by_one_are_no_reason_to_ask_for_the_others():
    waiting = held()
    for step, key in enumerate(KEYS):
        now = 0.1 + step / 1000
        assert waiting.due(now, TRIP) == []
        waiting.finish(key, now)
    assert waiting.deadline(TRIP) is None


def test_answers_that_are_results_let_ever_more_be_asked_for():
    waiting, now, numbers = held(), waiting_for(held()), []
    while waiting.deadline(TRIP) is not None:
        keys = waiting.due(now, TRIP)
        numbers.append(len(keys))
        for key in keys:
            waiting.finish(key, now + 0.001)
        now += 0.001
    assert numbers == [1, 2, 4, 8, 16, 32, 1]


def waiting_for(waiting: ResultPolling) -> float:
    """When the first may be asked for, jitter included."""
    found = waiting.deadline(TRIP)
    assert found is not None
    return 1.3 * found


def test_what_is_forgotten_is_not_asked_for():
    waiting = held()
    assert all(waiting.drop(key) for key in KEYS)
    assert not waiting.drop(KEYS[0])
    assert waiting.deadline(TRIP) is None
