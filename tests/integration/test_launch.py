"""Jobs of tests, which run next to each other."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.launch import NUM_PORTS, ROOT, free_port


def test_processes_with_tests_have_no_port_in_common() -> None:
    own = {free_port() for _ in range(2 * NUM_PORTS)}
    script = "from tests.integration.launch import free_port; print(*(free_port() for _ in range(200)))"
    other = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert own.isdisjoint(map(int, other.stdout.split()))
    assert len(own) <= NUM_PORTS
