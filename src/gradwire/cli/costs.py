"""The costs for `plan` and `simulate`: from a file, or measured on this machine while progress is shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.core.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from gradwire.planner.costs import Costs


def costs_of(path: Path | None, specs: Iterable[str], measure: bool = False) -> Costs:
    """Return the costs of compressors.

    Args:
        path: File of costs. None takes the file in this machine's cache, and measures what is missing there.
        specs: Compressors.
        measure: Measure all of them, and write the file.

    Raises:
        OptionError: The file does not exist, or is not a file of costs.
    """
    from rich.console import Console

    from gradwire.planner.costs import Costs
    from gradwire.simulate.machine import default_path, machine_costs

    if path is not None and not measure:
        if not path.is_file():
            raise OptionError(
                f"There is no file of costs {str(path)!r}. Leave --costs out to use this machine's, or write the file "
                f"with gradwire simulate --costs {path} --measure."
            )
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"The file of costs {str(path)!r} cannot be read: {error}.") from error
        return Costs.from_json(text)
    wanted = list(dict.fromkeys(["none", *specs]))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress(console) as bar:
        task = bar.add_task("looking for measurements", total=len(wanted))

        def show(spec: str) -> None:
            if not bar.tasks[task].completed:
                console.print(
                    "Measuring codecs on one core of this machine; they are compiled at first use. The figures are "
                    f"kept in {path or default_path()}."
                )
            bar.update(task, description=f"measuring {spec}", advance=1)
            if not console.is_terminal:
                console.print(f"Measuring {spec}…")

        return machine_costs(wanted, path, remeasure=measure, on_measure=show)


def progress(console: Console) -> Progress:
    """Return a progress bar with a count and the time, shown only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
