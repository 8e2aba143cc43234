"""Residuals as a transaction: what compression has left out so far, by parameter, element range and role.

A residual is float32 and in units of the mean: it is what must still be applied to the mean gradient. This holds for
both roles, `local` (this rank's own gradient) and `aggregate` (a sum that this rank encoded again). Therefore residuals
of the same elements can be added to each other, and nothing is lost.

A third role, `velocity`, holds the velocities of momentum correction. They are staged, sliced and saved like residuals,
but they are not part of what must still be applied.

Encodes *stage* the next residual. `commit` makes all staged residuals the state; `rollback` drops them and leaves the
state of the last commit, bit for bit. Stages chain: until the commit, each encode compensates with what the one before
staged. This takes two buffers per element range, the second from its first stage on.

`Synchronizer.commit` is the caller. `ddp.optimizers` triggers it after the user's optimizer.step(). Without an
optimizer, the next backward pass does, or saving the state.

Guarantees: asking for other ranges than the stored ones re-slices them without loss, also in an open chain. Threads may
stage different keys at the same time. No guarantees for threads that use the same key at the same time, or ask for
another range of a parameter while one of its buffers is written: `commit`, `rollback`, re-slicing and all that reads or
moves state belong between steps.
"""
# Shapes: N = elements of a range

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals import saved
from gradwire.residuals.slices import (
    ROLES,
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
from gradwire.residuals.states import States


@dataclass(frozen=True)
class ResidualKey:
    """Identifies a residual: an element range of a parameter, in one of the roles."""

    name: str
    range: ElementRange
    role: Role = "local"


class ResidualSlots:
    """The places of several residuals, found once and kept until the slices change. Made by `Residuals.slots`.

    Args:
        residuals: Residuals of this rank.
        keys: Keys of M residuals.
    """

    def __init__(self, residuals: Residuals, keys: Sequence[ResidualKey]) -> None:
        self.keys = keys
        self.slices: list[ResidualSlice] = []
        self.version = -1
        self.addresses: dict[int, tuple[int, np.ndarray]] = {}  # by id of the array, which is kept
        # Result of the latest `stage`, and the count of commits then; -1 if it does not tell the next one.
        self.latest: tuple[np.ndarray, np.ndarray] | None = None
        self.num_commits = -1
        self._residuals = residuals

    def stage(self, used: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        """Do `source` and `stage` for all keys.

        Args:
            used: Which keys to stage, M flags.

        Returns:
            Addresses of the residuals to compensate with, uint64[M], and of the buffers for the next ones; both 0 for
            keys that are not staged.
        """
        return self._residuals._stage_slots(self, used)

    def address(self, array: np.ndarray) -> int:
        """Return the address of a buffer. Asking NumPy in every step would take longer than encoding does."""
        known = self.addresses.get(id(array))
        if known is None:
            known = self.addresses[id(array)] = array.__array_interface__["data"][0], array
        return known[0]


class Residuals:
    """All residuals of one rank, and the states of its compressors, which are committed and rolled back with them.

    Attributes:
        states: States of compressors.
        loss_scale: Factor by which the gradients of this step, and so all residuals, are scaled.
    """

    def __init__(self) -> None:
        # Slices of one (name, role) never overlap. Gaps between them are zeros.
        self._slices: Slices = {}
        self._open: list[ResidualSlice] = []
        self._twins: list[ResidualSlice] = []  # one of each two
        self._lock = threading.Lock()
        self._version = 0  # counts the changes of `_slices`
        self._num_commits = 0  # a commit of all; others and rollbacks count twice, because they break the alternation
        self._zeros = np.zeros(0, np.float32)
        self._marked: dict[tuple[str, Role], list[tuple[ElementRange, np.ndarray]]] = {}  # staged at `mark`
        self.states = States()
        self._marked_states = self.states.staged
        self.loss_scale = 1.0

    # -- the step --------------------------------------------------------------------------------------------

    def source(self, key: ResidualKey) -> np.ndarray | None:
        """Return the residual to compensate with: the last staged one of this chain, else the state. None is zero.

        Call it before `stage`, which may return the same memory.
        """
        with self._lock:
            return self._slice(key).latest()

    def stage(self, key: ResidualKey) -> np.ndarray:
        """Return the buffer for the next residual, float32[N]. Write all of it before `commit`.

        If the key was staged before in this chain, this is the memory that `source` returns.
        """
        with self._lock:
            return self._staged(self._slice(key), key)

    def slots(self, keys: Sequence[ResidualKey]) -> ResidualSlots:
        """Return the places of several residuals, to stage them together in every step."""
        return ResidualSlots(self, keys)

    def _stage_slots(self, slots: ResidualSlots, used: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if all(used) and self._alternates(slots):
                for found in slots.slices:
                    found.staged, found.spare = found.spare, None
                self._open += slots.slices
                assert slots.latest is not None
                slots.latest, slots.num_commits = slots.latest[::-1], self._num_commits
                return slots.latest
            if slots.version != self._version:
                slots.slices = [self._slice(key) for key in slots.keys]
                slots.version = self._version
                slots.addresses.clear()
                most = max((key.range.count for key in slots.keys), default=0)
                if self._zeros.size < most:
                    self._zeros = np.zeros(most, np.float32)
            before, after = np.zeros(len(used), np.uint64), np.zeros(len(used), np.uint64)
            for index, (key, found, is_used) in enumerate(zip(slots.keys, slots.slices, used, strict=True)):
                if is_used:
                    latest = found.latest()
                    before[index] = slots.address(self._zeros if latest is None else latest)
                    after[index] = slots.address(self._staged(found, key))
            slots.latest = before, after
            slots.num_commits = self._num_commits if all(used) and (before != after).all() else -1
            return before, after

    def _alternates(self, slots: ResidualSlots) -> bool:
        """Whether all slices have two buffers, and the next stage writes what the latest one read."""
        return (
            slots.version == self._version
            and slots.num_commits == self._num_commits - 1
            and all(found.staged is None and found.spare is not None for found in slots.slices)
        )

    def _staged(self, found: ResidualSlice, key: ResidualKey) -> np.ndarray:
        if found.staged is None:
            found.staged = np.empty(key.range.count, np.float32) if found.spare is None else found.spare
            found.spare = None
            self._open.append(found)
        return found.staged

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the staged residuals the state, for some parameters or for all. Only swaps pointers."""
        with self._lock:
            self._num_commits += 1 if names is None else 2
            self._marked = {}
            self._part_twins()
            for each in self._open_of(names):
                if each.staged is not None:
                    each.committed, each.staged, each.spare = each.staged, None, each.committed
            self._open = [each for each in self._open if each.staged is not None]
            self.states.commit(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged since the last commit, for some parameters or for all. Only swaps pointers."""
        with self._lock:
            self._num_commits += 2
            self._part_twins()
            for each in self._open_of(names):
                if each.staged is not None:
                    each.staged, each.spare = None, each.staged
            self._open = [each for each in self._open if each.staged is not None]
            self.states.rollback(names)

    def mark(self) -> None:
        """Note what is staged now, for `return_to_mark`. Copies it."""
        with self._lock:
            self._marked, self._marked_states = {}, self.states.staged
            for key, slices in self._slices.items() if self._open else ():
                staged = [(held, each.staged.copy()) for held, each in slices.items() if each.staged is not None]
                if staged:
                    self._marked[key] = staged

    def return_to_mark(self, names: Collection[str]) -> None:
        """Stage what was staged at the last `mark`, for some parameters, as if no encode had staged anything since."""
        with self._lock:
            self.states.return_to(self._marked_states, names)
            staged = [
                (key, held, each)
                for key, slices in self._slices.items() if key[0] in names
                for held, each in slices.items() if each.staged is not None
            ]  # fmt: skip
            if not staged:
                return
            self._num_commits += 2
            self._part_twins()
            for key, held, each in staged:
                marked = [(old, values) for old, values in self._marked.get(key, ()) if overlap(old, held)]
                assert each.staged is not None, "selected"
                each.staged[:] = 0 if each.committed is None else each.committed
                for old, values in marked:
                    shared = intersection(old, held)
                    cut(each.staged, held, shared)[:] = cut(values, old, shared)
                if not marked:
                    each.staged, each.spare = None, each.staged
            self._open = [each for each in self._open if each.staged is not None]

    def _open_of(self, names: Collection[str] | None) -> Sequence[ResidualSlice]:
        if names is None:
            return self._open
        return [each for key, slices in self._slices.items() if key[0] in names for each in slices.values()]

    @property
    def is_open(self) -> bool:
        """Whether anything was staged since the last commit or rollback."""
        return bool(self._open)

    @property
    def has_open_velocity(self) -> bool:
        """Whether a velocity was staged since the last commit or rollback."""
        velocities = (slices for (_, role), slices in self._slices.items() if role == "velocity")
        return any(each.staged is not None for slices in velocities for each in slices.values())

    # -- moving state ----------------------------------------------------------------------------------------

    def add(self, key: ResidualKey, values: np.ndarray) -> None:
        """Add values, float32[N], to the state.

        Raises:
            ValueError: Another number of values than elements of the range.
            RuntimeError: Residuals are staged.
        """
        with self._lock:
            self._expect_closed("add()")
            if values.shape != (key.range.count,):
                raise ValueError(
                    f"The range of {key.name} has {key.range.count} elements, but the values have shape "
                    f"{values.shape}. Pass one value per element."
                )
            self._add(key, values)

    def holds_after_pruning(self, name: str) -> bool:
        """Delete a parameter's residuals that are zero, and return whether any other is left.

        Deleted residuals are not scanned again, so that later calls are fast.
        """
        if not any(self._slices.get((name, role)) for role in ROLES):
            return False
        with self._lock:
            for role in ROLES:
                slices = self._slices.get((name, role), {})
                if any(each.staged is not None for each in slices.values()):
                    return True
                for elements in [elements for elements, each in slices.items() if not any_of(each.committed)]:
                    del slices[elements]
                    self._version += 1
                if slices:
                    return True
            return False

    def scale(self, factor: float) -> None:
        """Multiply all values, staged ones included: the unit of the gradients has changed. The result is finite."""
        largest = np.finfo(np.float32).max
        with self._lock, np.errstate(over="ignore"):
            for slices in self._slices.values():
                for each in slices.values():
                    for values in (each.committed, each.staged):
                        if values is not None:
                            np.multiply(values, np.float32(factor), out=values)
                            np.clip(values, -largest, largest, out=values)

    def drop_velocity(self, name: str) -> None:
        """Delete the velocity of a parameter whose gradients are no longer momentum-corrected.

        Raises:
            RuntimeError: Residuals are staged.
        """
        with self._lock:
            self._expect_closed("drop_velocity()")
            self._slices.pop((name, "velocity"), None)
            self._version += 1

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the committed state: ``{"version", role: {parameter name: {offset: float32 tensor}}}``.

        Offsets are strings, so that any container accepts them as keys. ``"velocity"``, if present, has the form of a
        role. ``"states"``, if present, is the result of `States.state_dict`.
        """
        with self._lock:
            state = saved.written(self._slices)
            states = self.states.state_dict()
            return state | ({"states": states} if states else {})

    def load_state_dict(
        self, state: Mapping[str, Any], specs: Mapping[str, TensorSpec], *, merge: bool = False
    ) -> None:
        """Replace all residuals by a saved state. The whole state is checked first.

        Args:
            state: Result of `state_dict`.
            specs: Specs of the model's parameters by name.
            merge: Whether to add to the residuals instead, for the state of a rank that has left.

        Raises:
            ValueError: Another version, a range beyond its parameter, ranges that overlap, or values that are not
                finite.
            UnknownNameError: A parameter that the model does not have.
            TypeError: Anything else than float32 tensors in the form of `state_dict`.
            RuntimeError: Residuals are staged, with `merge`.
        """
        if merge:
            self._expect_closed("load_state_dict() with merge=True")
        loaded, states = saved.read(state, specs)
        with self._lock:
            self._version += 1
            self.states.load(states, merge=merge)
            if not merge:
                self._open.clear()
                self._slices = loaded
                self._twins.clear()
                for name, role in loaded:
                    for elements, each in loaded[name, role].items() if role == "aggregate" else ():
                        self._join_twins(each, loaded.get((name, "local"), {}).get(elements))
                return
            for (name, role), slices in loaded.items():
                for elements, each in slices.items():
                    if each.committed is not None:
                        self._add(ResidualKey(name, elements, role), each.committed)

    # -- reports ---------------------------------------------------------------------------------------------

    def norms(self) -> dict[str, dict[Role, float]]:
        """Return the 2-norms of the state by parameter name and role, without roles that hold nothing."""
        squares: dict[str, dict[Role, float]] = {}
        with self._lock:
            for (name, role), slices in self._slices.items():
                arrays = [each.committed for each in slices.values() if each.committed is not None]
                if arrays and role in ROLES:
                    total = sum(float(np.dot(values, values.astype(np.float64))) for values in arrays)
                    squares.setdefault(name, {})[role] = total**0.5
        return squares

    def total(self) -> dict[str, np.ndarray]:
        """Return the float64 sum of both roles by parameter name, up to the last element that has a residual."""
        totals: dict[str, np.ndarray] = {}
        with self._lock:
            for (name, role), slices in self._slices.items():
                for elements, each in slices.items():
                    if each.committed is None or role not in ROLES:
                        continue
                    before = totals.get(name, np.empty(0))
                    totals[name] = np.zeros(max(elements.end, before.size))
                    totals[name][: before.size] = before
                    totals[name][elements.offset : elements.end] += each.committed
        return totals

    @property
    def nbytes(self) -> int:
        """Memory of all buffers and states, in bytes."""
        with self._lock:
            buffers = (
                buffer
                for slices in self._slices.values()
                for each in slices.values()
                for buffer in (each.committed, each.staged, each.spare)
            )
            return sum(buffer.nbytes for buffer in buffers if buffer is not None) + self.states.nbytes

    # -- helpers; the lock is held ---------------------------------------------------------------------------

    def _slice(self, key: ResidualKey) -> ResidualSlice:
        """Return the slice of exactly this range. If there is none, re-slice those that overlap it."""
        slices = self._slices.setdefault((key.name, key.role), {})
        found = slices.get(key.range)
        if found is None:
            assert key.range.offset >= 0 and key.range.count >= 0, f"not a range: {key.range}"
            found = slices[key.range] = self._reslice(slices, key.range)
            self._version += 1
        self._take_over(key, found)
        return found

    def _take_over(self, key: ResidualKey, found: ResidualSlice) -> None:
        """Add what the other role holds of the range, because its encoder no longer exists.

        A rank mostly encodes each element once per step, in one role. A role that is asked for has replaced the other
        one: after a resume or a re-plan, under another strategy. If both are staged between two commits, the rank
        encodes its own gradient before it merges (`Compressor.encode_own_before_merge`), and each role keeps its own.
        """
        if key.role not in ROLES:
            return
        other: Role = "local" if key.role == "aggregate" else "aggregate"
        slices = self._slices.get((key.name, other), {})
        same = slices.get(key.range)
        if same is not None and same.staged is not None:
            self._join_twins(found, same)
        if found.twin is not None and found.twin is same:
            return
        if not any(overlap(old, key.range) for old in slices):
            return
        self._version += 1
        left = self._reslice(slices, key.range)
        self._open = [each for each in self._open if each is not left]
        if left.staged is not None or found.staged is not None:
            self._open = [each for each in self._open if each is not found] + [found]
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
        self._twins = kept

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
            self._open = [other for other in self._open if other is not each]
            if each.twin is not None:
                each.twin.twin = None
                each.twin = None
        self._add_to_open(found)
        return found

    def _add_to_open(self, found: ResidualSlice) -> None:
        if found.staged is not None:
            self._open.append(found)

    def _add(self, key: ResidualKey, values: np.ndarray) -> None:
        """Add to existing slices; make new ones only for the gaps between them."""
        self._version += 1
        slices = self._slices.setdefault((key.name, key.role), {})
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

    def _expect_closed(self, call: str) -> None:
        if self._open:
            raise RuntimeError(
                f"{call} is not possible while {len(self._open)} residuals are staged. Call commit() or rollback() "
                "first."
            )
