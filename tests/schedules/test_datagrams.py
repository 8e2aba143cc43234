"""The network of datagrams: the same seed is the same schedule, and what is done is counted."""

from __future__ import annotations

import pytest

from tests.schedules.datagrams import DatagramArrival, DatagramNetwork, Faults

FAULTS = Faults(loss=0.2, duplicate=0.2, truncate=0.1, corrupt=0.1, spread=0.01)


def arrivals(network: DatagramNetwork, count: int) -> list[DatagramArrival]:
    for number in range(count):
        network.send(number % 3, bytes([number % 256]) * 50)
    found = []
    while network.next_arrival() is not None:
        found.append(network.receive())
    return found


def test_the_same_seed_is_the_same_schedule():
    first, second, other = (arrivals(DatagramNetwork(FAULTS, seed), 300) for seed in (1, 1, 2))
    assert first == second != other


def test_everything_that_is_done_is_counted():
    network = DatagramNetwork(FAULTS, 0)
    found, done = arrivals(network, 2000), network.done
    assert len(found) == done["sent"] - done["lost"] + done["duplicated"] == sum(network.delivered.values())
    changed = [each for each in found if len(each.data) < 50 or each.data != each.data[:1] * 50]
    assert len(changed) == done["truncated"] + done["corrupted"] == sum(network.damaged.values())
    assert 300 < done["lost"] < 500
    assert [each.time for each in found] == sorted(each.time for each in found)
    assert [each.order for each in found] != sorted(each.order for each in found)


@pytest.mark.parametrize(("buffer_bytes", "arrive"), [(10_000, 20), (120, 3)])
def test_a_receiver_takes_so_many_bytes_a_second_and_keeps_so_many(buffer_bytes, arrive):
    network = DatagramNetwork(Faults(delay=0.5, rate=1000.0, buffer_bytes=buffer_bytes), 0)
    for _ in range(20):
        network.send(0, bytes(50))
    times = []
    while network.next_arrival() is not None:
        times.append(network.receive().time)
    assert len(times) == 20 - network.done["overflowed"] == arrive
    assert times[-1] == pytest.approx(0.5 + 0.05 * arrive)
