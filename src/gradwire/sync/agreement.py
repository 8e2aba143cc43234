"""Agreement: before any data is sent, ranks compare their configuration, and all raise if they differ.

Each rank publishes a document (plain data) in the job's store. Rank 0 compares the documents and publishes a verdict
that every rank reads. Either all ranks go on, or all raise: `DisagreementError` with the same message, or
`PeerTimeoutError` if any rank has given up before rank 0 let all go on.

Keys that all ranks have read are deleted. If a rank does not come in time, the verdict stays in the store for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from gradwire.core.errors import NO_TENSOR, DisagreementError, PeerTimeoutError, SyncError
from gradwire.net.store import num_received, receive

_POLL_SECONDS = 0.005
_LONGEST_PAUSE = 0.05
_GRACE_SECONDS = 1.0


class Store(Protocol):
    """The methods of torch.distributed.Store that this module uses."""

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
    lost: Callable[[], SyncError | None] = lambda: None,
    note: str = "",
) -> list[str]:
    """Return when every rank has published an equal `document` under `topic`.

    Args:
        store: Store of the job.
        rank: This rank.
        world_size: Number of ranks.
        topic: Prefix of the keys. Use each topic once per job.
        document: JSON-serializable data.
        timeout: Deadline for all ranks to come.
        lost: Returns the error of a rank that is gone, and will not come.
        note: Text for the other ranks; may differ between ranks.

    Returns:
        The notes by rank.

    Raises:
        DisagreementError: Documents differ. The message names the ranks and the first difference. On every rank.
        PeerTimeoutError: A rank did not come in time. The message names the missing ranks.
        SyncError: What `lost` has returned.
    """
    verdict: dict[str, Any]
    deadline = time.monotonic() + timeout.total_seconds()
    *keys, decision = *(f"{topic}/{peer}" for peer in range(world_size)), f"{topic}/verdict"
    # Number of ranks that have given up, plus the number of ranks once rank 0 lets all go on. Who adds first decides.
    outcome = f"{topic}/outcome"
    store.set(keys[rank], json.dumps([document, note], sort_keys=True))
    if rank == 0:
        texts = [_wait(store, key, deadline, lost) for key in keys]
        missing = [peer for peer, text in enumerate(texts) if text is None]
        verdict = {"missing": missing, "given_up": False, "difference": None, "notes": []}
        if not missing:
            documents, verdict["notes"] = zip(*(json.loads(text) for text in texts if text is not None))
            verdict["difference"] = _difference_of(documents)
            verdict["given_up"] = store.add(outcome, world_size) != world_size
        store.set(decision, json.dumps(verdict))
    # If a rank is late, rank 0 publishes its verdict only at the deadline.
    answer = _wait(store, decision, deadline + _GRACE_SECONDS * (rank != 0), lost)
    if answer is None and rank != 0 and _give_up(store, outcome) > world_size:
        answer = _wait(store, decision, time.monotonic() + timeout.total_seconds(), lost)
    if answer is None:
        verdict = {"missing": _missing(store, keys) or [0], "given_up": False, "difference": None}
    else:
        verdict = json.loads(answer)
    if rank == 0 and (verdict["missing"] or verdict["given_up"] or verdict["difference"] is not None):
        _wait_until_read(store, topic, world_size - 1 - len(verdict["missing"]))
    if answer is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            receive(store, topic, world_size, [*keys, decision, outcome])
    if verdict["missing"]:
        raise PeerTimeoutError(
            f"{_ranks(verdict['missing'])} did not reach this call within {timeout.total_seconds():g} s ({topic}). "
            "Make the same gradwire calls on every rank, including attach. Check that the missing rank is still "
            "running, and pass a larger timeout if it is slow to start. If it trains without gradwire, it waits in "
            "DDP's own all-reduce until this process ends.",
            rank=verdict["missing"][0],
            tensor=NO_TENSOR,
            phase="agreement",
        )
    if verdict["given_up"]:
        raise PeerTimeoutError(
            f"Another rank has given up, because not all ranks reached this call within {timeout.total_seconds():g} s "
            f"({topic}). Pass a larger timeout if some ranks are slow to start.",
            rank=None,
            tensor=NO_TENSOR,
            phase="agreement",
        )
    if verdict["difference"] is not None:
        raise DisagreementError(verdict["difference"])
    notes: list[str] = verdict["notes"]
    return notes


def share(
    store: Store,
    rank: int,
    world_size: int,
    topic: str,
    text: str | None,
    timeout: timedelta,
    lost: Callable[[], SyncError | None] = lambda: None,
) -> str:
    """Send rank 0's text to all ranks, and return it.

    Args:
        store: Store of the job.
        rank: This rank.
        world_size: Number of ranks.
        topic: Key of the text. Use each topic once per job.
        text: Text to send; ignored on other ranks than 0.
        timeout: Deadline for rank 0.
        lost: Returns the error of a rank that is gone.

    Raises:
        PeerTimeoutError: Rank 0 did not publish the text in time.
        SyncError: What `lost` has returned.
    """
    if rank == 0:
        assert text is not None, "rank 0 has the text"
        if world_size > 1:
            store.set(topic, text)
        return text
    found = _wait(store, topic, time.monotonic() + timeout.total_seconds(), lost)
    if found is None:
        raise PeerTimeoutError(
            f"Rank 0 did not publish {topic} within {timeout.total_seconds():g} s. Check that it is still running, or "
            "pass a larger timeout.",
            rank=0,
            tensor=NO_TENSOR,
            phase="agreement",
        )
    receive(store, topic, world_size - 1, [topic])
    return found


def _give_up(store: Store, outcome: str) -> int:
    """Count this rank as one that has given up. Returns the sum with it; 0 if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return store.add(outcome, 1)
    return 0


def _missing(store: Store, keys: Sequence[str]) -> list[int]:
    """Return the ranks whose keys are not in the store; none if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return [peer for peer, key in enumerate(keys) if not store.check([key])]
    return []


def _ranks(missing: list[int]) -> str:
    return ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))


def _wait_until_read(store: Store, topic: str, num_others: int) -> None:
    """Wait until the other ranks have read a failure: the process of rank 0 often holds the store."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while num_received(store, topic) < num_others and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _wait(store: Store, key: str, deadline: float, lost: Callable[[], SyncError | None]) -> str | None:
    """Return the value of a key, or None if it is not there in time or the store is gone.

    Raises:
        SyncError: What `lost` has returned.
    """
    pause = _POLL_SECONDS
    while True:
        error = lost()  # before the look at the store: a rank that has made the call may leave after it
        try:
            if store.check([key]):
                return store.get(key).decode()
            is_over = time.monotonic() > deadline
        except RuntimeError:  # torch's DistNetworkError and similar
            is_over = True
        if error is not None:
            raise error
        if is_over:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _difference_of(documents: Sequence[dict[str, Any]]) -> str | None:
    """Return None if all documents are equal, else a message about the first difference."""
    first = documents[0]
    for rank, other in enumerate(documents[1:], start=1):
        if other != first:
            where, mine, theirs = _difference(first, other)
            return (
                f"Ranks disagree: {where} = {mine!r} on rank 0 and {theirs!r} on rank {rank}. Make this call with the "
                "same model, method and options on every rank."
            )
    return None


def _difference(mine: Any, theirs: Any, where: str = "") -> tuple[str, Any, Any]:
    """Return the path to the first value that differs, and both values."""
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
