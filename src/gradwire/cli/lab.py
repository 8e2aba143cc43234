"""`gradwire lab`: run a command on every host of a network on this machine."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.cli.files import out_file
from gradwire.cli.options import grouped
from gradwire.core.errors import OptionError

if TYPE_CHECKING:
    from gradwire.lab import LabResult


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("lab", context_settings={"allow_interspersed_args": False})(grouped(lab))


@dataclass(frozen=True)
class LabNetwork:
    """Network."""

    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4
    rate: Annotated[str, typer.Option(help="Rate of each link in both directions: 10mbit, 1gbit or none.")] = "100mbit"
    loss: Annotated[str, typer.Option(help="Fraction of packets dropped on arrival: 0.1% or 0.001.")] = "0"
    delay: Annotated[str, typer.Option(help="One-way delay: 5ms or none. Needs the kernel's netem.")] = "none"
    queue: Annotated[
        str,
        typer.Option(help="Bytes that may wait at the switch for each host: 64kib. Default: 1,000 frames or 50 ms."),
    ] = "none"


@dataclass(frozen=True)
class LabLimits:
    """Time limits."""

    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds after which the commands are ended.")] = None
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that the other hosts may continue after one has failed.")
    ] = 10.0


@dataclass(frozen=True)
class LabOutput:
    """Output."""

    json_file: Annotated[Path | None, out_file("--json", help="Write the summary to this file.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not relay the hosts' output.")] = False
    only: Annotated[int | None, typer.Option(help="Relay the output of this host only.")] = None


def lab(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="Command that every host runs.")],
    network: LabNetwork,
    limits: LabLimits,
    output: LabOutput,
) -> None:
    """Run CMD on every host of a network on this machine. Each host has its own namespace and a shaped link.

    The environment of each command has torch's rendezvous (RANK, WORLD_SIZE, MASTER_ADDR, …) and GRADWIRE_LAB_HOST,
    _HOSTS, _RATE and _INTERFACE. Needs root or unprivileged user namespaces. The exit code is that of the host that
    failed first, or 124 if the time limit was reached.

    Example: gradwire lab --hosts 4 --rate 100mbit -- python train.py
    """
    from gradwire.lab import Lab

    if output.only is not None and not 0 <= output.only < network.hosts:
        raise OptionError(f"There is no host {output.only}: --only takes 0 to {network.hosts - 1}.")
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        with Lab(network.hosts, network.rate, loss=network.loss, delay=network.delay, queue=network.queue) as net:
            relay = None if output.quiet else partial(_relay, output.only)
            result = net.run(command, timeout=limits.timeout, grace=limits.grace, capture=False, on_line=relay)
    except KeyboardInterrupt:
        print("gradwire lab: interrupted; the lab is gone.", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
    if output.json_file is not None:
        summary = asdict(network) | {"command": command} | result.to_dict()
        output.json_file.write_text(json.dumps(summary, indent=2) + "\n")
    _print_summary(result, output)
    raise typer.Exit(result.exit_code)


def _relay(only: int | None, host: int, stream: str, line: str) -> None:
    """Print a line of a host, with its host, on the stream that it was written to."""
    if only in (None, host):
        print(f"[host {host}] {line}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    # An exception instead of an immediate exit, so that the commands can end in order.
    raise SystemExit(128 + number)


def _print_summary(result: LabResult, output: LabOutput) -> None:
    table = Table(title="gradwire lab: traffic at each host's interface", box=box.SIMPLE)
    for name in ("host", "MB sent", "MB received", "packets sent", "received", "dropped", "lost", "s", "end"):
        table.add_column(name, justify="left" if name == "end" else "right")
    for host in result.hosts:
        counts = host.counters
        table.add_row(
            *(str(host.host), f"{counts.bytes_sent / 1e6:.3f}", f"{counts.bytes_received / 1e6:.3f}"),
            *(str(counts.packets_sent), str(counts.packets_received)),
            *(str(host.drops.uplink + host.drops.downlink), str(host.drops.loss)),
            *(f"{host.seconds:.2f}", host.outcome.removeprefix("exit code ")),
        )
    Console(stderr=True).print(table)
    if not result.ok:
        print(f"gradwire lab: {result.message}", file=sys.stderr)
        relayed = not output.quiet and output.only in (None, result.first_failed)
        if result.first_failed is not None and not relayed:
            print(result.hosts[result.first_failed].stderr, file=sys.stderr, end="")
