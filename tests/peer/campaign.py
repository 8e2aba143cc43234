"""Runs torch's tests of DDP without gradwire and with it, and compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

import typer

from tests.peer.attaching import BASELINE, METHODS
from tests.peer.cell import FAILED, PASSED, SKIPPED, Outcome
from tests.peer.differences import DIFFERENCES, NOT_ON_CPU, NOT_WITH, OWN_HOOKS, TOO_LARGE, Difference


@dataclass(frozen=True)
class Finding:
    """What one outcome means.

    Attributes:
        kind: ``"passed"``, ``"differs"`` (as expected), ``"not runnable"`` or ``"wrong"``.
        reason: Why it differs or cannot run, or what is wrong.
    """

    kind: str
    reason: str = ""


def judge_baseline(outcome: Outcome, needs: str | None) -> Finding:
    """What a test shows without gradwire.

    Args:
        outcome: How it ended.
        needs: What it needs that is not here, if it is expected to fail.
    """
    if outcome.verdict == SKIPPED:
        return Finding("not runnable", outcome.detail)
    if outcome.verdict == FAILED:
        return (
            Finding("not runnable", needs) if needs else Finding("wrong", f"fails without gradwire: {outcome.detail}")
        )
    if needs:
        return Finding("wrong", "runs here after all. Remove it from differences.py.")
    return Finding("passed") if outcome.modules else Finding("not runnable", "makes no DDP module")


def judge_attached(outcome: Outcome, modules: int, difference: Difference | None) -> Finding:
    """What a test shows that passes without gradwire.

    Args:
        outcome: How it ended with gradwire attached.
        modules: Number of DDP modules that it makes without gradwire.
        difference: How it is expected to fail, if it is.
    """
    if outcome.verdict == PASSED:
        if difference:
            return Finding("wrong", "passes after all. Remove it from differences.py.")
        if outcome.modules != modules:
            return Finding("wrong", f"gradwire was attached to {outcome.modules} of {modules} modules.")
        return Finding("passed")
    if difference and outcome.verdict == FAILED and difference.error in outcome.detail:
        return Finding("differs", difference.reason)
    return Finding("wrong", f"{outcome.verdict} with gradwire attached: {outcome.detail}")


def outcomes(
    world_size: int, method: str, limit_seconds: float, names: list[str], only: list[str]
) -> Iterator[Outcome]:
    """Run tests in a process of their own."""
    command = [sys.executable, "-m", "tests.peer.cell", f"--world-size={world_size}", f"--method={method}"]
    command += [f"--limit-seconds={limit_seconds}", *(f"--only={part}" for part in only), *names]
    # torch's own way to set the number of threads starts some, which forks of the process would miss.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as cell:
        assert cell.stdout is not None
        try:
            for line in cell.stdout:
                yield Outcome(**json.loads(line))
        except BaseException:
            cell.terminate()
            raise
    if cell.returncode:
        raise RuntimeError(f"The process of the tests has ended with {cell.returncode}. Its error is above.")


@dataclass
class Comparison:
    """The findings of all tests with one world size, by method."""

    world_size: int
    findings: dict[str, dict[str, Finding]]

    def count(self, method: str, kind: str) -> int:
        return sum(finding.kind == kind for finding in self.findings[method].values())


def compare(world_size: int, methods: list[str], limit_seconds: float, only: list[str]) -> Comparison:
    """Run tests without gradwire, and those that pass with it attached."""
    findings: dict[str, dict[str, Finding]] = {BASELINE: {}}
    modules: dict[str, int] = {}
    needs = NOT_ON_CPU | NOT_WITH.get(world_size, {})
    for outcome in outcomes(world_size, BASELINE, limit_seconds, [], only):
        finding = judge_baseline(outcome, needs.get(outcome.test))
        findings[BASELINE][outcome.test] = finding
        _print(world_size, BASELINE, outcome, finding)
        if finding.kind == "passed":
            modules[outcome.test] = outcome.modules
    for method in methods:
        findings[method] = {}
        for outcome in outcomes(world_size, method, limit_seconds, list(modules), []) if modules else ():
            difference = DIFFERENCES.get(outcome.test)
            expected = difference if difference and world_size in difference.world_sizes else None
            finding = judge_attached(outcome, modules[outcome.test], expected)
            findings[method][outcome.test] = finding
            _print(world_size, method, outcome, finding)
    return Comparison(world_size, findings)


def unknown_names(comparisons: list[Comparison]) -> set[str]:
    """Names in `differences.py` that no test of torch has."""
    known = {test for each in comparisons for test in each.findings[BASELINE]}
    return {*NOT_ON_CPU, *TOO_LARGE, *OWN_HOOKS, *DIFFERENCES}.union(*NOT_WITH.values()) - known


def _print(world_size: int, method: str, outcome: Outcome, finding: Finding) -> None:
    print(f"{world_size} ranks, {method:8}  {finding.kind:12}  {outcome.seconds:5.1f} s  {outcome.test}", flush=True)
    if finding.kind == "wrong":
        print(textwrap.indent(finding.reason, "    "), flush=True)


def report(comparisons: list[Comparison], methods: list[str]) -> str:
    """The counts as a table, then each reason with its tests."""
    lines = ["", f"torch {version('torch')}, tests of DDP on CPU with Gloo", ""]
    lines.append("".join(f"{each:>16}" for each in ("ranks", "not runnable", BASELINE, *methods)))
    for each in comparisons:
        counts = [f"{each.world_size}", f"{each.count(BASELINE, 'not runnable')}", f"{each.count(BASELINE, 'passed')}"]
        for method in methods:
            differ = each.count(method, "differs")
            counts.append(f"{each.count(method, 'passed')}" + (f" ({differ} differ)" if differ else ""))
        lines.append("".join(f"{count:>16}" for count in counts))
    reasons: dict[tuple[str, str], set[str]] = {}
    for each in comparisons:
        for found in each.findings.values():
            for test, finding in found.items():
                if finding.kind in ("differs", "not runnable"):
                    reasons.setdefault((finding.kind, finding.reason), set()).add(test)
    for (kind, reason), tests in sorted(reasons.items()):
        lines += ["", f"{kind}: {reason}", *(f"    {test}" for test in sorted(tests))]
    return "\n".join(lines)


def main(
    world_size: Annotated[list[int] | None, typer.Option(help="Ranks; may be repeated. Default: 2 and 3.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Method; may be repeated. Default: all.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Part of the names of the tests to run.")] = None,
    limit_seconds: Annotated[float, typer.Option(help="Longest time that a test may take.")] = 60.0,
) -> None:
    """Run torch's tests of DDP without gradwire and with it attached, and compare."""
    began = time.monotonic()
    methods = method or list(METHODS)
    comparisons = [compare(size, methods, limit_seconds, only or []) for size in world_size or (2, 3)]
    print(report(comparisons, methods))
    wrong = sum(each.count(name, "wrong") for each in comparisons for name in each.findings)
    unknown = set() if only else unknown_names(comparisons)
    for name in sorted(unknown):
        print(f"differences.py has {name}, and no test of torch is called so.")
    print(f"\n{wrong + len(unknown)} unexpected, {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if wrong or unknown else 0)
