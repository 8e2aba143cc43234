"""Agreement: before any data is sent, all ranks compare what they are about to do, and all raise if they differ.

Each rank publishes a document (plain data) in the job's store; rank 0 compares and publishes a verdict that every
rank reads, so that either all go on or all raise `DisagreementError` with the same message.

What all ranks have read is deleted. Where a rank does not come in time, the verdict stays for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from gradwire.core.errors import DisagreementError, PeerTimeoutError
from gradwire.net.store import num_received, receive

_POLL_SECONDS = 0.005
_GRACE_SECONDS = 1.0


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


def agree(
    store: Store,
    rank: int,
    world_size: int,
    topic: str,
    document: dict[str, Any],
    timeout: timedelta,
    tell: str = "",
) -> list[str]:
    """Return once every rank has published an equal `document` under `topic`.

    Args:
        store: the job's store.
        topic: prefix of the keys; used once in a job.
        document: JSON-serializable.
        timeout: deadline for all ranks to come.
        tell: what the other ranks shall hear of this one; may differ.

    Returns:
        What each rank told, by rank.

    Raises:
        DisagreementError: documents differ; the message names the ranks and the first difference. On every rank.
        PeerTimeoutError: a rank did not come in time; the message names the missing ones.
    """
    verdict: dict[str, Any]
    deadline = time.monotonic() + timeout.total_seconds()
    *keys, decision = *(f"{topic}/{peer}" for peer in range(world_size)), f"{topic}/verdict"
    store.set(keys[rank], json.dumps([document, tell], sort_keys=True))
    if rank == 0:
        texts = [_wait(store, key, deadline) for key in keys]
        missing = [peer for peer, text in enumerate(texts) if text is None]
        verdict = {"missing": missing, "difference": None, "told": []}
        if not missing:
            documents, verdict["told"] = zip(*(json.loads(text) for text in texts if text is not None))
            verdict["difference"] = _difference_of(documents)
        store.set(decision, json.dumps(verdict))
    # A rank that is late costs rank 0 the whole deadline; its word comes a moment after.
    answer = _wait(store, decision, deadline + _GRACE_SECONDS * (rank != 0))
    verdict = {"missing": [0], "difference": None} if answer is None else json.loads(answer)
    if rank == 0 and (verdict["missing"] or verdict["difference"] is not None):
        _let_others_hear(store, topic, world_size - 1 - len(verdict["missing"]))
    if answer is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and what is in it
            receive(store, topic, world_size, [*keys, decision])
    if verdict["missing"]:
        raise PeerTimeoutError(
            f"{_ranks(verdict['missing'])} did not reach this call within {timeout.total_seconds():g} s ({topic}). "
            "Make the same gradwire calls on every rank, attach included. Look whether a missing rank still runs, and "
            "pass a larger timeout if it only starts slowly. If it trains without gradwire, it waits in DDP's own "
            "all-reduce until this process ends.",
            rank=verdict["missing"][0],
            tensor="none",
            phase="agreement",
        )
    if verdict["difference"] is not None:
        raise DisagreementError(verdict["difference"])
    told: list[str] = verdict["told"]
    return told


def share(store: Store, rank: int, world_size: int, topic: str, text: str | None, timeout: timedelta) -> str:
    """Bring rank 0's text to all ranks.

    Args:
        store: the job's store.
        topic: the key; used once in a job.
        text: on rank 0 what to tell, on the others anything.
        timeout: deadline for rank 0.

    Raises:
        PeerTimeoutError: rank 0 said nothing in time.
    """
    if rank == 0:
        assert text is not None, "rank 0 has the text"
        if world_size > 1:
            store.set(topic, text)
        return text
    found = _wait(store, topic, time.monotonic() + timeout.total_seconds())
    if found is None:
        raise PeerTimeoutError(
            f"Expected rank 0 to tell {topic} within {timeout.total_seconds():g} s, got nothing. Do: look whether it "
            "is alive, or pass a larger timeout.",
            rank=0,
            tensor="none",
            phase="agreement",
        )
    receive(store, topic, world_size - 1, [topic])
    return found


def _ranks(missing: list[int]) -> str:
    return ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))


def _let_others_hear(store: Store, topic: str, num_others: int) -> None:
    """Keep rank 0, whose process often holds the store, until the others have read the bad news too."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while num_received(store, topic) < num_others and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _wait(store: Store, key: str, deadline: float) -> str | None:
    """The value of a key, or None where it does not come in time, or its store is gone."""
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return store.get(key).decode()
    except RuntimeError:  # torch's DistNetworkError and its kin
        return None


def _difference_of(documents: Sequence[dict[str, Any]]) -> str | None:
    """None if all are equal, else one sentence on the first difference."""
    first = documents[0]
    for rank, other in enumerate(documents[1:], start=1):
        if other != first:
            where, mine, theirs = _difference(first, other)
            return (
                f"Expected all ranks to agree, got {where} = {mine!r} on rank 0 and {theirs!r} on rank {rank}. "
                "Do: make the call with the same model, method and options on every rank."
            )
    return None


def _difference(mine: Any, theirs: Any, where: str = "") -> tuple[str, Any, Any]:
    """The path to the first value that differs, and both values."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if key not in mine or key not in theirs or mine[key] != theirs[key]:
                return _difference(mine.get(key), theirs.get(key), f"{where}.{key}" if where else key)
    if isinstance(mine, list) and isinstance(theirs, list):
        for index, (left, right) in enumerate(zip(mine, theirs)):
            if left != right:
                return _difference(left, right, f"{where}[{index}]")
        return f"len({where})", len(mine), len(theirs)
    return where, mine, theirs
