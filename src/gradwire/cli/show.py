"""`gradwire show`: the code that a compressor of the language becomes."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.cli.targets import Options, Target, codec_of
from gradwire.core.errors import GradwireError, UnknownNameError

Backend = Annotated[str, typer.Option("--backend", help="cpu for Numba, triton for GPUs.")]


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("show")(show)


def show(target: Target, option: Options = None, backend: Backend = "cpu") -> None:
    """Print the generated code of a compressor written in the language.

    Comments say which line of the algorithm each part comes from.
    """
    from gradwire.compressors.traced import TracedCompressor
    from gradwire.lang import cpu, gpu

    emitters = {"cpu": cpu.emit, "triton": gpu.emit}
    if backend not in emitters:
        raise UnknownNameError("backend", backend, emitters)
    codec = codec_of(target, option)
    if not isinstance(codec, TracedCompressor):
        raise GradwireError(
            f"Expected a compressor of the language, got {codec!r}, which is written by hand. Do: read "
            f"{type(codec).__module__}."
        )
    program = codec.program
    typer.echo(f"# {codec!r}: {program.num_encode_lines} + {program.num_decode_lines} lines of the language")
    typer.echo(f"# operators: {', '.join(program.operators)}")
    typer.echo(f"# payload: {', '.join(f'{each.name} {each.dtype} of {each.node.space}' for each in program.fields)}\n")
    typer.echo(emitters[backend](program), nl=False)
