"""Agreement: before any data is sent, all ranks compare what they are about to do, and all raise if they differ.

Each rank publishes a document (plain data) in the job's store; rank 0 compares and publishes a verdict that every
rank reads, so that either all go on or all raise `DisagreementError` with the same message.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any, Protocol

from gradwire.core.errors import DisagreementError, PeerTimeoutError

_POLL_SECONDS = 0.005


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def agree(store: Store, rank: int, world_size: int, topic: str, document: dict[str, Any], timeout: timedelta) -> None:
    """Return once every rank has published an equal `document` under `topic`.

    Args:
        store: the job's store.
        topic: prefix of the keys; used once in a job.
        document: JSON-serialisable.
        timeout: deadline for all ranks to come.

    Raises:
        DisagreementError: documents differ; the message names the ranks and the first difference. On every rank.
        PeerTimeoutError: a rank did not come in time; the message names the missing ones.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"{topic}/{rank}", json.dumps(document, sort_keys=True))
    if rank == 0:
        texts = [_wait(store, f"{topic}/{peer}", peer, topic, deadline) for peer in range(world_size)]
        store.set(f"{topic}/verdict", json.dumps(_verdict([json.loads(text) for text in texts])))
    # A rank that is late costs rank 0 the whole deadline; its word comes a moment after.
    verdict = json.loads(_wait(store, f"{topic}/verdict", 0, topic, deadline + (rank != 0)))
    if verdict is not None:
        raise DisagreementError(verdict)


def _wait(store: Store, key: str, peer: int, topic: str, deadline: float) -> str:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"Rank {peer} did not come to {topic} within the deadline. Do: look whether it is alive and calls "
                "gradwire at the same point of the script, or pass a larger timeout.",
                rank=peer,
                tensor="none",
                phase="agreement",
            )
        time.sleep(_POLL_SECONDS)
    return store.get(key).decode()


def _verdict(documents: list[dict[str, Any]]) -> str | None:
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
