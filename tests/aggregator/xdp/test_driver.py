"""What drivers say of XDP."""

from __future__ import annotations

import sys

import pytest

from gradwire.aggregator.xdp import driver
from gradwire.aggregator.xdp.driver import sends_redirected
from gradwire.lab import Lab

ASK = """
import socket
from gradwire.aggregator.xdp.driver import sends_redirected
print(sends_redirected(socket.if_nametoindex("eth0")))
"""


def test_loopback_sends_nothing_for_programs_and_neither_does_what_is_not_there():
    assert not sends_redirected(1)
    assert not sends_redirected(1 << 30)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("_NAME", 99, id="no family is found"),  # by a kind of attribute that the kernel does not look at
        pytest.param("_CONTROL", 0, id="no answer comes"),  # to a message of this type
    ],
)
def test_a_kernel_that_does_not_say_counts_as_one_that_does_not(monkeypatch, name, value):
    monkeypatch.setattr(driver, name, value)
    assert not sends_redirected(1)


@pytest.mark.root
def test_a_cable_does_while_its_other_end_receives_by_napi():
    with Lab(2) as lab:
        lab.receive_by_napi(0)
        hosts = lab.run([sys.executable, "-c", ASK], timeout=100).check().hosts
    assert [host.stdout for host in hosts] == ["True\n", "False\n"]
