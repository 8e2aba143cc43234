"""The short form of the fuzz campaign; `python -m tests.fuzz --cases 1000000` is the long one."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import campaign
from tests.fuzz.target import Seed
from tests.fuzz.targets import targets
from tests.fuzz.wire import FrameTarget

CASES = 1500


@pytest.mark.parametrize("name", targets())
def test_any_bytes_lead_to_a_result_or_to_the_one_typed_error(name):
    outcome = campaign.run(targets()[name], CASES, seed=1)
    assert not outcome.failure
    assert outcome.cases > CASES / 2


class Careless(FrameTarget):
    name = "careless"

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        return data[70] == 0  # an IndexError on short input


class Endless(FrameTarget):
    name = "endless"

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        while data not in (start.data for start in self.corpus()):
            pass
        return True


@pytest.mark.parametrize(("target", "failure"), [(Careless(), "IndexError"), (Endless(), "no end within")])
def test_the_campaign_can_fail(target, failure, monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "HANG_SECONDS", 0.2)
    reproducer = tmp_path / "input.bin"
    outcome = campaign.run(target, 1000, seed=1, reproducer=reproducer)
    assert failure in outcome.failure
    assert reproducer.exists()
