"""What balanced sparse sums (ZEN) gain over all-gather: bytes and seconds, in the lab and with more simulated ranks.

One tensor of 4 million elements, of which `topk` sends 1 %. Its positions are those of fixed gradients:

- `uniform`: every rank draws its positions independently, and all are equally likely.
- `zipf`: position i is 1 / (i + 1) times as likely, as in the embedding of a vocabulary in order of frequency. Ranks
  draw independently, so that they often have the same positions, and most are at the beginning.

In the lab, blocks of steps take turns, on connections that stay open. A step lasts from a moment that all hosts know
until the slowest of them ends. Bytes are those of the interface, mean and largest over hosts. `dense` is Gloo's
all-reduce of the tensor in fp32, which is what DDP does with it as one bucket.

The simulated part draws positions for every rank, counts the different ones, and gives the simulator the overlap that
follows. `ranges` is the largest part of an owner over the mean if owners have equal ranges of positions, and `hashed`
if they are hashed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

from benchmarks import ranks as processes
from benchmarks.options import Rates, choose
from benchmarks.planning.calibration import common_moment, sleep_until
from benchmarks.ranks import say
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.lab import Lab
from gradwire.lab.counters import interface_counters
from gradwire.lab.units import parse_rate
from gradwire.planner import pairs
from gradwire.planner.costs import Costs
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

HOSTS, RATES = 8, ("100mbit", "1gbit")
SIMULATED, SIMULATED_RATE = (16, 32, 64, 128), "1gbit"
SHAPE, METHOD, RATIO = (2048, 2048), "topk", 0.01  # its default
EXPONENTS = {"uniform": 0.0, "zipf": 1.0}
STRATEGIES = ("allgather", "sparse_reduce", "scatter_reduce")
DENSE = "dense"
BLOCKS, BLOCK_STEPS = 4, 3
LATENCY = 1e-4  # of a simulated link
Row = dict[str, Any]
KEY, CHOICES = ("part", "rate", "ranks", "positions"), ("part", "rates", "num_ranks")


@dataclass(frozen=True)
class Cell:
    """Steps of one way with one kind of positions: seconds with percentiles, and bytes that a rank sends in a step.

    Attributes:
        growth: Number of different positions of all ranks, over those of one rank.
    """

    part: str
    rate: str
    ranks: int
    positions: str
    way: str
    seconds: float
    p20: float
    p80: float
    samples: int
    sent_bytes: float
    most_sent_bytes: float
    growth: float
    ranges: float
    hashed: float


def arrivals(positions: str, rank: int) -> np.ndarray:
    """Exponential times, of which the K first are a weighted sample of K positions without replacement."""
    size = SHAPE[0] * SHAPE[1]
    drawn = np.random.default_rng([rank, 11]).standard_exponential(size, np.float32)
    return drawn * np.arange(1, size + 1, dtype=np.float32) ** np.float32(EXPONENTS[positions])


def gradient(positions: str, rank: int) -> torch.Tensor:
    """A gradient whose largest elements have these positions. Signs alternate."""
    grad = 1 / (np.float32(1e-3) + arrivals(positions, rank))
    grad[::2] *= -1
    return torch.from_numpy(grad).view(SHAPE)


# -- on every host -----------------------------------------------------------------------------------------------


def worker() -> None:
    """One host: prints a line for each kind of positions and each way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options, spec = SyncOptions(threads=1), {"weight": TensorSpec(SHAPE)}
    synchronizers = {
        strategy: Synchronizer(None, Plan(METHOD, strategy=strategy, feedback="none"), tensors=spec, options=options)
        for strategy in STRATEGIES
    }
    for positions in EXPONENTS:
        kept = gradient(positions, dist.get_rank())
        ways = {way: _step_of(one) for way, one in synchronizers.items()}
        ways[DENSE] = lambda grad: dist.all_reduce(grad)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        sent = dict.fromkeys(ways, 0)
        for block in range(-1, BLOCKS):  # the first warms up
            for way, synchronize in ways.items():
                dist.barrier()
                before = interface_counters()
                found = [timed(synchronize, kept.clone()) for _ in range(BLOCK_STEPS)]
                dist.barrier()
                if block >= 0:
                    seconds[way] += found
                    sent[way] += (interface_counters() - before).bytes_sent
        for way in ways:
            total = torch.tensor([sent[way] / len(seconds[way])], dtype=torch.float64)
            most = total.clone()
            dist.all_reduce(total)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            say(positions=positions, way=way, seconds=seconds[way], sent=float(total) / HOSTS, most=float(most))
    for one in synchronizers.values():
        one.close()
    dist.destroy_process_group()


def _step_of(synchronizer: Synchronizer) -> Callable[[torch.Tensor], None]:
    def synchronize(grad: torch.Tensor) -> None:
        synchronizer.begin_step()
        synchronizer.submit([GradientSlice("weight", grad)])
        synchronizer.wait()
        synchronizer.commit()

    return synchronize


def timed(synchronize: Callable[[torch.Tensor], Any], grad: torch.Tensor) -> float:
    """Seconds of one step on the slowest host."""
    begun = common_moment()
    sleep_until(begun)
    synchronize(grad)
    seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


# -- the positions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What the positions of a number of ranks have in common; see `Cell`."""

    growth: float
    ranges: float
    hashed: float
    overlap: float


def draw(positions: str, num_ranks: Sequence[int]) -> dict[int, Drawn]:
    """Draw positions for every rank, and compare those of the first ranks."""
    size = SHAPE[0] * SHAPE[1]
    count, seen, found = round(RATIO * size), np.zeros(size, bool), {}
    first = np.empty(0, np.int64)
    for rank in range(max(num_ranks)):
        mine = np.sort(np.argpartition(arrivals(positions, rank), count)[:count])
        first = mine if rank == 0 else first
        seen[mine] = True
        if (world_size := rank + 1) in num_ranks:
            union = int(np.count_nonzero(seen))
            alone, independent = count / size, pairs.density_of_sum(count / size, world_size, 0.0)
            overlap = (independent - union / size) / (independent - alone)
            in_ranges = np.bincount(first * world_size // size, minlength=world_size)
            found[world_size] = Drawn(
                union / count, _spread(in_ranges), _spread(_owned(first, world_size)), min(1.0, max(0.0, overlap))
            )
    return found


def _owned(index: np.ndarray, owners: int) -> np.ndarray:
    """Number of pairs of each owner."""
    starts, rows = np.empty(owners + 1, np.int64), np.empty(index.size, np.uint32)
    values = np.zeros(index.size, np.float32)
    kernels.split_by_owner(index, values, 1, owners, rows, values.copy(), starts)
    return np.diff(starts)


def _spread(counts: np.ndarray) -> float:
    return float(counts.max() / counts.mean())


# -- lab and simulation ------------------------------------------------------------------------------------------


def run(
    part: Annotated[str, typer.Option(help="lab, simulated, or both if empty.")] = "",
    rates: Rates = "",
    num_ranks: Annotated[str, typer.Option("--ranks", help="Numbers of simulated ranks.")] = "",
) -> Iterator[Row]:
    """Lab, then simulation."""
    parts = choose(part, ("lab", "simulated"))
    if "lab" in parts:
        drawn = {positions: draw(positions, [HOSTS])[HOSTS] for positions in EXPONENTS}
        for rate in choose(rates, RATES):
            yield from in_lab(rate, drawn)
    if "simulated" in parts:
        costs, chosen = machine_costs([METHOD]), choose(num_ranks, SIMULATED)
        for positions in EXPONENTS:
            for world_size, each in draw(positions, chosen).items():
                yield from simulated(world_size, positions, each, costs)


def in_lab(rate: str, drawn: dict[str, Drawn]) -> Iterator[Row]:
    """One lab."""
    with Lab(HOSTS, rate) as lab:
        result = lab.run(processes.command(__name__, "worker"), env={"OMP_NUM_THREADS": "1"}, timeout=900)
    for said in processes.said(result.check()):
        steps, known = sorted(said["seconds"]), drawn[said["positions"]]
        fifth = len(steps) // 5
        cell = Cell(
            *("lab", rate, HOSTS, said["positions"], said["way"]),
            *(statistics.median(steps), steps[fifth], steps[-1 - fifth], len(steps), said["sent"], said["most"]),
            *(known.growth, known.ranges, known.hashed),
        )
        print(describe(cell), flush=True)
        yield asdict(cell)


def simulated(world_size: int, positions: str, drawn: Drawn, costs: Costs) -> Iterator[Row]:
    """One cluster, in which ranks send and receive at the same time and have a core each."""
    model = SimulatedModel([SimulatedGradient("weight", SHAPE, 0.0)])
    cluster = Cluster(world_size, SimulatedLink(parse_rate(SIMULATED_RATE), LATENCY))
    known = replace(costs, overlap=drawn.overlap)
    plans = {strategy: Plan(METHOD, strategy=strategy) for strategy in STRATEGIES} | {DENSE: Plan("none")}
    for way, plan in plans.items():
        result = step(model, plan, cluster, known)
        cell = Cell(
            *("simulated", SIMULATED_RATE, world_size, positions, way),
            *(result.seconds, result.seconds, result.seconds, 1, result.sent_bytes, result.sent_bytes),
            *(drawn.growth, drawn.ranges, drawn.hashed),
        )
        print(describe(cell), flush=True)
        yield asdict(cell)


def describe(cell: Cell) -> str:
    """One line."""
    return (
        f"{cell.part:>9} {cell.rate:>8} {cell.ranks:4} ranks {cell.positions:8} {cell.way:14} "
        f"{1e3 * cell.seconds:8.1f} ms ({1e3 * cell.p20:.0f} to {1e3 * cell.p80:.0f})   "
        f"{cell.sent_bytes / 1e6:7.2f} MB sent ({cell.most_sent_bytes / 1e6:.2f})   growth {cell.growth:6.2f}   "
        f"largest owner {cell.ranges:.2f}, hashed {cell.hashed:.2f}"
    )


def table(rows: Sequence[Row]) -> str:
    """One line for each way."""
    return "\n".join(describe(Cell(*(row[each.name] for each in fields(Cell)))) for row in rows)
