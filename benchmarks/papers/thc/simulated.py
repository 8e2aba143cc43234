"""THC's throughput on its seven models and on ResNets, simulated with measured constants: figures 6, 7, 9, 12 and 13.

**Simulated**: gradwire's operations run in virtual time (`gradwire.simulate`). Measured on one core of this machine:
codecs, tasks and frames; packets of Python's aggregation server and of its clients, over TCP and as datagrams of one
Ethernet frame (`benchmarks.micro.aggregation_server`); packets of the program in the kernel, without interfaces and
copies (`benchmarks.micro.xdp_packets`). Assumed: links, their latency, and the computation of a model: its
multiply-adds over the speed of a GPU in `STUDIES`. A rank is a machine, whose GPUs have already added up their
gradients. Copies between GPU and host are left out, and codecs and engine have one core each.

DDP is a ring over buckets of 25 MiB, the first of 1 MiB, that costs nothing except wire, latency and headers, so no
real one is faster. gradwire's methods get the same buckets. Where a label says "free", these costs are zero: a bound,
and not gradwire.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.micro import aggregation_server, xdp_packets
from benchmarks.options import choose
from benchmarks.planning.auto_simulated import BUCKET_BYTES, buckets_of
from benchmarks.plotting import COLORS, DENSE, figure, legend_below, plain_numbers
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, LinearCost
from gradwire.simulate import (
    Cluster,
    Compute,
    SimulatedGradient,
    SimulatedLink,
    SimulatedModel,
    SimulatedServer,
    StepResult,
    models,
    step,
)
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan

KEY, CHOICES = ("figure", "model"), ("figures", "chosen_models")
LATENCY_SECONDS = 20e-6
THC = "thc:granularity=30"  # the paper's, for up to eight workers
RIVALS = ("topk:ratio=0.1", "dgc:ratio=0.1", "terngrad")
SIZE = 1 << 22  # elements of the tensor whose packets are measured
Row = dict[str, Any]


class Study(NamedTuple):
    """A figure of the paper.

    Attributes:
        models: Models.
        ranks: Number of machines.
        rates: Rates of the links in bits per second, the paper's last.
        batch: Samples of a GPU in a step.
        flops: Assumed floating-point operations a second of a GPU.
    """

    models: tuple[str, ...]
    ranks: int
    rates: tuple[float, ...]
    batch: int
    flops: float


A100, A100_CONVOLUTIONS, V100 = 50e12, 20e12, 12e12
SEVEN = ("vgg16", "vgg19", "roberta-base", "roberta-large", "bart-large", "bert-base", "gpt2")
STUDIES = {
    "6": Study(SEVEN, 4, (1e9, 10e9, 25e9, 100e9), 32, A100),
    "12": Study(("resnet50", "resnet101", "resnet152"), 4, (1e9, 10e9, 25e9, 100e9), 32, A100_CONVOLUTIONS),
    "9": Study(("vgg16", "vgg19", "roberta-base", "bert-base", "gpt2"), 8, (1e9, 10e9, 25e9), 32, V100),
    "13": Study(("roberta-large", "bart-large"), 8, (1e9, 10e9, 25e9), 8, V100),
}
DDP = Costs(1, (LinkCosts(0.0, 0.0),), {"none": CodecCosts(FREE, FREE, FREE, LinearCost(0.0, 4.0))})
CONSTANTS = "constants"


@dataclass(frozen=True)
class Packets:
    """Measured times of packets."""

    python: LinearCost
    python_datagram: LinearCost
    xdp: LinearCost
    rank: LinearCost
    rank_datagram: LinearCost

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Packets:
        """The times in the rows of `measured_packets`."""
        found = {(row["method"], int(row["size"])): float(row["value"]) for row in rows if row["figure"] == CONSTANTS}

        def line(name: str) -> LinearCost:
            points = sorted((size, value) for (method, size), value in found.items() if method == name)
            return LinearCost.fit(*zip(*points)) if len(points) > 1 else LinearCost(points[0][1], 0.0)

        return cls(*map(line, ("server tcp", "server udp", "server xdp", "rank tcp", "rank udp")))

    def servers(self, link: SimulatedLink, ranks: int) -> dict[str, SimulatedServer]:
        """Servers by label, for that many ranks with such links."""
        python = SimulatedServer(packet=self.python, statistics_packet=self.python, rank_packet=self.rank)
        datagrams = replace(
            python,
            packet=self.python_datagram,
            statistics_packet=self.python_datagram,
            rank_packet=self.rank_datagram,
            mtu=1500,
        )
        wide = replace(link, rate_bits=ranks * (link.rate_bits or 0.0))
        xdp = replace(datagrams, packet=self.xdp)
        bridge = replace(xdp, link=SimulatedLink(None))
        return {
            "thc, Python": python,
            "thc, Python, link W times": replace(python, link=wide),
            "thc, Python, multicast": replace(datagrams, multicast=True),
            "thc, XDP": xdp,
            "thc, XDP on bridge": bridge,
            "thc, XDP on bridge, ranks' packets free": replace(bridge, rank_packet=FREE),
        }


def measured_packets() -> Iterator[Row]:
    """Measure packets of the server, in Python and in the kernel, and of a rank."""
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(affinity)})  # the server's process takes another core
    try:
        for transport, elements in (("tcp", 61_440), ("tcp", 8192), ("udp", 1024)):
            found = aggregation_server.measure(transport, elements, SIZE)
            yield _constant(f"server {transport}", elements, found.packet_seconds)
            yield _constant(f"rank {transport}", elements, found.worker_packet_seconds)
    finally:
        os.sched_setaffinity(0, affinity)
    times = list(xdp_packets.in_kernel("siphash", 60))
    yield _constant("server xdp", xdp_packets.ELEMENTS, statistics.median(times))


def _constant(method: str, size: int, seconds: float) -> Row:
    fixed = {"figure": CONSTANTS, "model": "packets", "source": "measured", "dtype": "uint8"}
    return {**fixed, "method": method, "size": size, "metric": "packet_seconds", "value": seconds, "unit": "s"}


def codec_rows(costs: Costs) -> Iterator[Row]:
    """Measured costs of codecs per element of tensors of a million."""
    for spec in ("none", THC, *RIVALS):
        codec = costs.codec(spec)
        parts = {"encode": codec.encode, "decode": codec.decode, "merge": codec.merge, "stats": codec.stats}
        parts |= {"accumulate": codec.accumulate, "finalize": codec.finalize}
        for name, cost in parts.items():
            if cost is not None:
                row = _constant(f"{spec} {name}", 1 << 20, cost(1 << 20) / (1 << 20))
                yield row | {"model": "codecs", "dtype": "float32", "metric": "seconds_per_element"}


def compute_of(name: str, study: Study) -> Compute:
    """Assumed computation: three times the forward pass's multiply-adds, a third of it forward."""
    work = sum(tensor.work for tensor in models.get(name).tensors)
    seconds = 6 * work * study.batch / study.flops
    return Compute(seconds / 3, seconds * 2 / 3)


def ddp(model: SimulatedModel, cluster: Cluster, dtype: torch.dtype) -> StepResult:
    """DDP's all-reduce of buckets, in float32 or by its fp16 hook."""
    buckets = [
        SimulatedGradient(
            f"bucket{index}", (sum(each.spec.numel for each in bucket), 1), bucket[-1].ready_seconds, dtype
        )
        for index, bucket in enumerate(buckets_of(model.gradients))
    ]
    plan = Plan("none", strategy="ring", min_elements=0)
    return step(replace(model, gradients=buckets, bucket_bytes=None), plan, cluster, DDP)


def free_codecs(costs: Costs) -> Costs:
    """The same costs with codecs, tasks and frames that take no time."""
    codec = costs.codec(THC)
    names = ("encode", "decode", "merge", "stats", "accumulate", "finalize")
    free = replace(codec, **dict.fromkeys(names, FREE))
    return replace(costs, codecs={**costs.codecs, THC: free}, add=FREE, task=0.0, frame=FREE)


def steps(
    model: SimulatedModel, ranks: int, rate: float, costs: Costs, packets: Packets
) -> Iterator[tuple[str, StepResult]]:
    """Steps of all methods on one model and link, by label."""
    cluster = Cluster(ranks, SimulatedLink(rate, LATENCY_SECONDS))
    yield "DDP fp32", ddp(model, cluster, torch.float32)
    yield "DDP fp16", ddp(model, cluster, torch.float16)
    between, through = Plan(THC, strategy="scatter_reduce"), Plan(THC, strategy="server")
    yield "thc, co-located", step(model, between, cluster, costs)
    servers = packets.servers(cluster.link, ranks)
    for label, server in servers.items():
        yield label, step(model, through, replace(cluster, server=server), costs)
    for spec in RIVALS:
        yield spec.replace(":ratio=0.1", " 10 %"), step(model, Plan(spec, strategy="scatter_reduce"), cluster, costs)
    free, bridge = free_codecs(costs), servers["thc, XDP on bridge, ranks' packets free"]
    yield "thc, co-located, all free", step(model, between, cluster, free)
    all_free = replace(bridge, statistics_packet=FREE, packet=FREE)
    yield "thc, in the switch, all free", step(model, through, replace(cluster, server=all_free), free)


def simulated(number: str, name: str, costs: Costs, packets: Packets) -> Iterator[Row]:
    """Rows of one model in one figure."""
    study = STUDIES[number]
    compute = compute_of(name, study)
    model = SimulatedModel.of(models.get(name), compute, BUCKET_BYTES)
    for rate in study.rates:
        base = 0.0
        for label, found in steps(model, study.ranks, rate, costs, packets):
            base = base or found.seconds
            waits = {cause: seconds for cause, seconds in found.split.items() if cause != "compute"}
            yield {
                "figure": number, "model": name, "method": label, "ranks": study.ranks, "rate": f"{rate / 1e9:g}gbit",
                "dtype": "float32", "source": "simulated", "metric": "step", "value": found.seconds, "unit": "s",
                "compute_seconds": compute.total_seconds, "over_ddp": base / found.seconds,
                "waits_most_for": max(waits, key=lambda cause: waits[cause]) if any(waits.values()) else "",
                **{f"{cause}_seconds_waited": seconds for cause, seconds in waits.items()},
            }  # fmt: skip


def run(
    figures: Annotated[str, typer.Option(help="Figures of the paper: 6, 12, 9, 13.")] = "",
    chosen_models: Annotated[str, typer.Option("--models", help="Models, such as vgg16.")] = "",
    *,
    done: Set[tuple[str, ...]],
    recorded: Sequence[Row],
) -> Iterator[list[Row]]:
    """Measure packets if the record lacks them, and simulate all figures."""
    constants = [row for row in recorded if row["figure"] == CONSTANTS and row["model"] == "packets"]
    if (CONSTANTS, "packets") not in done:
        constants = list(measured_packets())
        yield constants
    costs = machine_costs([THC, *RIVALS])
    if (CONSTANTS, "codecs") not in done:
        yield list(codec_rows(costs))
    packets = Packets.of(constants)
    for number in choose(figures, list(STUDIES)):
        for name in STUDIES[number].models:
            if name in choose(chosen_models, _known_models()) and (number, name) not in done:
                print(f"figure {number}, {name}", flush=True)
                yield list(simulated(number, name, costs, packets))


def _known_models() -> list[str]:
    return list(dict.fromkeys(name for study in STUDIES.values() for name in study.models))


def table(rows: Sequence[Row]) -> str:
    """Constants; and speed-ups over DDP fp32 by figure, rate, method and model."""
    lines = ["measured constants"]
    for row in rows:
        if row["figure"] == CONSTANTS:
            scale, unit = (1e6, "us a packet of") if row["metric"] == "packet_seconds" else (1e9, "ns an element of")
            lines.append(f"  {row['method']:28}{scale * row['value']:8.2f} {unit} {int(row['size'])}")
    for (number, rate), found in _by(rows, "figure", "rate"):
        names = list(dict.fromkeys(row["model"] for row in found))
        compute = {row["model"]: 1e3 * row["compute_seconds"] for row in found}
        lines += ["", f"figure {number}, {rate}: simulated steps a second over those of DDP fp32"]
        lines.append(f"{'':42}" + "".join(f"{name:>14}" for name in names))
        lines.append(f"{'computation, ms':42}" + "".join(f"{compute[name]:14.0f}" for name in names))
        for (label,), each in _by(found, "method"):
            lines.append(f"{label:42}" + "".join(f"{row['over_ddp']:14.2f}" for row in each))
    return "\n".join(lines)


def _by(rows: Sequence[Row], *columns: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Simulated rows by these columns, in the order of the rows."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["source"] == "simulated":
            found.setdefault(tuple(_text(row[column]) for column in columns), []).append(row)
    yield from found.items()


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


SHOWN = (
    "DDP fp16", "thc, co-located", "thc, Python", "thc, Python, link W times", "thc, XDP on bridge",
    "thc, XDP on bridge, ranks' packets free", "topk 10 %", "terngrad", "thc, in the switch, all free",
)  # fmt: skip


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Speed-ups over DDP fp32, a picture for each figure and a panel for each rate."""
    for (number,), found in _by(rows, "figure"):
        panels = list(_by(found, "rate"))
        names = list(dict.fromkeys(row["model"] for row in found))
        columns = 2 if len(panels) == 4 else len(panels)
        size = (max(8.0, 1.5 + 0.62 * len(names) * columns), 3.4 * (len(panels) // columns) + 1.2)
        path = folder / f"thc-simulated-{number}.svg"
        with figure(path, len(panels) // columns, columns, size, sharey=True) as grid:
            axes = list(itertools.chain.from_iterable(grid))
            for axis, ((rate,), each) in zip(axes, panels, strict=True):
                _panel(axis, each, names)
                axis.set_title(f"{rate.removesuffix('gbit')} Gb/s", fontsize=10)
            for line in grid:
                line[0].set_ylabel("steps/s over DDP fp32")
            grid[0][0].figure.suptitle(f"Simulated with measured constants: THC's figure {number}", fontsize=11)
            legend_below(axes[0], 3)


def _panel(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    for index, label in enumerate(SHOWN):
        points = {row["model"]: row["over_ddp"] for row in rows if row["method"] == label}
        places = [place + (index - len(SHOWN) / 2) * 0.08 for place in range(len(names))]
        is_free = label.endswith("free")
        color = DENSE if label.startswith("DDP") else COLORS[(index - 1) % len(COLORS)]
        face = "none" if is_free else color  # hollow: a bound
        axis.plot(places, [points[name] for name in names], "o", color=color, markerfacecolor=face, label=label)
    axis.axhline(1, color=DENSE, linewidth=1)
    axis.set_yscale("log")
    axis.set_yticks([0.03, 0.1, 0.3, 1, 3, 10])
    axis.minorticks_off()
    plain_numbers(axis.yaxis)
    axis.set_xticks(range(len(names)), names, rotation=25, fontsize=8)
    axis.grid(axis="y", color="#e4e7eb")
