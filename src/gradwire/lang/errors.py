"""The one error of the language: what cannot be traced, where, and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.core.errors import GradwireError

if TYPE_CHECKING:
    from gradwire.lang.ir import Location


class TraceError(GradwireError, TypeError):
    """An algorithm that the language cannot express.

    Attributes:
        where: the line of the user's algorithm, or None.
    """

    def __init__(self, problem: str, where: Location | None = None, remedy: str | None = None) -> None:
        place = f" (in {where}: {where.text})" if where else ""
        super().__init__(f"{problem}{place}." + (f" Do: {remedy}." if remedy else ""))
        self.where = where
