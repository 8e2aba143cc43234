"""The kernel's bpf system call: maps, programs, links and test runs, by ctypes alone.

Every object is a file descriptor. When the last one is closed, also by a process that is killed, the kernel frees map,
program and link. So a program that is attached by a link is detached at any exit.

Guarantees: a call that fails raises `RightsError` or `OptionError`, which says what the kernel lacks and what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from enum import IntEnum
from typing import Any

from gradwire.core.errors import OptionError, RightsError

_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280}
_ATTRIBUTE_BYTES = 144
_PACKET_CONTEXT_BYTES = 192
_LOG_BYTES = 1 << 24
_LOG_LINES = 6
_OLD_KERNEL = "Linux 6.6 or later is needed, with CONFIG_BPF_SYSCALL and CONFIG_XDP_SOCKETS or newer options"


class Command(IntEnum):
    """Commands of the bpf system call."""

    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    PROG_LOAD = 5
    PROG_TEST_RUN = 10
    INFO = 15
    BTF_LOAD = 18
    LINK_CREATE = 28
    LINK_UPDATE = 29
    ENABLE_STATS = 32


class ProgramType(IntEnum):
    """Where a program runs: on a packet in traffic control, or as early as the driver has it."""

    TRAFFIC_CONTROL = 3
    XDP = 6


class AttachType(IntEnum):
    """Places of links and of programs that are loaded for one place."""

    NONE = 0
    XDP_DEVICE_MAP = 33
    XDP = 37
    TCX_INGRESS = 46
    TCX_EGRESS = 47


class Descriptor:
    """A file descriptor of the kernel's. Use it in a `with` block, or close it."""

    number = -1

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Give it back to the kernel. Idempotent."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class BpfError(OSError):
    """The kernel refused a command; `errno` says why."""


def bpf(command: Command, attribute: bytes) -> tuple[int, bytes]:
    """Call the kernel, and return its answer and the attribute as it has left it.

    Raises:
        BpfError: The kernel refused.
        OptionError: There is no bpf system call that this module knows on this machine.
    """
    library, number = _library()
    buffer = ctypes.create_string_buffer(attribute.ljust(_ATTRIBUTE_BYTES, b"\0"), _ATTRIBUTE_BYTES)
    answer = library.syscall(number, int(command), buffer, _ATTRIBUTE_BYTES)
    if answer < 0:
        code = ctypes.get_errno()
        raise BpfError(code, os.strerror(code))
    return answer, buffer.raw


def load_program(kind: ProgramType, name: str, instructions: bytes, place: AttachType = AttachType.NONE) -> Descriptor:
    """Load a program, and return its descriptor.

    Raises:
        RightsError: This process may not load programs.
        OptionError: The verifier refuses the program. The message ends with the verifier's.
    """
    code, terms = ctypes.create_string_buffer(instructions, len(instructions)), ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1)
    for level in (0, 1):  # with a log only where it is needed: writing it takes seconds
        log = ctypes.create_string_buffer(_LOG_BYTES if level else 1)
        attribute = struct.pack(
            "<IIQQIIQII16sII", kind, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(terms),
            level, _LOG_BYTES if level else 0, ctypes.addressof(log) if level else 0, 0, 0, name.encode()[:15], 0,
            place,
        )  # fmt: skip
        try:
            return Descriptor(bpf(Command.PROG_LOAD, attribute)[0])
        except BpfError as error:
            if error.errno == errno.EPERM:
                raise no_rights(error) from error
            failure = error
    lines = log.value.decode(errors="replace").strip().splitlines()[-_LOG_LINES:]
    raise OptionError(
        f"The kernel's verifier refused the program {name!r} ({failure.strerror}). Update the kernel ({_OLD_KERNEL}), "
        "or serve without --xdp. It said: " + " | ".join(lines)
    ) from failure


def no_rights(error: OSError) -> RightsError:
    """Return what to raise where the kernel refuses for lack of rights."""
    return RightsError(
        f"This process may not use BPF ({error.strerror}). Run the server as root or with the capabilities CAP_BPF and "
        "CAP_NET_ADMIN, or serve without --xdp."
    )


def run_program(
    program: Descriptor, packet: bytes, *, repeat: int = 1, room: int = 4096, metadata: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Run an XDP program on a packet behind metadata, and return its verdict, and the packet and metadata it leaves."""
    size = len(metadata) + len(packet)
    given = ctypes.create_string_buffer(metadata + packet, size)
    found = ctypes.create_string_buffer(room)
    context = ctypes.create_string_buffer(struct.pack("<6I", len(metadata), size, 0, 0, 0, 0), 24)
    attribute = struct.pack(
        "<IIIIQQIIIIQQII", program.number, 0, size, room, ctypes.addressof(given), ctypes.addressof(found),
        repeat, 0, 24, 24, ctypes.addressof(context), ctypes.addressof(context), 0, 0,
    )  # fmt: skip
    _, answer = bpf(Command.PROG_TEST_RUN, attribute)
    verdict, end = struct.unpack_from("<I", answer, 4)[0], struct.unpack_from("<I", answer, 12)[0]
    start = struct.unpack_from("<I", context.raw, 0)[0]
    return verdict, found.raw[start:end], found.raw[:start]


def run_in_traffic_control(program: Descriptor, packet: bytes, *, mark: int) -> tuple[int, bytes]:
    """Run a program of traffic control on a packet with a mark, and return its verdict, and the packet it leaves."""
    given, found = ctypes.create_string_buffer(packet, len(packet)), ctypes.create_string_buffer(len(packet))
    context = ctypes.create_string_buffer(struct.pack("<8xI", mark), _PACKET_CONTEXT_BYTES)
    attribute = struct.pack(
        "<IIIIQQIIIIQQII", program.number, 0, len(packet), len(packet), ctypes.addressof(given),
        ctypes.addressof(found), 1, 0, _PACKET_CONTEXT_BYTES, 0, ctypes.addressof(context), 0, 0, 0,
    )  # fmt: skip
    _, answer = bpf(Command.PROG_TEST_RUN, attribute)
    return struct.unpack_from("<i", answer, 4)[0], found.raw


class RunTime:
    """Run time of a program while statistics are on (`enable_statistics`)."""

    def __init__(self, program: Descriptor) -> None:
        info = ctypes.create_string_buffer(232)
        bpf(Command.INFO, struct.pack("<IIQ", program.number, 232, ctypes.addressof(info)))
        self.nanoseconds, self.runs = struct.unpack_from("<QQ", info.raw, 192)
        self.verified = struct.unpack_from("<I", info.raw, 216)[0]


def enable_statistics() -> Descriptor:
    """Let the kernel count runs and run time of all programs until the descriptor is closed."""
    try:
        return Descriptor(bpf(Command.ENABLE_STATS, struct.pack("<I", 0))[0])
    except BpfError as error:
        raise no_rights(error) from error


def _library() -> tuple[ctypes.CDLL, int]:
    number = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or sys.byteorder != "little" or number is None:
        raise OptionError(
            f"--xdp needs Linux on {', '.join(_NUMBERS)}; this machine is {sys.platform} on {platform.machine()}. "
            "Serve without --xdp."
        )
    return _loaded_library(), number


@functools.cache
def _loaded_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
