"""How far the simulator is from the lab: the same steps in both, at every number of ranks, rate and strategy.

    python -m benchmarks.simulator_error                          # all, about ten minutes; needs a lab
    python -m benchmarks.simulator_error --ranks 2 --rates 1gbit  # a part of it, printed

Four matrices get ready one after another while ranks wait, as in a replayed backward; synchronisation and network are
real. The simulated cluster has this machine's cores, shared by all ranks, its measured costs, and links of the lab's
rate; nothing is fitted to the steps it is compared with. A measured step is that of the slowest rank; medians.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.core.spec import TensorSpec
from gradwire.lab import Lab
from gradwire.lab.units import parse_rate
from gradwire.simulate import Cluster, Compute, Gradient, Link, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Shard, Synchronizer

RANKS, RATES = (2, 4, 8), ("10mbit", "100mbit", "1gbit")
STRATEGIES, METHODS = ("ring", "scatter_reduce", "allgather"), ("none", "onebit")
LATENCY_SECONDS = 30e-6
BACKWARD_SECONDS = 0.05
GRADIENTS = [Gradient(f"layer{index}.weight", (128, 1024), BACKWARD_SECONDS * (index + 1) / 4) for index in range(4)]
WARM_UPS, MIN_STEPS, MAX_STEPS, TIMED_SECONDS = 1, 3, 30, 2.0
RESULTS = Path(__file__).parent / "results" / "simulator-error.csv"


@dataclass(frozen=True)
class Comparison:
    """One kind of step in both. Seconds; p20 and p80 of the measured ones."""

    ranks: int
    rate: str
    strategy: str
    method: str
    measured: float
    p20: float
    p80: float
    samples: int
    simulated: float
    error: float


# -- in the lab --------------------------------------------------------------------------------------------------


def worker(methods: list[str]) -> None:
    """One rank: prints the seconds of its steps, a line a method and strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for method in methods:
        for strategy in STRATEGIES:
            seconds = timed_steps(method, strategy)
            print(json.dumps({"method": method, "strategy": strategy, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def timed_steps(method: str, strategy: str) -> list[float]:
    """Seconds of each step on the slowest rank."""
    tensors = {grad.name: torch.randn(grad.shape) for grad in GRADIENTS}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    synchronizer = Synchronizer(None, Plan(method, strategy=strategy), tensors=specs)
    found: list[float] = []
    while len(found) < WARM_UPS + MIN_STEPS or (sum(found) < TIMED_SECONDS and len(found) < WARM_UPS + MAX_STEPS):
        dist.barrier()
        begun = time.perf_counter()
        synchronizer.begin_step()
        for grad in GRADIENTS:
            time.sleep(max(0.0, begun + grad.ready_seconds - time.perf_counter()))
            synchronizer.submit([Shard(grad.name, tensors[grad.name])])
        synchronizer.wait()
        synchronizer.commit()
        seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    synchronizer.close()
    return found[WARM_UPS:]


def measure(ranks: int, rate: str, methods: list[str]) -> list[dict[str, object]]:
    """Steps of all methods and strategies in a lab of its own."""
    command = [sys.executable, "-m", "benchmarks.simulator_error", "--worker", "--methods", *methods]
    with Lab(ranks, rate) as lab:
        result = lab.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=900).check()
    return [json.loads(line) for line in result.hosts[0].stdout.splitlines() if line.startswith("{")]


# -- in virtual time ---------------------------------------------------------------------------------------------


def simulate(ranks: int, rate: str, method: str, strategy: str) -> float:
    """Seconds of the same step."""
    cluster = Cluster(ranks, Link(parse_rate(rate), LATENCY_SECONDS), cores=os.cpu_count())
    costs = machine_costs([*METHODS])
    return step(GRADIENTS, method, cluster, costs, Compute(0.0, BACKWARD_SECONDS), strategy=strategy).seconds


def compare(ranks: int, rate: str, methods: list[str]) -> list[Comparison]:
    """All methods and strategies of one cluster."""
    found = []
    for row in measure(ranks, rate, methods):
        seconds, method, strategy = sorted(row["seconds"]), str(row["method"]), str(row["strategy"])
        median, fifth = statistics.median(seconds), len(seconds) // 5
        simulated = simulate(ranks, rate, method, strategy)
        spread = (median, seconds[fifth], seconds[-1 - fifth], len(seconds))
        found.append(Comparison(ranks, rate, strategy, method, *spread, simulated, simulated / median - 1))
    return found


def describe(row: Comparison) -> str:
    return (
        f"{row.ranks:3} {row.rate:>8} {row.strategy:15} {row.method:8} measured {1e3 * row.measured:9.2f} ms   "
        f"simulated {1e3 * row.simulated:9.2f} ms   {row.error:+7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=list(RANKS))
    parser.add_argument("--rates", nargs="*", default=list(RATES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--csv", type=Path, help=f"default, for the whole: {RESULTS}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.methods)
        return
    rows: list[Comparison] = []
    for ranks in options.ranks:
        for rate in options.rates:
            here = compare(ranks, rate, options.methods)
            print("\n".join(map(describe, here)), flush=True)
            rows += here
    errors = [abs(row.error) for row in rows]
    print(f"off by {statistics.median(errors):.1%} in the median, by {max(errors):.1%} at most, of {len(rows)} steps")
    is_whole = (options.ranks, options.rates, options.methods) == (list(RANKS), list(RATES), list(METHODS))
    target = options.csv or (RESULTS if is_whole else None)
    if target:
        with target.open("w", newline="") as file:
            writer = csv.DictWriter(file, asdict(rows[0]).keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(asdict, rows))


if __name__ == "__main__":
    main()
