"""`gradwire serve`: the server ends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

Parameters = Annotated[
    bool, typer.Option("--parameters", help="Serve parameters: workers push gradients, pull changes.")
]
Aggregate = Annotated[
    bool, typer.Option("--aggregate", help="Add up what workers send: indices into a table (THC), and maxima.")
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="How many workers the job has.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen at; beyond loopback a job key is required.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen at; 0 for any.")]
Job = Annotated[str, typer.Option("--job", help="Name of the job, as the workers have it.")]
State = Annotated[Path | None, typer.Option("--state", help="Folder of checkpoint and journal: survive a restart.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for which a worker may be silent.")]
Patience = Annotated[float, typer.Option("--patience", help="Seconds for which the job waits for lost workers.")]
Optimizer = Annotated[list[str], typer.Option("--optimizer", help="Import path of an optimizer beyond torch.optim.")]
Import = Annotated[list[str], typer.Option("--import", help="Module to import first, such as one with a compressor.")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="File with the job key; or GRADWIRE_JOB_KEY_FILE.")]
Udp = Annotated[bool, typer.Option("--udp", help="Take packets as datagrams; with --aggregate.")]
Multicast = Annotated[str, typer.Option("--multicast", help="Send results to this group and port once; with --udp.")]
Drop = Annotated[float, typer.Option("--drop", min=0, max=1, help="Drop this part of datagrams, to see; with --udp.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a secret key.")]


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("serve")(serve)


def serve(
    workers: Workers,
    parameters: Parameters = False,
    aggregate: Aggregate = False,
    host: Host = "127.0.0.1",
    port: Port = 7070,
    job: Job = "gradwire",
    state: State = None,
    timeout: Timeout = 60.0,
    patience: Patience = 120.0,
    optimizer: Optimizer = [],  # noqa: B006  typer reads it
    modules: Import = [],  # noqa: B006
    udp: Udp = False,
    multicast: Multicast = "",
    drop: Drop = 0.0,
    key_file: KeyFile = None,
    insecure: Insecure = False,
) -> None:
    """Run a server until all workers have finished: one that keeps parameters, or one that aggregates.

    Start it before the workers. They find a server of parameters by ParameterClient(model, optimizer, "HOST:PORT"), and
    one that aggregates by attach(ddp, Plan("thc", strategy="server"), options=SyncOptions(server="HOST:PORT")).

    SIGINT ends the job. So does SIGTERM, unless the server can be started again and go on. The exit code is then 128
    plus the signal's number.

    Example: gradwire serve --parameters --workers 4 --port 7070

    Example: gradwire serve --aggregate --workers 4 --udp
    """
    from gradwire.aggregator.process import AggregationOptions, AggregationServer
    from gradwire.bench.users import load_module, users_code
    from gradwire.core.errors import GradwireError, ServerStoppedError
    from gradwire.net.address import parse_address
    from gradwire.net.stopping import stopped_by_signals
    from gradwire.parameter_server.process import ParameterServer, ServerOptions
    from gradwire.parameter_server.shard import optimizer_class

    if parameters == aggregate:
        raise typer.BadParameter("Expected what to serve. Do: pass either --parameters or --aggregate.")
    if parameters and (udp or multicast or drop):
        raise typer.BadParameter("Expected --udp, --multicast and --drop with --aggregate. Do: leave them out.")
    if aggregate and (state or optimizer):
        raise typer.BadParameter("Expected --state and --optimizer with --parameters. Do: leave them out.")
    for module in modules:
        load_module(module)
    for path in optimizer:
        if "." not in path:
            raise typer.BadParameter(f"--optimizer takes an import path such as my_module.MyOptimizer, not {path!r}.")
        load_module(path.rpartition(".")[0])
        with users_code(f"Loading {path}"):
            optimizer_class(path, tuple(optimizer))
    limits = timedelta(seconds=timeout), timedelta(seconds=patience)
    try:
        server: ParameterServer | AggregationServer
        if parameters:
            options = ServerOptions(
                workers, host, port, job, state, timeout=limits[0], patience=limits[1], optimizers=tuple(optimizer),
                key_file=key_file, insecure=insecure,
            )  # fmt: skip
            server = ParameterServer(options)
        else:
            group = parse_address(multicast) if multicast else None
            ends = AggregationOptions(
                workers, host, port, job, udp, group, drop, timeout=limits[0], patience=limits[1], key_file=key_file,
                insecure=insecure,
            )  # fmt: skip
            server = AggregationServer(ends)
        what = "parameters" if parameters else "sums"
        typer.echo(f"Serving {what} to {workers} workers at {server.address[0]}:{server.address[1]}")
        with stopped_by_signals(server) as received:
            server.run(on_event=typer.echo)
    except ServerStoppedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(128 + received[0]) from None
    except (GradwireError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo("All workers have finished.")
