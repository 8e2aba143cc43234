"""Timers and the window, step by step; the schedules see only the outcome."""

from __future__ import annotations

import itertools
import random

from gradwire.aggregator.packet import PacketKey
from gradwire.aggregator.retransmission import FIRST_SECONDS, FIRST_WIDTH, ResultPolling, RoundTrip, Window

KEYS = [PacketKey(0, 0, packet) for packet in range(64)]
TRIP = 0.002


def window(sent: int = 4) -> Window:
    made = Window(256, random.Random(0))
    for key in KEYS[:sent]:
        made.send(key, 0.0)
    return made


def test_the_timeout_follows_the_measured_round_trip():
    trip = RoundTrip()
    assert trip.timeout == FIRST_SECONDS
    for _ in range(100):
        trip.measured(0.010)
    assert 0.011 <= trip.timeout < 0.0115
    trip.measured(0.2)
    assert trip.timeout > 0.2


def test_without_answers_one_packet_is_a_probe_at_growing_intervals():
    sent, now, again = window(), 0.0, []
    while now < 3:
        again += [(now, key) for key in sent.due(now).again]
        for _, key in again[-1:]:
            if again[-1][0] == now:
                sent.send_again(key, now)
        now += 0.001
    gaps = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(again)]
    assert 3 <= len(again) <= 5
    assert gaps == sorted(gaps)


def test_packets_sent_before_an_answered_one_are_sent_again_at_once():
    sent = window()
    sent.send(KEYS[10], 0.005)
    sent.finish(KEYS[10], 0.010)
    assert sent.due(0.006).again == []
    assert sent.due(0.100).again == KEYS[:4]


def test_a_held_packet_is_asked_for_and_not_sent_again():
    sent = window(1)
    sent.hold(KEYS[0], 0.001)
    found = [sent.due(step / 100) for step in range(1, 100)]
    assert not any(due.again for due in found)
    assert 2 <= sum(len(due.ask) for due in found) < 10


def test_the_width_grows_with_answers_and_halves_once_per_loss():
    sent = window(FIRST_WIDTH)
    assert not sent.has_room
    for key in KEYS[1:FIRST_WIDTH]:
        sent.finish(key, 0.01)
    for key in KEYS[FIRST_WIDTH : FIRST_WIDTH + 31 - 1]:
        assert sent.has_room
        sent.send(key, 0.01)
    assert not sent.has_room  # 16 and 15 answers
    assert sent.due(0.2).again == []  # the lost one waits for room
    assert not sent.has_room


def test_a_packet_is_recalled_once():
    sent = window(1)
    assert sent.recall(KEYS[0])
    assert not sent.recall(KEYS[0])
    assert sent.deadline() is None


# -- result polling -------------------------------------------------------------------------------------------


def held() -> ResultPolling:
    made = ResultPolling(random.Random(0))
    for key in KEYS:
        made.add(key, 0.0)
    return made


def asked_until(end: float, waiting: ResultPolling, now: float = 0.0) -> list[tuple[float, PacketKey]]:
    """Results asked for while the server answers each time that it still waits."""
    asked = []
    while now < end:
        for key in waiting.due(now, TRIP):
            asked.append((now, key))
            waiting.add(key, now + 0.001)
        now += 0.002
    return asked


def test_one_result_at_a_time_is_asked_for_at_growing_intervals_while_the_server_waits():
    times = [time for time, _ in asked_until(10.0, held())]
    assert 3 <= len(times) <= 8
    assert len(set(times)) == len(times)


def test_results_that_arrive_one_by_one_trigger_no_questions():
    waiting = held()
    for step, key in enumerate(KEYS):
        now = 0.1 + step / 1000
        assert waiting.due(now, TRIP) == []
        waiting.finish(key, now)
    assert waiting.deadline(TRIP) is None


def test_answers_with_results_widen_polling():
    waiting, now, numbers = held(), waiting_for(held()), []
    while waiting.deadline(TRIP) is not None:
        keys = waiting.due(now, TRIP)
        numbers.append(len(keys))
        for key in keys:
            waiting.finish(key, now + 0.001)
        now += 0.001
    assert numbers == [1, 2, 4, 8, 16, 32, 1]


def waiting_for(waiting: ResultPolling) -> float:
    """When the first may be asked for, including jitter."""
    found = waiting.deadline(TRIP)
    assert found is not None
    return 1.3 * found


def test_dropped_packets_are_not_asked_for():
    waiting = held()
    assert all(waiting.drop(key) for key in KEYS)
    assert not waiting.drop(KEYS[0])
    assert waiting.deadline(TRIP) is None
