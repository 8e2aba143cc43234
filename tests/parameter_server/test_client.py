"""Clients of a parameter server: residuals, and how they end."""

from __future__ import annotations

from datetime import timedelta
from threading import Event, Thread

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import OptionError, PeerTimeoutError, SyncError
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from tests.parameter_server.clients import connect, train_step


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
