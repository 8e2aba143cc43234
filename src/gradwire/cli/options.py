"""Options of commands: groups of them as dataclasses, and lists as users write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from gradwire.core.errors import OptionError

Momentum = Annotated[
    bool,
    typer.Option(
        help="Whether the optimizer applies momentum. If not, or with momentum correction, balanced has threelc, too."
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer run a command with parameters that are dataclasses of options.

    Each field of a dataclass is one option, annotated for typer: ``Annotated[int, typer.Option(help="…")]``. The first
    line of the dataclass's docstring is the title of its options on the help page.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []

    def add(name: str, default: Any, hint: Any) -> None:
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    for name, parameter in signature(command).parameters.items():
        kind = groups.get(name)
        if kind is None:
            add(name, parameter.default, hints[name])
            continue
        title = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        options = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            for info in get_args(options[field.name]):
                if isinstance(info, OptionInfo):
                    info.rich_help_panel = title
            add(field.name, Parameter.empty if field.default is MISSING else field.default, options[field.name])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**made, **given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def split(text: str) -> list[str]:
    """Items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def numbers(text: str) -> list[float]:
    """Numbers of a comma-separated list.

    Raises:
        OptionError: An item is not a number.
    """
    try:
        return [float(item) for item in split(text)]
    except ValueError:
        raise OptionError(f"{text!r} is not a list of numbers. Write it like 25,4.") from None


def seconds(text: str) -> float:
    """Seconds of a duration such as ``20us``; 0 for ``none``."""
    from gradwire.lab.units import parse_delay

    delay = parse_delay(text)
    return delay.total_seconds() if delay else 0.0
