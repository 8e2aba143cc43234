"""`gradwire serve`: parameter servers and aggregators."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.net.liveness import STALL_TIMEOUT

_MAX_SECONDS = 1e9  # about 30 years; clocks of operating systems take no more than ten times as much


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("serve")(serve)


def serve(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers of the job.")],
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Serve parameters: workers push gradients and pull updates.")
    ] = False,
    aggregate: Annotated[
        bool, typer.Option("--aggregate", help="Add up what workers send: THC's table indices, and maxima.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond loopback, a job key is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 7070,
    job: Annotated[str, typer.Option(help="Name of the job, the same as the workers'.")] = "gradwire",
    state: Annotated[
        Path | None, typer.Option(help="Folder of checkpoint and journal, to survive a restart; --parameters.")
    ] = None,
    fsync: Annotated[
        str, typer.Option(help="When the journal is written to disk: always, or with each checkpoint; --state.")
    ] = "checkpoint",
    timeout: Annotated[float, typer.Option(help="Seconds without a sign of life before a worker is lost.")] = 60.0,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a lost worker.")] = 120.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds for which a live worker may hold up a step; --parameters.")
    ] = STALL_TIMEOUT.total_seconds(),
    optimizer: Annotated[
        list[str], typer.Option(help="Import path of an optimizer beyond torch.optim; --parameters.")
    ] = [],  # noqa: B006  typer reads it
    modules: Annotated[
        list[str], typer.Option("--import", help="Module to import first, for example with a compressor.")
    ] = [],  # noqa: B006
    udp: Annotated[bool, typer.Option("--udp", help="Exchange packets as datagrams; --aggregate.")] = False,
    multicast: Annotated[str, typer.Option(help="Send each result once, to this GROUP:PORT; --udp.")] = "",
    drop: Annotated[float, typer.Option(min=0, max=1, help="Drop this fraction of datagrams, as a test; --udp.")] = 0.0,
    xdp: Annotated[
        str, typer.Option(help="Network interface at which the kernel adds up, on Linux as root; --aggregate.")
    ] = "",
    xdp_mode: Annotated[
        str,
        typer.Option(
            help="native: in the interface's driver; broadcast: the driver copies results, too; generic: with any "
            "driver; --xdp."
        ),
    ] = "native",
    trust_network: Annotated[
        bool, typer.Option("--trust-network", help="Checksums instead of keyed tags in packets; --xdp.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve metrics for Prometheus at this port; 0 for any free one."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address for metrics, which anyone who reaches it can read; --metrics-port.")
    ] = "127.0.0.1",
    key_file: Annotated[
        Path | None, typer.Option(help="File with the job key. Default: GRADWIRE_JOB_KEY_FILE.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a secret key.")] = False,
    integrity: Annotated[
        str | None, typer.Option(help="Protection of frames: crc, or mac, the default with a job key.")
    ] = None,
    tls: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(help="Connections under TLS: files of certificate, private key, and authority's certificate."),
    ] = None,
) -> None:
    """Run a parameter server or an aggregator until all workers have finished.

    Start it before the workers. They connect to a parameter server with ParameterClient(model, optimizer,
    "HOST:PORT"), and to an aggregator with attach(ddp, Plan("thc", strategy="server"),
    options=SyncOptions(server="HOST:PORT")).

    The workers of a parameter server bring all options of the training, such as backups and staleness (JobOptions). A
    worker whose options differ from those of worker 0 is refused.

    SIGINT ends the job. SIGTERM ends it too, unless the server can be started again and continue. The exit code is then
    128 plus the number of the signal.

    Example: gradwire serve --parameters --workers 4 --port 7070 --metrics-port 9464

    Example: gradwire serve --aggregate --workers 4 --udp

    Example: gradwire serve --aggregate --workers 4 --host 10.0.0.9 --xdp eth0
    """
    from gradwire.bench.users import load_module, users_code
    from gradwire.core.errors import GradwireError, ServerStoppedError
    from gradwire.net.address import parse_address
    from gradwire.net.server import Server, stopped_by_signals
    from gradwire.net.tls import TlsFiles
    from gradwire.observe.event_lines import EventLines
    from gradwire.observe.exposition import MetricsServer

    if parameters == aggregate:
        raise typer.BadParameter("Pass either --parameters or --aggregate.")
    if parameters and (udp or multicast or drop or xdp):
        raise typer.BadParameter("--udp, --multicast, --drop and --xdp go with --aggregate.")
    if trust_network and not xdp:
        raise typer.BadParameter("--trust-network goes with --xdp.")
    if fsync != "checkpoint" and not state:
        raise typer.BadParameter("--fsync goes with --state.")
    if aggregate and (state or optimizer):
        raise typer.BadParameter("--state and --optimizer go with --parameters.")
    for name, seconds in (("timeout", timeout), ("patience", patience), ("stall-timeout", stall_timeout)):
        if not 0 <= seconds <= _MAX_SECONDS:
            raise typer.BadParameter(f"--{name} takes seconds from 0 to {_MAX_SECONDS:g}, not {seconds:g}.")
    for module in modules:
        load_module(module)
    for path in optimizer:
        from gradwire.parameter_server.shard import optimizer_class

        if "." not in path:
            raise typer.BadParameter(f"--optimizer takes an import path such as my_module.MyOptimizer, not {path!r}.")
        load_module(path.rpartition(".")[0])
        with users_code(f"Loading {path}"):
            optimizer_class(path, tuple(optimizer))
    common: dict[str, Any] = {
        "workers": workers, "host": host, "port": port, "job": job, "key_file": key_file, "insecure": insecure,
        "integrity": integrity, "tls": None if tls is None else TlsFiles(*tls),
        "timeout": timedelta(seconds=timeout), "patience": timedelta(seconds=patience),
    }  # fmt: skip
    server: Server
    try:
        with contextlib.ExitStack() as stack:
            metrics = None
            if metrics_port is not None:  # first, because a server that does not run keeps its address
                where = metrics_host, metrics_port
                metrics = stack.enter_context(MetricsServer(where, lambda: server.counts()))
            if parameters:
                from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions

                stall = timedelta(seconds=stall_timeout)
                server = ParameterServer(
                    ParameterServerOptions(
                        **common, stall_timeout=stall, state=state, fsync=fsync, optimizers=tuple(optimizer)
                    )
                )
            else:  # which needs no torch
                from gradwire.aggregator.options import AggregationOptions
                from gradwire.aggregator.process import AggregationServer

                group = parse_address(multicast) if multicast else None
                guard = "crc32c" if trust_network else "siphash"
                server = AggregationServer(
                    AggregationOptions(
                        **common, udp=udp or bool(xdp), multicast=group, drop=drop,
                        xdp=xdp or None, xdp_mode=xdp_mode, guard=guard,
                    )
                )  # fmt: skip
            received = stack.enter_context(stopped_by_signals(server))  # first: whoever reads "Serving" may send one
            what = "parameters" if parameters else "sums"
            typer.echo(f"Serving {what} to {workers} workers at {server.address[0]}:{server.address[1]}")
            if metrics is not None:
                typer.echo(f"Metrics at {metrics.url}")
            lines = EventLines(typer.echo)
            stack.callback(lines.end)
            server.run(on_event=lines.put)
            lines.put("All workers have finished.")
    except ServerStoppedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(128 + received[0]) from None
    except (GradwireError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
