"""`gradwire top`: a live view of a running job on this machine."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.files import out_file

if TYPE_CHECKING:
    from rich.console import RenderableType


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("top")(top)


def top(
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the status files. Default: where jobs of this user write them.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Begin of a job's name. Default: the newest running job.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end, as without a terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 1.0,
    svg: Annotated[Path | None, out_file(help="Write the frame to this file, as a picture. With --once.")] = None,
) -> None:
    """Watch a running job: ranks, links, bytes saved, times of a step, decisions of `auto`, and residuals.

    Each rank rewrites a small file of its status every two seconds, which only its user can read. This command shows
    the ranks whose files are in the folder, usually those of this machine, and changes nothing. Ctrl-C ends it. The
    exit code is 1 if there is no job.

    Example: gradwire top
    """
    try:
        folder = _default_folder() if folder is None else folder
        _show(folder, job, interval, once or svg is not None or not sys.stdout.isatty(), svg)
    except _NoJobError as error:
        typer.echo(f"gradwire top: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


class _NoJobError(Exception):
    """There is nothing to show. The message says what to do."""


def _show(folder: Path, job: str | None, interval: float, once: bool, svg: Path | None) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(record=svg is not None)
    first = _frame(folder, job, console.width)
    if once:
        console.print(first)
        if svg is not None:
            picture = console.export_svg(title="gradwire top")
            svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))  # which a server would send
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(interval)
            try:
                live.update(_frame(folder, job, console.width))
            except _NoJobError as error:  # its files are gone
                live.update(Text(str(error)))


def _default_folder() -> Path:
    from gradwire.observe.recorder import default_directory

    try:
        return default_directory()
    except OSError as error:
        raise _NoJobError(f"{error}. Pass --folder, or set GRADWIRE_DUMP_DIR to a folder of yours.") from None


def _frame(folder: Path, name: str | None, width: int) -> RenderableType:
    """Return what there is to see now."""
    from gradwire.cli.top_page import page
    from gradwire.observe.jobs import jobs_of
    from gradwire.observe.status import printable
    from gradwire.observe.status_files import read_folder

    where = printable(str(folder))
    try:
        found = read_folder(folder)
    except OSError as error:
        raise _NoJobError(f"{where} cannot be read: {error.strerror}. Pass another --folder.") from None
    jobs = jobs_of(found.files)
    chosen = [each for each in jobs if name is None or each.name.startswith(name)]
    if chosen:
        return page(chosen[0], [each for each in jobs if each is not chosen[0]], found, width)
    if jobs:
        names = ", ".join(each.name[:8] for each in jobs[:8])
        raise _NoJobError(f"There is no job {printable(name or '')!r} in {where}. There are: {names}.")
    refused = "".join(f"\n{file}: {reason}" for file, reason in list(found.refused.items())[:8])
    raise _NoJobError(
        f"No job has written its status to {where}. Start one that calls gradwire.attach, as the same user on this "
        "machine. If it has SyncOptions(dump_dir=...) or GRADWIRE_DUMP_DIR, pass that folder as --folder. If it has "
        f"SyncOptions(status_interval=timedelta(0)), leave that out.{refused}"
    )
