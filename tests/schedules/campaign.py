"""Schedules of faults for an aggregation server: random loss, stragglers and restarts in virtual time.

    python -m tests.schedules --schedules 100000          # 20 minutes on two cores
    python -m tests.schedules --only 4711                 # one of them again
    python -m tests.schedules --xdp --schedules 100000 --record build/xdp.jsonl    # goes on where it was ended (root)

Each schedule is a job with random workers, window, loss of up to a half, repetition, reordering, truncation, flipped
bits, slow workers, fraction, sums that are filled with zeros after a while, and restarts of the server. Every result of
every worker is compared, bit for bit, with a model that has no packets. `tests/aggregator/test_schedules.py` is the
short form.

With `--xdp`, each packet to the server goes to the program of `gradwire.aggregator.xdp`, with a tag in every second
schedule. Its answers travel on, and each is compared with that of the server without I/O, byte by byte
(`tests/schedules/kernel.py`). `tests/aggregator/xdp/test_program.py` is the short form.

A record has a line of JSON for each 50 schedules that have ended: their seeds, counts of faults, failures, and the last
commit of what they test. Lines of other commits, and of trees with changes, do not count.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.aggregator.xdp.guard import GUARDS
from tests.commits import CHANGED, last_commit
from tests.schedules import jobs, kernel
from tests.schedules.datagrams import Faults

LOSSES = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5)
LIMIT_SECONDS = 10_000.0  # of virtual time
BLOCK = 50
"""Schedules that a process runs, and a record notes, at a time."""
REPORTED = 20
"""Blocks after which a sitting says how far it is."""
TESTED = "src/gradwire/aggregator", "src/gradwire/kernels", "src/gradwire/wire", "tests/schedules"


def schedule(seed: int, *, xdp: bool = False) -> Counter[str]:
    """Run and check one schedule, and return the counts of faults."""
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 3, 3, 4, 5, 8))
    options = {"fraction": 0.75, "max_misses": rng.choice((1, 3, 8))} if rng.random() < 0.3 else {}
    if not xdp:
        options["fill_seconds"] = rng.choice((0.0, 0.0, 0.0, 0.01, 0.5))
    job = (kernel.kernel_config if xdp else jobs.small_config)(world_size, **options)
    rounds = sorted(rng.sample([0, 1, 2, 255, 256, 1 << 16, 1 << 32, (1 << 64) - 2], 3))
    faults = Faults(
        rng.choice(LOSSES), rng.choice((0, 0.1, 0.3)), rng.choice((0, 0.02)), rng.choice((0, 0.02, 0.1)),
        delay=rng.choice((0.00005, 0.001, 0.05)), spread=rng.choice((0, 0.001, 0.1)),
    )  # fmt: skip
    slow = {worker: rng.choice((0.0, 0.0, 0.001, 0.2)) for worker in range(world_size)}
    in_kernel = functools.partial(kernel.KernelAggregator, guard_name=sorted(GUARDS)[seed % 2])
    run = jobs.simulation(
        job, rounds, faults, seed, window=rng.choice((1, 4, 64)), pace=lambda worker, place: slow[worker],
        **({"server": in_kernel, "sealed": kernel.KernelAggregator.sealed} if xdp else {}),
    )  # fmt: skip
    restarts, finished = rng.choice((0, 0, 1, 2)) if job.needed == world_size else 0, False
    for _ in range(restarts):
        finished = finished or run.run(until=run.network.now + rng.expovariate(1 / (10 * faults.delay + 0.01)))
        if not finished:
            run.restart()
    if not finished and not run.run(until=LIMIT_SECONDS):
        raise AssertionError(f"no end within {LIMIT_SECONDS} s of virtual time")
    jobs.check(run, rounds)
    if xdp:
        run.aggregator.check_counters()
    done = run.network.done
    done["restarts"] = len(run.server_counters) - 1
    done["added"] = sum(counters.taken for counters in run.server_counters)
    done["late"] = sum(counters.late for counters in run.server_counters)
    done["filled"] = sum(counters.filled for counters in run.worker_counters)
    return done


def attempt(seeds: range, xdp: bool) -> tuple[range, Counter[str], list[tuple[int, str]]]:
    """Run a block of schedules, and return the counts of faults, and the schedules that failed with their errors."""
    total: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            total += schedule(seed, xdp=xdp)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return seeds, total, failed


class Record:
    """Blocks that have ended, in a file that several sittings write.

    Args:
        path: The file; None for a record of this sitting alone.
        xdp: Whether the schedules go to the kernel's program.
        of: What `last_commit` says.

    Attributes:
        rows: Blocks of this commit and kind, by the seed of their first schedule.
    """

    def __init__(self, path: Path | None, xdp: bool, of: str) -> None:
        self._path, self._of = path, {"commit": of, "xdp": xdp}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows: dict[int, dict[str, Any]] = {
            row["first"]: row
            for row in rows
            if self._of == {name: row[name] for name in self._of} and not row["commit"].endswith(CHANGED)
        }

    def lacks(self, seeds: range) -> bool:
        """Whether a block has not ended."""
        row = self.rows.get(seeds.start)
        return row is None or row["schedules"] != len(seeds)

    def add(self, seeds: range, total: Counter[str], failed: list[tuple[int, str]]) -> None:
        """Note that a block has ended."""
        row = {"first": seeds.start, "schedules": len(seeds), "counts": total, "failed": failed, **self._of}
        self.rows[seeds.start] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def summary(self) -> str:
        """Return the number of schedules, of failures, and the counts of faults."""
        counts = sum((Counter(row["counts"]) for row in self.rows.values()), Counter[str]())
        schedules, failed = (sum(found) for found in zip(*((row["schedules"], len(row["failed"]))
                                                           for row in self.rows.values())))  # fmt: skip
        said = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        return f"{schedules} schedules, {failed} failed. Packets: {said}"


def campaign(seeds: range, processes: int, record: Record, *, xdp: bool = False) -> None:
    """Run the schedules that a record lacks, and note them there."""
    blocks = [seeds[start : start + BLOCK] for start in range(0, len(seeds), BLOCK)]
    due = [block for block in blocks if record.lacks(block)]
    with multiprocessing.get_context("forkserver").Pool(processes) as pool:
        for number, done in enumerate(pool.imap_unordered(functools.partial(attempt, xdp=xdp), due), 1):
            record.add(*done)
            for seed, error in done[2]:
                print(f"schedule {seed}: {error}", flush=True)
            if number % REPORTED == 0:
                print(f"Block {number} of {len(due)}. {record.summary()}", flush=True)


def main(
    schedules: Annotated[int, typer.Option(help="Number of schedules.", min=1)] = 2000,
    first: Annotated[int, typer.Option(help="Seed of the first schedule.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes that run them.")] = 2,
    xdp: Annotated[bool, typer.Option("--xdp", help="Compare the kernel's program with the server.")] = False,
    record: Annotated[Path | None, typer.Option(help="File that notes what has ended, to go on later.")] = None,
    only: Annotated[int | None, typer.Option(help="Run the one schedule of this seed, in this process.")] = None,
) -> None:
    """Check that an aggregation server adds every contribution exactly once under network faults."""
    if only is not None:
        print(dict(schedule(only, xdp=xdp)))
        return
    began, noted = time.monotonic(), Record(record, xdp, last_commit(*TESTED))
    before = len(noted.rows)
    campaign(range(first, first + schedules), processes, noted, xdp=xdp)
    print(f"{noted.summary()}. {len(noted.rows) - before} blocks of {BLOCK} in {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if any(row["failed"] for row in noted.rows.values()) else 0)
