from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.handshake import JobKey
from gradwire.net.rendezvous import Deadline, Meeting, meet

from .recorder import PATIENCE

SOON = timedelta(seconds=0.2)


def all_meet(
    store: dist.Store, world_size: int, name: str = "test", keys: Sequence[JobKey | None] | None = None
) -> list[Meeting]:
    found: dict[int, Meeting] = {}

    def run(rank: int) -> None:
        key = None if keys is None else keys[rank]
        found[rank] = meet(store, name, rank, world_size, ("127.0.0.1", 1000 + rank), Deadline(PATIENCE), key)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world_size)]


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("worker", tcp)


def test_all_ranks_learn_the_same(store):
    meetings = all_meet(store, 3)
    assert {meeting.key.reveal() for meeting in meetings} == {meetings[0].key.reveal()}
    assert {meeting.member.epoch for meeting in meetings} == {meetings[0].member.epoch}
    assert [meeting.member.rank for meeting in meetings] == [0, 1, 2]
    for meeting in meetings:
        assert meeting.addresses == [("127.0.0.1", 1000 + rank) for rank in range(3)]
    assert meetings[0].key.reveal().hex() not in repr(meetings)


def test_a_group_that_meets_again_is_another_incarnation(store):
    first, second = all_meet(store, 2)[0], all_meet(store, 2)[0]
    assert first.member.epoch != second.member.epoch
    assert first.key.reveal() != second.key.reveal()


def test_what_all_have_read_does_not_stay(store):
    before = store.num_keys()
    for _ in range(3):
        all_meet(store, 3)
        assert store.num_keys() == before + 3  # the number of each rank's latest meeting


def test_a_rank_that_has_failed_alone_meets_the_others_when_it_tries_again(store):
    for attempt in range(3):
        with pytest.raises(PeerTimeoutError):
            meet(store, "test", attempt % 2, 3, ("127.0.0.1", 1), Deadline(SOON))
    meetings = all_meet(store, 3)
    assert {meeting.member.epoch for meeting in meetings} == {meetings[0].member.epoch}
    assert meetings[0].addresses == [("127.0.0.1", 1000 + rank) for rank in range(3)]


def test_ranks_that_wait_go_on_with_one_that_has_given_up_and_tries_again():
    """The ranks that are patient stay in the call; the third one comes last."""
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        found[rank] = meet(store, "test", rank, 3, ("127.0.0.1", 1000 + rank), Deadline(PATIENCE))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    threads[0].start()
    for _ in range(2):
        with pytest.raises(PeerTimeoutError):
            meet(store, "test", 1, 3, ("127.0.0.1", 1), Deadline(SOON))
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({found[rank].member.epoch for rank in range(3)}) == 1


def test_two_groups_live_in_one_store():
    store = dist.HashStore()
    assert all_meet(store, 2, "one")[0].member.epoch != all_meet(store, 2, "two")[0].member.epoch


@pytest.mark.parametrize(("present", "missing"), [(0, [1, 2]), (1, [0, 2])])
def test_missing_ranks_are_named(present, missing):
    with pytest.raises(PeerTimeoutError, match=r"within 0\.2 s") as caught:
        meet(dist.HashStore(), "test", present, 3, ("127.0.0.1", 1), Deadline(SOON))
    assert f"ranks {missing}" in str(caught.value)
    assert caught.value.rank == missing[0]
    assert caught.value.phase == "rendezvous"


def test_a_loopback_address_of_another_machine_is_an_error_that_says_what_to_set():
    store = dist.HashStore()
    record = {"host": "127.0.1.1", "port": 5, "place": "elsewhere/1"}
    store.add("gradwire/test/generation/1", 1)
    store.set("gradwire/test/1/address/1", json.dumps(record))
    with pytest.raises(SyncError, match="Set MASTER_ADDR") as caught:
        meet(store, "test", 0, 2, ("127.0.0.1", 1), Deadline(PATIENCE))
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("job", "no json"), ("job", '{"epoch": "00"}'), ("job", "[]"), ("address/0", "{}"), ("address/0", "[")],
)
def test_a_store_that_holds_something_else_is_a_sync_error(key, value):
    store = dist.HashStore()
    store.set("gradwire/test/1/job", json.dumps({"epoch": "00" * 8, "integrity": "crc", "key": "00" * 32}))
    store.set("gradwire/test/1/address/0", json.dumps({"host": "10.0.0.1", "port": 5, "place": ""}))
    store.set(f"gradwire/test/1/{key}", value)
    with pytest.raises(SyncError, match="store"):
        meet(store, "test", 1, 2, ("127.0.0.1", 1), Deadline(PATIENCE))


def test_a_store_that_has_gone_is_a_sync_error():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(SyncError, match="store"):
        meet(client, "test", 0, 2, ("127.0.0.1", 1), Deadline(PATIENCE))


class Transcript:
    """A store that keeps every value that was ever written to it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.written: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.written.append(value)
        self.store.set(key, value)

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def stored(store: dist.Store, generation: int, world_size: int = 3) -> str:
    keys = ["job", "closed", *(f"address/{rank}" for rank in range(world_size))]
    keys = [f"gradwire/test/{generation}/{key}" for key in keys]
    return " ".join(store.get(key).decode() for key in keys if store.check([key]))


def test_a_given_key_never_enters_the_store():
    key, transcript = JobKey.draw(), Transcript()
    meetings = all_meet(transcript, 3, keys=[key] * 3)
    assert all(meeting.key is key for meeting in meetings)
    assert len({meeting.member.epoch for meeting in meetings}) == 1
    assert len(transcript.written) >= 4
    assert not any(key.reveal().hex() in value for value in transcript.written)


def keys_in(transcript: Transcript) -> list[str]:
    return [json.loads(value)["key"] for value in transcript.written if '"key"' in value]


def test_a_drawn_key_leaves_the_store_with_whoever_fails():
    transcript, found = Transcript(), {}
    with pytest.raises(PeerTimeoutError):
        meet(transcript, "test", 0, 3, ("127.0.0.1", 1), Deadline(SOON))

    def run(rank: int) -> None:
        found[rank] = meet(transcript, "test", rank, 3, ("127.0.0.1", 1), Deadline(PATIENCE))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    threads[0].start()
    transcript.store.wait(["gradwire/test/2/job"])
    for _ in range(2):  # in the first generation, which is closed, and in the second, where rank 0 waits
        with pytest.raises(PeerTimeoutError):
            meet(transcript, "test", 1, 3, ("127.0.0.1", 1), Deadline(SOON))
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({found[rank].member.epoch for rank in range(3)}) == 1
    assert len(keys_in(transcript)) >= 2
    left = " ".join(stored(transcript.store, generation) for generation in range(1, 10))
    assert "127.0.0.1" in left
    assert not any(key in left for key in keys_in(transcript))


def test_a_drawn_key_leaves_the_store_with_a_rank_that_cannot_reach_another():
    transcript = Transcript()
    transcript.set("gradwire/test/1/job", json.dumps({"epoch": "00" * 8, "integrity": "crc", "key": "ab" * 32}))
    transcript.set("gradwire/test/1/address/0", json.dumps({"host": "127.0.0.1", "port": 5, "place": ""}))
    with pytest.raises(SyncError, match="Set MASTER_ADDR"):
        meet(transcript, "test", 1, 2, ("10.0.0.1", 1001), Deadline(PATIENCE))
    assert keys_in(transcript) == ["ab" * 32]
    assert "ab" * 32 not in stored(transcript.store, 1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ((JobKey(bytes(32)), JobKey(bytes([1]) * 32)), "Rank 0 has another job key, unlike rank 1"),
        ((JobKey(bytes(32)), None), "Rank 1 has no job key, unlike rank 0"),
        ((None, JobKey(bytes(32))), "Rank 0 has no job key, unlike rank 1"),
    ],
)
def test_ranks_with_different_keys_are_told_what_to_set(keys, words):
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, store, "test", 0, 2, ("127.0.0.1", 1), Deadline(timedelta(seconds=1)), keys[0])
        with pytest.raises(SyncError, match=rf"{words}\. Set GRADWIRE_JOB_KEY or GRADWIRE_JOB_KEY_FILE") as caught:
            meet(store, "test", 1, 2, ("127.0.0.1", 2), Deadline(PATIENCE), keys[1])
        assert caught.value.phase == "rendezvous"
        error = other.exception()
    assert error is None or isinstance(error, PeerTimeoutError)  # it met rank 1, or waits for it to come again


def test_whoever_can_write_the_store_cannot_talk_a_rank_out_of_its_key():
    """A record with another key in it, as a job without a given key has it."""
    store = dist.HashStore()
    store.set("gradwire/test/1/job", json.dumps({"epoch": "00" * 8, "integrity": "crc", "key": "00" * 32}))
    store.set("gradwire/test/1/address/0", json.dumps({"host": "10.0.0.1", "port": 5, "place": ""}))
    with pytest.raises(SyncError, match="Rank 0 has no job key"):
        meet(store, "test", 1, 2, ("127.0.0.1", 1), Deadline(PATIENCE), JobKey.draw())


def test_ranks_with_different_integrity_are_told_what_to_pass():
    store = dist.HashStore()
    meet_0 = partial(meet, store, "test", 0, 2, ("127.0.0.1", 1), Deadline(timedelta(seconds=1)), integrity="mac")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet_0)
        with pytest.raises(SyncError, match=r"Pass the same SyncOptions\(integrity=\.\.\.\) on all ranks"):
            meet(store, "test", 1, 2, ("127.0.0.1", 2), Deadline(PATIENCE))
        other.exception()
