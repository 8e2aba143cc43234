"""Options that name a file or a folder to write: refused before anything is measured where they cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer


def out_file(*names: str, help: str) -> Any:
    """An option for a file that the command writes at its end; its folder is made.

    Args:
        names: of the option, where they are not the parameter's.
        help: for the help page.
    """
    return typer.Option(*names, help=help, callback=_writable)


def out_folder(help: str) -> Any:
    """An option for a folder that the command fills at its end; it is made."""
    return typer.Option(help=help, callback=_folder)


def _folder(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and _is_given(context, option):
        _make(path, path)
    return path


def _is_given(context: typer.Context, option: typer.CallbackParam) -> bool:
    """Whether the user named it; what is made by default is made when there is something to write."""
    source = context.get_parameter_source(option.name or "")
    return source is not None and source.name == "COMMANDLINE"


def _make(folder: Path, wanted: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{wanted} cannot be written: {error.strerror}.") from None


def _writable(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is None or not _is_given(context, option):
        return path
    _make(path.parent, path)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder. Name a file in it.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: Permission denied.")
    return path
