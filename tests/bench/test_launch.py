"""Links that ranks ask for in the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.bench.job import RateRequest, to_line
from gradwire.bench.launch import _Listener
from gradwire.lab import Lab


@pytest.mark.root
def test_a_servers_link_has_its_share_of_the_rate_that_ranks_ask_for(tmp_path: Path) -> None:
    with Lab(2) as lab:
        listener = _Listener(tmp_path, lambda message: None)
        listener.lab, listener.server = lab, (1, 4.0)
        listener(0, "stdout", to_line(RateRequest(1, "100mbit")))
        assert lab.rates == (100_000_000, 400_000_000)
        listener(0, "stdout", to_line(RateRequest(2, None)))
        assert lab.rates == (None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"rate-1", "rate-2"}
