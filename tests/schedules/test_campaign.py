"""The record of a campaign, which several sittings write."""

from __future__ import annotations

from collections import Counter

from tests.schedules import campaign
from tests.schedules.campaign import BLOCK, Record


def test_a_sitting_goes_on_where_the_last_one_ended(tmp_path):
    path, blocks = tmp_path / "records" / "xdp.jsonl", [range(BLOCK), range(BLOCK, 2 * BLOCK)]

    def sitting(of: str = "abc1234", xdp: bool = True) -> Record:
        return Record(path, xdp, of)

    first = sitting()
    assert all(first.lacks(block) for block in blocks)
    first.add(blocks[0], Counter(lost=3, sent=9), [(7, "AssertionError: differs")])
    second = sitting()
    assert [second.lacks(block) for block in blocks] == [False, True]
    second.add(blocks[1], Counter(lost=1), [])
    assert sitting().summary() == f"{2 * BLOCK} schedules, 1 failed. Packets: lost 4, sent 9"
    assert sitting().lacks(range(3))
    assert sitting(xdp=False).lacks(blocks[0])
    assert sitting("abc1235").lacks(blocks[0])
    for of in ("abc1235", "abc1234-dirty"):
        sitting(of).add(blocks[0], Counter(), [])
        assert sitting(of).lacks(blocks[0]) == of.endswith("-dirty")


def test_a_block_has_what_its_schedules_have():
    seeds = range(40, 43)
    assert campaign.attempt(seeds, False) == (seeds, sum((campaign.schedule(seed) for seed in seeds), Counter()), [])
