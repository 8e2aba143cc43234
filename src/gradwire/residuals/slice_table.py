"""The slices of a rank's residuals: found by key, cut to the ranges that are asked for, committed and rolled back.

Slices of one parameter and role never overlap, and gaps between them are zeros. Asking for another range re-slices
those that overlap it, without loss, also in an open chain. `residuals.transaction` has the rules of a step, and makes
all calls under its lock.
"""
# Shapes: N = elements of a range

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gradwire.core.spec import ElementRange
from gradwire.residuals.slices import (
    ROLES,
    ResidualKey,
    ResidualSlice,
    Role,
    Slices,
    any_of,
    cut,
    intersection,
    join,
    overlap,
    sum_of,
)


class SliceTable:
    """All slices of one rank.

    Attributes:
        slices: By parameter name, role and element range.
        open: Those that are staged, in the order of staging.
        version: Counts the changes of `slices`.
    """

    def __init__(self) -> None:
        self.slices: Slices = {}
        self.open: list[ResidualSlice] = []
        self.version = 0
        self._twins: list[ResidualSlice] = []  # one of each two

    def find(self, key: ResidualKey) -> ResidualSlice:
        """Return the slice of exactly this range. If there is none, re-slice those that overlap it."""
        slices = self.slices.setdefault((key.name, key.role), {})
        found = slices.get(key.range)
        if found is None:
            assert key.range.offset >= 0 and key.range.count >= 0, f"not a range: {key.range}"
            found = slices[key.range] = self._reslice(slices, key.range)
            self.version += 1
        self._take_over(key, found)
        return found

    def stage(self, found: ResidualSlice, key: ResidualKey) -> np.ndarray:
        """Return the buffer for the next residual of a slice that `find` has returned, float32[N]."""
        if found.staged is None:
            found.staged = np.empty(key.range.count, np.float32) if found.spare is None else found.spare
            found.spare = None
            self.open.append(found)
        return found.staged

    def commit(self, names: Collection[str] | None) -> None:
        """Make the staged residuals the state, for some parameters or for all."""
        self._part_twins()
        for each in self._open_of(names):
            if each.staged is not None:
                each.committed, each.staged, each.spare = each.staged, None, each.committed
        self._forget_closed()

    def rollback(self, names: Collection[str] | None) -> None:
        """Drop what was staged since the last commit, for some parameters or for all."""
        self._part_twins()
        for each in self._open_of(names):
            if each.staged is not None:
                each.staged, each.spare = None, each.staged
        self._forget_closed()

    def copy_staged(self) -> dict[tuple[str, Role], list[tuple[ElementRange, np.ndarray]]]:
        """Return copies of what is staged, by parameter name and role."""
        copies = {}
        for key, slices in self.slices.items() if self.open else ():
            staged = [(held, each.staged.copy()) for held, each in slices.items() if each.staged is not None]
            if staged:
                copies[key] = staged
        return copies

    def restage(
        self, copies: dict[tuple[str, Role], list[tuple[ElementRange, np.ndarray]]], names: Collection[str]
    ) -> bool:
        """Stage what `copy_staged` returned, and nothing else, for some parameters. Return whether any was staged."""
        staged = [
            (key, held, each)
            for key, slices in self.slices.items() if key[0] in names
            for held, each in slices.items() if each.staged is not None
        ]  # fmt: skip
        if not staged:
            return False
        self._part_twins()
        for key, held, each in staged:
            marked = [(old, values) for old, values in copies.get(key, ()) if overlap(old, held)]
            assert each.staged is not None, "selected"
            each.staged[:] = 0 if each.committed is None else each.committed
            for old, values in marked:
                shared = intersection(old, held)
                cut(each.staged, held, shared)[:] = cut(values, old, shared)
            if not marked:
                each.staged, each.spare = None, each.staged
        self._forget_closed()
        return True

    def add(self, key: ResidualKey, values: np.ndarray) -> None:
        """Add values, float32[N], to the state: to existing slices, and to new ones for the gaps between them."""
        self.version += 1
        slices = self.slices.setdefault((key.name, key.role), {})
        at = key.range.offset
        for old in sorted(old for old in slices if overlap(old, key.range)):
            if at < old.offset:
                gap = ElementRange(at, old.offset - at)
                slices[gap] = ResidualSlice(cut(values, key.range, gap).copy())
            shared = intersection(old, key.range)
            found = slices[old]
            if found.committed is None:
                found.committed = np.zeros(old.count, np.float32)
            cut(found.committed, old, shared)[:] += cut(values, key.range, shared)
            at = shared.end
        if at < key.range.end:
            gap = ElementRange(at, key.range.end - at)
            slices[gap] = ResidualSlice(cut(values, key.range, gap).copy())

    def replace(self, loaded: Slices) -> None:
        """Replace all slices."""
        self.version += 1
        self.slices = loaded
        self.open.clear()
        self._twins.clear()
        for name, role in loaded:
            for elements, each in loaded[name, role].items() if role == "aggregate" else ():
                self._join_twins(each, loaded.get((name, "local"), {}).get(elements))

    def prune(self, name: str) -> bool:
        """Delete slices of a parameter that are zero. Return whether another one is left, or any is staged."""
        for role in ROLES:
            slices = self.slices.get((name, role), {})
            if any(each.staged is not None for each in slices.values()):
                return True
            for elements in [elements for elements, each in slices.items() if not any_of(each.committed)]:
                del slices[elements]
                self.version += 1
            if slices:
                return True
        return False

    def drop(self, name: str, role: Role) -> None:
        """Delete the slices of a parameter in a role."""
        self.slices.pop((name, role), None)
        self.version += 1

    # -- staged slices ---------------------------------------------------------------------------------------

    def _open_of(self, names: Collection[str] | None) -> Sequence[ResidualSlice]:
        if names is None:
            return self.open
        return [each for key, slices in self.slices.items() if key[0] in names for each in slices.values()]

    def _forget_closed(self) -> None:
        self.open = [each for each in self.open if each.staged is not None]

    # -- ranges ----------------------------------------------------------------------------------------------

    def _reslice(self, slices: dict[ElementRange, ResidualSlice], wanted: ElementRange) -> ResidualSlice:
        """Cut a range out of the slices that overlap it. What they hold outside the range remains."""
        overlapping = [(old, slices.pop(old)) for old in [old for old in slices if overlap(old, wanted)]]
        found = join(overlapping, wanted)
        for old, each in overlapping:
            for outside in (
                ElementRange(old.offset, wanted.offset - old.offset),
                ElementRange(wanted.end, old.end - wanted.end),
            ):
                if outside.count > 0:
                    slices[outside] = join([(old, each)], outside)
                    self._add_to_open(slices[outside])
            self.open = [other for other in self.open if other is not each]
            if each.twin is not None:
                each.twin.twin = None
                each.twin = None
        self._add_to_open(found)
        return found

    def _add_to_open(self, found: ResidualSlice) -> None:
        if found.staged is not None:
            self.open.append(found)

    # -- roles -----------------------------------------------------------------------------------------------

    def _take_over(self, key: ResidualKey, found: ResidualSlice) -> None:
        """Add what the other role holds of the range, because its encoder no longer exists.

        A rank mostly encodes each element once per step, in one role. A role that is asked for has replaced the other
        one: after a resume or a re-plan, under another strategy. If both are staged between two commits, the rank
        encodes its own gradient before it merges (`Compressor.encode_own_before_merge`), and each role keeps its own.
        """
        if key.role not in ROLES:
            return
        other: Role = "local" if key.role == "aggregate" else "aggregate"
        slices = self.slices.get((key.name, other), {})
        same = slices.get(key.range)
        if same is not None and same.staged is not None:
            self._join_twins(found, same)
        if found.twin is not None and found.twin is same:
            return
        if not any(overlap(old, key.range) for old in slices):
            return
        self.version += 1
        left = self._reslice(slices, key.range)
        self.open = [each for each in self.open if each is not left]
        if left.staged is not None or found.staged is not None:
            self.open = [each for each in self.open if each is not found] + [found]
            found.staged = sum_of(found.latest(), left.latest())
        found.committed = sum_of(found.committed, left.committed)

    def _join_twins(self, one: ResidualSlice, other: ResidualSlice | None) -> None:
        if other is not None and one.twin is not other:
            one.twin, other.twin = other, one
            self._twins.append(one)

    def _part_twins(self) -> None:
        """Forget twins of which only one was staged: it takes over from the other when it is asked for."""
        kept = []
        for one in self._twins:
            other = one.twin
            if other is not None and (one.staged is None) == (other.staged is None):
                kept.append(one)
            elif other is not None:
                one.twin = other.twin = None
                self.version += 1  # so that whoever keeps slices asks again
        self._twins = kept
