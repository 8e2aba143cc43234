"""How the ranks of a group find each other: through the store that torch.distributed already has.

Rank 0 draws a job key and an epoch and puts them into the store; every rank puts its address there and waits
until all have. Trust in the store is PyTorch's own. Values are text, never pickles.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.protocol.handshake import KEY_BYTES, JobKey, Member
from gradwire.transport.address import is_loopback, place

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._at = time.monotonic() + timeout.total_seconds()

    @property
    def left(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self._at - time.monotonic())


@dataclass(frozen=True)
class Meeting:
    """What a rank knows once all have met.

    Attributes:
        member: this rank in this incarnation of the group.
        key: the job key.
        addresses: host and port of every rank.
    """

    member: Member
    key: JobKey
    addresses: list[tuple[str, int]]


def meet(store: Any, name: str, rank: int, world_size: int, address: tuple[str, int], deadline: Deadline) -> Meeting:
    """Publish `address`, wait for all other ranks and return what they published.

    Raises:
        PeerTimeoutError: ranks are missing at the deadline; the message names them.
        SyncError: the store failed, or a rank published an address that this rank cannot reach.
    """
    try:
        # A group that is set up again under its name must not meet the addresses of the time before.
        generation = store.add(f"gradwire/{name}/generation/{rank}", 1)
        prefix = f"gradwire/{name}/{generation}"
        if rank == 0:
            store.set(f"{prefix}/job", JobKey.draw().reveal().hex() + secrets.token_bytes(8).hex())
        record = {"host": address[0], "port": address[1], "place": place()}
        store.set(f"{prefix}/address/{rank}", json.dumps(record))
        _wait(store, prefix, world_size, deadline)
        job = bytes.fromhex(store.get(f"{prefix}/job").decode())
        key, epoch = JobKey(job[:KEY_BYTES]), int.from_bytes(job[KEY_BYTES:], "little")
        addresses = [_address(store, prefix, peer) for peer in range(world_size)]
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, SyncError):
            raise
        raise SyncError(
            f"Expected the job's store to hold the group {name!r}, got {error!r}. Look whether rank 0 still runs.",
            phase="rendezvous",
        ) from error
    return Meeting(Member(name, rank, world_size, epoch), key, addresses)


def _wait(store: Any, prefix: str, world_size: int, deadline: Deadline) -> None:
    # Polls instead of `store.wait`, which would lock the job's store for the whole wait.
    keys = {f"{prefix}/address/{peer}": peer for peer in range(world_size)}
    pause = _FIRST_PAUSE
    while not store.check([*keys, f"{prefix}/job"]):
        if deadline.left == 0:
            missing = [peer for key, peer in keys.items() if not store.check([key])]
            raise PeerTimeoutError(
                f"Expected all {world_size} ranks within {deadline.timeout.total_seconds():g} s, got none of "
                f"ranks {missing} (in the rendezvous of {prefix!r}). Look at the logs of those ranks; raise "
                "the timeout if they start slowly.",
                rank=missing[0] if missing else 0,
                phase="rendezvous",
            )
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _address(store: Any, prefix: str, peer: int) -> tuple[str, int]:
    record = json.loads(store.get(f"{prefix}/address/{peer}"))
    host, port = str(record["host"]), int(record["port"])
    if is_loopback(host) and record["place"] != place():
        raise SyncError(
            f"Expected an address of rank {peer} that this machine can reach, got {host} of {record['place']}. "
            "The master's name leads to loopback there: set MASTER_ADDR to an address that all machines reach, "
            "or GLOO_SOCKET_IFNAME to the interface that they share.",
            rank=peer,
            phase="rendezvous",
        )
    return host, port
