"""Rendezvous: the ranks of a group find each other through the store of torch.distributed.

Rank 0 draws an epoch and puts it into the store. Every rank publishes its address there and waits for all others.
Values are text, never pickles.

If the user has given a job key, it never enters the store: rank 0 publishes a proof that it holds the key. Whoever can
read or write the store can then keep the ranks apart, but cannot join them. Otherwise rank 0 draws a key and puts it
into the store for the duration of the rendezvous, and the store is trusted as PyTorch trusts it.

Each attempt is a generation with its own keys, so that nobody reads addresses of an earlier attempt. A rank takes part
in each generation once. A rank that gives up closes the generation, and the others move on to the next one. Therefore
ranks that try again meet, however often each has failed.

The last reader deletes what a generation has left in the store. Two things stay there: the number of each rank's latest
generation under a name, which tells a new attempt from an old one, and the addresses of a closed generation, for late
ranks. A drawn key does not stay: the rank that closes a generation overwrites it, and so does rank 0 if it finds its
generation closed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.address import is_loopback, loopback_id
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.keys import KEY_FILE_VARIABLE, KEY_VARIABLE
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


@dataclass(frozen=True)
class _ThisRank:
    """What a rank brings to a rendezvous: `key` if `key_is_given`, else a key that rank 0 may put into the store."""

    name: str
    rank: int
    world_size: int
    record: str
    key: JobKey
    key_is_given: bool


def meet(
    store: Any, name: str, rank: int, world_size: int, address: tuple[str, int], deadline: Deadline,
    key: JobKey | None = None, integrity: str | None = None,
) -> Meeting:  # fmt: skip
    """Publish `address`, wait for all other ranks and return what they published.

    Args:
        store: The job's store.
        name: Prefix in the store.
        rank: This rank.
        world_size: Number of ranks.
        address: Host and port at which this rank listens.
        deadline: When to give up.
        key: The job key, if the user has given one; the same on all ranks.
        integrity: `JobKey.integrity` of the key that is drawn if there is none.

    Raises:
        PeerTimeoutError: Ranks are missing at the deadline. The message names them.
        SyncError: The store failed, a rank published an address that this rank cannot reach, or rank 0 has another key
            or another integrity.
    """
    record = json.dumps({"host": address[0], "port": address[1], "place": loopback_id()})
    mine = _ThisRank(name, rank, world_size, record, key or JobKey.draw(integrity or "crc"), key is not None)
    try:
        late: list[int] = []
        while True:
            met = _meet(store, mine, store.add(f"gradwire/{name}/generation/{rank}", 1), deadline, late)
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


def _meet(store: Any, mine: _ThisRank, generation: int, deadline: Deadline, late: list[int]) -> Meeting | list[int]:
    """Meet in one generation. If it is closed, return the ranks that were missing.

    Args:
        late: Ranks that were missing in an earlier one, whose deadline was another rank's.
    """
    prefix = f"gradwire/{mine.name}/{generation}"
    closed = f"{prefix}/closed"
    if store.check([closed]):
        return []
    keys = [f"{prefix}/job", *(f"{prefix}/address/{peer}" for peer in range(mine.world_size))]
    if mine.rank == 0:
        store.set(keys[0], _job_record(mine))
    store.set(keys[1 + mine.rank], mine.record)
    try:
        missing = _wait(store, prefix, keys, deadline, late)
        job = store.get(keys[0]) if missing is None else b""
        if not job:  # another rank has closed the generation
            if mine.rank == 0:
                store.set(keys[0], "")
            return missing or []
        key, epoch = _read_job(job, mine)
        addresses = [_address(store, where, peer) for peer, where in enumerate(keys[1:])]
    except BaseException:
        store.set(closed, "")
        store.set(keys[0], "")  # not deleted: others may be about to read it
        raise
    receive(store, prefix, mine.world_size, keys)
    return Meeting(GroupMember(mine.name, mine.rank, mine.world_size, epoch), key, addresses)


def _job_record(mine: _ThisRank) -> str:
    """What rank 0 publishes about the job. A key that the user has given is not in it."""
    epoch = secrets.token_bytes(8)
    record = {"epoch": epoch.hex(), "integrity": mine.key.integrity}
    if mine.key_is_given:
        return json.dumps({**record, "proof": _key_proof(mine.key, mine.name, epoch)})
    return json.dumps({**record, "key": mine.key.reveal().hex()})


def _read_job(record: bytes, mine: _ThisRank) -> tuple[JobKey, int]:
    """Return key and epoch of the job.

    Raises:
        SyncError: Rank 0 has another key or integrity, or one of the two ranks has been given no key.
    """
    job = json.loads(record)
    epoch = bytes.fromhex(job["epoch"])
    number = int.from_bytes(epoch, "little")
    problem = _key_problem(job, mine, epoch)
    if problem is None and job["integrity"] != mine.key.integrity:
        problem = (
            f"Rank 0 has integrity={job['integrity']!r}, and rank {mine.rank} has {mine.key.integrity!r}. Pass the "
            "same SyncOptions(integrity=...) on all ranks."
        )
    if problem is not None:
        raise SyncError(problem, rank=mine.rank, phase="rendezvous")
    return mine.key if mine.key_is_given else JobKey(bytes.fromhex(job["key"]), mine.key.integrity), number


def _key_problem(job: dict[str, str], mine: _ThisRank, epoch: bytes) -> str | None:
    """What is wrong with the keys of rank 0 and of this rank; None if they agree."""
    advice = f"Set {KEY_VARIABLE} or {KEY_FILE_VARIABLE} to the same key on all ranks, or on none."
    given = "proof" in job
    if mine.key_is_given != given:
        keyless, other = (0, mine.rank) if mine.key_is_given else (mine.rank, 0)
        return f"Rank {keyless} has no job key, unlike rank {other}. {advice}"
    if given and not hmac.compare_digest(job["proof"], _key_proof(mine.key, mine.name, epoch)):
        return f"Rank 0 has another job key, unlike rank {mine.rank}. {advice}"
    return None


def _key_proof(key: JobKey, name: str, epoch: bytes) -> str:
    return key.mac(b"gradwire rendezvous", name.encode(), epoch).hex()


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
