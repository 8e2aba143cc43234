"""A payload during tracing: the result of `concat`, and the argument of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.graph import graph, user_location
from gradwire.lang.ir import Field
from gradwire.lang.symbols import Value


class SymbolicPayload:
    """Result of `concat`: named values in the order of the payload's bytes."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields


class PayloadField:
    """Argument of a decoder. The fields of the payload are attributes; `size` is that of the gradient."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.__dict__.update(values)

    @property
    def size(self) -> Value:
        return Value(graph().add("size", ()))

    def __getattr__(self, name: str) -> Any:
        raise TraceError(
            f"The payload has no field {name!r}; it has {', '.join(sorted(self.__dict__))}", user_location(),
            "name it in concat",
        )  # fmt: skip
