"""Counts: named numbers of a process that monitoring reads, in the terms of Prometheus."""

from __future__ import annotations

from typing import NamedTuple


class Count(NamedTuple):
    """A number at one moment.

    Attributes:
        name: Name without ``gradwire_``, with its unit. Ends in ``_total`` if the number only grows.
        meaning: What it counts, in one line.
        value: The number.
        labels: Names and values of labels.
    """

    name: str
    meaning: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
