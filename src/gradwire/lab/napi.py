"""Let one end of a cable (veth) receive by NAPI, as network cards do: it gets an XDP program that passes everything.

A cable takes what XDP programs at its other end send only then. `ethtool -K INTERFACE gro on` is not enough: the kernel
(6.18) then puts frames that a program sends back (`XDP_TX`) into the ring of the receiving end, and does not wake it.
Once 256 of them wait there, it takes no packet any more, and stands still.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gradwire.lab.errors import LabError

if TYPE_CHECKING:
    from gradwire.aggregator.xdp.system import Descriptor

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_ATTACH_SECONDS = 30


def receive_by_napi(namespace: str, interface: str) -> Descriptor:
    """Attach the program until the descriptor is closed or this process ends.

    Args:
        namespace: File of the interface's network namespace.
        interface: Name of the interface.

    Raises:
        RightsError, OptionError: The kernel does not take the program; the message says why.
        LabError: This process may not enter the namespace.
    """
    with ThreadPoolExecutor(1) as thread:  # a thread of its own, which may be in another namespace
        return thread.submit(_attach, namespace, interface).result(_ATTACH_SECONDS)


def _attach(namespace: str, interface: str) -> Descriptor:
    from gradwire.aggregator.xdp import loader
    from gradwire.aggregator.xdp.assembler import Assembler
    from gradwire.aggregator.xdp.program import PASS
    from gradwire.aggregator.xdp.system import ProgramType

    library = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as file:
        if library.setns(file.fileno(), _NEW_NETWORK):
            raise LabError(f"The network of the lab cannot be entered ({os.strerror(ctypes.get_errno())}). Be root.")
    code = Assembler("xdp")
    code.leave(PASS)
    with loader.load(code, ProgramType.XDP, ()) as program:
        return loader.attach_xdp(program, interface, "native")
