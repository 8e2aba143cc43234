"""The table of attacks in a short form: every sum stays right, and hostile datagrams are answered with 0 bytes."""

from __future__ import annotations

import pytest

from tests.attacks.table import Size, attacks


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_attacks_cost_their_sender_and_not_the_job():
    found = {each.name: each for each in attacks(Size(connections=200, datagrams=300, sessions=10, seconds=2))}
    *during, with_crc, with_mac = found.values()
    for each in during:
        assert each.flood.sent > 0, each  # all sums were compared while it lasted, and a wrong one had ended this test
        if each.unit == "datagrams":
            assert each.flood.got_bytes == 0, each
        elif "a second" not in each.name:
            assert each.flood.closed == each.flood.sent, each
    for quiet in ("connections that say nothing", "connections that send garbage"):
        assert found[quiet].flood.got_bytes == 0
    handshakes = found["handshakes with another key"].flood
    assert 0 < handshakes.got_bytes < handshakes.sent_bytes
    assert with_crc.cost == "a sum is wrong"  # the change was made, and its checksums fit
    assert with_mac.cost == "the job ends for a wrong tag; no sum is wrong"
