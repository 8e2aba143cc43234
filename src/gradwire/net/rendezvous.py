"""Rendezvous: the ranks of a group find each other through the store of torch.distributed.

Rank 0 draws a job key and an epoch and puts them into the store. Every rank publishes its address there and waits for
all others. The store is trusted as PyTorch trusts it. Values are text, never pickles.

Each attempt is a generation with its own keys, so that nobody reads addresses of an earlier attempt. A rank takes part
in each generation once. A rank that gives up closes the generation, and the others move on to the next one. Therefore
ranks that try again meet, however often each has failed.

The last reader deletes the keys of a generation. Two things stay in the store: the number of each rank's latest
generation under a name, which tells a new attempt from an old one, and the keys of a closed generation, for late ranks.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.address import is_loopback, loopback_id
from gradwire.net.handshake import KEY_BYTES, GroupMember, JobKey
from gradwire.net.store import receive

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Deadline:
    """A deadline.

    Args:
        timeout: Time from now to the deadline.

    Attributes:
        timeout: As given.
        at: The deadline, on the monotonic clock.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.at = time.monotonic() + timeout.total_seconds()

    @property
    def left(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at - time.monotonic())


@dataclass(frozen=True)
class Meeting:
    """Result of the rendezvous.

    Attributes:
        member: This rank in this incarnation of the group.
        key: The job key.
        addresses: Host and port of every rank.
    """

    member: GroupMember
    key: JobKey
    addresses: list[tuple[str, int]]


def meet(store: Any, name: str, rank: int, world_size: int, address: tuple[str, int], deadline: Deadline) -> Meeting:
    """Publish `address`, wait for all other ranks and return what they published.

    Raises:
        PeerTimeoutError: Ranks are missing at the deadline. The message names them.
        SyncError: The store failed, or a rank published an address that this rank cannot reach.
    """
    record = json.dumps({"host": address[0], "port": address[1], "place": loopback_id()})
    try:
        late: list[int] = []
        while True:
            generation = store.add(f"gradwire/{name}/generation/{rank}", 1)
            met = _meet(store, name, generation, rank, world_size, record, deadline, late)
            if isinstance(met, Meeting):
                return met
            late = met or late
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, SyncError):
            raise
        raise SyncError(
            f"The job's store failed in the rendezvous of {name!r}: {error!r}. Check whether rank 0 still runs.",
            phase="rendezvous",
        ) from error


def _meet(
    store: Any, name: str, generation: int, rank: int, world_size: int, record: str, deadline: Deadline, late: list[int]
) -> Meeting | list[int]:
    """Meet in one generation. If it is closed, return the ranks that were missing.

    Args:
        late: Ranks that were missing in an earlier one, whose deadline was another rank's.
    """
    prefix = f"gradwire/{name}/{generation}"
    closed = f"{prefix}/closed"
    if store.check([closed]):
        return []
    keys = [f"{prefix}/job", *(f"{prefix}/address/{peer}" for peer in range(world_size))]
    if rank == 0:
        store.set(keys[0], JobKey.draw().reveal().hex() + secrets.token_bytes(8).hex())
    store.set(keys[1 + rank], record)
    try:
        missing = _wait(store, prefix, keys, deadline, late)
        if missing is not None:
            return missing
        job = bytes.fromhex(store.get(keys[0]).decode())
        key, epoch = JobKey(job[:KEY_BYTES]), int.from_bytes(job[KEY_BYTES:], "little")
        addresses = [_address(store, where, peer) for peer, where in enumerate(keys[1:])]
    except BaseException:
        store.set(closed, "")
        raise
    receive(store, prefix, world_size, keys)
    return Meeting(GroupMember(name, rank, world_size, epoch), key, addresses)


def _wait(store: Any, prefix: str, keys: list[str], deadline: Deadline, late: list[int]) -> list[int] | None:
    """Wait until the job and all addresses are there. Return who is missing if another rank closes the generation."""
    # Polls instead of `store.wait`, which would lock the job's store for the whole wait.
    pause, world_size = _FIRST_PAUSE, len(keys) - 1
    while not store.check(keys):
        if store.check([f"{prefix}/closed"]):
            return _missing(store, keys)
        if deadline.left == 0:
            missing = _missing(store, keys)
            missing = [peer for peer in late if peer in missing] or missing
            raise PeerTimeoutError(
                f"Of {world_size} ranks, ranks {missing} have not come within {deadline.timeout.total_seconds():g} s "
                f"(in the rendezvous of {prefix!r}). Look at the logs of those ranks; raise the timeout if they start "
                "slowly.",
                rank=missing[0] if missing else 0,
                phase="rendezvous",
            )
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return None


def _missing(store: Any, keys: list[str]) -> list[int]:
    return [peer for peer, key in enumerate(keys[1:]) if not store.check([key])]


def _address(store: Any, key: str, peer: int) -> tuple[str, int]:
    record = json.loads(store.get(key))
    host, port = str(record["host"]), int(record["port"])
    if is_loopback(host) and record["place"] != loopback_id():
        raise SyncError(
            f"This machine cannot reach rank {peer}, which listens at {host} of {record['place']}: the master's name "
            "is a loopback address there. Set MASTER_ADDR to an address that all machines reach, or GLOO_SOCKET_IFNAME "
            "to the interface that they share.",
            rank=peer,
            phase="rendezvous",
        )
    return host, port
