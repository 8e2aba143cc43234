"""Tests that need something of the machine: skipped with the reason where it is missing, and counted at the end.

A run on a machine without the rights must not look like a run that passed everything, so the summary has one line a
marker whatever the options.

Properties are tried on the same examples in every run; `make test-long` tries others, and of a property that does not
say how many, 2,000.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import pytest
from hypothesis import settings

# No deadline: the first call of a kernel compiles it, and that is not a slow example.
settings.register_profile("gradwire", derandomize=True, deadline=None)
settings.register_profile("campaign", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile("gradwire")


def _no_lab() -> str | None:
    from gradwire.lab import available

    return available()


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "Expected a CUDA device, torch finds none."


def _no_loss() -> str | None:
    from gradwire.core.errors import RightsError
    from gradwire.lab.rights import find_loss_tool

    try:
        find_loss_tool()
    except RightsError as error:
        return str(error)
    return None


def _no_bpf() -> str | None:
    from gradwire.aggregator.xdp.loader import available

    return available()


def _no_atheris() -> str | None:
    found = importlib.util.find_spec("atheris")
    return None if found else "Expected the package atheris, which exists for Linux on x86-64 and Python 3.11 to 3.13."


def _no_frameworks() -> str | None:
    missing = [name for name in ("accelerate", "transformers", "lightning") if importlib.util.find_spec(name) is None]
    return f"Expected {', '.join(missing)}. Run `make test-trainers`." if missing else None


NEEDS: dict[str, Callable[[], str | None]] = {
    "root": functools.cache(_no_lab),
    "loss": functools.cache(_no_loss),
    "gpu": functools.cache(_no_gpu),
    "atheris": functools.cache(_no_atheris),
    "bpf": functools.cache(_no_bpf),
    "frameworks": functools.cache(_no_frameworks),
}
"""Why tests with a marker cannot run on this machine, or None if they can."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run. A machine is asked only for what a collected test needs."""
    for item in items:
        for name, why_not in NEEDS.items():
            if item.get_closest_marker(name) and (reason := why_not()):
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a marker: how many of its tests ran, how many could not, and why."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    reports = [report for report in reports if isinstance(report, pytest.TestReport)]
    lines = []
    for name in NEEDS:
        # By the keywords of reports, which come from other processes too where tests run in several.
        marked = [report for report in reports if name in report.keywords]
        ran = {report.nodeid for report in marked if report.when == "call" and not report.skipped}
        skipped = {report.nodeid: _reason(report) for report in marked if report.skipped}
        if marked:
            line = f"{name}: {len(ran)} ran, {len(skipped)} could not"
            lines.append("; because ".join([line, *sorted(set(skipped.values()))]))
    if lines:
        terminalreporter.section("tests that need something of the machine")
    for line in lines:
        terminalreporter.write_line(line)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
