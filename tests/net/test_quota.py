from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.net.quota import SourceQuota, source_of


def replace(quota: SourceQuota[int], host: str, holder: int) -> int | None:
    leaving = quota.take(host, holder)
    if leaving is not None:
        quota.leave(leaving)
    return leaving


def test_who_has_few_places_keeps_them_under_a_flood_from_elsewhere() -> None:
    quota: SourceQuota[int] = SourceQuota(20)
    assert replace(quota, "10.0.0.1", -1) is None
    left = [replace(quota, f"10.0.1.{caller % 9}", caller) for caller in range(2000)]
    assert -1 not in left
    assert len(quota) == 20


def test_within_a_flood_from_one_address_the_oldest_is_not_the_first_to_go() -> None:
    quota: SourceQuota[int] = SourceQuota(20)
    stayed = Counter[int]()
    came = {}
    for caller in range(5000):
        came[caller] = caller
        leaving = replace(quota, "10.0.0.1", caller)
        if leaving is not None:
            stayed[(caller - came[leaving]) // 20] += 1
    assert 0.3 < sum(count for times, count in stayed.items() if times) / stayed.total() < 0.45  # 1 / e, not 0
    assert stayed[3] > 50


@given(st.integers(1, 6), st.lists(st.integers(0, 4), max_size=60), st.randoms(use_true_random=False))
def test_places_are_bounded_and_shared(places: int, hosts: list[int], draw: random.Random) -> None:
    quota: SourceQuota[int] = SourceQuota(places)
    held: dict[int, int] = {}
    for holder, host in enumerate(hosts):
        held[holder] = host
        before = Counter(held.values())
        leaving = quota.take(f"10.0.0.{host}", holder)
        assert (leaving is None) == (len(held) <= places)
        if leaving is not None:
            assert before[held[leaving]] == max(before.values())
            quota.leave(leaving)
            del held[leaving]
        elif draw.random() < 0.3:
            gone = draw.choice(sorted(held))
            quota.leave(gone)
            del held[gone]
        assert len(quota) == len(held) <= places


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("fd00::1", "fd00::ffff:2", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_what_counts_as_one_source(first: str, second: str, same: bool) -> None:
    assert (source_of(first) == source_of(second)) is same
