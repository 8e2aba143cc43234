"""A worker's connection to a server that the test plays: what goes out, and in which order."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.parameter_server.connection import ServerConnection
from gradwire.parameter_server.session import Groups, TrainingJoin, TrainingWelcome, decode_groups
from gradwire.wire.frame import FrameKind, Header
from tests.net.recorder import until
from tests.net.stranger import Mute
from tests.parameter_server.harness import make_config

WAIT = 20.0
FIRST: Groups = ({"lr": 0.5},)
NEXT: Groups = ({"lr": 0.25},)
CONFIG = make_config(workers=1)
JOIN = TrainingJoin(CONFIG, FIRST, 1)


class Server(Mute):
    """Listens, writes down what it hears, and says what it is told to."""

    def __init__(self) -> None:
        self.epoch = job_epoch("gradwire")
        self.heard: queue.Queue[tuple[Header, bytes]] = queue.Queue()
        self.ends: queue.Queue[SyncError | None] = queue.Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.endpoint = ReconnectingEndpoint(
            GroupMember("gradwire", 1, 2, self.epoch), job_key("127.0.0.1", "gradwire"), self,
            timeout=timedelta(seconds=WAIT), listener=listener, callers=frozenset({0}),
        )  # fmt: skip
        self.endpoint.start()

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self.heard.put((header, body.tobytes()))

    def left(self, peer: int, error: SyncError | None) -> None:
        self.ends.put(error)

    def hear(self, kind: FrameKind) -> bytes:
        header, body = self.heard.get(timeout=WAIT)
        assert header.kind is kind
        return body

    def welcome(self, words: bytes = TrainingWelcome(True, (0, 0), (-1, -1), (-1, -1)).to_bytes()) -> None:
        self.endpoint.send(0, Header(FrameKind.WELCOME, sender=1, epoch=self.epoch), np.frombuffer(words, np.uint8))

    def break_connection(self) -> None:
        with self.endpoint._lock:
            for link in self.endpoint._links.values():
                link.socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.endpoint.close()


VALUES = {parameter.name: torch.zeros(parameter.shape) for parameter in CONFIG.tensors}


def call(server: Server, stall_seconds: float = WAIT, values: dict[str, torch.Tensor] = VALUES) -> ServerConnection:
    options = ConnectionOptions(timeout=timedelta(seconds=WAIT), stall_timeout=timedelta(seconds=stall_seconds))
    made = ServerConnection(server.address, JOIN, 0, "gradwire", options, values)
    made.start()
    return made


@pytest.fixture
def connection(server: Server) -> Iterator[ServerConnection]:
    made = call(server)
    yield made
    made.close()


def test_pushes_wait_for_a_welcome_and_go_after_values_and_hyperparameters(
    server: Server, connection: ServerConnection
) -> None:
    assert TrainingJoin.from_bytes(server.hear(FrameKind.JOIN)).groups == FIRST
    server.welcome()
    for kind in (FrameKind.MODEL, FrameKind.MODEL, FrameKind.GROUPS):
        server.hear(kind)
    server.break_connection()
    server.hear(FrameKind.JOIN)
    connection.wait_for_values()
    connection.send_groups(NEXT)
    for slot in connection.slots:
        connection.push(slot, torch.ones(slot.config.shape), 0)
    server.welcome()
    server.hear(FrameKind.MODEL)
    server.hear(FrameKind.MODEL)
    assert decode_groups(server.hear(FrameKind.GROUPS)) == NEXT
    server.hear(FrameKind.PAYLOAD)
    server.hear(FrameKind.PAYLOAD)
    server.break_connection()
    assert TrainingJoin.from_bytes(server.hear(FrameKind.JOIN)).groups == NEXT


def test_a_push_that_meets_a_new_connection_waits_for_its_welcome(
    server: Server, connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = connection._endpoint
    send_all = endpoint.send_all

    def reconnect_first(*arguments: Any, **options: Any) -> bool:
        """The connection is lost when the push has been encoded, and there is another one before it is sent."""
        monkeypatch.setattr(endpoint, "send_all", send_all)
        server.break_connection()
        server.hear(FrameKind.JOIN)
        until(lambda: endpoint._link(1, None) is not None)
        return send_all(*arguments, **options)

    server.hear(FrameKind.JOIN)
    server.welcome()
    for kind in (FrameKind.MODEL, FrameKind.MODEL, FrameKind.GROUPS):
        server.hear(kind)
    until(lambda: connection.slots[1].has_pushed_since(-1))  # the welcome has been taken
    connection.send_groups(NEXT)
    monkeypatch.setattr(endpoint, "send_all", reconnect_first)
    connection.push(connection.slots[0], torch.ones(connection.slots[0].config.shape), 0)
    server.welcome()
    server.hear(FrameKind.MODEL)
    server.hear(FrameKind.MODEL)
    assert decode_groups(server.hear(FrameKind.GROUPS)) == NEXT
    server.hear(FrameKind.PAYLOAD)


def test_a_worker_that_finishes_while_its_connection_is_lost_calls_again_to_say_goodbye(server: Server) -> None:
    connection = call(server)
    server.hear(FrameKind.JOIN)
    server.welcome()
    connection.wait_for_values()
    server.break_connection()
    assert server.ends.get(timeout=WAIT) is not None
    until(lambda: connection._lost_at is not None)
    connection.close()
    server.hear(FrameKind.MODEL)
    assert server.ends.get(timeout=WAIT) is None


def test_a_server_that_is_there_and_says_nothing_is_one_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.parameter_server.connection.GRACE_SECONDS", 0.1)
    connection = call(server, stall_seconds=0.5)
    server.hear(FrameKind.JOIN)
    try:
        with pytest.raises(PeerTimeoutError, match=r"did not send the model within 0.5 s, though it is there"):
            connection.wait_for_values()
    finally:
        connection.close()


def test_a_server_that_is_not_there_is_told_of_at_once_with_the_command_that_starts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"gradwire serve --parameters --workers 1 --host 127.0.0.1 --port {port} --job mine"
    options = ConnectionOptions(timeout=timedelta(seconds=1))
    connection = ServerConnection(("127.0.0.1", port), JOIN, 0, "mine", options, VALUES)
    connection.start()
    try:
        with pytest.raises(
            PeerTimeoutError,
            match=rf"at 127.0.0.1:{port} gave rank 0 no connection for 1 s \(.*\)\. Start it with: {command}",
        ):
            connection.wait_for_values()
    finally:
        connection.close()
    (record,) = caplog.records  # once, however often it is called
    assert record.levelname == "WARNING"  # which Python prints where nobody has configured logging
    assert f"Nobody answers at 127.0.0.1:{port} yet" in record.getMessage()
    assert record.getMessage().endswith(f"start it with: {command}")


def test_a_long_wait_for_other_workers_is_told_of(
    server: Server, connection: ServerConnection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire.parameter_server.connection.NOTICE_SECONDS", 0.3)
    monkeypatch.setattr("gradwire.parameter_server.connection.GRACE_SECONDS", 0.1)
    connection._options = ConnectionOptions(stall_timeout=timedelta(seconds=1))
    server.hear(FrameKind.JOIN)
    with pytest.raises(PeerTimeoutError, match="though it is there"):
        connection.wait_for_values()
    (record,) = caplog.records
    assert "Waiting for the model." in record.getMessage() and "waits for other workers" in record.getMessage()


@pytest.mark.parametrize("words", [b"", b"{}", b"\xff", TrainingWelcome(False, (0,), (-1,), (-1,)).to_bytes()])
def test_a_welcome_that_cannot_be_read_is_one_error_at_once(
    server: Server, connection: ServerConnection, words: bytes
) -> None:
    server.hear(FrameKind.JOIN)
    server.welcome(words)
    with pytest.raises(SyncError, match=r"an answer that this worker cannot read: Not ") as raised:
        connection.wait_for_values()
    assert not isinstance(raised.value, PeerTimeoutError)
    assert "127.0.0.1" in str(raised.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_does_not_wait_for_what_only_its_parent_can_hear(
    server: Server, connection: ServerConnection
) -> None:
    server.hear(FrameKind.JOIN)
    child = os.fork()
    if child == 0:
        try:
            connection.wait_for_values()
        except SyncError as error:
            os._exit(not str(error).endswith("start workers with the 'spawn' method."))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    server.welcome()
    connection.wait_for_values()


@pytest.mark.timeout(15)
def test_an_exception_on_the_endpoints_thread_is_told_to_whoever_waits(server: Server) -> None:
    connection = call(server, values={})
    server.hear(FrameKind.JOIN)
    server.welcome()
    try:
        with pytest.raises(SyncError, match="KeyError") as caught:
            connection.wait_for_values()
        assert isinstance(caught.value.__cause__, KeyError)
    finally:
        connection.close()
