"""The page of `gradwire top`: one job, as tables for a terminal.

Texts come from files. They are printed as they are, without markup, and have no control characters
(`gradwire.observe.status`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradwire.observe.jobs import JobView, RankView
from gradwire.observe.status import AutoStatus, DecisionStatus, LinkStatus, RankStatus
from gradwire.observe.status_files import StatusFolder

STYLES = {
    "running": ("●", "green"), "starting": ("○", "cyan"), "blocked": ("◐", "yellow"), "idle": ("○", "yellow"),
    "silent": ("?", "magenta"), "stopped": ("‖", "magenta"), "killed": ("✗", "bold red"), "failed": ("✗", "bold red"),
    "ended": ("✓", "dim"),
}  # fmt: skip
MAX_LINKS = 8
"""Largest number of ranks whose links are shown as a matrix."""
MAX_TENSORS = 8
MAX_NAMED = 16
_COLUMNS: dict[str, tuple[int, Literal["left", "right"]]] = {
    "rank": (0, "right"), "state": (0, "left"), "step": (0, "right"), "step ms": (0, "right"),
    "runs, waits": (116, "left"), "wait ms": (70, "right"), "encode": (100, "right"), "decode": (100, "right"),
    "transit": (100, "right"), "sent": (50, "right"), "ratio": (80, "right"), "residual": (70, "right"),
    "process": (80, "right"),
}  # fmt: skip
"""Figures of a rank: the width of the terminal from which on they are shown, and how they are aligned."""
BAR, SPARK = 10, "▁▂▃▄▅▆▇█"
LATE_SECONDS = 5.0


def page(job: JobView, others: Sequence[JobView], folder: StatusFolder, width: int = 120) -> RenderableType:
    """Return the page.

    Args:
        job: What is shown.
        others: Other jobs of the folder, which are named.
        folder: The folder that they were found in.
        width: Columns of the terminal. A narrow one gets fewer figures of a rank.
    """
    first = job.first
    parts: list[RenderableType] = [_title(job), _tiles(job, width), _ranks(job, width), *_troubles(job)]
    if any(rank.status.links for rank in job.ranks):
        parts.append(_links(job))
    if first.auto is not None:
        parts.append(_auto(first.auto))
    if first.tensors:
        parts.append(_tensors(first))
    parts += [_hanging("!", Text(note), "yellow") for note in first.notes]
    return Group(*parts, *_footer(job, others, folder))


# -- the top -------------------------------------------------------------------------------------------------


def _title(job: JobView) -> RenderableType:
    first = job.first
    method = first.method if first.auto is None else f"{first.method}, fidelity {first.auto.fidelity}"
    title = Text.assemble(
        ("gradwire top", "bold cyan"), "  ", (first.script, "bold"), ("  job ", "dim"), job.name[:8],
        ("  method ", "dim"), method, ("  attached ", "dim"),
        f"{_duration(time.time() - first.started)} ago",
    )  # fmt: skip
    return Group(title, Text())


def _tiles(job: JobView, width: int) -> RenderableType:
    statuses = [rank.status for rank in job.ranks]
    slowest = max(statuses, key=lambda each: each.latest.seconds)
    sent, dense = (sum(getattr(each, name) for each in statuses) for name in ("sent_bytes", "dense_bytes"))
    latest = slowest.latest
    wait = f"{latest.wait / latest.seconds:.0%} waiting" if latest.seconds else "none yet"
    norms = [each.residual_norm for each in statuses if each.residual_norm is not None]
    rollbacks = max(each.rollbacks for each in statuses)
    room = max(1, width // 5 - 3)
    tiles = [
        ("step", f"{max(each.step for each in statuses):,}", f"{rollbacks:,} rolled back"),
        ("step time", _seconds(latest.seconds or None), wait),
        (
            "step times",
            sparkline(slowest.history, room),
            f"up to {_seconds(max(slowest.history[-room:], default=None))}",
        ),
        ("bytes saved", _bytes(dense - sent), f"{dense / sent:,.1f}× fewer" if sent else "–"),
        ("residual norm", f"{max(norms):.3g}" if norms else "–", "largest rank"),
    ]
    grid = Table.grid(expand=True)
    for _ in tiles:
        grid.add_column(ratio=1)
    grid.add_row(*(_tile(*each) for each in tiles))
    return grid


def _tile(name: str, value: str, below: str) -> RenderableType:
    lines = Group(Text(value, "bold", justify="center"), Text(below, "dim", justify="center"))
    return Panel(lines, title=Text(name), box=box.ROUNDED, border_style="cyan", padding=0)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the latest values as bars, the largest of them as the highest."""
    shown = values[-max(1, width) :]
    highest = max(shown, default=0.0)
    if not highest > 0:
        return "–"
    return "".join(SPARK[min(len(SPARK) - 1, int(each / highest * len(SPARK)))] for each in shown)


# -- ranks ---------------------------------------------------------------------------------------------------


def _ranks(job: JobView, width: int) -> RenderableType:
    hosts = {rank.status.host for rank in job.ranks}
    table = _table()
    for name, (least, align) in _COLUMNS.items():
        if width >= least:
            table.add_column(name, justify=align, no_wrap=True)
    for rank in job.ranks:
        cells = _rank_cells(rank, with_host=len(hosts) > 1)
        table.add_row(*(cells[name] for name, (least, _) in _COLUMNS.items() if width >= least))
    where = "" if len(hosts) > 1 else f" on {job.first.host}"
    return Group(
        _heading("Ranks", f"{len(job.ranks)} of {job.first.world_size}{where}; times and bytes of a step"), table
    )


def _rank_cells(rank: RankView, with_host: bool) -> dict[str, RenderableType]:
    status, latest = rank.status, rank.status.latest
    mark, style = STYLES[rank.state]
    process = f"{status.host}:{status.process.number}" if with_host else str(status.process.number)
    times = {
        "step ms": latest.seconds, "wait ms": latest.wait, "encode": latest.encode, "decode": latest.decode,
        "transit": latest.link,
    }  # fmt: skip
    return {
        "rank": str(status.rank),
        "state": Text(f"{mark} {rank.state}", style),
        "step": f"{status.step:,}",
        **{name: f"{1e3 * each:.1f}" if latest.steps else "–" for name, each in times.items()},
        "runs, waits": _bar(latest.wait, latest.seconds),
        "sent": _bytes(latest.sent_bytes),
        "ratio": f"{latest.dense_bytes / latest.sent_bytes:.1f}×" if latest.sent_bytes else "–",
        "residual": "–" if status.residual_norm is None else f"{status.residual_norm:.3g}",
        "process": Text(process, "dim"),
    }


def _bar(wait: float, whole: float) -> Text:
    if not whole:
        return Text("")
    waiting = min(BAR, max(0, round(BAR * wait / whole)))
    return Text.assemble(("█" * (BAR - waiting), "green"), ("░" * waiting, "yellow"))


def _troubles(job: JobView) -> list[RenderableType]:
    """What ranks say that do not just run."""
    lines: list[RenderableType] = []
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank in job.ranks:
        if rank.text:
            by_text.setdefault((rank.state, rank.text), []).append(rank.status.rank)
    for (state, text), ranks in by_text.items():
        mark, style = STYLES[state]
        lines.append(_hanging(mark, Text.assemble((f"{_named(ranks)}: ", style), text), style))
    if job.missing:
        text = (
            f"{_named(job.missing)}: no status in this folder. gradwire top sees the ranks of this machine. Run it on "
            "the others, too, or give all ranks one shared folder (GRADWIRE_DUMP_DIR)."
        )
        lines.append(_hanging("…", Text(text, "dim"), "dim"))
    return [*lines, Text()] if lines else []


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


def _hanging(mark: str, text: Text, style: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style), text)
    return grid


# -- links ---------------------------------------------------------------------------------------------------


def _links(job: JobView) -> RenderableType:
    rows = [rank.status for rank in job.ranks if rank.status.links][:MAX_LINKS]
    peers = sorted({link.peer for row in rows for link in row.links} | {row.rank for row in rows})[:MAX_LINKS]
    table = _table()
    table.add_column("rank")
    for peer in peers:
        table.add_column(f"to {peer}", justify="right")
    for row in rows:
        links = {link.peer: link for link in row.links}
        table.add_row(str(row.rank), *(_link(links.get(peer)) for peer in peers))
    caption = "share of the time in which frames were in transit, and bytes so far, from row to column"
    return Group(_heading("Links", caption), table)


def _link(link: LinkStatus | None) -> Text:
    if link is None:
        return Text("·", "dim")
    if link.gone:
        return Text("gone", "red")
    text = Text(f"{link.busy:.0%} {_bytes(link.sent_bytes)}", "yellow" if link.busy > 0.9 else "")
    if link.silent_seconds is not None and link.silent_seconds > LATE_SECONDS:
        text.append(f" silent {link.silent_seconds:.0f} s", "magenta")
    return text


# -- auto, tensors, the bottom -------------------------------------------------------------------------------


def _auto(auto: AutoStatus) -> RenderableType:
    does = "watches" if auto.settled else "measures and tries"
    now = Text.assemble(("auto ", "bold"), "now: ", (auto.current, "bold green"), (f"  ({does})", "dim"))
    if not auto.decisions:
        return Group(now, Text("It has not decided yet.", "dim"), Text())
    latest = auto.decisions[-1]
    table = _table()
    for name in ("candidate", "measured", "predicted", ""):
        table.add_column(name, justify="left" if name in ("candidate", "") else "right")
    for each in latest.candidates:
        chosen = each.name == latest.chosen
        table.add_row(
            Text(each.name, "bold green" if chosen else ""), _seconds(each.measured), _seconds(each.predicted),
            Text("← chosen", "green") if chosen else "",
        )  # fmt: skip
    earlier = [Text(f"Before: {_decision(each)}", "dim") for each in auto.decisions[-3:-1]]
    return Group(now, Text(_decision(latest)), table, *earlier, *([Text()] if earlier else []))


def _decision(decision: DecisionStatus) -> str:
    rate = (
        f"{decision.link_bits / 1e6:.3g} Mb/s" if decision.link_bits < 1e9 else f"{decision.link_bits / 1e9:.3g} Gb/s"
    )
    link = f"{rate}, {_seconds(decision.link_latency)}"
    return f"Step {decision.step:,}, {decision.reason}: {decision.chosen}. Slowest link {link}."


def _tensors(status: RankStatus) -> RenderableType:
    table = _table()
    table.add_column("tensor", no_wrap=True, max_width=36)
    table.add_column("method", no_wrap=True, max_width=44)
    for name in ("elements", "sent", "ratio", "residual"):
        table.add_column(name, justify="right")
    for each in status.tensors[:MAX_TENSORS]:
        norm = "–" if each.residual_norm is None else f"{each.residual_norm:.3g}"
        table.add_row(
            Text(each.name),
            Text(each.method),
            f"{each.elements:,}",
            _bytes(each.sent_bytes),
            f"{each.ratio:.1f}×",
            norm,
        )
    return Group(_heading("Tensors", f"those of rank {status.rank} that send most, figures of a step"), table)


def _footer(job: JobView, others: Sequence[JobView], folder: StatusFolder) -> list[Text]:
    lines = []
    if others:
        named = [f"{each.name[:8]} ({each.first.script}, {'running' if each.live else 'ended'})" for each in others[:4]]
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        lines.append(Text(f"Other jobs here: {', '.join(named)}{more}. Pass --job to see one.", "dim"))
    if folder.refused:
        name, reason = next(iter(folder.refused.items()))
        more = f", and {len(folder.refused) - 1} more files" if len(folder.refused) > 1 else ""
        lines.append(Text(f"Not read: {name}: {reason}{more}", "dim"))
    return lines


def _heading(title: str, caption: str) -> Text:
    return Text.assemble((title, "bold"), (f"  {caption}", "dim"))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="cyan")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1e3
    return f"{value:.3g} {unit}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
