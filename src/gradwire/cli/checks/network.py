"""Checks of the network: the address that ranks would use, interfaces, and settings of the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire.cli.checks.finding import NOTE, OK, PROBLEM, Check, Finding
from gradwire.core.errors import OptionError
from gradwire.net.address import address_toward, interface_address, is_loopback

PORTS = {29500: "torchrun's rendezvous", 7070: "gradwire serve"}
"""Ports that are used unless told otherwise."""
_LEAST_FILES = 1024
_LEAST_PORTS = 1000
_SECONDS = 5.0
_NET = Path("/sys/class/net")
_SYSCTL = Path("/proc/sys/net")


def addresses() -> Iterator[Finding]:
    """The address at which this rank would listen."""
    names, master = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("MASTER_ADDR")
    if names:
        yield _address("GLOO_SOCKET_IFNAME", f"{names}: this rank would listen at", interface_address, names.split(","))
    if master:
        toward = "its interface has" if names else "this rank would listen at"
        yield _address("MASTER_ADDR", f"{master}: {toward}", address_toward, master)
    name = socket.gethostname()
    try:
        found = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        advice = (
            f"Add it to /etc/hosts (`127.0.0.1 {name}`), or set GLOO_SOCKET_IFNAME to the interface that ranks share."
        )
        yield Finding(NOTE, "host name", f"{name!r} has no address ({error}): Gloo asks for it.", advice)
        return
    text = f"{name}: {found}"
    if is_loopback(found) and not names:
        text += "; jobs on several machines set GLOO_SOCKET_IFNAME"
    yield Finding(OK, "host name", text)


def _address(variable: str, text: str, find: Callable[[Any], str], value: Any) -> Finding:
    try:
        return Finding(OK, variable, f"{text} {find(value)}")
    except OptionError as error:
        return Finding(PROBLEM, variable, str(error))


def interfaces() -> Iterator[Finding]:
    """Each interface that is up, with its address, packet size and speed."""
    for _, name in socket.if_nameindex():
        folder = _NET / name
        if _read(folder / "operstate") not in ("up", "unknown"):
            continue
        try:
            address = interface_address([name])
        except OptionError:
            continue
        speed = _read(folder / "speed")
        rate = f", {int(speed) / 1000:g} Gb/s" if speed.isdecimal() and int(speed) > 0 else ""
        yield Finding(OK, f"interface {name}", f"{address}, MTU {_read(folder / 'mtu') or 'unknown'}{rate}")


def kernel_settings() -> Iterator[Finding]:
    """Congestion control, ports and descriptors."""
    used = _read(_SYSCTL / "ipv4/tcp_congestion_control")
    if used:
        others = [name for name in _read(_SYSCTL / "ipv4/tcp_available_congestion_control").split() if name != used]
        text = f"{used}; also there: {', '.join(others)}" if others else used
        yield Finding(OK, "congestion control", text)
    first, _, last = _read(_SYSCTL / "ipv4/ip_local_port_range").partition("\t")
    if first.isdecimal() and last.isdecimal():
        count = int(last) - int(first) + 1
        text = f"{first} to {last}, from which the kernel takes those of ranks"
        if count < _LEAST_PORTS:
            advice = "Widen it: sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
            yield Finding(NOTE, "ports", f"{text}: only {count}.", advice)
        else:
            yield Finding(OK, "ports", text + "; a firewall between the machines must let them pass")
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= most < _LEAST_FILES:
        yield Finding(NOTE, "open files", f"At most {most}; a rank needs one per peer.", "Raise it: ulimit -n 4096")
    else:
        yield Finding(OK, "open files", f"at most {most}")


def default_ports() -> Iterator[Finding]:
    """Whether the ports that are used unless told otherwise are free."""
    for port, user in PORTS.items():
        probe = socket.socket()
        probe.settimeout(_SECONDS)
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield Finding(NOTE, f"port {port}", f"Not free ({error.strerror}), for {user}.", "Choose another port.")
            else:
                yield Finding(OK, f"port {port}", f"free, for {user}")


CHECKS: tuple[Check, ...] = (addresses, interfaces, kernel_settings, default_ports)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
