"""What drivers say of XDP."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradwire.aggregator.xdp.driver import sends_redirected

CABLE = """
import socket, subprocess
from gradwire.aggregator.xdp.driver import sends_redirected
from gradwire.lab.offload import change
for command in ("add one type veth peer name two", "set one up", "set two up"):
    subprocess.run(["ip", "link", *command.split()], check=True)
before = sends_redirected(socket.if_nametoindex("one"))
change("gro", "two")
print(before, sends_redirected(socket.if_nametoindex("one")))
"""


def test_loopback_sends_nothing_for_programs_and_neither_does_what_is_not_there():
    assert not sends_redirected(1)
    assert not sends_redirected(1 << 30)


@pytest.mark.root
def test_a_cable_does_while_its_other_end_receives_by_napi():
    done = subprocess.run(["unshare", "-n", sys.executable, "-c", CABLE], capture_output=True, text=True, timeout=100)
    assert done.stdout == "False True\n", done.stderr
