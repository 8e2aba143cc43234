"""Bytes and packets of an interface, as the kernel counts them.

A command inside the lab calls `interface_counters` on its own interface. The counters come from `/proc/net/dev`, which
shows the reader's network namespace; `/sys/class/net` belongs to the namespace that mounted it. Bytes include Ethernet
headers, like the shaping. One packet is one frame on the wire, because segmentation in the kernel is off in a lab.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

from gradwire.core.errors import OptionError


@dataclass(frozen=True)
class InterfaceCounters:
    """Bytes and packets that an interface has carried, headers included."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """Traffic since `earlier`."""
        return InterfaceCounters(*(now - before for now, before in zip(astuple(self), astuple(earlier))))

    def mirrored(self) -> InterfaceCounters:
        """The same traffic, as counted at the other end of the cable."""
        return InterfaceCounters(self.bytes_received, self.bytes_sent, self.packets_received, self.packets_sent)


@dataclass(frozen=True)
class Drops:
    """Packets that a host lost, by cause.

    Attributes:
        uplink: Packets dropped because the queue from the host to the bridge was full.
        downlink: Packets dropped because the queue from the bridge to the host was full.
        loss: Packets dropped on arrival by the lab's `loss` option.
    """

    uplink: int
    downlink: int
    loss: int

    def __sub__(self, earlier: Drops) -> Drops:
        """Drops since `earlier`, or since a queue's counter began again, which is so if it has become smaller."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Drops(*(now - before if now >= before else now for now, before in pairs))


def parse_net_dev(text: str) -> dict[str, InterfaceCounters]:
    """Parse `/proc/net/dev` into counters by interface name."""
    table = {}
    for line in text.splitlines()[2:]:
        name, _, fields = line.partition(":")
        received_bytes, received, *rest = (int(field) for field in fields.split())
        # Transmit counters start in the ninth column, seven columns after the received packets.
        sent_bytes, sent = rest[6], rest[7]
        table[name.strip()] = InterfaceCounters(sent_bytes, received_bytes, sent, received)
    return table


def interface_counters(name: str | None = None) -> InterfaceCounters:
    """Counters of an interface in the calling process's network namespace.

    Args:
        name: Interface; None means the lab's, from the environment variable `GRADWIRE_LAB_INTERFACE`.

    Raises:
        OptionError: There is no such interface, or no name was given outside a lab.
    """
    name = name or os.environ.get("GRADWIRE_LAB_INTERFACE")
    if name is None:
        raise OptionError("No interface was named outside a lab. Pass a name, or run under `gradwire lab`.")
    table = parse_net_dev(Path("/proc/net/dev").read_text())
    if name not in table:
        raise OptionError(f"This host has no interface {name!r}. Known: {', '.join(table)}.")
    return table[name]
