"""Bytes and packets of an interface, read where the kernel counts them.

A command inside the lab calls `interface_counters` on its own interface. It reads `/proc/net/dev`, which
shows the network namespace of the reader; `/sys/class/net` does not, since a sysfs mount belongs to the
namespace that mounted it. Bytes count Ethernet headers, as the shaping does; one packet is one frame on the
wire (segmentation in the kernel is off in a lab).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gradwire.core.errors import OptionError


@dataclass(frozen=True)
class InterfaceCounters:
    """What an interface has carried, in bytes and in packets, headers included."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """What was carried since `earlier`."""
        return InterfaceCounters(
            self.bytes_sent - earlier.bytes_sent,
            self.bytes_received - earlier.bytes_received,
            self.packets_sent - earlier.packets_sent,
            self.packets_received - earlier.packets_received,
        )

    def mirrored(self) -> InterfaceCounters:
        """The same traffic as the other end of the cable counts it."""
        return InterfaceCounters(self.bytes_received, self.bytes_sent, self.packets_received, self.packets_sent)


@dataclass(frozen=True)
class Drops:
    """Packets that a host lost, by cause.

    Attributes:
        uplink: dropped because the queue from the host to the bridge was full.
        downlink: dropped because the queue from the bridge to the host was full.
        loss: dropped on arrival by the lab's `loss` option.
    """

    uplink: int
    downlink: int
    loss: int

    def __sub__(self, earlier: Drops) -> Drops:
        """What was dropped since `earlier`."""
        return Drops(self.uplink - earlier.uplink, self.downlink - earlier.downlink, max(0, self.loss - earlier.loss))


def parse_net_dev(text: str) -> dict[str, InterfaceCounters]:
    """Counters by interface name, from the text of `/proc/net/dev`."""
    table = {}
    for line in text.splitlines()[2:]:
        name, _, fields = line.partition(":")
        received_bytes, received, *rest = (int(field) for field in fields.split())
        # The transmit side starts at the ninth column: seven columns after the received packets.
        sent_bytes, sent = rest[6], rest[7]
        table[name.strip()] = InterfaceCounters(sent_bytes, received_bytes, sent, received)
    return table


def interface_counters(name: str | None = None) -> InterfaceCounters:
    """Counters of one interface of the calling process's own network namespace.

    Args:
        name: interface; None means the lab's, from the environment variable `GRADWIRE_LAB_INTERFACE`.

    Raises:
        OptionError: there is no such interface, or none was given outside a lab.
    """
    name = name or os.environ.get("GRADWIRE_LAB_INTERFACE")
    if name is None:
        raise OptionError("Expected an interface name outside a lab, got None. Pass one, or run under `gradwire lab`.")
    table = parse_net_dev(Path("/proc/net/dev").read_text())
    if name not in table:
        raise OptionError(f"Expected an interface of this host, got {name!r}. There are: {', '.join(table)}.")
    return table[name]
