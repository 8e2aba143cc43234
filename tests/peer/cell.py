"""The process that runs torch's tests with one world size and one method, and prints one line of JSON for each.

    python -m tests.peer.cell --world-size 2 --method none test_ddp_sink_noclone

It imports torch and its tests once. Each test is a fork of it and leads a process group of its own, in which its ranks
are. The group is killed when the test has ended, or has not within its limit.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import IO, Annotated

import typer

from tests.peer import attaching, suite
from tests.peer.differences import OWN_HOOKS, TOO_LARGE

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_GRACE_SECONDS = 15.0  # in which torch collects the stacks of a test that hangs
_LOG_CHARACTERS = 40_000


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Attributes:
        test: Name of the test.
        verdict: ``"passed"``, ``"failed"`` (hung and crashed, too) or ``"skipped"``.
        detail: What failed, with the end of what the test printed; or why it is skipped.
        modules: Number of DDP modules that were made, and attached unless this is the baseline, over all ranks.
        seconds: Time that it took.
    """

    test: str
    verdict: str
    detail: str
    modules: int
    seconds: float


def run(case: type[unittest.TestCase], test: str, method: str, limit_seconds: float) -> Outcome:
    """Run one test in a fork of this process."""
    began = time.monotonic()
    modules = multiprocessing.Value(ctypes.c_ulong)
    reader, writer = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _be_the_test(case, test, method, modules, writer, log)
        try:
            writer.close()
            verdict, detail = FAILED, f"It had not ended within {limit_seconds:.0f} s."
            if reader.poll(limit_seconds + _GRACE_SECONDS):
                with suppress(EOFError):
                    detail = "Its process has ended without a result."
                    verdict, detail = reader.recv()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if verdict == FAILED:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_CHARACTERS))
            detail += "\n--- output ---\n" + log.read().decode(errors="replace")
    return Outcome(test, verdict, detail, modules.value, round(time.monotonic() - began, 2))


def _be_the_test(
    case: type[unittest.TestCase],
    test: str,
    method: str,
    modules: ctypes.c_ulong,
    writer: Connection,
    log: IO[bytes],
) -> None:
    """Run a test in this process, which has just been forked, and end."""
    try:
        os.setsid()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

        def note() -> None:
            with modules.get_lock():
                modules.value += 1

        attaching.install(method, test not in OWN_HOOKS, note)
        result = unittest.TestResult()
        unittest.TestSuite([case(test)]).run(result)
        sys.stdout.flush()
        if result.skipped:
            writer.send((SKIPPED, result.skipped[0][1]))
        elif result.wasSuccessful():
            writer.send((PASSED, ""))
        else:
            writer.send((FAILED, "\n".join(text for _, text in result.errors + result.failures)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main(
    tests: Annotated[list[str] | None, typer.Argument(help="Names of tests. Default: all.")] = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    method: Annotated[str, typer.Option(help="How gradwire is attached.")] = attaching.BASELINE,
    only: Annotated[list[str] | None, typer.Option(help="Part of the names of the tests to run.")] = None,
    limit_seconds: Annotated[float, typer.Option(help="Longest time that a test may take.")] = 60.0,
) -> None:
    """Run torch's tests of DDP with one world size and one method."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the running test
    cases = suite.load(world_size, limit_seconds)
    attaching.warm_up(method)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"GRADWIRE_DUMP_DIR": folder, "TMPDIR": folder}
        tempfile.tempdir = folder
        for name in tests or cases:
            if only and not any(part in name for part in only):
                continue
            if name in TOO_LARGE:
                outcome = Outcome(name, SKIPPED, TOO_LARGE[name], 0, 0.0)
            else:
                outcome = run(cases[name], name, method, limit_seconds)
            print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    typer.run(main)
