"""`gradwire simulate`: training steps of clusters of any size, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.costs import costs_of, progress
from gradwire.cli.files import out_file
from gradwire.core.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.planner.costs import Costs
    from gradwire.simulate import Straggler
    from gradwire.simulate.sweep import Scenario, SweepMethod, SweepRow

MODELS = "vgg19, resnet50, ugatit, ugatit-light, bert-base, bert-large, lstm, transformer"


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("simulate")(simulate)


def simulate(
    model: Annotated[str, typer.Option(help=f"One of {MODELS}.")] = "resnet50",
    method: Annotated[
        str, typer.Option(help="NAME or NAME:option=value; with @STRATEGY for one of its own.")
    ] = "onebit",
    compare: Annotated[str, typer.Option(help="More methods, separated by commas.")] = "none",
    strategy: Annotated[
        str | None, typer.Option(help="scatter_reduce, ring, allgather or hierarchical; default: the plan's.")
    ] = None,
    partitions: Annotated[int, typer.Option(help="Ranges that a rank's share of a tensor is cut into.")] = 1,
    bucket: Annotated[
        float | None,
        typer.Option(min=0.001, help="Hand gradients over in buckets of so many MB, as DDP. Default: one by one."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks: 4,16,64.")] = "4,16,64",
    rate: Annotated[
        str | None, typer.Option(help="Of each link: 10gbit,25gbit. Default: that of --costs, or 10gbit.")
    ] = None,
    latency: Annotated[str, typer.Option(help="One way: 20us.")] = "20us",
    compute: Annotated[str, typer.Option(help="Forward and backward of a rank: 100ms. A third is forward.")] = "100ms",
    optimizer: Annotated[str, typer.Option(help="The optimizer's step: 5ms.")] = "none",
    per_node: Annotated[int, typer.Option(help="Ranks of a node, which share its link.")] = 1,
    inner_rate: Annotated[str, typer.Option(help="Of a rank to the others of its node.")] = "100gbit",
    inner_latency: Annotated[str, typer.Option(help="The same, one way.")] = "5us",
    straggler: Annotated[
        list[str] | None, typer.Option(metavar="RANK:KEY=VALUE,…", help="3:slowdown=2,delay=10ms,rate=1gbit.")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Cores that all ranks share, as in the lab.")] = None,
    fold: Annotated[
        bool | None, typer.Option("--fold/--full", help="One rank for all that are like it; default above 16.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs; default: this machine's, kept in the cache.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's codecs anew.")] = False,
    csv: Annotated[Path | None, out_file(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, out_file(help="Draw step time and efficiency: .png, .svg, .pdf.")] = None,
    trace: Annotated[Path | None, out_file(help="Chrome trace of --method, fewest ranks, first rate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and no table.")] = False,
) -> None:
    """Predict the step time of a cluster: the real task graphs in virtual time, with measured costs.

    Codecs are measured on one core of this machine the first time they are asked for. Efficiency is the step without
    communication over the step.

    Example: gradwire simulate --model vgg19 --method onebit --ranks 4,16,64,256 --rate 10gbit,100gbit --plot out.png
    """
    from gradwire.lab.units import parse_rate
    from gradwire.simulate import Cluster, Compute, SimulatedLink, models
    from gradwire.simulate.sweep import Scenario, SweepMethod, write_csv

    if plot is not None:
        from gradwire.bench.extras import need
        from gradwire.simulate.plots import check_format

        need("matplotlib", extra="report", purpose="the plot")
        check_format(plot)
    chosen, counts = models.get(model.lower()), sorted(_whole_numbers(ranks))
    main = SweepMethod.parse(method, strategy)
    methods = list(dict.fromkeys([*(SweepMethod.parse(text, strategy) for text in _split(compare)), main]))
    stragglers = dict(_straggler(text) for text in straggler or [])
    for each in methods:
        each.plan(partitions)  # what cannot run is refused before anything is measured
    for count in counts:
        Cluster(count, SimulatedLink(None), per_node, SimulatedLink(None), stragglers, cores)
    rates: list[float | None] = [parse_rate(text) for text in _split(rate or "10gbit")]
    computing = Compute(_seconds(compute) / 3, _seconds(compute) * 2 / 3, _seconds(optimizer))
    described = SimulatedLink(None, _seconds(latency))
    inner = SimulatedLink(parse_rate(inner_rate), _seconds(inner_latency))
    known = costs_of(costs, [each.canonical for each in methods], measure)
    measured = SimulatedLink.measured(known.slowest) if rate is None and known.slowest.seconds_per_byte else None
    scenario = Scenario(
        chosen,
        computing,
        known,
        measured or described,
        per_node,
        inner,
        stragglers,
        cores,
        partitions,
        fold,
        bucket_bytes=None if bucket is None else bucket * (1 << 20),
    )
    if measured is not None:
        rates = [measured.rate_bits]
    rows = _run(scenario, methods, counts, rates)
    if csv is not None:
        write_csv(rows, csv)
    if plot is not None:
        from gradwire.simulate.plots import write_plot

        write_plot(rows, plot, f"{chosen.name}: simulated steps with {compute} of forward and backward")
    if trace is not None:
        scenario.run(main, counts[0], rates[0], trace=True).write_trace(trace)
    _print(rows, known, as_json)


def _run(
    scenario: Scenario, methods: list[SweepMethod], counts: list[int], rates: list[float | None]
) -> list[SweepRow]:
    from rich.console import Console

    from gradwire.simulate.sweep import sweep

    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=len(methods) * len(counts) * len(rates))
        return sweep(scenario, methods, counts, rates, lambda row: bar.advance(task))


def _print(rows: list[SweepRow], costs: Costs, as_json: bool) -> None:
    from gradwire.simulate.sweep import plain

    if as_json:
        typer.echo(json.dumps({"costs": costs.made_by, "rows": [plain(row) for row in rows]}, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 118)  # fewer columns would cut the numbers off, and a pipe has no width
    console.print(_table(rows))
    console.print(
        "Waits, in ms: what the longest chain of what waited for what spent on messages (wire), and on encodes,\n"
        "merges, decodes and the turn for them on the processor (codecs).\n"
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
    for name in (*names, "waits: wire", "codecs"):
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
        )
    return table


# -- what users write --------------------------------------------------------------------------------------------


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in _split(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise OptionError(f"Expected numbers of ranks such as 4,16,64, got {text!r}. Do: pass whole numbers above 0.")
    return found


def _seconds(text: str) -> float:
    from gradwire.lab.units import parse_delay

    delay = parse_delay(text)
    return delay.total_seconds() if delay else 0.0


def _straggler(text: str) -> tuple[int, Straggler]:
    """A rank and how it differs, from ``3:slowdown=2,delay=10ms,rate=1gbit``."""
    from gradwire.lab.units import parse_rate
    from gradwire.simulate import Straggler

    rank, _, rest = text.partition(":")
    pairs = dict(part.partition("=")[::2] for part in _split(rest))
    try:
        place, slowdown = int(rank), float(pairs.pop("slowdown", "1"))
        delay, rate = _seconds(pairs.pop("delay", "none")), parse_rate(pairs.pop("rate", None))
    except ValueError:
        pairs["?"] = text
    if pairs:
        raise OptionError(
            f"Expected a straggler as RANK:KEY=VALUE with slowdown, delay or rate, got {text!r}. Do: "
            "--straggler 3:slowdown=2,delay=10ms,rate=1gbit."
        )
    return place, Straggler(slowdown, delay, rate)
