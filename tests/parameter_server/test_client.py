"""Clients of a parameter server: residuals, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event, Thread

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError, PeerTimeoutError, SyncError
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from tests.parameter_server.clients import ALONE, backward, connect, sgd, train_step
from tests.parameter_server.processes import batch


@pytest.mark.timeout(120)
def test_residuals_are_loaded_as_they_were_saved() -> None:
    """Also right after a step, while the encoder thread still pushes and the update of the step is on its way."""
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    transfer = gw.TransferOptions(min_elements=64, chunk_elements=100)  # several chunks
    with connect(server, transfer=transfer) as client:
        saved: dict[str, torch.Tensor] = {}
        for step in range(5):
            train_step(client, step)
            saved = saved or client.state_dict()
        assert saved["weight"].count_nonzero() > 100
        client.load_state_dict({name: residual.double() for name, residual in saved.items()})
        loaded = client.state_dict()
        with pytest.raises(OptionError, match="Load the state of the same model"):
            client.load_state_dict({"weight": torch.zeros(3)})
    serving.join()
    assert loaded.keys() == saved.keys()
    assert torch.equal(loaded["weight"], saved["weight"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_saved_residual_is_not_loaded_if_a_push_has_taken_it_along(
    steps_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker saves, goes on, and is killed. Another process takes its place."""
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    transfer = gw.TransferOptions(min_elements=64)
    killed = connect(server, transfer=transfer)
    for step in range(3):
        train_step(killed, step)
    saved = killed.state_dict()
    assert saved["weight"].count_nonzero() > 100
    for step in range(3, 3 + steps_after):
        train_step(killed, step)
    killed.wait()
    with connect(server, transfer=transfer) as client:  # the server closes the other's connection
        client.load_state_dict(saved)
        found = client.state_dict()
        assert found["gradwire.step"] == 3 + steps_after
    serving.join()
    assert ("are not loaded" in caplog.text) == bool(steps_after)
    if steps_after:
        assert "weight" not in found
    else:
        assert torch.equal(found["weight"], saved["weight"])
    with contextlib.suppress(SyncError):
        killed.close()


@pytest.mark.timeout(120)
def test_a_straggler_ends_in_good_order_when_enough_others_have_finished() -> None:
    server = ParameterServer(ParameterServerOptions(3))
    others_finished = Event()
    found: dict[int, tuple[list[bool], torch.Tensor]] = {}

    def work(worker: int) -> None:
        goes_on = []
        with connect(server, gw.JobOptions(worker=worker, workers=3, backups=1)) as client:
            for step in range(8):
                goes_on.append(train_step(client, step))
                if worker == 2:
                    assert others_finished.wait(60)
        assert client.finished == (worker == 2)
        found[worker] = goes_on, client.model.weight.detach()

    threads = [Thread(target=work, args=(worker,)) for worker in range(3)]
    serving = Thread(target=server.run)
    for thread in [serving, *threads]:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    others_finished.set()
    for thread in [threads[2], serving]:
        thread.join()
    assert found[0][0] == [True] * 8
    assert not found[2][0][-1]
    for worker in (1, 2):
        assert torch.equal(found[worker][1], found[0][1])


@pytest.mark.timeout(120)
def test_a_straggler_that_another_one_has_ended_the_job_for_has_the_model_of_all() -> None:
    """It is steps behind when the job ends, and everything that it has not applied has arrived."""
    server = ParameterServer(ParameterServerOptions(4))
    has_joined, ended = Event(), Event()
    found: dict[int, torch.Tensor] = {}
    goes_on: dict[int, bool] = {}

    def work(worker: int) -> None:
        with connect(server, gw.JobOptions(worker=worker, workers=4, backups=1)) as client:
            if worker == 3:
                has_joined.set()
            assert has_joined.wait(60)
            for step in range(9 if worker == 2 else 8):
                backward(client.model, step)
                if worker == 3:  # takes no step before, so that none of the others is left out
                    assert ended.wait(60)
                goes_on[worker] = client.step()
                if not goes_on[worker]:
                    break
        found[worker] = client.model.weight.detach()

    threads = [Thread(target=work, args=(worker,)) for worker in range(4)]
    serving = Thread(target=server.run)
    for thread in [serving, *threads]:
        thread.start()
    for thread in threads[:3]:
        thread.join()
    ended.set()
    for thread in [threads[3], serving]:
        thread.join()
    assert not goes_on[3]
    for worker in range(1, 4):
        assert torch.equal(found[worker], found[0])


@pytest.mark.timeout(120)
def test_a_straggler_that_was_up_to_date_computes_with_the_parameters_of_the_step_that_it_skips_to() -> None:
    """After `wait()`, nothing is left to pull, until others have closed steps without it."""
    server = ParameterServer(ParameterServerOptions(2))
    is_away, others_are_ahead = Event(), Event()
    weights: dict[int, torch.Tensor] = {}

    def go_ahead() -> None:
        with connect(server, gw.JobOptions(worker=0, workers=2, backups=1)) as client:
            for step in range(6):
                backward(client.model, step)
                weights[client.steps] = client.model.weight.detach().clone()
                client.step()
                if step == 1:
                    assert is_away.wait(60)
            client.wait()
            others_are_ahead.set()

    def come_late() -> None:
        with connect(server, gw.JobOptions(worker=1, workers=2, backups=1)) as client:
            train_step(client, 0)
            client.wait()
            is_away.set()
            assert others_are_ahead.wait(60)
            backward(client.model, 1)
            assert client.steps > 2
            assert torch.equal(client.model.weight, weights[client.steps])
            client.step()

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(each) for each in (go_ahead, come_late, server.run)]:
            future.result(90)


@pytest.mark.timeout(120)
def test_a_worker_that_fails_in_its_last_step_has_not_finished() -> None:
    server = ParameterServer(ParameterServerOptions(1, patience=timedelta(seconds=1)))

    def fail() -> None:
        client = connect(server)
        client._encoder.submit(lambda: 1 / 0)
        with pytest.raises(SyncError, match="ZeroDivisionError") as caught:
            client.close()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    worker = Thread(target=fail)
    worker.start()
    events: list[str] = []
    with pytest.raises(PeerTimeoutError):
        server.run(events.append)
    worker.join()
    assert any("gave up: SyncError: The thread gradwire-encoder failed: ZeroDivisionError" in each for each in events)


class Vectors(torch.nn.Module):
    """A matrix, and several vectors, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(48, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 5)
        self.extra = torch.nn.Parameter(torch.zeros(5))
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out + self.extra if self.uses_extra else out


@contextlib.contextmanager
def training(**transfer: bool) -> Iterator[gw.ParameterClient]:
    """Context manager: the only worker of a server."""
    server = ParameterServer(ParameterServerOptions(1))

    def serve() -> None:
        with contextlib.suppress(SyncError):  # the worker has given up
            server.run()

    serving = Thread(target=serve)
    serving.start()
    model = Vectors()
    optimizer, address = torch.optim.Adam(model.parameters(), lr=1e-2), f"127.0.0.1:{server.address[1]}"
    try:
        with gw.ParameterClient(
            model, optimizer, address, job=ALONE, transfer=gw.TransferOptions(**transfer)
        ) as client:
            yield client
    finally:
        serving.join()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [False, True])
def test_vectors_that_are_joined_end_with_the_same_bits(overlap: bool) -> None:
    models, sent = [], []
    for join_vectors in (False, True):
        with training(join_vectors=join_vectors, overlap=overlap) as client:
            for step in range(6):
                train_step(client, step)
            client.wait()
            sent.append(client.sent_bytes)
        models.append(client.model)
    for apart, joined in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(apart, joined)
    assert sent[1] < sent[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("join_vectors", [False, True])
def test_a_vector_without_a_gradient_is_refused_with_advice_unless_vectors_travel_apart(join_vectors: bool) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(training(join_vectors=join_vectors))
        client.model.uses_extra = False
        if join_vectors:
            stack.enter_context(
                pytest.raises(AttachError, match=r"'extra' has no gradient in this.*join_vectors=False")
            )
        train_step(client, 0)
        client.wait()
    assert not client.model.extra.any()


@pytest.mark.timeout(120)
def test_the_residual_of_one_joined_vector_is_loaded_and_leaves_the_others() -> None:
    with training() as client:
        client.load_state_dict({"norm.bias": torch.arange(40.0)})
        client.load_state_dict({"extra": torch.ones(5)})
        state = client.state_dict()
    assert torch.equal(state["norm.bias"], torch.arange(40.0))
    assert torch.equal(state["extra"], torch.ones(5))
    assert not state["first.bias"].any()


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_is_refused_by_each_call_and_waits_for_no_lock() -> None:
    """Such as the encoder thread holds while it sends."""
    with training() as client, contextlib.ExitStack() as held:
        train_step(client, 0)
        client.wait()
        for lock in client._connections[0]._locks:
            held.enter_context(lock)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            refused = 0
            for call in (client.step, client.wait, client.state_dict, lambda: client.load_state_dict({}), client.close):
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except SyncError as error:
                        refused += str(error).endswith("start workers with the 'spawn' method.")
            os._exit(refused != 5)
        held.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train_step(client, 1)


def two_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 8, bias=False), torch.nn.Linear(8, 5, bias=False))


@pytest.mark.timeout(120)
def test_a_module_of_the_model_is_trained_alone() -> None:
    """The other's values stay, and both may be trained together afterwards."""
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    alone, model = two_layers(), two_layers()
    optimizer = sgd(alone)

    def backward_of(trained: torch.nn.Sequential, step: int) -> None:
        x, y = batch(0, step)
        part = trained[0] if step < 5 else trained
        torch.nn.functional.cross_entropy(part(x), y).backward()

    address = f"127.0.0.1:{server.address[1]}"
    with gw.ParameterClient(model, sgd(model), address, compressor="none", job=ALONE) as client:
        for step in range(9):
            backward_of(model, step)
            client.step()
            backward_of(alone, step)
            optimizer.step()
            optimizer.zero_grad()
    serving.join()
    for trained, expected in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(trained, expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_outdated_values_are_refused(overlap: bool) -> None:
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    client = connect(server, transfer=gw.TransferOptions(overlap=overlap))
    train_step(client, 0)
    client.wait()
    client.model.weight.square().sum().backward()
    client.step()
    loss = client.model.weight.square().sum()
    if not overlap:
        loss.backward()
    with pytest.raises(AttachError, match=r"Call client.wait\(\) before you read"):
        loss.backward() if overlap else client.step()
    client.close()
    serving.join()
