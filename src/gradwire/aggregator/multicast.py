"""Results to a multicast group: every worker could write them, so none is used before the server has named its hash.

The server sends each result once to the group, under a key that all workers have, and its SHA-256 to each worker under
that worker's own key (DIGEST). If either is lost, the worker asks for the result, which then comes under its own key.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from gradwire.aggregator.packet import SERVER, PacketKey, PacketKind, pack, unpack
from gradwire.core.errors import FrameError

_HASH_BYTES = 32
_ENTRY = struct.Struct(f"<QII{_HASH_BYTES}s")
_MAX_ENTRIES = 24  # so that a DIGEST packet fits the least MTU of a session
_MAX_CANDIDATES = 2
_NO_KEY = PacketKey(0, 0, 0)


class ResultHashes:
    """Hashes of results that the server has sent to the group, and not yet to the workers."""

    def __init__(self) -> None:
        self._entries: list[bytes] = []

    def add(self, result: np.ndarray) -> None:
        """Note a result packet that goes to the group."""
        self._entries.append(_ENTRY.pack(*unpack(result).key, hashlib.sha256(result.data).digest()))

    def flush(self, epoch: int) -> list[np.ndarray]:
        """Return the packets to send to each worker."""
        entries, self._entries = self._entries, []
        return [
            pack(PacketKind.DIGEST, _NO_KEY, SERVER, epoch, b"".join(entries[start : start + _MAX_ENTRIES]))
            for start in range(0, len(entries), _MAX_ENTRIES)
        ]


def hashes_of(body: np.ndarray) -> list[tuple[PacketKey, bytes]]:
    """Return the results that a DIGEST packet lists, with their hashes.

    Raises:
        FrameError: The body is not such a list.
    """
    if body.nbytes % _ENTRY.size:
        raise FrameError(f"Expected hashes of {_ENTRY.size} bytes each, got {body.nbytes} bytes.")
    return [(PacketKey(*key), found) for *key, found in _ENTRY.iter_unpack(body.tobytes())]


class UnprovenResults:
    """Results from the group whose hashes have not come, and hashes whose results have not come, at a worker.

    The caller passes only results that it waits for, and forgets what it has.
    """

    def __init__(self) -> None:
        self._results: dict[PacketKey, list[bytes]] = {}
        self._hashes: dict[PacketKey, bytes] = {}

    def add_result(self, key: PacketKey, packet: bytes) -> bool:
        """Whether a result has the hash that has come for it. Without one, it is kept; the first few of a key are."""
        if key in self._hashes:
            return hashlib.sha256(packet).digest() == self._hashes[key]
        kept = self._results.setdefault(key, [])
        if len(kept) < _MAX_CANDIDATES:
            kept.append(packet)
        return False

    def add_hash(self, key: PacketKey, named: bytes) -> bytes | None:
        """Return the kept result with this hash. If there is none, the hash is kept."""
        self._hashes[key] = named
        kept = self._results.pop(key, [])
        return next((packet for packet in kept if hashlib.sha256(packet).digest() == named), None)

    def forget(self, key: PacketKey) -> None:
        """Forget a result that has been taken."""
        self._results.pop(key, None)
        self._hashes.pop(key, None)
