"""The table of the benchmark of memory."""

from __future__ import annotations

import os

from benchmarks.micro.memory import peak_bytes, reset_peak, table


def test_memory_is_above_that_of_the_same_optimizer_and_speed_that_of_the_same_processes() -> None:
    found = {
        "ddp-fp32": {"memory": 1e9, "residuals": 0, "limit": 0, "step": 0.5, "ddp_step": 0.5},
        "ddp-fp32+adam": {"memory": 3e9, "residuals": 0, "limit": 0, "step": 1.0, "ddp_step": 1.0},
        "onebit": {"memory": 1.9e9, "residuals": 8e8, "limit": 1e9, "step": 1.0, "ddp_step": 0.5},
        "gcomp": {"memory": 3.1e9, "residuals": 0, "limit": 2e8, "step": 1.0, "ddp_step": 2.0},
    }
    rows = [
        {"method": method, "metric": name, "value": value} for method in found for name, value in found[method].items()
    ]
    lines = [line.split() for line in table(rows).splitlines()]
    assert lines[1][:2] == ["ddp-fp32", "-"]
    assert lines[3] == ["onebit", "900", "1000", "800", "1000", "ms", "0.50"]
    assert lines[4] == ["gcomp", "100", "200", "0", "1000", "ms", "2.00"]


def test_the_peak_can_be_reset() -> None:
    large = bytearray(os.urandom(64 << 20))
    before = peak_bytes()
    del large
    reset_peak()
    assert peak_bytes() < before - (32 << 20)
