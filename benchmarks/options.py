"""Options that benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from benchmarks.intervals import MAX_VALUES
from gradwire.core.errors import OptionError

Cifar10 = Annotated[Path, typer.Option(help="Folder or tar of CIFAR-10 as images.")]
Sst2 = Annotated[Path, typer.Option(help="Folder of SST-2, with train.tsv.")]
Rates = Annotated[str, typer.Option(help="Rates of each link, one after another.")]
Seeds = Annotated[int, typer.Option(min=1, max=MAX_VALUES, help="Trainings of each method.")]
Seconds = Annotated[float, typer.Option(help="About how long each method is timed at each rate.")]

T = TypeVar("T", str, int, float)


def listed(text: str, default: Sequence[str], separator: str = ",") -> list[str]:
    """The values of a list with commas in between, or the default for an empty one."""
    return [part.strip() for part in text.split(separator) if part.strip()] or list(default)


def choose(text: str, known: Sequence[T], separator: str = ",") -> list[T]:
    """The chosen ones of known values: a list with commas in between, or all for an empty one.

    Raises:
        OptionError: One of them is unknown.
    """
    found = [type(known[0])(part) for part in listed(text, (), separator)] or list(known)
    if unknown := [each for each in found if each not in known]:
        raise OptionError(f"{unknown[0]!r} is not known here. Known: {', '.join(map(str, known))}.")
    return found
