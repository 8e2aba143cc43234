"""Maps: memory that programs in the kernel and this process share.

All are arrays with keys from 0. A map whose values begin with a lock is described to the kernel by a few types (BTF),
because it must know where the lock is.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import struct
from pathlib import Path

import numpy as np

from gradwire.aggregator.xdp.system import BpfError, Command, Descriptor, bpf, no_rights
from gradwire.core.errors import OptionError

_ARRAY, _ARRAY_OF_EACH_PROCESSOR, _DEVICES = 2, 6, 14
_DEVICE = struct.Struct("<Ii")
_MMAPABLE = 1 << 10
_LOCKED = 4
_BTF_MAGIC, _BTF_INT, _BTF_STRUCT = 0xEB9F, 1, 4


class ArrayMap(Descriptor):
    """An array of values of one size.

    Args:
        name: Name that programs use.
        value_bytes: Size of a value.
        num_values: Number of values.
        locked: Whether values begin with a lock of 4 bytes.

    Raises:
        RightsError: This process may not create maps.
        OptionError: The kernel has no memory for it.
    """

    kind = _ARRAY
    flags = 0

    def __init__(self, name: str, value_bytes: int, num_values: int, *, locked: bool = False) -> None:
        self.name, self.value_bytes, self.num_values, self.locked = name, value_bytes, num_values, locked
        types = _lock_types(value_bytes) if locked else None
        try:
            if num_values >> 32:
                raise BpfError(errno.E2BIG, os.strerror(errno.E2BIG))
            attribute = struct.pack(
                "<IIIIIII16sIIII", self.kind, 4, value_bytes, num_values, self.flags, 0, 0, name.encode(), 0,
                types.number if types else 0, 1 if types else 0, 3 if types else 0,
            )  # fmt: skip
            super().__init__(bpf(Command.MAP_CREATE, attribute)[0])
        except BpfError as error:
            if error.errno == errno.EPERM:
                raise no_rights(error) from error
            raise OptionError(
                f"The kernel refused a map of {num_values} values of {value_bytes} bytes ({error.strerror}): {name}. "
                "Send fewer tensors through the aggregator, raise the fraction, or serve without --xdp."
            ) from error
        finally:
            if types is not None:
                types.close()

    def read(self, key: int) -> bytes:
        """Return a value; where it has a lock, as no program has half written it."""
        value = ctypes.create_string_buffer(self._exchanged_bytes)
        self._exchange(Command.MAP_LOOKUP, key, value)
        return value.raw

    def write(self, key: int, value: bytes) -> None:
        """Replace a value."""
        assert len(value) == self._exchanged_bytes, f"a value of {self.name} takes {self._exchanged_bytes} bytes"
        self._exchange(Command.MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)))

    @property
    def _exchanged_bytes(self) -> int:
        return self.value_bytes

    def _exchange(self, command: Command, key: int, value: ctypes.Array[ctypes.c_char]) -> None:
        place = ctypes.c_uint32(key)
        addresses = ctypes.addressof(place), ctypes.addressof(value)
        bpf(command, struct.pack("<IIQQQ", self.number, 0, *addresses, _LOCKED if self.locked else 0))


class SharedMap(ArrayMap):
    """An array that this process sees as memory, `view`: uint8[num_values, value_bytes]."""

    flags = _MMAPABLE

    def __init__(self, name: str, value_bytes: int, num_values: int) -> None:
        assert value_bytes % 8 == 0, "values in shared memory are whole words"
        super().__init__(name, value_bytes, num_values)
        page = mmap.PAGESIZE
        self._memory = mmap.mmap(self.number, -(-value_bytes * num_values // page) * page)
        words = np.frombuffer(self._memory, np.uint8, value_bytes * num_values)
        self.view = words.reshape(num_values, value_bytes)


class DeviceMap(ArrayMap):
    """Interfaces that a packet can be redirected to, each with a program that runs on what is sent there."""

    kind = _DEVICES

    def __init__(self, name: str, num_devices: int) -> None:
        super().__init__(name, _DEVICE.size, num_devices)

    def send(self, key: int, interface: int, program: Descriptor) -> None:
        """Send to the interface with an index, through a program for `AttachType.XDP_DEVICE_MAP`."""
        self.write(key, _DEVICE.pack(interface, program.number))


class CounterMap(ArrayMap):
    """Counters of 8 bytes, a copy for each processor."""

    kind = _ARRAY_OF_EACH_PROCESSOR

    def __init__(self, name: str, num_counters: int) -> None:
        super().__init__(name, 8 * num_counters, 1)

    def totals(self) -> list[int]:
        """Return the counters' sums over the processors."""
        found = np.frombuffer(self.read(0), np.uint64).reshape(_num_processors(), -1)
        return [int(total) for total in found.sum(axis=0)]

    def clear(self) -> None:
        """Set all counters to 0."""
        self.write(0, bytes(self._exchanged_bytes))

    @property
    def _exchanged_bytes(self) -> int:
        return self.value_bytes * _num_processors()


@functools.cache
def _num_processors() -> int:
    """Number of processors that the kernel allots memory for."""
    try:
        possible = Path("/sys/devices/system/cpu/possible").read_text()
    except OSError:
        return os.cpu_count() or 1
    return int(possible.strip().split(",")[-1].split("-")[-1]) + 1


def _lock_types(value_bytes: int) -> Descriptor:
    """Tell the kernel the types of a map: 1 a key of 4 bytes, 2 a lock, 3 a value that begins with a lock."""
    names = b"\0int\0bpf_spin_lock\0val\0slot\0lock\0"
    at = {name: names.index(b"\0" + name + b"\0") + 1 for name in (b"int", b"bpf_spin_lock", b"val", b"slot", b"lock")}
    types = struct.pack("<IIII", at[b"int"], _BTF_INT << 24, 4, 32)
    types += struct.pack("<IIIIII", at[b"bpf_spin_lock"], _BTF_STRUCT << 24 | 1, 4, at[b"val"], 1, 0)
    types += struct.pack("<IIIIII", at[b"slot"], _BTF_STRUCT << 24 | 1, value_bytes, at[b"lock"], 2, 0)
    blob = struct.pack("<HBBIIIII", _BTF_MAGIC, 1, 0, 24, 0, len(types), len(types), len(names)) + types + names
    given = ctypes.create_string_buffer(blob, len(blob))
    try:
        return Descriptor(bpf(Command.BTF_LOAD, struct.pack("<QQIII", ctypes.addressof(given), 0, len(blob), 0, 0))[0])
    except BpfError as error:
        if error.errno == errno.EPERM:
            raise no_rights(error) from error
        raise OptionError(
            f"This kernel does not take descriptions of types ({error.strerror}), which locks need. Use one with "
            "CONFIG_DEBUG_INFO_BTF, or serve without --xdp."
        ) from error
