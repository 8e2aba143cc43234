"""Parts of a record: rows that are measured together, identified by some of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def key_of(row: Row, key: Sequence[str]) -> tuple[str, ...]:
    """Key of the part that a row belongs to. 1.0 from a file and 1 from a run are equal."""
    values = (row.get(name) for name in key)
    return tuple("" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def merged(old: Sequence[Row], new: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Old rows, with parts replaced by new rows; new parts come last."""
    parts: dict[tuple[str, ...], list[Row]] = {}
    for rows in (old, new):
        fresh = {key_of(row, key): [] for row in rows}
        parts |= fresh
        for row in rows:
            parts[key_of(row, key)].append(row)
    return [row for rows in parts.values() for row in rows]
