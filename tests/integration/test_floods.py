"""A worker that needs 100 ms for each step of its handshake joins every kind of listener during floods in the lab."""

from __future__ import annotations

import functools

import pytest

from tests.integration.flood import LISTENERS
from tests.integration.flooded import CONNECT, ELSEWHERE, GREET, SEND, SHARED, flooded

pytestmark = [pytest.mark.ci, pytest.mark.root, pytest.mark.timeout(400)]
STEPS, PAUSE = 20, 0.1


@functools.cache
def undisturbed(listener: str) -> str:
    """Digest of the results without a flood."""
    return flooded(listener, [], steps=STEPS)["digest"]


@pytest.mark.parametrize("sources", [ELSEWHERE, SHARED], ids=["from others", "from its own address"])
@pytest.mark.parametrize("listener", LISTENERS)
def test_a_slow_worker_gets_in_and_its_sums_are_right(listener, sources):
    flood = GREET if listener == "tls" else CONNECT
    said = flooded(listener, [flood], sources, steps=STEPS, pause=PAUSE)
    assert said["connect_s"] > 3 * PAUSE
    assert said["digest"] == undisturbed(listener)
    (ended,) = said["floods"]
    assert ended["closed"] > 0, "the listener has seen nothing of the flood"
    assert ended["got_bytes"] > 0, "no handshake of the flood was answered"


@pytest.mark.parametrize("sources", [ELSEWHERE, SHARED], ids=["from others", "from its own address"])
def test_sums_are_right_during_ten_thousand_datagrams_a_second(sources):
    said = flooded("datagrams", [CONNECT, SEND], sources, steps=STEPS, pause=PAUSE)
    assert said["digest"] == undisturbed("datagrams")
    connections, datagrams = said["floods"]
    assert connections["closed"] > 0
    assert datagrams["sent"] >= SEND[1]
    assert datagrams["got_bytes"] == 0
