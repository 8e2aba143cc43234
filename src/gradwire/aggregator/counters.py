"""What has happened to packets, as numbers that can be held against what a network did to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PacketCounters:
    """Of one end.

    Attributes:
        sent: packets, those that were sent again included.
        sent_again: contributions and results that had been sent before.
        received: packets that came, in any state, but for those of the next two.
        forged: datagrams that carry no tag of this job and this life of the server: damaged, or of others.
        dropped: datagrams that were thrown away on purpose, as `drop` asks for.
        corrupt: of those, not a packet: truncated, or with a flipped bit.
        stale: of another life of the server.
        refused: a packet, but not one that may come.
        duplicates: contributions that were there already; results that nobody waited for.
        late: contributions to what had been answered without them.
        taken: contributions that were added, or noted as empty; results that were waited for.
    """

    sent: int = 0
    sent_again: int = 0
    received: int = 0
    forged: int = 0
    dropped: int = 0
    corrupt: int = 0
    stale: int = 0
    refused: int = 0
    duplicates: int = 0
    late: int = 0
    taken: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in vars(self).items())
