"""`gradwire simulate`: training steps of clusters of any size, in virtual time."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.costs import costs_of, progress
from gradwire.cli.files import out_file
from gradwire.cli.options import grouped, seconds, split
from gradwire.cli.plan import MODELS
from gradwire.core.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.planner.costs import Costs
    from gradwire.simulate import Cluster, SimulatedModel, SimulatedServer, Straggler
    from gradwire.simulate.sweep import SweepMethod, SweepRow


DEFAULT_LATENCY = "20us"
DEFAULT_INNER_RATE, DEFAULT_INNER_LATENCY = "100gbit", "5us"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate")(grouped(simulate))


@dataclass(frozen=True)
class ModelOptions:
    """Model."""

    model: Annotated[str, typer.Option(help=f"One of {MODELS}.")] = "resnet50"
    compute: Annotated[
        str, typer.Option(help="Time of a rank's forward and backward pass. A third of it is forward.")
    ] = "100ms"
    optimizer: Annotated[str, typer.Option(help="Time of the optimizer's step.")] = "none"
    bucket: Annotated[
        float | None, typer.Option(min=0.001, help="Size of DDP's buckets in MB. Default: one tensor at a time.")
    ] = None

    def simulated(self) -> SimulatedModel:
        """The model with its compute times."""
        from gradwire.simulate import Compute, SimulatedModel, models

        both = seconds(self.compute)
        compute = Compute(both / 3, both * 2 / 3, seconds(self.optimizer))
        bucket_bytes = None if self.bucket is None else self.bucket * (1 << 20)
        return SimulatedModel.of(models.get(self.model.lower()), compute, bucket_bytes)


@dataclass(frozen=True)
class MethodOptions:
    """Methods."""

    method: Annotated[
        str, typer.Option(help="Compressor, such as topk:ratio=0.01. Append @STRATEGY for a strategy of its own.")
    ] = "onebit"
    compare: Annotated[str, typer.Option(help="Methods to compare with, separated by commas.")] = "none"
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategy: scatter_reduce, sparse_reduce, ring, allgather, hierarchical or server (an aggregator, for "
            "thc and uthc). Default: the plan's choice."
        ),
    ] = None
    partitions: Annotated[
        int | None, typer.Option(help="Ranges that a tensor is cut into. Default: the plan's choice.")
    ] = None

    def parsed(self) -> list[SweepMethod]:
        """`method`, then the methods to compare with."""
        from gradwire.simulate.sweep import SweepMethod

        texts = [self.method, *split(self.compare)]
        methods = [SweepMethod.parse(text, self.strategy, self.partitions) for text in texts]
        for method in methods:
            method.plan()  # refuses what cannot run
        return methods


@dataclass(frozen=True)
class ClusterOptions:
    """Cluster."""

    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "4,16,64"
    rate: Annotated[
        str | None, typer.Option(help="Rates of each link, such as 10gbit,25gbit. Default: --costs', or 10gbit.")
    ] = None
    latency: Annotated[str | None, typer.Option(help="One-way latency of each link. Default: --costs', or 20us.")] = (
        None
    )
    per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node, which share its link. Default: 1, or without --rate --costs'.")
    ] = None
    inner_rate: Annotated[
        str | None, typer.Option(help="Rate between the ranks of a node. Default: 100gbit, or without --rate --costs'.")
    ] = None
    inner_latency: Annotated[
        str | None,
        typer.Option(help="Latency between the ranks of a node. Default: 5us, or without --rate --costs'."),
    ] = None
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK:KEY=VALUE,…",
            help="A rank that differs, such as 3:slowdown=2,delay=10ms,rate=1gbit. May be repeated.",
        ),
    ] = None
    cores: Annotated[int | None, typer.Option(help="Cores that all ranks share, as in the lab.")] = None

    def clusters(self, server: SimulatedServer | None, costs: Costs | None = None) -> list[Cluster]:
        """The clusters of all numbers of ranks and rates, or with the costs' measured links if no rate is given.

        Raises:
            OptionError: A value does not fit, or describes links that were measured.
        """
        from gradwire.lab.units import parse_rate
        from gradwire.planner.costs import slowest
        from gradwire.simulate import Cluster, SimulatedLink

        per_node = 1 if self.per_node is None else self.per_node
        latency = seconds(self.latency or DEFAULT_LATENCY)
        links = [SimulatedLink(parse_rate(text), latency) for text in split(self.rate or "10gbit")]
        inner = SimulatedLink(
            parse_rate(self.inner_rate or DEFAULT_INNER_RATE), seconds(self.inner_latency or DEFAULT_INNER_LATENCY)
        )
        if costs is not None and slowest(costs.links).seconds_per_byte and self.rate is None:
            self._expect_no_other(costs)
            per_node = costs.ranks_per_node
            links = [SimulatedLink.measured(slowest(costs.links), per_node)]
            inner = inner if costs.within is None else SimulatedLink.measured(costs.within)
        stragglers = dict(_straggler(text) for text in self.straggler or [])
        return [
            Cluster(count, each, per_node, inner, stragglers, self.cores, server=server)
            for count, each in itertools.product(sorted(_whole_numbers(self.ranks)), links)
        ]

    def _expect_no_other(self, costs: Costs) -> None:
        """Check that no option contradicts measured links."""
        per_node = None if self.per_node == costs.ranks_per_node else self.per_node
        options = {
            "--latency": self.latency, "--per-node": per_node,
            "--inner-rate": self.inner_rate, "--inner-latency": self.inner_latency,
        }  # fmt: skip
        for name, value in options.items():
            if value is not None:
                raise OptionError(
                    f"The costs have measured links of their own, with {costs.ranks_per_node} ranks on each node, so "
                    f"{name} {value} cannot apply. Leave {name} out, or describe all links: --rate, --per-node, "
                    "--inner-rate."
                )


@dataclass(frozen=True)
class SimulatedServerOptions:
    """Aggregation server, for the strategy server."""

    server: Annotated[
        str | None,
        typer.Option(
            help="What adds up: python (packets over TCP, the default) or xdp (in the kernel, frames of 1,500 bytes)."
        ),
    ] = None
    server_rate: Annotated[
        str | None, typer.Option(help="Rate of its link; none for a server in the switch. Default: that of the ranks.")
    ] = None
    multicast: Annotated[
        bool, typer.Option("--multicast", help="It sends a result once, to all ranks, in frames of 1,500 bytes.")
    ] = False

    def simulated(self, methods: list[SweepMethod], latency: str | None) -> SimulatedServer | None:
        """The server, if a method needs one.

        Raises:
            OptionError: It is unknown, or no method needs one.
        """
        from gradwire.lab.units import parse_rate
        from gradwire.simulate import SimulatedLink, SimulatedServer
        from gradwire.simulate.served import SERVER

        if not any(method.strategy == SERVER for method in methods):
            if self != SimulatedServerOptions():
                raise OptionError(
                    "No method travels through a server, so its options cannot apply. Pass --method thc --strategy "
                    "server, or leave --server, --server-rate and --multicast out."
                )
            return None
        if self.server not in (None, "python", "xdp"):
            raise UnknownNameError("server", self.server, ("python", "xdp"))
        link = None
        if self.server_rate is not None:
            link = SimulatedLink(parse_rate(self.server_rate), seconds(DEFAULT_LATENCY if latency is None else latency))
        if self.server == "xdp":
            return SimulatedServer.xdp(link, multicast=self.multicast)
        return SimulatedServer.datagrams(link, multicast=True) if self.multicast else SimulatedServer(link)


@dataclass(frozen=True)
class SimulationOptions:
    """Costs and precision."""

    costs: Annotated[
        Path | None, typer.Option(help="File of measured costs. Default: this machine's, kept in the cache.")
    ] = None
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's codecs again.")] = False
    fold: Annotated[
        bool | None,
        typer.Option("--fold/--full", help="Let one rank stand for all that are like it. Default: above 16 ranks."),
    ] = None


@dataclass(frozen=True)
class SimulationOutput:
    """Output."""

    csv: Annotated[Path | None, out_file(help="Write the figures to this file.")] = None
    plot: Annotated[Path | None, out_file(help="Plot step time and efficiency: .png, .svg or .pdf.")] = None
    trace: Annotated[
        Path | None, out_file(help="Write a Chrome trace of --method with the fewest ranks at the first rate.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False


def simulate(
    model: ModelOptions,
    methods: MethodOptions,
    cluster: ClusterOptions,
    server: SimulatedServerOptions,
    simulation: SimulationOptions,
    output: SimulationOutput,
) -> None:
    """Predict the step time of a cluster: the real operations in virtual time, with measured costs.

    The first use of a codec measures it on one core of this machine. Efficiency is the time of a step without
    communication over the time of the step.

    Example: gradwire simulate --model vgg19 --method onebit --ranks 4,16,64,256 --rate 10gbit,100gbit --plot out.png
    """
    from gradwire.simulate import step
    from gradwire.simulate.sweep import write_csv

    if output.plot is not None:
        from gradwire.bench.extras import need
        from gradwire.simulate.plots import check_format

        need("matplotlib", extra="report", purpose="the plot")
        check_format(output.plot)
    # All options are checked before anything is measured.
    chosen = model.simulated()
    main, *others = methods.parsed()
    parsed = list(dict.fromkeys([*others, main]))
    aggregator = server.simulated(parsed, cluster.latency)
    cluster.clusters(aggregator)
    costs = costs_of(simulation.costs, [each.canonical for each in parsed], simulation.measure)
    clusters = cluster.clusters(aggregator, costs)
    rows = _run(chosen, parsed, clusters, costs, simulation.fold)
    if output.csv is not None:
        write_csv(rows, output.csv)
    if output.plot is not None:
        from gradwire.simulate.plots import write_plot

        title = f"{chosen.name}: simulated steps with {model.compute} of forward and backward"
        write_plot(rows, output.plot, title)
    if output.trace is not None:
        step(chosen, main.plan(), clusters[0], costs, fold=simulation.fold).write_trace(output.trace)
    _print(rows, costs, output.as_json)


def _run(
    model: SimulatedModel, methods: list[SweepMethod], clusters: list[Cluster], costs: Costs, fold: bool | None
) -> list[SweepRow]:
    from rich.console import Console

    from gradwire.simulate.sweep import sweep

    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=len(methods) * len(clusters))
        return sweep(model, methods, clusters, costs, fold=fold, on_row=lambda row: bar.advance(task))


def _print(rows: list[SweepRow], costs: Costs, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"costs": costs.made_by, "rows": [row.flat() for row in rows]}, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 130)  # fewer columns would cut the numbers off, and a pipe has no width
    console.print(_table(rows))
    console.print(
        "Waits, in ms, on the longest chain of dependencies: for messages (wire); for encodes, merges, decodes and a\n"
        "free processor (codecs); for the processor of a server.\n"
        f"Costs: {costs.made_by or 'from a file'}.",
        highlight=False,
    )


def _table(rows: list[SweepRow]) -> Table:
    from rich import box
    from rich.table import Table

    from gradwire.lab.units import format_rate

    compute = rows[0].compute_seconds
    table = Table(
        title=f"{rows[0].model}: simulated steps, {1e3 * compute:.4g} ms without communication", box=box.SIMPLE
    )
    names = ("ranks", "link", "method", "step ms", "ideal", "× none", "efficiency", "MB sent")
    served = any(row.split["server"] for row in rows)
    for name in (*names, "waits: wire", "codecs", *["server"] * served):
        table.add_column(name, justify="left" if name in ("method", "link") else "right", no_wrap=True)
    dense = {(row.ranks, row.rate_bits): row.step_seconds for row in reversed(rows) if row.method == "none"}
    for before, row in zip([None, *rows], rows):
        if before is not None and (before.ranks, before.rate_bits) != (row.ranks, row.rate_bits):
            table.add_section()
        base = dense.get((row.ranks, row.rate_bits))
        rate = None if row.rate_bits is None else round(row.rate_bits)
        codecs = sum(row.split[name] for name in ("encode", "merge", "decode", "processor"))
        table.add_row(
            *(str(row.ranks), format_rate(rate), row.label, f"{1e3 * row.step_seconds:.2f}"),
            *(
                f"{1e3 * row.ideal_seconds:.2f}",
                f"{base / row.step_seconds:.2f}" if base else "",
                f"{row.efficiency:.0%}",
            ),
            *(f"{row.sent_bytes / 1e6:.2f}", f"{1e3 * row.split['wire']:.1f}", f"{1e3 * codecs:.1f}"),
            *[f"{1e3 * row.split['server']:.1f}"] * served,
        )
    return table


# -- parsing -----------------------------------------------------------------------------------------------------


def _whole_numbers(text: str) -> list[int]:
    try:
        found = [int(item) for item in split(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise OptionError(f"{text!r} is not a list of numbers of ranks. Pass whole numbers above 0, such as 4,16,64.")
    return found


def _straggler(text: str) -> tuple[int, Straggler]:
    """Parse ``3:slowdown=2,delay=10ms,rate=1gbit``: a rank and how it differs."""
    from gradwire.lab.units import parse_rate
    from gradwire.simulate import Straggler

    rank, _, rest = text.partition(":")
    pairs = dict(item.partition("=")[::2] for item in split(rest))
    try:
        index, slowdown = int(rank), float(pairs.pop("slowdown", "1"))
        delay, rate = seconds(pairs.pop("delay", "none")), parse_rate(pairs.pop("rate", None))
    except ValueError:
        pairs["?"] = text
    if pairs:
        raise OptionError(
            f"{text!r} does not describe a straggler. Write RANK:KEY=VALUE with slowdown, delay or rate, such as "
            "--straggler 3:slowdown=2,delay=10ms,rate=1gbit."
        )
    return index, Straggler(slowdown, delay, rate)
