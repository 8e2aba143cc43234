"""`gradwire serve`: the server ends."""

from __future__ import annotations

import importlib
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

Parameters = Annotated[
    bool, typer.Option("--parameters", help="Serve parameters: workers push gradients, pull changes.")
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="How many workers the job has.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen at; beyond loopback a job key is required.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen at; 0 for any.")]
Job = Annotated[str, typer.Option("--job", help="Name of the job, as the workers have it.")]
State = Annotated[Path | None, typer.Option("--state", help="Folder of checkpoint and journal: survive a restart.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for which a worker may be silent.")]
Patience = Annotated[float, typer.Option("--patience", help="Seconds for which the job waits for lost workers.")]
Optimizer = Annotated[list[str], typer.Option("--optimizer", help="Import path of an optimizer beyond torch.optim.")]
Import = Annotated[list[str], typer.Option("--import", help="Module to import first, such as one with a compressor.")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="File with the job key; or GRADWIRE_JOB_KEY_FILE.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a secret key.")]


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("serve")(serve)


def serve(
    workers: Workers,
    parameters: Parameters = False,
    host: Host = "127.0.0.1",
    port: Port = 7070,
    job: Job = "gradwire",
    state: State = None,
    timeout: Timeout = 60.0,
    patience: Patience = 120.0,
    optimizer: Optimizer = [],  # noqa: B006  typer reads it
    modules: Import = [],  # noqa: B006
    key_file: KeyFile = None,
    insecure: Insecure = False,
) -> None:
    """Run a parameter server until all workers have finished. Start one for each part of the model."""
    from gradwire.core.errors import GradwireError
    from gradwire.server.parameters import ParameterServer, ServerOptions

    if not parameters:
        raise typer.BadParameter("Expected what to serve. Do: pass --parameters.")
    for module in modules:
        importlib.import_module(module)
    try:
        options = ServerOptions(
            workers, host, port, job, state, timeout=timedelta(seconds=timeout), patience=timedelta(seconds=patience),
            optimizers=tuple(optimizer), key_file=key_file, insecure=insecure,
        )  # fmt: skip
        server = ParameterServer(options)
        typer.echo(f"Serving parameters to {workers} workers at {server.address[0]}:{server.address[1]}")
        server.run(on_event=typer.echo)
    except (GradwireError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo("All workers have finished.")
