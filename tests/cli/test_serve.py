"""`gradwire serve`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.cli.app import build_app
from gradwire.core.errors import SyncError
from tests.net.certificates import Authority

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from gradwire.cli import main; main()"


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


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    result = serve("--parameters", "--workers", "1", "--port", "0", "--tls", *[str(tmp_path / "none.pem")] * 3)
    assert result.exit_code == 1
    assert "Name a certificate, its private key without a password" in result.output


@pytest.mark.ci
@pytest.mark.parametrize("tls", [False, True])
def test_a_worker_trains_with_it(tls, tmp_path):
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--parameters", "--workers", "1", "--port", "0"]
    connection = gw.ConnectionOptions()
    if tls:
        authority = Authority(tmp_path)
        files = authority.files("server")
        command += ["--tls", str(files.certificate), str(files.key), str(files.authority)]
        connection = gw.ConnectionOptions(tls=authority.files("worker"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = re.search(r":(\d+)$", server.stdout.readline()).group(1)
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, losses = torch.randn(64, 40), []
        target = x @ torch.randn(40, 30)
        job, transfer = gw.JobOptions(worker=0, workers=1), gw.TransferOptions(min_elements=0)
        with gw.ParameterClient(
            model, optimizer, f"127.0.0.1:{port}", job=job, transfer=transfer, connection=connection
        ) as client:
            for _ in range(30):
                loss = (model(x) - target).square().mean()
                loss.backward()
                client.step()
                losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        assert server.wait(30) == 0
        assert "All workers have finished." in server.stdout.read()


def test_it_serves_one_thing_with_its_own_options():
    both = serve("--workers", "2", "--parameters", "--aggregate")
    assert both.exit_code == 2
    assert "Pass either" in both.output
    assert serve("--workers", "2", "--parameters", "--udp").exit_code == 2
    assert serve("--workers", "2", "--aggregate", "--optimizer", "my.Own").exit_code == 2
    without_state = serve("--workers", "2", "--parameters", "--fsync", "always")
    assert without_state.exit_code == 2
    assert "--fsync goes with --state." in without_state.output


@pytest.mark.parametrize("option", ["--timeout", "--patience", "--stall-timeout"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e300"])
def test_it_takes_seconds_that_a_clock_can_count(option, seconds):
    result = serve("--parameters", "--workers", "1", "--port", "0", option, seconds)
    assert result.exit_code == 2
    assert f"{option} takes seconds from 0 to 1e+09" in " ".join(result.output.replace("│", "").split())


def test_it_knows_when_to_write_to_disk(tmp_path):
    result = serve("--workers", "2", "--parameters", "--port", "0", "--state", str(tmp_path), "--fsync", "sometimes")
    assert result.exit_code == 1
    assert "fsync='sometimes' is unknown. Pass one of 'always', 'checkpoint'." in result.output


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("--parameters", signal.SIGTERM),
        pytest.param("--parameters", signal.SIGINT, marks=pytest.mark.ci),
        pytest.param("--aggregate", signal.SIGTERM, marks=pytest.mark.ci),
        ("--aggregate", signal.SIGINT),
        pytest.param("--aggregate --udp", signal.SIGTERM, marks=pytest.mark.ci),
        pytest.param("--aggregate --udp", signal.SIGINT, marks=pytest.mark.ci),
    ],
)
def test_a_signal_is_told_to_the_workers_at_once(kind, number):
    """Of servers that no other can take over from."""
    command = [sys.executable, "-m", "gradwire.cli", "serve", *kind.split(), "--workers", "3", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        address = re.search(r"at (.*:\d+)$", server.stdout.readline()).group(1)
        if kind != "--parameters":
            terms = SessionConfig(3, (), (Stream(Operation.MAXIMUM, 50),), fraction=0.6)
            client = AggregationClient(address, terms, 0)
            result = client.submit(0, 0, np.ones(50, np.float32), np.empty(50, np.float32)).result
        else:
            model = torch.nn.Linear(4, 3)
            optimizer, job = torch.optim.SGD(model.parameters()), gw.JobOptions(worker=0, workers=3)
            client = gw.ParameterClient(model, optimizer, address, job=job)
            model(torch.ones(2, 4)).sum().backward()
            client.step()
            result = client.wait
        server.send_signal(number)
        with pytest.raises(SyncError, match=f"has ended: .* stopped by {number.name}"):
            result()
        client.close("over")
        assert server.wait(30) == 128 + number
        assert server.stderr.read() == f"The server was stopped by {number.name}.\n"


def test_workers_add_up_with_it():
    """Its process has no torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", "--aggregate", "--udp", "--workers", "2", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = re.search(r":(\d+)$", server.stdout.readline()).group(1)
        terms = SessionConfig(
            2, (IndexTable(8, tuple(range(256)), 16),), (Stream(Operation.SUM, 5000),), packet_elements=2048
        )
        clients = [AggregationClient(f"127.0.0.1:{port}", terms, rank) for rank in range(2)]
        outs = [np.empty(5000, np.uint16) for _ in clients]
        payloads = [np.random.default_rng(rank).integers(0, 256, 5000, np.uint8) for rank in range(2)]
        futures = [client.submit(0, 0, *given) for client, *given in zip(clients, payloads, outs)]
        assert [future.result(30).counts.tolist() for future in futures] == [[2, 2, 2]] * 2
        total = payloads[0].astype(np.uint16) + payloads[1]
        assert all((out == total).all() for out in outs)
        for client in clients:
            client.close()
        assert server.wait(30) == 0
        assert "All workers have finished." in server.stdout.read()


@pytest.mark.parametrize("reader", ["is gone", "reads nothing"])
def test_a_server_does_not_wait_for_whoever_reads_its_output(reader):
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", "--aggregate", "--workers", "1", "--port", "0"]
    output, written = os.pipe()
    fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(command, stdout=written, stderr=subprocess.PIPE, text=True) as server:
        port = re.search(r":(\d+)$", os.read(output, 4096).decode().rstrip()).group(1)
        filler = os.open(f"/proc/self/fd/{written}", os.O_WRONLY | os.O_NONBLOCK)
        os.close(written)
        with contextlib.suppress(BlockingIOError):
            while reader == "reads nothing":
                os.write(filler, b"x")
        os.close(filler)
        if reader == "is gone":
            os.close(output)
        terms = SessionConfig(1, (), (Stream(Operation.MAXIMUM, 50),))
        client = AggregationClient(f"127.0.0.1:{port}", terms, 0)
        sent, out = np.ones(50, np.float32), np.empty(50, np.float32)
        for round_ in range(3):
            client.submit(round_, 0, sent.view(np.uint8), out).result(30)
        client.close()
        if reader == "reads nothing":
            assert os.read(output, 4096).strip(b"x") == b""
            assert b"All workers have finished." in b"".join(iter(lambda: os.read(output, 4096), b""))
            os.close(output)
        assert server.wait(30) == 0
        said = server.stderr.read()
        assert ("writing one failed: BrokenPipeError" in said) == (reader == "is gone"), said


def metrics_of(url: str) -> dict[str, float]:
    """Numbers by name and labels."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for line in lines if line[0] != "#" for name, _, value in [line.rpartition(" ")]}


def test_an_aggregator_says_its_counts_to_prometheus():
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--udp", "--workers", "1", "--port", "0"]
    with subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"at (.*:\d+)$", server.stdout.readline()).group(1)
        url = re.search(r"Metrics at (http://127\.0\.0\.1:\d+/metrics)$", server.stdout.readline()).group(1)
        before = metrics_of(url)
        assert before["gradwire_workers"] == 1
        assert before['gradwire_worker_present{worker="0"}'] == 0
        client = AggregationClient(address, SessionConfig(1, (), (Stream(Operation.MAXIMUM, 50),)), 0)
        client.submit(0, 0, np.ones(50, np.float32), np.empty(50, np.float32)).result(30)
        found = metrics_of(url)
        assert found['gradwire_worker_present{worker="0"}'] == 1
        assert found["gradwire_sessions"] == 1
        assert found['gradwire_packets_total{kind="taken",place="server"}'] == 1
        assert found["gradwire_received_bytes_total"] > 0
        assert not any('place="kernel"' in name for name in found)
        client.close()
        assert server.wait(30) == 0


@pytest.mark.ci
def test_a_parameter_server_says_its_counts_to_prometheus():
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--parameters", "--workers", "1", "--port", "0"]
    with subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"at (.*:\d+)$", server.stdout.readline()).group(1)
        url = re.search(r"Metrics at (.*)$", server.stdout.readline()).group(1)
        model = torch.nn.Linear(4, 3)
        optimizer, job = torch.optim.SGD(model.parameters(), lr=0.1), gw.JobOptions(worker=0, workers=1)
        with gw.ParameterClient(model, optimizer, address, job=job) as client:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                client.step()
            client.wait()
            found = metrics_of(url)
        assert found["gradwire_steps_total"] == 3
        assert found["gradwire_parameters"] == 2
        assert found["gradwire_steps_ahead"] == found["gradwire_pushes_waiting"] == 0
        assert found['gradwire_worker_present{worker="0"}'] == 1
        assert found["gradwire_sent_bytes_total"] > 0
        assert server.wait(30) == 0


def test_metrics_at_a_port_that_is_taken_are_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = serve("--aggregate", "--workers", "1", "--port", "0", "--metrics-port", port)
    assert result.exit_code == 1
    assert "Address already in use" in result.output
