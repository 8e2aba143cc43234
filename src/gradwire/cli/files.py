"""Options for output files and folders. Paths that cannot be written are refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer


def out_file(*names: str, help: str) -> Any:
    """An option for a file that the command writes at its end. Its folder is created.

    Args:
        names: Names of the option, if they differ from the parameter's.
        help: Text of the help page.
    """
    return typer.Option(*names, help=help, callback=_checked_file)


def out_folder(help: str) -> Any:
    """An option for a folder that the command fills at its end. It is created."""
    return typer.Option(help=help, callback=_checked_folder)


def _checked_folder(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and _was_named(context, option):
        _create(path, path)
    return path


def _was_named(context: typer.Context, option: typer.CallbackParam) -> bool:
    """Whether the user named the path. Default paths are created when there is something to write."""
    source = context.get_parameter_source(option.name or "")
    return source is not None and source.name == "COMMANDLINE"


def _create(folder: Path, wanted: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{wanted} cannot be written: {error.strerror}.") from None


def _checked_file(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is None or not _was_named(context, option):
        return path
    _create(path.parent, path)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder. Name a file in it.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: Permission denied.")
    return path
