"""`gradwire serve`."""

from __future__ import annotations

import re
import subprocess
import sys

import torch
from typer.testing import CliRunner

import gradwire as gw
from gradwire.cli.app import build_app


def serve(*arguments: str):
    return CliRunner().invoke(build_app(), ["serve", *arguments])


def test_it_says_what_to_serve():
    result = serve("--workers", "2")
    assert result.exit_code == 2
    assert "--parameters" in result.output


def test_it_wants_a_key_beyond_loopback(monkeypatch):
    monkeypatch.delenv("GRADWIRE_JOB_KEY", raising=False)
    monkeypatch.delenv("GRADWIRE_JOB_KEY_FILE", raising=False)
    result = serve("--parameters", "--workers", "2", "--host", "0.0.0.0", "--port", "0")
    assert result.exit_code == 1
    assert "GRADWIRE_JOB_KEY_FILE" in result.output


def test_a_worker_trains_with_it():
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--parameters", "--workers", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = re.search(r":(\d+)$", server.stdout.readline()).group(1)
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, losses = torch.randn(64, 40), []
        target = x @ torch.randn(40, 30)
        with gw.ParameterClient(model, optimizer, f"127.0.0.1:{port}", worker=0, workers=1, min_elements=0) as client:
            for _ in range(30):
                loss = (model(x) - target).square().mean()
                loss.backward()
                client.step()
                losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        assert server.wait(30) == 0
        assert "All workers have finished." in server.stdout.read()
