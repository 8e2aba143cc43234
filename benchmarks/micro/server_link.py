"""How busy the link of a parameter server is, and how its workers share it.

A server and its workers, each on a host of the lab. A step computes gradients of one matrix, pushes them and pulls the
update, with hardly any computation. Meanwhile, the counters of all interfaces are read many times a second. All hosts
share the cores of one machine.

- `as is`: Linux's receive buffers, which grow with a connection, and links of one rate.
- `small buffers`: receive buffers of 64 KiB on all hosts.
- `equal shares`: the link of each worker has the server's rate over the number of workers, so that the server's link
  gives each the same share, and is full only while all of them send.
- `small and equal`: both.
"""
# Shapes: n, m = rows and columns of the matrix, W = workers

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

import gradwire as gw
from benchmarks.intervals import interval
from benchmarks.options import Rates, choose, listed
from benchmarks.ranks import command, say
from gradwire.core.errors import OptionError
from gradwire.lab import Lab
from gradwire.lab.units import parse_rate
from gradwire.net.client import ConnectionOptions
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions

PORT = 7072
COLUMNS = 1000
WARM_UP = 2  # steps
SAMPLE_SECONDS, WINDOW_SECONDS = 0.02, 0.2
BUSY = 0.8  # share of the rate above which a link is busy
SMALL_BUFFER = "4096 65536 65536"
SECONDS_LEFT = 300.0  # for one run
KEY, CHOICES = ("method", "case", "rate", "run"), ("rates", "compressors", "cases", "runs")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Whether receive buffers are small, and whether the workers' links have equal shares of the server's rate."""

    small: bool = False
    equal: bool = False


CASES = {
    "as is": Case(),
    "small buffers": Case(small=True),
    "equal shares": Case(equal=True),
    "small and equal": Case(small=True, equal=True),
}
METRICS = ("step", "fairness_push", "fairness_pull", "busy_push", "busy_pull", "busy_both", "receive_buffer")


def serve(host: str, workers: int) -> None:
    """The server's process."""
    ParameterServer(ParameterServerOptions(workers, host, PORT, insecure=True)).run(lambda text: None)


def work(host: str, worker: int, workers: int, compressor: str, num_bytes: int, steps: int) -> None:
    """A worker's process, which prints the times of its steps and when the first of them began."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(COLUMNS, num_bytes // 4 // COLUMNS, bias=False)
    client = gw.ParameterClient(
        model, torch.optim.SGD(model.parameters(), 1e-3), f"{host}:{PORT}", compressor=compressor,
        job=gw.JobOptions(worker=worker, workers=workers), connection=ConnectionOptions(insecure=True),
    )  # fmt: skip
    inputs, times = torch.randn(4, COLUMNS), [time.monotonic()]
    for _ in range(WARM_UP + steps):
        model(inputs).square().mean().backward()
        client.step()
        times.append(time.monotonic())
    client.close()
    times.append(time.monotonic())
    say(times=times[WARM_UP:])


# -- one run ---------------------------------------------------------------------------------------------------------


Sample = tuple[float, list[tuple[int, int]]]
"""Time, and bytes that each host has sent and received; host 0 is the server."""


def measure(case: Case, rate: str, workers: int, compressor: str, num_bytes: int, steps: int) -> dict[str, float]:
    """Figures of one run, by metric."""
    rate_bits = parse_rate(rate)
    if not rate_bits:
        raise OptionError("A link that is not shaped is never busy. Pass rates such as 100mbit.")
    with Lab(workers + 1, rate) as lab:
        for worker in range(1, workers + 1) if case.equal else ():
            lab.set_rate(rate_bits / workers, worker)
        for host in range(workers + 1) if case.small else ():
            _limit_buffers(lab, host)
        address = lab.addresses[0]
        lab.popen(command(__spec__.name, "serve", address, workers))
        jobs = [
            lab.popen(
                command(__spec__.name, "work", address, worker, workers, compressor, num_bytes, steps), worker + 1,
                stdout=subprocess.PIPE, text=True,
            )
            for worker in range(workers)
        ]  # fmt: skip
        samples, buffers, ends = list[Sample](), [0], time.monotonic() + SECONDS_LEFT
        while any(job.poll() is None for job in jobs):
            if time.monotonic() > ends:
                raise TimeoutError(f"The workers have not ended within {SECONDS_LEFT:g} s. Pass fewer steps or bytes.")
            samples.append((time.monotonic(), [(c.bytes_sent, c.bytes_received) for c in lab.counters()]))
            if len(samples) % 20 == 0:
                buffers += _buffers(lab)
            time.sleep(SAMPLE_SECONDS)
        printed = [json.loads(job.communicate(timeout=30)[0])["times"] for job in jobs]
    began, ended = max(times[0] for times in printed), min(times[-1] for times in printed)
    timed = [sample for sample in samples if began <= sample[0] <= ended]
    step = statistics.median((times[-1] - times[0]) / steps for times in printed)
    return {"step": step, **sharing(timed, rate_bits), "receive_buffer": max(buffers)}


def sharing(samples: Sequence[Sample], rate_bits: float) -> dict[str, float]:
    """How workers share the server's link, and for which share of the time it is busy.

    The fairness of a window is Jain's index, (Σx)² / (W Σx²) of the workers' bytes: 1 for equal shares, 1/W if one
    worker has the whole link. Its mean is over the windows in which the link is busy in this direction.
    """
    windows = list(_windows(samples))
    found: dict[str, float] = {}
    busy: dict[str, list[bool]] = {}
    for way, server_column in (("push", 1), ("pull", 0)):
        worker_column = 1 - server_column
        fairness, busy[way] = [], []
        for seconds, hosts in windows:
            busy[way].append(hosts[0][server_column] * 8 > BUSY * rate_bits * seconds)
            own = [host[worker_column] for host in hosts[1:]]
            if busy[way][-1]:
                fairness.append(sum(own) ** 2 / (len(own) * sum(each**2 for each in own)))
        found[f"fairness_{way}"] = statistics.fmean(fairness) if fairness else float("nan")
        found[f"busy_{way}"] = statistics.fmean(busy[way]) if busy[way] else float("nan")
    both = [all(pair) for pair in zip(busy["push"], busy["pull"], strict=True)]
    return {**found, "busy_both": statistics.fmean(both) if both else float("nan")}


def _windows(samples: Sequence[Sample]) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Seconds of each window, and bytes that each host has sent and received in it."""
    start = samples[0] if samples else None
    for sample in samples:
        assert start is not None, "there are samples"
        if (seconds := sample[0] - start[0]) >= WINDOW_SECONDS:
            yield seconds, [(b[0] - a[0], b[1] - a[1]) for a, b in zip(start[1], sample[1], strict=True)]
            start = sample


def _limit_buffers(lab: Lab, host: int) -> None:
    script = f"echo {SMALL_BUFFER} > /proc/sys/net/ipv4/tcp_rmem"
    lab.popen(["sh", "-ec", script], host).wait(10)
    shown = lab.popen(["cat", "/proc/sys/net/ipv4/tcp_rmem"], host, stdout=subprocess.PIPE, text=True)
    if shown.communicate(timeout=10)[0].split() != SMALL_BUFFER.split():
        raise OptionError(
            "This machine's receive buffers cannot be changed in a lab. Pass --cases 'as is,equal shares'."
        )


def _buffers(lab: Lab) -> list[int]:
    """Receive buffers of the server's connections, in bytes."""
    listing = lab.popen(["ss", "-tmnH"], 0, stdout=subprocess.PIPE, text=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return [int(size) for size in re.findall(r"skmem:\(r\d+,rb(\d+)", listing.communicate(timeout=10)[0])]
    return []


# -- the record ------------------------------------------------------------------------------------------------------


def run(
    rates: Rates = "100mbit",
    compressors: Annotated[str, typer.Option(help="Compressors of gradients and updates.")] = "none,threelc",
    cases: Annotated[str, typer.Option(help=f"Cases: {', '.join(CASES)}.")] = "",
    workers: Annotated[int, typer.Option(min=2, help="Number of workers.")] = 4,
    num_bytes: Annotated[int, typer.Option(help="Bytes of the matrix.")] = 4_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 10,
    runs: Annotated[int, typer.Option(min=1, max=10, help="Runs of each case, in turns.")] = 3,
) -> Iterator[list[Row]]:
    """Rows of each run; the cases take turns."""
    for rate in listed(rates, ()):
        for compressor in listed(compressors, ()):
            for number in range(runs):
                for case in choose(cases, list(CASES)):
                    found = measure(CASES[case], rate, workers, compressor, num_bytes, steps)
                    fixed = {"method": compressor, "case": case, "rate": rate, "run": number, "ranks": workers}
                    yield [
                        {**fixed, "metric": metric, "value": found[metric], "size": num_bytes, "source": "measured"}
                        for metric in METRICS
                    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown table: means over the runs, with 95 % intervals."""
    lines = [
        "| rate | method | case | step, ms | fairness of pushes | of pulls | busy, % | both ways | buffer, KiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, method, case in dict.fromkeys((row["rate"], row["method"], row["case"]) for row in rows):
        mine = [row for row in rows if (row["rate"], row["method"], row["case"]) == (rate, method, case)]

        def cell(metric: str, unit: float, mine: Sequence[Row] = mine) -> str:
            mean, half = interval([unit * row["value"] for row in mine if row["metric"] == metric])
            if math.isnan(mean):
                return "–"  # the link is never busy for a whole window
            return f"{mean:.3g} ± {half:.2g}"

        busy = f"{cell('busy_push', 100)}, {cell('busy_pull', 100)}"
        lines.append(
            f"| {rate} | {method} | {case} | {cell('step', 1e3)} | {cell('fairness_push', 1)} | "
            f"{cell('fairness_pull', 1)} | {busy} | {cell('busy_both', 100)} | {cell('receive_buffer', 1 / 1024)} |"
        )
    return "\n".join(lines)
