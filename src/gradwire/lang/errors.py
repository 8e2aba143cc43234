"""The error of the language: what cannot be traced, where, and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.core.errors import GradwireError

if TYPE_CHECKING:
    from gradwire.lang.ir import Location


class TraceError(GradwireError, TypeError):
    """An algorithm that the language cannot express.

    Attributes:
        where: Line of the user's algorithm, or None.
    """

    def __init__(self, problem: str, where: Location | None = None, remedy: str = "") -> None:
        place = f" (in {where}: {where.text})" if where else ""
        advice = f" {remedy[0].upper()}{remedy[1:]}." if remedy else ""
        super().__init__(f"{problem}{place}.{advice}")
        self.where = where
