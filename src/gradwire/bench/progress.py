"""Progress bars of a benchmark: the whole run, and the current method."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gradwire.bench import job, methods
from gradwire.bench.job import Segment
from gradwire.bench.table import rate_text


class Bars(Progress):
    """Context manager that shows the progress of a run.

    Args:
        num_segments: Number of segments.
        console: Console for the bars; for standard error if standard output is read by machines.
    """

    def __init__(self, num_segments: int, console: Console) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._all = self.add_task("methods", total=num_segments, note="starting the ranks")
        self._now = self.add_task("", total=1, note="", visible=False)

    def __call__(self, segment: Segment, progress: job.Progress) -> None:
        """Show the progress of rank 0."""
        self.update(self._all, completed=progress.segment, note="")
        doing = "training" if progress.phase == "train" else f"timed at {rate_text(progress.rate)}"
        self.update(
            self._now,
            description=methods.label(segment.method),
            completed=progress.step,
            total=progress.steps,
            note=doing + ("" if progress.loss is None else f", loss {progress.loss:.2f}"),
            visible=True,
        )
