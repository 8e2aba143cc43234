"""Counters and table of the incast benchmark. The lab itself is tested in `tests/lab`."""

from dataclasses import asdict

from benchmarks.papers.hipress import incast


def test_a_host_counts_packets_that_are_sent_again() -> None:
    assert set(incast.tcp_counters()) == {"resent", "timeouts"}


def test_the_gain_of_slots_is_that_over_all_peers() -> None:
    plain, slots = (
        incast.Cell("100mbit", "32kib", "allgather", way, seconds, 0.1, 0.9, 1.0, 16, 100.0, 1.5)
        for way, seconds in (("all peers", 0.6), ("slots", 0.5))
    )
    first, second = incast.table([asdict(plain), asdict(slots)]).splitlines()
    assert "all peers" in first and "600.0 ms" in first and "%" not in first
    assert "slots" in second and second.endswith("+20.0%")
