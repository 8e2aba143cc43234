"""What checksums, tags, TLS, and files on disk cost the step of a job with a parameter server.

Two hosts of a lab, one for the server and one for its worker. A step computes gradients of one matrix, pushes them and
pulls the update. All kinds take the same steps with the same compressor and link. Both hosts share the cores of one
machine. The openssl command makes the certificates.
"""
# Shapes: n, m = rows and columns of the matrix

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import gradwire as gw
from benchmarks.options import Rates, choose, listed
from benchmarks.ranks import command, say
from gradwire.bench.statistics import Spread
from gradwire.lab import Lab
from gradwire.net.client import ConnectionOptions
from gradwire.net.tls import TlsFiles
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions

PORT = 7071
SERVER, WORKER = 0, 1
COLUMNS = 1000
WARM_UP = 3
KEY, CHOICES = ("method", "case", "rate"), ("rates", "compressors")
Row = dict[str, Any]


class Kind(NamedTuple):
    """How frames are protected, and when the server writes its state to disk (None: it keeps none)."""

    integrity: str | None
    fsync: str | None = None


KINDS = {
    "crc": Kind("crc"),
    "mac": Kind("mac"),
    "tls": Kind(None),
    "crc+state": Kind("crc", "checkpoint"),
    "crc+fsync always": Kind("crc", "always"),
}


def certificate(folder: Path) -> TlsFiles:
    """The certificate of both ends, which is its own authority."""
    return TlsFiles(folder / "end.pem", folder / "end.key", folder / "end.pem")


def make_certificate(folder: Path, host: str) -> None:
    made = certificate(folder)
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=end"
    files = ["-addext", f"subjectAltName=IP:{host}", "-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    made.key.chmod(0o600)


def protection(name: str, folder: str) -> dict[str, Any]:
    """Options of both ends."""
    return {"integrity": KINDS[name].integrity, "tls": certificate(Path(folder)) if name == "tls" else None}


def serve(name: str, host: str, folder: str) -> None:
    """The server's process."""
    options = ParameterServerOptions(1, host, PORT, **protection(name, folder))
    if (fsync := KINDS[name].fsync) is not None:
        state = Path(folder, "state")
        state.mkdir(mode=0o700)
        options = replace(options, state=state, fsync=fsync)
    ParameterServer(options).run(lambda text: None)


def work(name: str, host: str, folder: str, compressor: str, num_bytes: int, seconds: float) -> None:
    """The worker's process, which prints the times of its steps."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(COLUMNS, num_bytes // 4 // COLUMNS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    client = gw.ParameterClient(
        model, optimizer, f"{host}:{PORT}", compressor=compressor, job=gw.JobOptions(worker=0, workers=1),
        connection=ConnectionOptions(**protection(name, folder)),
    )  # fmt: skip
    inputs, ends = torch.randn(4, COLUMNS), 0.0
    times: list[float] = []
    while len(times) < 2 * WARM_UP or time.perf_counter() < ends:
        began = time.perf_counter()
        model(inputs).square().mean().backward()
        client.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        if len(times) == WARM_UP:
            ends = time.perf_counter() + seconds
    client.close()
    say(seconds=times[WARM_UP:])


def steps(name: str, rate: str, compressor: str, num_bytes: int, seconds: float) -> list[float]:
    """Seconds of each step of one kind."""
    with Lab(2, None if rate == "none" else rate) as lab, tempfile.TemporaryDirectory() as folder:
        host = lab.addresses[SERVER]
        make_certificate(Path(folder), host)
        env = {"GRADWIRE_JOB_KEY": secrets.token_hex(32)}
        server = lab.popen(command(__spec__.name, "serve", name, host, folder), SERVER, env=env)
        try:
            arguments = name, host, folder, compressor, num_bytes, seconds
            worker = lab.popen(
                command(__spec__.name, "work", *arguments), WORKER, env=env, stdout=subprocess.PIPE, text=True
            )
            printed, _ = worker.communicate(timeout=60 + 20 * seconds)
            server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
        found: list[float] = json.loads(printed)["seconds"]
        return found


def run(
    rates: Rates = "none,1gbit",
    compressors: Annotated[str, typer.Option(help="Compressors of gradients and updates.")] = "none,threelc",
    kinds: Annotated[str, typer.Option(help=f"Kinds of protection: {', '.join(KINDS)}.")] = "",
    num_bytes: Annotated[int, typer.Option(help="Bytes of the matrix.")] = 25_000_000,
    seconds: Annotated[float, typer.Option(help="How long each kind is timed, in each of two turns.")] = 4.0,
) -> Iterator[Row]:
    """One row for each kind, compressor and rate. The kinds take two turns."""
    chosen = choose(kinds, list(KINDS))
    for rate in listed(rates, ()):
        for compressor in listed(compressors, ()):
            found: dict[str, list[float]] = {kind: [] for kind in chosen}
            for kind in (*chosen, *chosen):
                found[kind] += steps(kind, rate, compressor, num_bytes, seconds)
            for kind, each in found.items():
                spread = Spread.of(each)
                yield {
                    "method": compressor, "case": kind, "rate": rate, "metric": "step", "unit": "s", "ranks": 1,
                    "value": spread.median, "p20": spread.p20, "p80": spread.p80, "samples": spread.size,
                    "size": num_bytes, "source": "measured",
                }  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Milliseconds of each kind, and their ratio to those of checksums."""
    lines, crc = [], 0.0
    for row in rows:
        crc = row["value"] if row["case"] == "crc" else crc
        ratio = f"{row['value'] / crc:6.2f} of crc" if crc else ""
        lines.append(f"{row['rate']:>8} {row['method']:10}{row['case']:26}{1e3 * row['value']:9.1f} ms{ratio}")
    return "\n".join(lines)
