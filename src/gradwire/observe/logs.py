"""Logs of scalars: at regular intervals, named numbers go to TensorBoard, Weights & Biases, a function or a CSV file.

Guarantees: a target that raises ends its log with a warning. It never stops training, and no other rank waits for it.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.core.errors import OptionError, OptionTypeError

logger = logging.getLogger("gradwire")
STEP = "gradwire/step"
Writer = Callable[[Mapping[str, float], int], object]
"""Called with the scalars and the step."""
_MAX_HEADER = 1 << 16


class ScalarLog:
    """Writes scalars to a target until `close`, and once more when it is closed.

    Args:
        target: See `writer_to`.
        every: Interval in steps.
        scalars: Returns the scalars of the time since its last call.
        names: Names of all scalars.
        num_steps: Number of steps so far.
    """

    def __init__(
        self,
        target: Any,
        every: int,
        scalars: Callable[[], Mapping[str, float]],
        names: Sequence[str],
        num_steps: int = 0,
    ) -> None:
        if every < 1:
            raise OptionError(f"every must be at least 1, but it is {every}. Pass the interval in steps.")
        self._write: Writer | None = writer_to(target, names)
        self._every = every
        self._scalars = scalars
        self._num_steps = num_steps  # when it wrote last

    def step(self, num_steps: int) -> None:
        """Write if it is time. Called between steps.

        Args:
            num_steps: Number of steps so far.
        """
        if num_steps - self._num_steps >= self._every:
            self._flush(num_steps)

    def close(self, num_steps: int | None = None) -> None:
        """Write what is left, if the number of steps is given, and stop. Idempotent."""
        if num_steps is not None and num_steps > self._num_steps:
            self._flush(num_steps)
        self._write = None

    def _flush(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._write is None:
            return
        try:
            found = self._scalars()
            self._write(found, int(found[STEP]))
        except Exception:  # on this rank alone: all others would wait for it
            self._write = None
            logger.warning("Scalars could not be written in step %d. This log ends.", num_steps, exc_info=True)


def writer_to(target: Any, names: Sequence[str]) -> Writer:
    """Return what writes to a target.

    Args:
        target: The path of a CSV file, which is continued if it has the same columns; an object with `add_scalar`, such
            as TensorBoard's SummaryWriter; an object with `log`; a Weights & Biases run, whose next row gets the
            scalars, so that its history keeps its own steps; or a function that takes the scalars and the step.
        names: Names of all scalars.

    Raises:
        OptionError: The file has other columns.
        OptionTypeError: The target is something else.
    """
    if isinstance(target, str | os.PathLike):
        return _CsvFile(Path(target), names).write
    if callable(getattr(target, "add_scalar", None)):
        return lambda scalars, step: [target.add_scalar(name, value, step) for name, value in scalars.items()]
    if callable(getattr(target, "log", None)):
        if callable(getattr(target, "define_metric", None)):
            target.define_metric("gradwire/*", step_metric=STEP)
            return lambda scalars, step: target.log(dict(scalars), commit=False)
        return lambda scalars, step: target.log(dict(scalars))
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise OptionTypeError(
        f"Scalars cannot be logged to {target!r}. Pass the path of a CSV file, a SummaryWriter, a Weights & Biases "
        "run, or a function of the scalars and the step."
    )


class _CsvFile:
    """A row per call. Opened for each, so that a process that is killed loses nothing."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._names = list(names)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="") as file:
            file.seek(0)
            header = next(csv.reader(file.read(_MAX_HEADER).splitlines()), None)
            if header is None:
                csv.writer(file).writerow(self._names)
            elif header != self._names:
                raise OptionError(f"{path} has other columns than these scalars. Pass another path.")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow([scalars[name] for name in self._names])
