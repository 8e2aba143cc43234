"""Parts of a record: rows that are measured together, named by a few of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def key_of(row: Row, key: Sequence[str]) -> tuple[str, ...]:
    """What part a row is of. 1.0 from a file and 1 from a run are the same."""
    values = (row.get(name) for name in key)
    return tuple("" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def merged(old: Sequence[Row], new: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """New rows in the place of the old ones of the same part, or at the end."""
    parts: dict[tuple[str, ...], list[Row]] = {}
    for rows in (old, new):
        fresh = {key_of(row, key): [] for row in rows}
        parts |= fresh
        for row in rows:
            parts[key_of(row, key)].append(row)
    return [row for rows in parts.values() for row in rows]
