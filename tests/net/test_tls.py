"""Connections under TLS: what they carry, whom they refuse, and what somebody on the way can see and do."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from gradwire.core.errors import OptionError
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.net.tls import TlsFiles, TlsSocket

from .certificates import Authority
from .recorder import until
from .test_reconnecting import EPOCH, SERVER, Owner, frame

KEY = JobKey(bytes(32))
SECRET = np.frombuffer(b"words that nobody on the way is to read " * 50, np.uint8)


class Certificates:
    """Files of two ends that trust each other, and of others that do not fit."""

    def __init__(self, folder: Path) -> None:
        job, other = Authority(folder / "job"), Authority(folder / "other")
        self.server, self.worker = job.files("server"), job.files("worker", "DNS:worker")
        self.of_another_host = job.files("elsewhere", "IP:127.0.0.9,DNS:elsewhere")
        self.signed_elsewhere = other.files("worker", authority=job)
        self.trusts_others = TlsFiles(self.worker.certificate, self.worker.key, other.files("x").authority)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple]]:
    made: list[ReconnectingEndpoint] = []

    def make(server: TlsFiles | None, worker: TlsFiles | None, through: Callable | None = None) -> tuple:
        there, here, limit = Owner(), Owner(), timedelta(seconds=10)
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        made.append(
            ReconnectingEndpoint(
                GroupMember("job", SERVER, SERVER + 1, EPOCH), KEY, there, timeout=limit, listener=listener,
                callers=frozenset({1}), tls=None if server is None else server.context(server=True),
            )
        )  # fmt: skip
        made.append(
            ReconnectingEndpoint(
                GroupMember("job", 1, SERVER + 1, EPOCH), KEY, here, timeout=limit,
                call=(SERVER, address if through is None else through(address)),
                tls=None if worker is None else worker.context(server=False),
            )
        )  # fmt: skip
        for endpoint in made:
            endpoint.start()
        return made[0], there, made[1], here

    yield make
    for endpoint in reversed(made):
        endpoint.close()


def test_frames_go_both_ways_at_the_same_time(ends, certificates):
    server, there, worker, here = ends(certificates.server, certificates.worker)
    here.hear("joined")
    there.hear("joined")
    sizes = [0, 1, 72, 16_312, 16_313, 65_464, 65_536, 5_000_000, 7, 3_000_000]
    bodies = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    for number, body in enumerate(bodies):
        assert worker.send(SERVER, frame(1, number), body)
        assert server.send(1, frame(SERVER, number), body)
    for number, body in enumerate(bodies):
        assert there.hear("frame")[2:] == (number, body.tobytes())
        assert here.hear("frame")[2:] == (number, body.tobytes())


def test_frames_of_many_threads_arrive_and_close_sends_what_is_queued(ends, certificates):
    _, there, worker, here = ends(certificates.server, certificates.worker)
    here.hear("joined")

    def send(thread: int) -> None:
        for number in range(300):
            worker.send(SERVER, frame(1, 1000 * thread + number), np.full(40 * thread, number % 256, np.uint8))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.send(SERVER, frame(1, 9999), np.zeros(2_000_000, np.uint8))
    worker.close()
    got = [there.hear("frame") for _ in range(1201)]
    for thread in range(4):
        assert [each[2] - 1000 * thread for each in got if each[2] // 1000 == thread] == list(range(300))
    assert got[-1][2] == 9999
    assert there.hear("left") == ("left", 1, None)


def test_a_paused_end_goes_on_with_what_was_buffered(ends, certificates):
    server, there, worker, here = ends(certificates.server, certificates.worker)
    here.hear("joined")
    there.hear("joined")
    server.pause(1, True)
    for number in range(20):
        worker.send(SERVER, frame(1, number), np.zeros(100_000, np.uint8))
    server.pause(1, False)
    assert [there.hear("frame")[2] for _ in range(20)] == list(range(20))


def test_a_socket_with_nothing_left_says_so(certificates):
    """Else the thread of all connections does not sleep until the next bytes come."""
    here, there = socket.socketpair()
    for each in (here, there):
        each.setblocking(False)
    server = TlsSocket(here, certificates.server.context(server=True), None)
    worker = TlsSocket(there, certificates.worker.context(server=False), "127.0.0.1")
    for _ in range(3):
        for end in (worker, server):
            with contextlib.suppress(BlockingIOError):
                end.shake_hands()
    room = memoryview(bytearray(1000))
    worker.send(bytes(1000))
    assert server.recv_into(room) == 1000
    assert server.buffered, "there may be more"
    with pytest.raises(BlockingIOError):
        server.recv_into(room)
    assert not server.buffered
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("server", "worker", "problem"),
    [
        ("server", "signed_elsewhere", "."),  # what the server tells it: another word in each version of OpenSSL
        ("server", "trusts_others", "certificate verify failed"),
        ("of_another_host", "worker", "not valid for '127.0.0.1'|IP address mismatch"),
        ("server", None, "handshake"),
        (None, "worker", "."),
    ],
)
def test_ends_that_do_not_trust_each_other_do_not_meet(ends, certificates, server, worker, problem):
    _, there, caller, here = ends(*(name and getattr(certificates, name) for name in (server, worker)))
    until(lambda: caller.problem)
    assert re.search(problem, caller.problem), caller.problem
    assert there.events.empty()
    assert here.events.empty()


class Wire:
    """Somebody on the way, who keeps every byte and may change one."""

    def __init__(self) -> None:
        self.seen = b""
        self.change = False
        self._sockets: list[socket.socket] = []

    def __call__(self, server: tuple[str, int]) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)
        threading.Thread(target=self._run, args=(listener, server), daemon=True).start()
        return listener.getsockname()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _run(self, listener: socket.socket, server: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            caller, _ = listener.accept()
            called = socket.create_connection(server)
            self._sockets += [caller, called]
            threading.Thread(target=self._pass, args=(called, caller), daemon=True).start()
            self._pass(caller, called)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.seen += data
                if self.change:
                    data[len(data) // 2] ^= 1
                target.sendall(data)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.mark.parametrize("secure", [True, False])
def test_nobody_on_the_way_can_read(ends, certificates, wire, secure):
    files = (certificates.server, certificates.worker) if secure else (None, None)
    _, there, worker, here = ends(*files, through=wire)
    here.hear("joined")
    worker.send(SERVER, frame(1, 1), SECRET)
    assert there.hear("frame")[3] == SECRET.tobytes()
    assert len(wire.seen) > SECRET.nbytes
    assert (b"words that nobody" in wire.seen) == (not secure)


def test_nobody_on_the_way_can_change_a_bit(ends, certificates, wire):
    _, there, worker, here = ends(certificates.server, certificates.worker, through=wire)
    here.hear("joined")
    there.hear("joined")
    wire.change = True
    worker.send(SERVER, frame(1, 1), SECRET)
    _, peer, error = there.hear("left")
    assert peer == 1
    assert error is not None
    assert there.events.empty()


def test_files_that_are_no_use_are_named(certificates, tmp_path):
    files = certificates.server
    with pytest.raises(OptionError, match="Name a certificate, its private key without a password"):
        TlsFiles(tmp_path / "none.pem", files.key, files.authority).context(server=True)
    with pytest.raises(OptionError, match="TLS cannot use"):
        TlsFiles(files.certificate, certificates.worker.key, files.authority).context(server=True)
    readable = tmp_path / "readable.key"
    readable.write_bytes(Path(files.key).read_bytes())
    readable.chmod(0o644)
    with pytest.raises(OptionError, match=r"Others than its owner can read the private key .* Run chmod 600"):
        TlsFiles(files.certificate, readable, files.authority).context(server=True)
