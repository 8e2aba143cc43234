"""Places for unauthenticated connections, shared fairly between the addresses that they come from.

While there are free places, anybody gets one. When all are taken, a source with the most places loses one of them, at
random. So a source cannot take the places of sources that have fewer. Within a flood from one address, a caller that
needs time still keeps its place for that time now and then: with P places and R calls a second, it keeps it for t
seconds with a probability of about exp(-R t / P). With the oldest first, it never would if R t > P.

An IPv6 source is its network of 64 bits, within which one machine may have any address.
"""

from __future__ import annotations

import ipaddress
import random
from functools import lru_cache
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class SourceQuota(Generic[Holder]):
    """The places of one listener.

    Args:
        num_places: Number of places; at least 1.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._sources: dict[Holder, str] = {}
        self._holders: dict[str, list[Holder]] = {}
        self._rng = random.Random()

    def __len__(self) -> int:
        """Return the number of places that are taken."""
        return len(self._sources)

    def take(self, host: str, holder: Holder) -> Holder | None:
        """Give a place to a holder from the address `host`. Returns who has to leave for it, perhaps the holder."""
        source = source_of(host)
        self._sources[holder] = source
        self._holders.setdefault(source, []).append(holder)
        if len(self._sources) <= self._num_places:
            return None
        most = max(map(len, self._holders.values()))
        heaviest = self._rng.choice([source for source, holders in self._holders.items() if len(holders) == most])
        return self._rng.choice(self._holders[heaviest])

    def leave(self, holder: Holder) -> None:
        """Give the place of a holder back."""
        source = self._sources.pop(holder)
        self._holders[source].remove(holder)
        if not self._holders[source]:
            del self._holders[source]


@lru_cache(1024)
def source_of(host: str) -> str:
    """Return what an address counts as: itself, or the /64 network of an IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
