"""How the ranks of a group find each other: through the store that torch.distributed already has.

Rank 0 draws a job key and an epoch and puts them into the store; every rank puts its address there and waits
until all have. Trust in the store is PyTorch's own. Values are text, never pickles.

Each attempt is a generation with keys of its own, so that nobody meets the addresses of an attempt before. A rank takes
part in each generation once. Who gives up closes the generation, and the others go on to the next one: so ranks that
try again meet, however often each has failed.

What all have read is deleted. What stays: for each rank, the number of its latest generation under a name, without
which it could not tell a new attempt from an old one; and of a generation that was closed, all that was said in it, for
ranks that are late.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.address import is_loopback, place
from gradwire.net.handshake import KEY_BYTES, GroupMember, JobKey
from gradwire.net.store import receive

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.at = time.monotonic() + timeout.total_seconds()

    @property
    def left(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at - time.monotonic())


@dataclass(frozen=True)
class Meeting:
    """What a rank knows once all have met.

    Attributes:
        member: this rank in this incarnation of the group.
        key: the job key.
        addresses: host and port of every rank.
    """

    member: GroupMember
    key: JobKey
    addresses: list[tuple[str, int]]


def meet(store: Any, name: str, rank: int, world_size: int, address: tuple[str, int], deadline: Deadline) -> Meeting:
    """Publish `address`, wait for all other ranks and return what they published.

    Raises:
        PeerTimeoutError: ranks are missing at the deadline; the message names them.
        SyncError: the store failed, or a rank published an address that this rank cannot reach.
    """
    record = json.dumps({"host": address[0], "port": address[1], "place": place()})
    try:
        while True:
            generation = store.add(f"gradwire/{name}/generation/{rank}", 1)
            met = _meet(store, name, generation, rank, world_size, record, deadline)
            if met is not None:
                return met
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, SyncError):
            raise
        raise SyncError(
            f"Expected the job's store to hold the group {name!r}, got {error!r}. Look whether rank 0 still runs.",
            phase="rendezvous",
        ) from error


def _meet(
    store: Any, name: str, generation: int, rank: int, world_size: int, record: str, deadline: Deadline
) -> Meeting | None:
    """Meet in one generation, unless it is closed."""
    prefix = f"gradwire/{name}/{generation}"
    closed = f"{prefix}/closed"
    if store.check([closed]):
        return None
    keys = [f"{prefix}/job", *(f"{prefix}/address/{peer}" for peer in range(world_size))]
    if rank == 0:
        store.set(keys[0], JobKey.draw().reveal().hex() + secrets.token_bytes(8).hex())
    store.set(keys[1 + rank], record)
    try:
        if not _wait(store, prefix, keys, deadline):
            return None
        job = bytes.fromhex(store.get(keys[0]).decode())
        key, epoch = JobKey(job[:KEY_BYTES]), int.from_bytes(job[KEY_BYTES:], "little")
        addresses = [_address(store, where, peer) for peer, where in enumerate(keys[1:])]
    except BaseException:
        store.set(closed, "")
        raise
    receive(store, prefix, world_size, keys)
    return Meeting(GroupMember(name, rank, world_size, epoch), key, addresses)


def _wait(store: Any, prefix: str, keys: list[str], deadline: Deadline) -> bool:
    """Wait until the job and all addresses are there; False where another rank has closed the generation."""
    # Polls instead of `store.wait`, which would lock the job's store for the whole wait.
    pause, world_size = _FIRST_PAUSE, len(keys) - 1
    while not store.check(keys):
        if store.check([f"{prefix}/closed"]):
            return False
        if deadline.left == 0:
            missing = [peer for peer, key in enumerate(keys[1:]) if not store.check([key])]
            raise PeerTimeoutError(
                f"Expected all {world_size} ranks within {deadline.timeout.total_seconds():g} s, got none of "
                f"ranks {missing} (in the rendezvous of {prefix!r}). Look at the logs of those ranks; raise "
                "the timeout if they start slowly.",
                rank=missing[0] if missing else 0,
                phase="rendezvous",
            )
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _address(store: Any, key: str, peer: int) -> tuple[str, int]:
    record = json.loads(store.get(key))
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
