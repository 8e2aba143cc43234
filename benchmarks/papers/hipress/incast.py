"""What time slots gain under incast: eight hosts in the lab, with small and with usual buffers at the switch.

Fixed gradients, so that hosts compute next to nothing. Three patterns of traffic:

- `allgather`: every host sends 1 MB to every other host.
- `scatter_reduce`: 4 MB in eight chunks, each to its owner and back from there.
- `one owner`: eight tensors of 128 KiB (`int8`), submitted one after another. Each travels as a whole, from seven hosts
  to its owner and back. All hosts begin with the same owner: the worst case of incast.

Blocks of steps with and without slots take turns, on connections that stay open. A step lasts from a moment that all
hosts know until the slowest of them ends. Packets that TCP sends again, and its timeouts, are those of all hosts, from
the kernel's counters in each host's namespace.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import ranks as processes
from benchmarks.options import Rates, choose
from benchmarks.planning.calibration import common_moment, sleep_until
from benchmarks.ranks import say
from gradwire.core.spec import TensorSpec
from gradwire.lab import Lab
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

HOSTS, RATES, QUEUES = 8, ("100mbit", "1gbit"), ("32kib", "256kib")
PATTERNS = {
    "allgather": (Plan("none", strategy="allgather"), [(256, 1024)]),
    "scatter_reduce": (Plan("none", strategy="scatter_reduce"), [(1024, 1024)]),
    "one owner": (Plan("int8", strategy="scatter_reduce"), [(128, 1024)] * 8),
}
BLOCKS, BLOCK_STEPS = 4, 4
COUNTERS = {"snmp": {"RetransSegs": "resent"}, "netstat": {"TCPTimeouts": "timeouts"}}
Row = dict[str, Any]
KEY, CHOICES = ("rate", "queue"), ("rates", "queues")
WAYS = {"all peers": False, "slots": True}


@dataclass(frozen=True)
class Cell:
    """Steps of one pattern, with or without slots: seconds with percentiles, and packets of all hosts for each step."""

    rate: str
    queue: str
    pattern: str
    way: str
    seconds: float
    p20: float
    p80: float
    worst: float
    samples: int
    resent_packets: float
    timeouts: float


# -- on every host -----------------------------------------------------------------------------------------------


def tcp_counters() -> Counter[str]:
    """Packets that this host's TCP has sent again, and its timeouts."""
    found: Counter[str] = Counter()
    for file, names in COUNTERS.items():
        lines = [line.split() for line in Path("/proc/self/net", file).read_text().splitlines()]
        for header, values in zip(lines[::2], lines[1::2]):
            known = dict(zip(header, values))
            found.update({mine: int(known[theirs]) for theirs, mine in names.items() if theirs in known})
    return found


def worker() -> None:
    """One host: prints a line for each pattern and each way to send."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for pattern, (plan, shapes) in PATTERNS.items():
        grads = {f"layer{index}.weight": torch.randn(shape) for index, shape in enumerate(shapes)}
        specs = {name: TensorSpec.of(grad) for name, grad in grads.items()}
        ways = {
            way: Synchronizer(None, plan, tensors=specs, options=SyncOptions(time_slots=slots, threads=1))
            for way, slots in WAYS.items()
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        counts: dict[str, Counter[str]] = {way: Counter() for way in ways}
        for block in range(-1, BLOCKS):  # the first warms up
            for way, synchronizer in ways.items():
                before = tcp_counters()
                found = [timed(synchronizer, grads) for _ in range(BLOCK_STEPS)]
                if block >= 0:
                    seconds[way] += found
                    counts[way].update(tcp_counters() - before)
        for way, synchronizer in ways.items():
            synchronizer.close()
            both = torch.tensor([counts[way][name] for name in ("resent", "timeouts")], dtype=torch.float64)
            dist.all_reduce(both)
            resent, timeouts = (both / len(seconds[way])).tolist()
            say(pattern=pattern, way=way, seconds=seconds[way], resent=resent, timeouts=timeouts)
    dist.destroy_process_group()


def timed(synchronizer: Synchronizer, grads: dict[str, torch.Tensor]) -> float:
    """Seconds of one step on the slowest host."""
    begun = common_moment()
    sleep_until(begun)
    synchronizer.begin_step()
    for name, grad in grads.items():
        synchronizer.submit([GradientSlice(name, grad)])
    synchronizer.wait()
    synchronizer.commit()
    seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


# -- the labs ----------------------------------------------------------------------------------------------------


def run(
    rates: Rates = "",
    queues: Annotated[str, typer.Option(help="Bytes that may wait at the switch for each host.")] = "",
) -> Iterator[Row]:
    """All labs."""
    for rate in choose(rates, RATES):
        for queue in choose(queues, QUEUES):
            with Lab(HOSTS, rate, queue=queue) as lab:
                result = lab.run(processes.command(__name__, "worker"), env={"OMP_NUM_THREADS": "1"}, timeout=900)
            for said in processes.said(result.check()):
                steps = sorted(said["seconds"])
                fifth = len(steps) // 5
                spread = (statistics.median(steps), steps[fifth], steps[-1 - fifth], steps[-1], len(steps))
                counts = (said["resent"], said["timeouts"])
                cell = Cell(rate, queue, said["pattern"], said["way"], *spread, *counts)
                print(describe(cell), flush=True)
                yield asdict(cell)


def describe(cell: Cell) -> str:
    """One line for each way to send."""
    return (
        f"{cell.rate:>8} {cell.queue:>7} {cell.pattern:15} {cell.way:10} "
        f"{1e3 * cell.seconds:7.1f} ms ({1e3 * cell.p20:.0f} to {1e3 * cell.p80:.0f}, worst {1e3 * cell.worst:.0f})   "
        f"{cell.resent_packets:7.1f} packets resent, {cell.timeouts:5.2f} timeouts a step"
    )


def table(rows: Sequence[Row]) -> str:
    """One line for each way to send, and what slots gain."""
    lines, found = [], [Cell(*(row[each.name] for each in fields(Cell))) for row in rows]
    for plain, slotted in zip(found[::2], found[1::2]):
        gain = plain.seconds / slotted.seconds - 1
        lines += [describe(plain), f"{describe(slotted)}   {gain:+.1%}"]
    return "\n".join(lines)
