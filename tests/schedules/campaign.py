"""Schedules of faults for an aggregation server: random loss, stragglers and restarts in virtual time.

    python -m tests.schedules --schedules 100000          # 20 minutes on two cores
    python -m tests.schedules --only 4711                 # one of them again
    python -m tests.schedules --schedules 100000 --xdp    # against the program in the kernel (root)

Each schedule is a job with random workers, window, loss of up to a half, repetition, reordering, truncation, flipped
bits, slow workers, fraction, and restarts of the server. Every result of every worker is compared, bit for bit, with a
model that has no packets. `tests/aggregator/test_schedules.py` is the short form.

With `--xdp`, each packet to the server goes to the program of `gradwire.aggregator.xdp`, with a tag in every second
schedule. Its answers travel on, and each is compared with that of the server without I/O, byte by byte
(`tests/schedules/kernel.py`). `tests/aggregator/xdp/test_program.py` is the short form.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import time
from collections import Counter
from typing import Annotated

import typer

from gradwire.aggregator.xdp.guard import GUARDS
from tests.schedules import jobs, kernel
from tests.schedules.datagrams import Faults

LOSSES = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5)
LIMIT_SECONDS = 10_000.0  # of virtual time


def schedule(seed: int, *, xdp: bool = False) -> Counter[str]:
    """Run and check one schedule, and return the counts of faults."""
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 3, 3, 4, 5, 8))
    options = {"fraction": 0.75, "max_misses": rng.choice((1, 3, 8))} if rng.random() < 0.3 else {}
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
        **({"server": in_kernel} if xdp else {}),
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
    return done


def attempt(seed: int, xdp: bool) -> tuple[int, Counter[str], str]:
    """Run one schedule in a pool of processes, with an error as text."""
    try:
        return seed, schedule(seed, xdp=xdp), ""
    except Exception as error:
        return seed, Counter(), f"{type(error).__name__}: {error}"


def campaign(seeds: range, processes: int, *, xdp: bool = False) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run schedules, and return the counts of faults and the schedules that failed."""
    total: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    with multiprocessing.get_context("forkserver").Pool(processes) as pool:
        for number, (seed, done, error) in enumerate(
            pool.imap_unordered(functools.partial(attempt, xdp=xdp), seeds, chunksize=50), 1
        ):
            total += done
            if error:
                failed.append((seed, error))
                print(f"schedule {seed}: {error}", flush=True)
            if number % 5000 == 0:
                print(f"{number} schedules, {len(failed)} failed", flush=True)
    return total, failed


def main(
    schedules: Annotated[int, typer.Option(help="Number of schedules.")] = 2000,
    first: Annotated[int, typer.Option(help="Seed of the first schedule.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes that run them.")] = 2,
    xdp: Annotated[bool, typer.Option("--xdp", help="Compare the kernel's program with the server.")] = False,
    only: Annotated[int | None, typer.Option(help="Run the one schedule of this seed, in this process.")] = None,
) -> None:
    """Check that an aggregation server adds every contribution exactly once under network faults."""
    if only is not None:
        print(dict(schedule(only, xdp=xdp)))
        return
    began = time.monotonic()
    total, failed = campaign(range(first, first + schedules), processes, xdp=xdp)
    said = ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
    print(f"{schedules} schedules in {time.monotonic() - began:.0f} s, {len(failed)} failed. Packets: {said}")
    raise typer.Exit(1 if failed else 0)
