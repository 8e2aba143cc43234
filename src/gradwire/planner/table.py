"""The plan table: what the planner decided for each tensor, with the times that it predicts.

For people and for files: `str(table)` explains it, `save` and `load` keep it in a JSON file with a line a tensor,
`plan` is what `attach` takes. A pinned table is not to be replaced by later measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core.errors import OptionError
from gradwire.planner.costs import expect_document
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry

FORMAT, VERSION = "gradwire plan", 1


@dataclass(frozen=True)
class PlanRow:
    """One tensor. Seconds are those it would take with link and codec free.

    Attributes:
        name: parameter name.
        numel: elements.
        dtype: element type, as ``"float32"``.
        ready: when backward has made its gradient.
        spec: the compressor, as ``"threelc:sparsity=1.5"``.
        strategy: how it travels.
        partitions: ranges a rank's share is cut into.
        batched: travels in one message with other small tensors; seconds are then its share of theirs.
        encode: in which a rank's codec encodes.
        wire: in which a rank's link is busy.
        decode: in which a rank's codec decodes and merges.
        total: from gradient to mean, where these overlap.
        dense: the total without compression, by the best strategy or the framework's own all-reduce.
    """

    name: str
    numel: int
    dtype: str
    ready: float
    spec: str
    strategy: str
    partitions: int
    batched: bool
    encode: float
    wire: float
    decode: float
    total: float
    dense: float


@dataclass(frozen=True)
class PlanTable:
    """The plan of a model and what it predicts. Seconds of a whole step.

    Attributes:
        rows: in the order in which backward makes the gradients.
        world_size: ranks it was made for.
        fidelity: what the user allowed, or the methods there were to choose from.
        native: the framework's own all-reduce is faster than any of this: leave the gradients to it.
        step: of this plan.
        dense_step: without compression, by gradwire.
        native_step: by the framework's own all-reduce.
        ideal_step: the larger of the step without communication and the time of this plan's bytes on the link.
        limit: what this plan's step waits for: ``"backward"``, ``"link"``, ``"codec"`` or ``"latency"``.
        pinned: the user wants this plan and no other.
    """

    rows: tuple[PlanRow, ...]
    world_size: int
    fidelity: str
    native: bool
    step: float
    dense_step: float
    native_step: float
    ideal_step: float
    limit: str
    pinned: bool = False

    def entries(self) -> dict[str, PlanEntry]:
        """What `Plan.of_entries` takes.

        Raises:
            UnknownNameError, OptionError: a row names a compressor or options that do not exist.
        """
        return {row.name: _entry(row) for row in self.rows}

    def plan(self) -> Plan:
        """What `attach` and `Synchronizer` take, on every rank the same. It sends dense tensors by gradwire, too: where
        `native` is set, not attaching at all is faster.

        Raises:
            UnknownNameError, OptionError: as `entries` and `Plan.of_entries`.
        """
        return Plan.of_entries(self.entries())

    @property
    def compresses(self) -> bool:
        return any(row.spec != DENSE_NAME for row in self.rows)

    def verdict(self) -> str:
        """The decision in a sentence or two."""
        dense = min(self.dense_step, self.native_step)
        by = "the framework's own all-reduce" if self.native_step <= self.dense_step else "gradwire"
        if not self.compresses:
            return f"Do not compress: no method promises less than the {seconds(dense)} of a dense step by {by}."
        kinds = sorted({row.spec for row in self.rows if row.spec != DENSE_NAME})
        count = sum(row.spec != DENSE_NAME for row in self.rows)
        return (
            f"Compress {count} of {len(self.rows)} tensors ({', '.join(kinds)}): a step of {seconds(self.step)} in "
            f"place of {seconds(dense)} dense by {by}, {dense / self.step:.2f} times faster. What limits it: "
            f"{self.limit}; ideal is {seconds(self.ideal_step)}."
        )

    def __str__(self) -> str:
        lines = [_HEADINGS, *map(_cells, _grouped(self.rows))]
        widths = [max(map(len, column)) for column in zip(*lines)]
        body = ["  ".join(_align(cell, width, index) for index, (cell, width) in enumerate(zip(line, widths))).rstrip()
                for line in lines]  # fmt: skip
        title = f"Plan for {self.world_size} ranks, fidelity {self.fidelity}{', pinned' if self.pinned else ''}"
        return "\n".join([title, "", *body, "", self.verdict()])

    # -- as a file -------------------------------------------------------------------------------------------

    def pin(self) -> PlanTable:
        """The same plan, not to be replaced."""
        return replace(self, pinned=True)

    def to_json(self) -> str:
        """A document with a line a tensor."""
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        head |= {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        text = json.dumps(head, indent=1).removesuffix("\n}")
        rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in self.rows)
        return f'{text},\n "rows": [\n{rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> PlanTable:
        """Read what `to_json` wrote, or a person changed.

        Raises:
            OptionError: it is no such document, of another version, or has unknown, missing or ill-typed entries.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionError(f"Expected a plan as JSON, got something else ({error}). Do: make it anew.") from None
        document = expect_document(document, FORMAT, VERSION)
        rows = document.pop("rows", None)
        if not isinstance(rows, list):
            raise OptionError(f"Expected rows, a list, got {rows!r}. Do: make the plan anew.")
        document["rows"] = tuple(PlanRow(**_checked(row, PlanRow, f"row {index}")) for index, row in enumerate(rows))
        table = cls(**_checked(document, cls, "the plan"))
        table.entries()  # names and options of compressors, too
        return table

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> PlanTable:
        """Read a file. Raises as `from_json` does."""
        return cls.from_json(Path(path).read_text())


def _entry(row: PlanRow) -> PlanEntry:
    compressor = compressor_of(row.spec)
    feedback = "none" if compressor.exact else compressor.default_feedback
    return PlanEntry(compressor, row.strategy, row.partitions, feedback, row.batched)


def _checked(document: Any, cls: type, where: str) -> dict[str, Any]:
    """The entries of a JSON object, none unknown, none missing, each of its field's type."""
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    known = {field.name: kinds.get(str(field.type), tuple) for field in fields(cls)}
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    if not isinstance(document, dict) or not needed <= set(document) <= set(known):
        raise OptionError(f"Expected {', '.join(known)} (in {where}), got {document!r}. Do: make the plan anew.")
    for name, value in document.items():
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            raise OptionError(f"Expected {name} of another type, got {value!r} (in {where}). Do: make the plan anew.")
    return document


# -- for people --------------------------------------------------------------------------------------------------

_HEADINGS = ("tensor", "elements", "ready", "compressor", "strategy", "parts", "encode", "wire", "decode", "total",
             "dense", "faster")  # fmt: skip
_LEFT = (0, 3, 4)  # columns of text


def _grouped(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The rows, with those that travel in one message as one."""
    rows = list(rows)
    small: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.batched:
            small.setdefault(row.spec, []).append(row)
    return [row for row in rows if not row.batched] + [_together(batch) for batch in small.values()]


def _together(rows: list[PlanRow]) -> PlanRow:
    """Small tensors as one row."""
    if len(rows) == 1:
        return rows[0]
    sums = {name: sum(getattr(row, name) for row in rows)
            for name in ("numel", "encode", "wire", "decode", "total", "dense")}  # fmt: skip
    return replace(rows[0], name=f"{len(rows)} small tensors", ready=max(row.ready for row in rows), **sums)


def _cells(row: PlanRow) -> tuple[str, ...]:
    times = (row.encode, row.wire, row.decode, row.total, row.dense)
    faster = f"{row.dense / row.total:.1f}x" if row.total and row.spec != DENSE_NAME else ""
    return (row.name, f"{row.numel:,}", seconds(row.ready), row.spec, row.strategy, str(row.partitions),
            *map(seconds, times), faster)  # fmt: skip


def _align(cell: str, width: int, index: int) -> str:
    return cell.ljust(width) if index in _LEFT else cell.rjust(width)


def seconds(value: float) -> str:
    """A time with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value * 1e6:.3g} us"
