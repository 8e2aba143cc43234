"""`gradwire show`: print the generated code of a compressor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.targets import Options, Target, codecs_of
from gradwire.core.errors import GradwireError, UnknownNameError

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor
    from gradwire.lang.ir import Program


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("show")(show)


def show(
    target: Target,
    option: Options = None,
    backend: Annotated[str, typer.Option(help="cpu (Numba) or triton (GPUs).")] = "cpu",
) -> None:
    """Print the generated code of a compressor written in the language.

    Comments name the line of the algorithm that each statement comes from.

    Example: gradwire show int8 --option block=256 --backend triton
    """
    from gradwire.lang.targets import numba, triton

    emitters = {"cpu": numba.emit, "triton": triton.emit}
    if backend not in emitters:
        raise UnknownNameError("backend", backend, emitters)
    for codec in codecs_of(target, option).values():
        _print(_source(codec, emitters[backend]))


def _source(codec: Compressor, emit: Callable[[Program], str]) -> str:
    """The code, under a comment with the compressor's operators and payload."""
    from gradwire.compressors.base.traced import TracedCompressor
    from gradwire.lang.operators.base import used_operators

    if not isinstance(codec, TracedCompressor):
        raise GradwireError(
            f"{codec!r} is not written in the language, so it has no generated code. Read {type(codec).__module__}, or "
            f"show one of these: {', '.join(_of_the_language())}."
        )
    program = codec.program
    title = [
        f"# {codec!r}: {program.num_encode_lines} + {program.num_decode_lines} lines of the language",
        f"# operators: {', '.join(used_operators(program))}",
        f"# payload: {', '.join(map(str, program.fields))}",
    ]
    return "\n".join([*title, "", emit(program)])


def _of_the_language() -> list[str]:
    from gradwire.compressors import describe, names
    from gradwire.compressors.base.traced import TracedCompressor

    return [name for name in names() if isinstance(describe(name).default, TracedCompressor)]


def _print(source: str) -> None:
    """Print with colors on a terminal, and without into a file or a pipe."""
    if not sys.stdout.isatty():
        typer.echo(source, nl=False)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(source, "python", background_color="default", word_wrap=True))
