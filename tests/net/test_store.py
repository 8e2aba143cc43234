"""The job's store where whoever holds it does not answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.core.errors import PeerTimeoutError
from gradwire.net.address import store_host
from gradwire.net.store import BoundedStore
from gradwire.sync.group import GroupInfo
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Synchronizer

SOON = timedelta(seconds=0.5)


@pytest.fixture
def frozen() -> Iterator[dist.Store]:
    """A store at the end of a connection that has stopped to carry anything."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stopped, ends = threading.Event(), []

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not stopped.is_set():
                    sink.sendall(data)

    def connect() -> None:
        ends.extend([listener.accept()[0], socket.create_connection(("127.0.0.1", server.port))])
        for way in (ends, ends[::-1]):
            threading.Thread(target=pass_on, args=way, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=connect, daemon=True).start()
        store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False)
        stopped.set()
        yield store
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)
            end.close()
    for thread in threading.enumerate():
        if thread.name == "gradwire-store":
            thread.join(20)


@pytest.mark.timeout(30)
def test_a_rank_that_is_set_up_with_a_frozen_store_ends_with_an_error(frozen: dist.Store) -> None:
    with pytest.raises(PeerTimeoutError, match=r"within 0\.5 s"):
        Synchronizer(GroupInfo(1, 2, frozen, "frozen"), Plan("none"), options=SyncOptions(timeout=SOON))


@pytest.mark.timeout(30)
def test_once_it_has_not_answered_nobody_waits_for_it(frozen: dist.Store) -> None:
    store = BoundedStore(frozen, SOON)
    for call in (lambda: store.check(["a"]), lambda: store.set("a", "b"), lambda: store.add("a", 1)):
        with pytest.raises(PeerTimeoutError, match="has not answered"):
            call()
    assert sum(thread.name == "gradwire-store" for thread in threading.enumerate()) == 1


def test_it_is_the_store_that_it_bounds() -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(dist.PrefixStore("job", tcp), SOON)
    store.set("a", "b")
    assert store.get("a") == b"b" == tcp.get("job/a")
    assert store.check(["a"])
    assert not store.check(["a", "c"])
    assert [store.add("n", 2), store.add("n", 1)] == [2, 3]
    assert store_host(store) == "127.0.0.1"
    with pytest.raises(TypeError):
        store.set("a", object())  # type: ignore[arg-type]
