"""`gradwire plan`: by what each tensor of a model should travel, from measured codecs and a described network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.costs import costs_of
from gradwire.cli.files import out_file
from gradwire.core.errors import OptionError

if TYPE_CHECKING:
    from gradwire.sync.costs import Costs

DEFAULT_RANKS, DEFAULT_RATE = 4, "1gbit"


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str, typer.Option(help="vgg19, resnet50, ugatit, ugatit-light, bert-base, bert-large, lstm or transformer.")
    ] = "resnet50",
    fidelity: Annotated[
        str, typer.Option(help="What may be done to gradients: exact, near-lossless, balanced or aggressive.")
    ] = "balanced",
    ranks: Annotated[int | None, typer.Option(help="Number of ranks. Default: that of --costs, or 4.")] = None,
    rate: Annotated[str | None, typer.Option(help="Of each link: 10gbit. Default: that of --costs, or 1gbit.")] = None,
    latency: Annotated[str, typer.Option(help="One way, where --rate is given: 20us.")] = "20us",
    compute: Annotated[str, typer.Option(help="Forward and backward of a rank: 100ms. A third is forward.")] = "100ms",
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs; default: this machine's, kept in the cache.")
    ] = None,
    save: Annotated[
        Path | None, out_file(help="Write the plan to this file, pinned, as PlanTable.load reads it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and no table.")] = False,
) -> None:
    """Plan a model: for each tensor compressor, strategy and partitions, with the times that are predicted.

    Codecs are measured on one core of this machine the first time they are asked for.

    Example: gradwire plan --model vgg19 --rate 1gbit --ranks 4 --save plan.json
    """
    from gradwire.simulate import models
    from gradwire.sync import planner
    from gradwire.sync.fidelity import methods

    seconds = _seconds(compute)
    forward, backward = seconds / 3, seconds * 2 / 3
    chosen = models.get(model)
    known = _network(costs_of(costs, [method.spec for method in methods(fidelity)]), ranks, rate, latency)
    tensors = [planner.Gradient(tensor.name, tensor.shape, ready=share * backward)
               for tensor, share in chosen.backward()]  # fmt: skip
    table = planner.plan(tensors, known, fidelity=fidelity, backward=backward, rest=forward)
    if save is not None:
        table.pin().save(save)
    typer.echo(table.to_json() if as_json else f"{table}\n\nCosts: {known.made_by or 'from a file'}.")


def _network(costs: Costs, ranks: int | None, rate: str | None, latency: str) -> Costs:
    """The costs with the network that was asked for; where none was, with the one that was measured."""
    from gradwire.lab.units import parse_rate
    from gradwire.sync.costs import LinkCosts

    measured = costs.slowest.seconds_per_byte > 0
    if rate is None and measured:
        world_size = ranks or costs.world_size
        links = costs.links if world_size == costs.world_size else (costs.slowest,)
        return replace(costs, world_size=world_size, links=links)
    bits = parse_rate(rate or DEFAULT_RATE)
    if bits is None:
        raise OptionError(f"Expected the rate of a link, got {rate!r}. Do: --rate 1gbit.")
    # The framework's all-reduce was measured on another link: it is taken to use this one as well as can be.
    world_size = ranks or (costs.world_size if measured else DEFAULT_RANKS)
    return replace(costs, world_size=world_size, links=(LinkCosts(_seconds(latency), 8 / bits),), native=None)


def _seconds(text: str) -> float:
    from gradwire.lab.units import parse_delay

    delay = parse_delay(text)
    return delay.total_seconds() if delay else 0.0
