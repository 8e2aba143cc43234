"""Costs of codecs, tasks and frames on this machine, measured once and kept in the user's cache."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gradwire.compressors.base.registry import compressor_of
from gradwire.core.errors import OptionError
from gradwire.core.files import write_whole
from gradwire.kernels.cpu.compile import fingerprint
from gradwire.planner.costs import Costs, LinkCosts
from gradwire.simulate.frames import measure_frame
from gradwire.tuning.measure_codec import SIZES, measure_add, measure_codec, measure_task

SECONDS_PER_CODEC = 1.5


def default_path() -> Path:
    """``costs.json`` in ``$GRADWIRE_CACHE_DIR``, or in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("GRADWIRE_CACHE_DIR") or Path(cache) / "gradwire") / "costs.json"


def machine_costs(
    specs: Iterable[str],
    path: Path | None = None,
    *,
    remeasure: bool = False,
    sizes: tuple[int, ...] = SIZES,
    seconds_per_codec: float = SECONDS_PER_CODEC,
    on_measure: Callable[[str], None] = lambda spec: None,
) -> Costs:
    """Costs of these compressors on this machine. What the file lacks is measured and added to it.

    Args:
        specs: Compressors, such as ``"none"`` or ``"threelc:sparsity=1.5"``; ``"none"`` is always included.
        path: File of costs; None for `default_path`.
        remeasure: Whether to measure even what the file has.
        sizes: Numbers of elements of the measured tensors.
        seconds_per_codec: Approximate time to measure each compressor.
        on_measure: Called with each compressor before it is measured.

    Returns:
        Costs without a link: simulations take the links of their cluster.
    """
    path, stamp = path or default_path(), _stamp()
    known = None if remeasure else _read(path, stamp)
    missing = [spec for spec in dict.fromkeys(["none", *specs]) if known is None or spec not in known.codecs]
    if known is not None and not missing:
        return known
    measured = {}
    for spec in missing:
        on_measure(spec)
        measured[spec] = measure_codec(compressor_of(spec), sizes, seconds_per_codec)
    if known is None:
        links = (LinkCosts(0.0, 0.0),)
        costs = Costs(
            1, links, measured, add=measure_add(sizes), task=measure_task(), frame=measure_frame(), made_by=stamp
        )
    else:
        costs = replace(known, codecs={**known.codecs, **measured})
    with contextlib.suppress(OSError):  # if nothing can be written, the next call measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, costs.to_json())
    return costs


def _read(path: Path, stamp: str) -> Costs | None:
    """Costs in the file, if they were measured on this machine with these kernels."""
    try:
        known = Costs.from_json(path.read_text())
    except (OSError, UnicodeDecodeError, OptionError):
        return None
    return known if known.made_by == stamp else None


def _stamp() -> str:
    return f"{processor_name()}, one thread; gradwire {version('gradwire')}, kernels {fingerprint()}"


def processor_name() -> str:
    """Name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
