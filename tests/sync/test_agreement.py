"""Agreement: all ranks go on, or all raise the same; a thread a rank over a real store."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.core.errors import DisagreementError, GradwireError, PeerLostError, PeerTimeoutError
from gradwire.sync.agreement import agree, share

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.5)


def outcomes(
    documents: list[Any], timeout: timedelta = LONG, store: dist.Store | None = None
) -> list[GradwireError | None]:
    """What each rank's `agree` raised; a rank whose document is None does not come."""
    store = store or dist.HashStore()

    def come(rank: int) -> GradwireError | None:
        if documents[rank] is None:
            return None
        try:
            agree(store, rank, len(documents), "topic", documents[rank], timeout)
        except GradwireError as error:
            return error
        return None

    with ThreadPoolExecutor(len(documents)) as pool:
        return list(pool.map(come, range(len(documents)), timeout=60))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_documents_let_all_go_on(world_size: int) -> None:
    document = {"seed": 1, "tensors": [{"name": "w", "shape": [3, 4]}], "none": None}
    assert outcomes([document] * world_size) == [None] * world_size


def test_the_order_of_keys_is_no_difference_but_that_of_lists_is() -> None:
    assert outcomes([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [None, None]
    assert all(isinstance(error, DisagreementError) for error in outcomes([{"a": [1, 2]}, {"a": [2, 1]}]))


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_difference_is_the_same_error_on_every_rank(odd: int) -> None:
    documents = [{"seed": 7 if rank == odd else 5} for rank in range(4)]
    found = outcomes(documents)
    assert all(type(error) is DisagreementError for error in found)
    assert len({str(error) for error in found}) == 1
    values = "7 on rank 0 and 5 on rank 1" if odd == 0 else f"5 on rank 0 and 7 on rank {odd}"
    assert f"seed = {values}" in str(found[0])
    assert "Make this call with the same model, method and options on every rank." in str(found[0])


def test_all_ranks_may_differ() -> None:
    found = outcomes([{"method": name} for name in ("threelc", "onebit", "topk")])
    assert len({str(error) for error in found}) == 1
    assert "method = 'threelc' on rank 0 and 'onebit' on rank 1" in str(found[2])


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c = 1 on rank 0 and 2 on rank 1"),
        (
            {"tensors": [{"name": "w"}, {"name": "v", "shape": [3, 4]}]},
            {"tensors": [{"name": "w"}, {"name": "v", "shape": [3, 5]}]},
            "tensors[1].shape[1] = 4 on rank 0 and 5 on rank 1",
        ),
        ({"t": [1, 2]}, {"t": [1, 2, 3]}, "len(t) = 2 on rank 0 and 3 on rank 1"),
        ({"t": []}, {"t": ["x"]}, "len(t) = 0 on rank 0 and 1 on rank 1"),
        ({"a": 1, "b": 2}, {"a": 1}, "b = 2 on rank 0 and None on rank 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "b = None on rank 0 and 2 on rank 1"),
        ({"a": {"b": 1}}, {"a": [1]}, "a = {'b': 1} on rank 0 and [1] on rank 1"),
        ({"x": [[1, {"y": 2}]]}, {"x": [[1, {"y": 3}]]}, "x[0][1].y = 2 on rank 0 and 3 on rank 1"),
        ({"world_size": 2, "b": 1}, {"world_size": 3, "b": 1}, "world_size = 2 on rank 0 and 3 on rank 1"),
    ],
)
def test_the_first_difference_is_named_by_its_path(mine: Any, theirs: Any, said: str) -> None:
    for error in outcomes([mine, theirs]):
        assert said in str(error)


@pytest.mark.parametrize("missing", [[1], [2], [1, 3]])
def test_missing_ranks_are_named_on_every_rank_in_time(missing: list[int]) -> None:
    documents = [None if rank in missing else {"a": 1} for rank in range(4)]
    start = time.monotonic()
    found = outcomes(documents, SHORT)
    assert time.monotonic() - start < 2 * SHORT.total_seconds() + 5
    for rank, error in enumerate(found):
        if rank not in missing:
            assert type(error) is PeerTimeoutError
            assert (error.rank, error.phase) == (missing[0], "agreement")
            assert re.match(f"Ranks? {', '.join(map(str, missing))} did not reach this call", str(error))
            assert "Make the same gradwire calls on every rank" in str(error)
            assert "pass a larger timeout" in str(error)


def test_without_rank_0_the_others_name_it() -> None:
    for error in outcomes([None, {}, {}], SHORT)[1:]:
        assert type(error) is PeerTimeoutError
        assert error.rank == 0


def test_a_rank_whose_time_is_over_before_the_verdict_names_who_has_not_come() -> None:
    """Rank 0 came later than this rank, and still waits for rank 2."""
    store = dist.HashStore()
    store.set("topic/0", "[{}, null]")
    with pytest.raises(PeerTimeoutError, match="Rank 2 did not reach this call") as caught:
        agree(store, 1, 3, "topic", {}, SHORT)
    assert caught.value.rank == 2


def test_if_a_rank_has_given_up_the_others_do_not_go_on() -> None:
    """Its document is there when rank 0 comes."""
    store = dist.HashStore()
    with pytest.raises(PeerTimeoutError):
        agree(store, 1, 3, "topic", {}, SHORT)
    late = outcomes([{}, None, {}], LONG, store)
    assert all(isinstance(late[rank], PeerTimeoutError) and "has given up" in str(late[rank]) for rank in (0, 2))


def test_a_rank_that_gives_up_as_rank_0_lets_all_go_on_follows() -> None:
    store = dist.HashStore()
    store.add("topic/outcome", 2)  # rank 0 has
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(agree, store, 1, 2, "topic", {}, SHORT)
        time.sleep(SHORT.total_seconds() + 1.5)  # its deadline, and half of a second more
        store.set("topic/verdict", '{"missing": [], "given_up": false, "difference": null, "notes": ["", ""]}')
        assert late.result(30) == ["", ""]


def test_the_error_of_a_lost_rank_counts_before_the_end_of_the_store() -> None:
    """Rank 0's process holds the store: both are lost at the same time."""

    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    lost = PeerLostError("Rank 0 has left", rank=0)
    with pytest.raises(PeerLostError) as caught:
        agree(Gone(), 1, 3, "topic", {}, LONG, lambda: lost)
    assert caught.value is lost
    with pytest.raises(PeerTimeoutError, match="Rank 0 did not reach this call"):
        agree(Gone(), 1, 3, "topic", {}, LONG)


def test_a_missing_rank_counts_before_a_difference() -> None:
    """What a rank that is not there would have said is not known."""
    found = outcomes([{"a": 1}, {"a": 2}, None], SHORT)
    assert [type(error) for error in found[:2]] == [PeerTimeoutError] * 2


def test_the_notes_of_all_ranks_reach_all() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        notes = pool.map(lambda rank: agree(store, rank, 3, "topic", {}, LONG, note=f"host {rank}"), range(3))
        assert list(notes) == [["host 0", "host 1", "host 2"]] * 3


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("worker", tcp)


@pytest.mark.parametrize("documents", [[{"a": 1}], [{"a": 1}] * 3, [{"a": 1}, {"a": 2}, {"a": 1}]])
def test_nothing_stays_in_the_store_once_all_have_heard(store: dist.Store, documents: list[Any]) -> None:
    before = store.num_keys()
    outcomes(documents, store=store)
    assert store.num_keys() == before


def test_a_rank_that_is_late_still_hears_that_it_was_missed() -> None:
    store = dist.HashStore()
    assert [type(error) for error in outcomes([{"a": 1}, {"a": 1}, None], SHORT, store)] == [
        PeerTimeoutError,
        PeerTimeoutError,
        type(None),
    ]
    with pytest.raises(PeerTimeoutError, match="Rank 2 did not reach this call") as caught:
        agree(store, 2, 3, "topic", {"a": 1}, LONG)
    assert caught.value.rank == 2
    assert store.num_keys() == 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_text_that_is_shared_does_not_stay(store: dist.Store, world_size: int) -> None:
    before = store.num_keys()
    with ThreadPoolExecutor(world_size) as pool:
        heard = pool.map(
            lambda rank: share(store, rank, world_size, "topic", None if rank else "words", LONG), range(world_size)
        )
        assert list(heard) == ["words"] * world_size
    assert store.num_keys() == before


def test_topics_are_apart() -> None:
    store = dist.HashStore()
    for topic, value in (("first", 1), ("second", 2)):
        agree(store, 0, 1, topic, {"a": value}, SHORT)
