"""From an object file to a program in the kernel, attached to an interface.

The object is read as far as needed: one section of instructions, and the places in it that name maps.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable

from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.maps import ArrayMap
from gradwire.aggregator.xdp.system import (
    AttachType,
    BpfError,
    Command,
    Descriptor,
    ProgramType,
    bpf,
    load_program,
    no_rights,
)
from gradwire.core.errors import GradwireError, OptionError

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQ")
_LOAD_64 = 0x18
_MAP_BY_DESCRIPTOR = 1
_PASS = 2
_GENERIC, _NATIVE = 1 << 1, 1 << 2
BROADCAST = "broadcast"
MODES = {"native": _NATIVE, BROADCAST: _NATIVE, "generic": _GENERIC}
"""How a program is attached: by the driver, which may also send the copies of results, or by the kernel for any
driver."""


def load(
    code: Assembler, kind: ProgramType, maps: Iterable[ArrayMap], place: AttachType = AttachType.NONE
) -> Descriptor:
    """Compile a program, and load it with its maps.

    Raises:
        RightsError: This process may not load programs.
        OptionError: The kernel's verifier refuses the program.
    """
    return load_object(code.compile(), code.section, kind, maps, place)


def load_object(
    elf: bytes, section: str, kind: ProgramType, maps: Iterable[ArrayMap], place: AttachType = AttachType.NONE
) -> Descriptor:
    """Load a compiled program; see `load`."""
    return load_program(kind, section, link_maps(elf, section, maps), place)


def link_maps(elf: bytes, section: str, maps: Iterable[ArrayMap]) -> bytes:
    """Return the instructions of a section of an object file, with the descriptors of the maps that they name."""
    sections = _sections(elf)
    instructions = bytearray(_content(elf, sections[section]))
    descriptors = {each.name: each.number for each in maps}
    places = sections.get(f".rel{section}")
    if places is None:
        return bytes(instructions)
    symbols = sections[".symtab"]
    names = _content(elf, sections[".strtab"])
    for at, which in _RELOCATION.iter_unpack(_content(elf, places)):
        symbol = _SYMBOL.unpack_from(elf, symbols[4] + (which >> 32) * _SYMBOL.size)
        name = _text(names, symbol[0])
        assert instructions[at] == _LOAD_64, f"{name} is named elsewhere than in a load of 64 bits"
        instructions[at + 1] = instructions[at + 1] & 0x0F | _MAP_BY_DESCRIPTOR << 4
        struct.pack_into("<i", instructions, at + 4, descriptors[name])
    return bytes(instructions)


def attach_xdp(program: Descriptor, interface: str, mode: str) -> Descriptor:
    """Attach an XDP program to an interface, until the descriptor is closed or this process ends.

    Raises:
        RightsError: This process may not attach programs.
        OptionError: There is no such interface, it has a program, or its driver does not support the mode.
    """
    advice = {
        errno.EBUSY: f"Another XDP program is attached. Detach it: ip link set dev {interface} xdp off.",
        errno.EEXIST: f"Another XDP program is attached. Detach it: ip link set dev {interface} xdp off.",
        errno.EOPNOTSUPP: "Its driver does not run XDP programs itself. Pass --xdp-mode generic.",
        errno.EINVAL: "Its driver may refuse long frames or merged packets: try ip link set dev "
        f"{interface} mtu 1500, ethtool -K {interface} lro off gro off, or --xdp-mode generic.",
    }
    if mode not in MODES:
        raise OptionError(f"There is no XDP mode {mode!r}. Pass one of {', '.join(MODES)}.")
    return _attach(program, interface, AttachType.XDP, MODES[mode], advice)


def attach_ingress(program: Descriptor, interface: str) -> Descriptor:
    """Attach a program of traffic control to what an interface receives, until the descriptor is closed."""
    return _attach(program, interface, AttachType.TCX_INGRESS, 0, {})


def attach_egress(program: Descriptor, interface: str) -> Descriptor:
    """Attach a program of traffic control to what an interface sends, until the descriptor is closed."""
    return _attach(program, interface, AttachType.TCX_EGRESS, 0, {})


def replace(link: Descriptor, program: Descriptor) -> None:
    """Put another program in the place of an attached one. No packet passes between them."""
    bpf(Command.LINK_UPDATE, struct.pack("<IIII", link.number, program.number, 0, 0))


def interface_index(interface: str) -> int:
    """Return the number of a network interface.

    Raises:
        OptionError: There is none of this name.
    """
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise OptionError(f"There is no network interface {interface!r}. Pass one of {known} to --xdp.") from error


def available() -> str | None:
    """Return why programs cannot be loaded here, or None if they can. Loads a small one to find out."""
    code = Assembler("xdp")
    code.leave(_PASS)
    try:
        with ArrayMap("tried", 8, 1, locked=True), load(code, ProgramType.XDP, ()):
            return None
    except GradwireError as error:
        return str(error)


def _attach(program: Descriptor, interface: str, place: AttachType, flags: int, advice: dict[int, str]) -> Descriptor:
    index = interface_index(interface)
    try:
        return Descriptor(bpf(Command.LINK_CREATE, struct.pack("<IIII", program.number, index, place, flags))[0])
    except BpfError as error:
        if error.errno == errno.EPERM:
            raise no_rights(error) from error
        default = "Use Linux 6.6 or later, or serve without --xdp."
        raise OptionError(
            f"The program cannot be attached to {interface} ({error.strerror}). {advice.get(error.errno or 0, default)}"
        ) from error


def _sections(elf: bytes) -> dict[str, tuple[int, ...]]:
    start, size, count, of_names = struct.unpack_from("<Q10xHHH", elf, 40)
    found = [_SECTION.unpack_from(elf, start + number * size) for number in range(count)]
    names = _content(elf, found[of_names])
    return {_text(names, each[0]): each for each in found}


def _content(elf: bytes, section: tuple[int, ...]) -> bytes:
    return elf[section[4] : section[4] + section[5]]


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()
