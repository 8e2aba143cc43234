"""`gradwire plan`: plans a model for a described network, from codecs measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.costs import costs_of
from gradwire.cli.files import out_file
from gradwire.cli.options import Momentum, seconds
from gradwire.cli.targets import object_of
from gradwire.core.errors import OptionError

if TYPE_CHECKING:
    from gradwire.bench.timeline import Timeline
    from gradwire.planner.costs import Costs

DEFAULT_RANKS, DEFAULT_RATE, DEFAULT_SECONDS = 4, "1gbit", 0.1
WITHIN_NODES = 20e-6, 0.5e-9  # seconds, and seconds per byte: TCP over loopback, about 2 GB/s
MODELS = (
    "vgg16, vgg19, resnet50, resnet101, resnet152, ugatit, ugatit-light, bert-base, bert-large, roberta-base, "
    "roberta-large, bart-large, gpt2, lstm, transformer"
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str, typer.Option(help=f"{MODELS}; or MODULE:FUNCTION or path/to/file.py:FUNCTION, which returns model, batch.")
    ] = "resnet50",
    fidelity: Annotated[
        str, typer.Option(help="How much gradients may change: exact, near-lossless, balanced or aggressive.")
    ] = "balanced",
    momentum: Momentum = True,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks. Default: from --costs, or 4.")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rate of links, such as 10gbit. Default: from --costs, or 1gbit.")
    ] = None,
    latency: Annotated[str, typer.Option(help="One-way latency of each link, used with --rate.")] = "20us",
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks that share a node and its link, used with --rate.")
    ] = 1,
    bucket: Annotated[float, typer.Option(min=0.001, help="Size of DDP's buckets in MB of 2^20 bytes.")] = 25.0,
    compute: Annotated[
        str | None,
        typer.Option(help="Time of forward and backward. Default: measured for a FUNCTION, else 100ms."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="File of measured costs. Default: this machine's, kept in the cache.")
    ] = None,
    save: Annotated[Path | None, out_file(help="Write the plan to this file, for PlanTable.load.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Choose compressor, strategy and partitions for each tensor of a model, with predicted times.

    Codecs are measured on one core of this machine when they are first needed. For a model of your own, name a function
    as for `gradwire probe`. Its steps are timed in this process.

    Example: gradwire plan --model vgg19 --rate 1gbit --ranks 4 --save plan.json

    Example: gradwire plan --model my_module:job --rate 1gbit --ranks 4
    """
    from gradwire import planner
    from gradwire.planner.fidelity import methods

    allowed = methods(fidelity, momentum=momentum)
    _bits(rate), seconds(latency)  # mistakes are refused before anything is measured
    step = _timeline(model, None if compute is None else seconds(compute))
    known = _network(costs_of(costs, [method.spec for method in allowed]), ranks, rate, latency, ranks_per_node)
    bucket_bytes = int(bucket * (1 << 20))
    table = planner.plan(
        planner.in_buckets(step.gradients, bucket_bytes), known, fidelity=fidelity, momentum=momentum,
        backward=step.backward, rest=step.rest, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    if save is not None:
        table.pin().save(save)
    typer.echo(table.to_json() if as_json else f"{table}\n\nCosts: {known.made_by or 'from a file'}.")


def _timeline(model: str, duration: float | None) -> Timeline:
    """Return when gradients are ready: as measured for a user's model, else from the work of each layer."""
    from gradwire.bench.probe_job import from_user
    from gradwire.bench.timeline import Timeline, measure
    from gradwire.planner import PlannedTensor
    from gradwire.simulate import models

    if ":" in model:
        typer.echo(f"Timing steps of {model}…", err=True)
        measured = measure(from_user(model, object_of(model)))
        return measured if duration is None else measured.lasting(duration)
    chosen = models.get(model)
    gradients = tuple(PlannedTensor(tensor.name, tensor.shape, ready=share * 2) for tensor, share in chosen.backward())
    return Timeline(gradients, rest=1.0, backward=2.0).lasting(DEFAULT_SECONDS if duration is None else duration)


def _network(costs: Costs, ranks: int | None, rate: str | None, latency: str, ranks_per_node: int = 1) -> Costs:
    """Return the costs with the described network, or without one with the measured network."""
    from gradwire.planner.costs import LinkCosts
    from gradwire.planner.options import for_ranks

    measured = costs.slowest.seconds_per_byte > 0
    if rate is None and measured:
        return for_ranks(costs, ranks or costs.world_size)
    # The framework's all-reduce was measured on another link. It is assumed to use this one fully.
    world_size = ranks or (costs.world_size if measured else DEFAULT_RANKS)
    link = LinkCosts(seconds(latency), 8 * ranks_per_node / _bits(rate))
    within = None if ranks_per_node == 1 else LinkCosts(*WITHIN_NODES)
    known = for_ranks(replace(costs, ranks_per_node=1, within=None), world_size)
    return replace(known, links=(link,), native=None, ranks_per_node=ranks_per_node, within=within)


def _bits(rate: str | None) -> float:
    """Parse bits per second of a link."""
    from gradwire.lab.units import parse_rate

    bits = parse_rate(rate or DEFAULT_RATE)
    if bits is None:
        raise OptionError(f"A plan needs the rate of a link, not {rate!r}. Write it as --rate 1gbit.")
    return bits
