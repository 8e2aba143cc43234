import pytest

from gradwire.core.errors import OptionError
from gradwire.lab.counters import Drops, InterfaceCounters, interface_counters, parse_net_dev

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:      11       1    0    0    0     0          0         0       11       1    0    0    0     0       0          0
  eth0:123456789012  22    3    4    5     6          7         8      900      12   13   14   15    16      17         18
"""  # noqa: E501


def test_columns_of_the_kernels_table():
    assert parse_net_dev(NET_DEV) == {
        "lo": InterfaceCounters(11, 11, 1, 1),
        "eth0": InterfaceCounters(bytes_sent=900, bytes_received=123456789012, packets_sent=12, packets_received=22),
    }


def test_traffic_between_two_readings_and_from_the_other_end():
    since = InterfaceCounters(10, 200, 3, 4) - InterfaceCounters(1, 100, 1, 1)
    assert since == InterfaceCounters(bytes_sent=9, bytes_received=100, packets_sent=2, packets_received=3)
    assert since.mirrored() == InterfaceCounters(bytes_sent=100, bytes_received=9, packets_sent=3, packets_received=2)
    assert Drops(5, 5, 5) - Drops(1, 2, 3) == Drops(4, 3, 2)
    assert Drops(0, 2, 5) - Drops(7, 3, 5) == Drops(0, 2, 0), "a queue that is made again counts from 0"


def test_an_interface_of_this_machine():
    assert interface_counters("lo").bytes_sent >= 0


def test_an_unknown_interface_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"no interface 'wire7'.*lo"):
        interface_counters("wire7")


def test_without_a_name_outside_a_lab(monkeypatch):
    monkeypatch.delenv("GRADWIRE_LAB_INTERFACE", raising=False)
    with pytest.raises(OptionError, match="run under `gradwire lab`"):
        interface_counters()
    monkeypatch.setenv("GRADWIRE_LAB_INTERFACE", "lo")
    assert interface_counters().bytes_sent >= 0
