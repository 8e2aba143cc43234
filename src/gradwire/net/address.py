"""Addresses: which one of this machine the other ranks can reach, and how users write one.

A rank listens at the address that its machine uses toward the host of the job's store. That is loopback if the store's
host is a loopback name. `GLOO_SOCKET_IFNAME` overrides it, as for Gloo. A rank never listens at every interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.core.errors import OptionError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def local_address(store: Any) -> str:
    """Return the address to listen at.

    Args:
        store: The job's `torch.distributed.Store`.

    Raises:
        OptionError: `GLOO_SOCKET_IFNAME` names no interface with an address.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names:
        return interface_address(names.split(","))
    host = store_host(store)
    return LOOPBACK if host is None else address_toward(host)


def store_host(store: Any) -> str | None:
    """Return the host that serves `store`, or None if it has none (a file, a hash table)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else os.environ.get("MASTER_ADDR") or None


def resolve(host: str) -> str:
    """Return the address of `host`: IPv4, unless `host` is an IPv6 address itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # the latter if it cannot be a name
        raise OptionError(f"There is no address of {host!r} ({error}). Name a host that this machine knows.") from error


def address_toward(host: str) -> str:
    """Return the source address of this machine's packets to `host`. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OptionError(
            f"There is no route to {host!r} ({error}). Set GLOO_SOCKET_IFNAME to the interface that the ranks share."
        ) from error


def interface_address(names: list[str]) -> str:
    """Return the address (IPv4, else global IPv6) of the first interface in `names` that has one. Linux only."""
    for name in names:
        address = _ipv4_of(name.strip()) or _ipv6_of(name.strip())
        if address:
            return address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise OptionError(
        f"No interface in GLOO_SOCKET_IFNAME={','.join(names)} has an address. Known interfaces: {known}."
    )


def loopback_id() -> str:
    """Return host name and network namespace. Two processes with the same ones share a loopback interface."""
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or "localhost", can only be reached from its own machine.

    Other names do not count, whatever they resolve to: they may resolve to something else next time.
    """
    flags = 0 if host.lower() == "localhost" else socket.AI_NUMERICHOST
    try:
        found = [ipaddress.ip_address(address[0]) for *_, address in socket.getaddrinfo(host, None, flags=flags)]
    except (OSError, ValueError):  # a name, or not even that
        return False
    return all((getattr(each, "ipv4_mapped", None) or each).is_loopback for each in found)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port".

    Raises:
        OptionError: `text` is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise OptionError(f"{text!r} is not an address. Write it as host:port.")
    if not 0 < int(port) < 1 << 16:
        raise OptionError(f"There is no port {port} (in {text!r}). Pass one from 1 to 65535.")
    return host.strip("[]"), int(port)


def parse_addresses(given: str | Sequence[str]) -> list[tuple[str, int]]:
    """Return host and port of each of "host:port", separated by commas or in a sequence.

    Raises:
        OptionError: One is something else.
    """
    texts = given.split(",") if isinstance(given, str) else given
    return [parse_address(text.strip()) for text in texts if text.strip()]


def _ipv4_of(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: GLOO_SOCKET_IFNAME cannot be resolved there
        return None
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _ipv6_of(name: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return None
    for line in table.read_text().splitlines():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope in ("00", "10"):  # global or host, not link-local
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None


def serve_command(what: str, workers: int, address: tuple[str, int], job: str) -> str:
    """Return the command that starts the server which workers expect at `address`; `what` is the option of its kind."""
    named = "" if job == "gradwire" else f" --job {job}"
    return f"gradwire serve {what} --workers {workers} --host {address[0]} --port {address[1]}{named}"
