"""Turn segmentation by the interface off, so that interfaces count frames.

Run as a script (`python -I -S offload.py INTERFACE…`) in the interfaces' namespace. It does what `ethtool -K INTERFACE
tso off` does, without ethtool: TCP still hands down large packets, which the kernel cuts into frames before the
interface. Limiting TCP itself (`gso_max_segs 1`) also gives frames, but keeps one flow below 500 Mbit/s on a small
machine, compared to several Gbit/s.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_ETHTOOL_STSO = 0x1F


def segment_in_software(interface: str) -> None:
    """Switch TCP segmentation offload of an interface off."""
    value = array.array("B", struct.pack("=II", _ETHTOOL_STSO, 0))
    address, _ = value.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        segment_in_software(name)
