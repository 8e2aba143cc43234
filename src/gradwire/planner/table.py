"""The plan table: the planner's decision for each tensor, with predicted times.

`str(table)` explains it, `save` and `load` keep it in a JSON file with a line per tensor, and `plan` returns what
`attach` takes. A pinned table must not be replaced because of later measurements.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core.errors import OptionError
from gradwire.core.files import write_whole
from gradwire.planner.documents import expect_fields, read_document
from gradwire.sync.fusion import is_fused
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry

FORMAT, VERSION = "gradwire plan", 2
_NATIVE = {"fp32": "the framework's own all-reduce", "fp16": "DDP's fp16 hook"}


@dataclass(frozen=True)
class PlanRow:
    """One tensor. Times are in seconds, with link and codec otherwise idle.

    Attributes:
        name: Name of the parameter.
        numel: Number of elements.
        dtype: Element type, such as ``"float32"``.
        ready: When backward has computed the gradient.
        spec: Compressor, such as ``"threelc:sparsity=1.5"``.
        strategy: Name of the strategy.
        partitions: Number of ranges that it is cut into. With one, it is fused with others where that is possible.
        batched: Whether it travels in one message with other dense tensors of its bucket. Times are then its share of
            theirs.
        encode: Time in which a rank encodes.
        wire: Time in which a rank's link is busy.
        decode: Time in which a rank decodes and merges.
        total: Time from gradient to mean, in which these overlap.
        dense: Total without compression, by the best strategy or the framework's own all-reduce.
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
    """The plan of a model, with predictions. Times are seconds of a whole step.

    Attributes:
        rows: Tensors in the order in which backward computes the gradients.
        world_size: Number of ranks that it was made for.
        fidelity: Level of fidelity that the user allowed, or the methods to choose from.
        native: Whether the framework's own all-reduce is faster than any plan.
        step: Step by this plan, or by that all-reduce.
        dense_step: Step without compression, by gradwire.
        native_step: Step by the framework's own all-reduce, of the fastest kind that was allowed.
        native_kind: This kind: ``"fp32"``, or ``"fp16"`` for DDP's fp16 hook. Empty if none was allowed.
        ideal_step: The larger of the step without communication and the time of this plan's bytes on the link.
        limit: What this plan's step waits for: ``"backward"``, ``"link"``, ``"codec"`` or ``"latency"``.
        pinned: Whether the user wants this plan and no other.
        feedback: Momentum correction of all tensors, as `PlanEntry.feedback`. Empty for the usual feedback of each.
    """

    rows: tuple[PlanRow, ...]
    world_size: int
    fidelity: str
    native: bool
    step: float
    dense_step: float
    native_step: float
    native_kind: str
    ideal_step: float
    limit: str
    pinned: bool = False
    feedback: str = ""

    def entries(self) -> dict[str, PlanEntry]:
        """Return the argument of `Plan.of_entries`.

        Raises:
            UnknownNameError, OptionError: A row names a compressor or options that do not exist.
        """
        return {row.name: _entry(row, self.feedback) for row in self.rows}

    def plan(self) -> Plan:
        """Return the plan for `attach` and `Synchronizer`, the same on every rank.

        gradwire sends dense tensors, too. If `native` is set, the framework's all-reduce of `native_kind` is faster.

        Raises:
            UnknownNameError, OptionError: See `entries` and `Plan.of_entries`.
        """
        return Plan.of_entries(self.entries())

    @property
    def compresses(self) -> bool:
        """Whether any tensor is compressed."""
        return any(row.spec != DENSE_NAME for row in self.rows)

    def verdict(self) -> str:
        """Return the decision in a sentence or two."""
        if self.world_size == 1:
            return "There is nothing to decide: a single rank exchanges no gradients."
        dense = min(self.dense_step, self.native_step)
        by = (
            "gradwire, dense"
            if not self.native_kind or self.dense_step < self.native_step
            else _NATIVE[self.native_kind]
        )
        if not self.compresses:
            advice = (
                f" Use that, and do not attach this plan, with which a step takes {seconds(self.dense_step)}."
                if self.native
                else ""
            )
            return f"Do not compress: no plan promises to save enough of a step of {seconds(dense)} by {by}.{advice}"
        kinds = sorted({row.spec for row in self.rows if row.spec != DENSE_NAME})
        count = sum(row.spec != DENSE_NAME for row in self.rows)
        return (
            f"Compress {count} of {len(self.rows)} tensors ({', '.join(kinds)}): a step of {seconds(self.step)} in "
            f"place of {seconds(dense)} by {by}, {dense / max(self.step, 1e-12):.2f} times faster. What limits it: "
            f"{self.limit}; ideal is {seconds(self.ideal_step)}."
        )

    def __str__(self) -> str:
        fused = Counter(_group(row, self.feedback) for row in self.rows)
        lines = [
            _HEADINGS,
            *(_cells(row, fused[_group(row, self.feedback)] > 1) for row in _grouped(self.rows)),
        ]
        widths = [max(map(len, column)) for column in zip(*lines)]
        body = ["  ".join(_align(cell, width, index) for index, (cell, width) in enumerate(zip(line, widths))).rstrip()
                for line in lines]  # fmt: skip
        title = f"Plan for {self.world_size} ranks, fidelity {self.fidelity}{', pinned' if self.pinned else ''}"
        return "\n".join([title, "", *body, "", self.verdict()])

    # -- as a file -------------------------------------------------------------------------------------------

    def pin(self) -> PlanTable:
        """Return the same plan, pinned."""
        return replace(self, pinned=True)

    def to_json(self) -> str:
        """Return a document with a line per tensor."""
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        head |= {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        text = json.dumps(head, indent=1).removesuffix("\n}")
        rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in self.rows)
        return f'{text},\n "rows": [\n{rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> PlanTable:
        """Read what `to_json` wrote, or a person changed.

        Raises:
            OptionError: It is another document or version, or has unknown, missing or ill-typed entries.
        """
        document = read_document(text, FORMAT, VERSION)
        rows = document.pop("rows", None)
        if not isinstance(rows, list):
            raise OptionError(f"rows must be a list, not {rows!r}. Make the plan again.")
        document["rows"] = tuple(PlanRow(**_checked(row, PlanRow, f"row {index}")) for index, row in enumerate(rows))
        table = cls(**_checked(document, cls, "the plan"))
        entries = table.entries()  # refuses unknown names and options of compressors
        if len(entries) < len(table.rows):
            twice = Counter(row.name for row in table.rows).most_common(1)[0][0]
            raise OptionError(f"{twice!r} has several rows. Correct the file, or make the plan again.")
        return table

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file. All ranks may write the same one."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> PlanTable:
        """Read a file. Raises what `from_json` raises."""
        return cls.from_json(Path(path).read_text(errors="replace"))


def _entry(row: PlanRow, feedback: str) -> PlanEntry:
    compressor = compressor_of(row.spec)
    usual = "none" if compressor.exact else compressor.default_feedback
    return PlanEntry(compressor, row.strategy, row.partitions, feedback or usual, row.batched)


def _checked(document: Any, cls: type, where: str) -> dict[str, Any]:
    """Return the entries of a JSON object for a dataclass, each of its field's type."""
    found = expect_fields(document, cls, where)
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    known = {field.name: kinds.get(str(field.type), tuple) for field in fields(cls)}
    for name, value in found.items():
        is_number = isinstance(value, (int, float))
        wrong_type = not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool)
        if wrong_type or (is_number and not 0 <= value < math.inf):
            raise OptionError(f"{name} must not be {value!r} (in {where}). Correct the file, or make the plan again.")
    return found


# -- for people --------------------------------------------------------------------------------------------------

_HEADINGS = ("tensor", "elements", "ready", "compressor", "strategy", "parts", "encode", "wire", "decode", "total",
             "dense", "faster")  # fmt: skip
_LEFT = (0, 3, 4)  # columns of text


def _grouped(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Combine the rows of batched tensors."""
    rows = list(rows)
    batches: dict[tuple[str, str], list[PlanRow]] = {}
    for row in rows:
        if row.batched:
            batches.setdefault((row.spec, row.strategy), []).append(row)
    return [row for row in rows if not row.batched] + [_together(batch) for batch in batches.values()]


def _together(rows: list[PlanRow]) -> PlanRow:
    if len(rows) == 1:
        return rows[0]
    sums = {name: sum(getattr(row, name) for row in rows)
            for name in ("numel", "encode", "wire", "decode", "total", "dense")}  # fmt: skip
    kind = "dense" if rows[0].spec == DENSE_NAME else "cast"
    return replace(rows[0], name=f"{len(rows)} {kind} tensors", ready=max(row.ready for row in rows), **sums)


def _group(row: PlanRow, feedback: str) -> tuple[object, ...]:
    """Return what the tensors have in common that are fused with this one; its name if it is not."""
    if is_fused(_entry(row, feedback), row.numel):
        return row.ready, row.spec, row.strategy, row.dtype
    return (row.name,)


def _cells(row: PlanRow, fused: bool) -> tuple[str, ...]:
    times = (row.encode, row.wire, row.decode, row.total, row.dense)
    faster = f"{row.dense / row.total:.1f}x" if row.total and row.spec != DENSE_NAME else ""
    parts = "fused" if fused else str(row.partitions)
    return (row.name, f"{row.numel:,}", seconds(row.ready), row.spec, row.strategy, parts,
            *map(seconds, times), faster)  # fmt: skip


def _align(cell: str, width: int, index: int) -> str:
    return cell.ljust(width) if index in _LEFT else cell.rjust(width)


def limit_of(step: float, compute: float, wire: float, codec: float, margin: float) -> str:
    """Return what a step waits for: ``"backward"``, ``"link"``, ``"codec"`` or ``"latency"``.

    Args:
        step: Seconds of the step.
        compute: Seconds without communication.
        wire: Seconds in which the link is busy.
        codec: Seconds in which the codec is busy.
        margin: Share of the step, below which what exceeds `compute` does not count.
    """
    tail = step - compute
    if tail <= margin * step:
        return "backward"
    if max(wire, codec) < tail / 2:
        return "latency"
    return "link" if wire >= codec else "codec"


def seconds(value: float) -> str:
    """Format a time with three digits and a unit."""
    value = value if value >= 1000 else float(f"{value:.3g}")  # which may be of the next unit
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value * 1e6:.3g} us"
