"""THC with three kinds of aggregation server, in the lab: step times and rounds, against DDP and co-located servers.

    tcp         Python's server over TCP, as in `benchmarks.papers.thc.lab`
    multicast   Python's server over UDP; each result is sent once, to all ranks
    xdp         the program in the kernel's packet path, in generic mode, which works between virtual cables

The server's link has the rate of the ranks' links, or W times that rate (`wide`). Packets of `multicast` and
`xdp` fit an Ethernet frame. Parts, rounds and steps are those of `benchmarks.papers.thc.lab`. Each cell is a job of its
own, with new processes, so a run that was ended goes on with the cells that its file lacks.

`round_server` is processor time of the server's process. It leaves out what `xdp` does in the kernel, on the cores that
all hosts share. Acknowledgments of `xdp`, at most 8 % of what the server sends, do not wait in the queue of its link.
"""
# Shapes: W = ranks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks import plotting
from benchmarks.keys import key_of
from benchmarks.options import Rates, Seconds, choose, listed
from benchmarks.papers.thc.lab import RANKS, RATES, Asked, Row, measure_rounds, measure_steps
from gradwire.bench.methods import DDP_FP16, DDP_FP32


class Case(NamedTuple):
    """A method, the kind of its server, and the server's link over that of the ranks."""

    method: str
    server: str = "tcp"
    link: float = 1.0


_FRAMES = "thc@server:mtu=1500"
CASES = {
    "DDP fp32": Case(DDP_FP32),
    "DDP fp16 hook": Case(DDP_FP16),
    "co-located": Case("thc@scatter_reduce"),
    **{
        f"{server}{width}": Case(method, server, link)
        for (server, method), (width, link) in product(
            {"tcp": "thc@server", "multicast": _FRAMES, "xdp": _FRAMES}.items(), {"": 1.0, " wide": RANKS}.items()
        )
    },
}
PARTS = {"rounds": measure_rounds, "steps": measure_steps}
KEY, CHOICES = ("part", "case", "rate"), ("parts", "cases", "rates")
_COLUMNS = ("round", "round_worker", "round_server", "round_wire")


def run(
    parts: Annotated[str, typer.Option(help="rounds, steps, or both.")] = "",
    cases: Annotated[str, typer.Option(help=f"Cases: {', '.join(CASES)}.")] = "",
    rates: Rates = "",
    workload: Annotated[str, typer.Option(help="What the ranks train.")] = "text",
    seconds: Seconds = 8.0,
    deadline: Annotated[float, typer.Option(help="Seconds after which a cell fails.")] = 600.0,
    *,
    done: AbstractSet[tuple[str, ...]] = frozenset(),
) -> Iterator[list[Row]]:
    """All cells, each a list of rows. At each rate, the cases follow each other."""
    chosen = listed(rates, RATES), choose(cases, list(CASES)), choose(parts, list(PARTS))
    for rate, name, part in product(*chosen):
        fixed = {"case": name, "ranks": RANKS, "dtype": "float32", "source": "measured"}
        if key_of({**fixed, "part": part, "rate": rate}, KEY) in done:
            continue
        method, server, link = CASES[name]
        print(f"{rate}: {name}, {part}", flush=True)
        asked = Asked([rate], [method], workload, seconds, 0, 0, deadline, server=server, link=link)
        yield [{**fixed, **row} for row in PARTS[part](asked)]


# -- tables ------------------------------------------------------------------------------------------------------------


def value(rows: Sequence[Row], case: str, rate: str, metric: str) -> float:
    """A figure; NaN where it was not measured."""
    found = [row["value"] for row in rows if (row["case"], row["rate"], row["metric"]) == (case, rate, metric)]
    return float(found[0]) if found else float("nan")


def table(rows: Sequence[Row]) -> str:
    """Markdown table for each rate: milliseconds, and bytes of a rank's interface for each element."""
    return "\n\n".join(_table_of(rows, rate) for rate in dict.fromkeys(row["rate"] for row in rows))


def _table_of(rows: Sequence[Row], rate: str) -> str:
    lines = [
        f"| {rate} | step, ms | faster than DDP fp32 | round, ms | worker | server | wire | there, B | back, B |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ddp = value(rows, "DDP fp32", rate, "step")
    for case in _cases(rows, rate):
        step = value(rows, case, rate, "step")
        cells = [f"{1e3 * step:.0f}", f"{ddp / step:.2f}"]
        cells += [f"{1e3 * value(rows, case, rate, metric):.0f}" for metric in _COLUMNS]
        cells += [f"{value(rows, case, rate, f'bytes_{way}_an_element'):.2f}" for way in ("there", "back")]
        lines.append(f"| {case} | {' | '.join(cells)} |".replace("nan", "–"))
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Draw the steps of all cases, with 20th and 80th percentiles, a panel for each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows if row["metric"] == "step"))
    with plotting.figure(folder / "thc-servers.png", columns=len(rates), size=(5 * len(rates), 3.6)) as axes:
        for axis, rate in zip(axes[0], rates):
            steps = {row["case"]: row for row in rows if (row["metric"], row["rate"]) == ("step", rate)}
            names = [case for case in CASES if case in steps]
            medians = [1e3 * steps[name]["value"] for name in names]
            spread = [
                [abs(1e3 * steps[name][bound] - median) for name, median in zip(names, medians)]
                for bound in ("p20", "p80")
            ]
            colors = [plotting.DENSE if name.startswith("DDP") else plotting.COLORS[0] for name in names]
            axis.barh(names, medians, xerr=spread, color=colors, error_kw={"elinewidth": 0.8})
            axis.invert_yaxis()
            axis.set_title(rate)
            axis.set_xlabel("ms per step")


def _cases(rows: Sequence[Row], rate: str) -> list[str]:
    measured = {row["case"] for row in rows if row["rate"] == rate}
    return [case for case in CASES if case in measured]
