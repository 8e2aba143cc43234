"""Turn segmentation by the interface off, so that interfaces count frames.

Run as a script (`python -I -S offload.py tso|gro INTERFACE…`) in the interfaces' namespace. With `tso`, it does what
`ethtool -K INTERFACE tso off` does, without ethtool: TCP still hands down large packets, which the kernel cuts into
frames before the interface. Limiting TCP itself (`gso_max_segs 1`) also gives frames, but keeps one flow below 500
Mbit/s on a small machine, compared to several Gbit/s.

With `gro`, it does what `ethtool -K INTERFACE gro on` does. Cables (veth) then receive by NAPI, as network cards do.
They must for frames that an XDP program at the other end sends.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_SETTINGS = {"tso": (0x1F, 0), "gro": (0x2C, 1)}  # numbers of ETHTOOL_STSO and ETHTOOL_SGRO, and the value to set


def change(setting: str, interface: str) -> None:
    """Switch TCP segmentation of an interface off, or its receive offload on."""
    value = array.array("B", struct.pack("=II", *_SETTINGS[setting]))
    address, _ = value.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        change(sys.argv[1], name)
