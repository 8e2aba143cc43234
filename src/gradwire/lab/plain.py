"""Make cables and bridge plain: interfaces count frames, and the bridge passes them on without packet filters.

Run as a script (`python -I -S plain.py INTERFACE…`) in the namespace of bridge and interfaces, whose segmentation it
turns off. That is what `ethtool -K INTERFACE tso off` does, without ethtool: TCP still hands down large packets, which
the kernel cuts into frames before the interface. Limiting TCP itself (`gso_max_segs 1`) also gives frames, but keeps
one flow below 500 Mbit/s on a small machine, compared to several Gbit/s.

Where the machine filters bridged packets (`br_netfilter`, as container engines do), every frame in the lab would go
through filters, too, though they are empty there. That takes a tenth of a packet's time.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import sys
from pathlib import Path

_SIOCETHTOOL = 0x8946
_ETHTOOL_STSO = 0x1F
_FILTERS = Path("/proc/sys/net/bridge")
"""Settings of the namespace that reads them. There are none without `br_netfilter`."""


def segment_in_software(interface: str) -> None:
    """Switch TCP segmentation offload of an interface off."""
    value = array.array("B", struct.pack("=II", _ETHTOOL_STSO, 0))
    address, _ = value.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))


def filter_nothing() -> None:
    """Let bridges of this namespace pass frames on without packet filters, where that may be set."""
    for setting in _FILTERS.glob("bridge-nf-call-*"):
        with contextlib.suppress(OSError):  # /proc/sys of a container is mostly read-only
            setting.write_text("0")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        segment_in_software(name)
    filter_nothing()
