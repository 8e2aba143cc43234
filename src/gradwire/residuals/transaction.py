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
from typing import Any

import numpy as np

from gradwire.core.spec import TensorSpec
from gradwire.residuals import saved
from gradwire.residuals.slice_table import SliceTable
from gradwire.residuals.slices import ROLES, ResidualKey, ResidualSlice, Role
from gradwire.residuals.states import States


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
        self._table = SliceTable()
        self._lock = threading.Lock()
        self._num_commits = 0  # a commit of all; others and rollbacks count twice, because they break the alternation
        self._zeros = np.zeros(0, np.float32)
        self._marked = self._table.copy_staged()
        self.states = States()
        self._marked_states = self.states.staged
        self.loss_scale = 1.0

    # -- the step --------------------------------------------------------------------------------------------

    def source(self, key: ResidualKey) -> np.ndarray | None:
        """Return the residual to compensate with: the last staged one of this chain, else the state. None is zero.

        Call it before `stage`, which may return the same memory.
        """
        with self._lock:
            return self._table.find(key).latest()

    def stage(self, key: ResidualKey) -> np.ndarray:
        """Return the buffer for the next residual, float32[N]. Write all of it before `commit`.

        If the key was staged before in this chain, this is the memory that `source` returns.
        """
        with self._lock:
            return self._table.stage(self._table.find(key), key)

    def slots(self, keys: Sequence[ResidualKey]) -> ResidualSlots:
        """Return the places of several residuals, to stage them together in every step."""
        return ResidualSlots(self, keys)

    def _stage_slots(self, slots: ResidualSlots, used: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if all(used) and self._alternates(slots):
                for found in slots.slices:
                    found.staged, found.spare = found.spare, None
                self._table.open += slots.slices
                assert slots.latest is not None
                slots.latest, slots.num_commits = slots.latest[::-1], self._num_commits
                return slots.latest
            if slots.version != self._table.version:
                slots.slices = [self._table.find(key) for key in slots.keys]
                slots.version = self._table.version
                slots.addresses.clear()
                most = max((key.range.count for key in slots.keys), default=0)
                if self._zeros.size < most:
                    self._zeros = np.zeros(most, np.float32)
            before, after = np.zeros(len(used), np.uint64), np.zeros(len(used), np.uint64)
            for index, (key, found, is_used) in enumerate(zip(slots.keys, slots.slices, used, strict=True)):
                if is_used:
                    latest = found.latest()
                    before[index] = slots.address(self._zeros if latest is None else latest)
                    after[index] = slots.address(self._table.stage(found, key))
            slots.latest = before, after
            slots.num_commits = self._num_commits if all(used) and (before != after).all() else -1
            return before, after

    def _alternates(self, slots: ResidualSlots) -> bool:
        """Whether all slices have two buffers, and the next stage writes what the latest one read."""
        return (
            slots.version == self._table.version
            and slots.num_commits == self._num_commits - 1
            and all(found.staged is None and found.spare is not None for found in slots.slices)
        )

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the staged residuals the state, for some parameters or for all. Only swaps pointers."""
        with self._lock:
            self._num_commits += 1 if names is None else 2
            self._marked = {}
            self._table.commit(names)
            self.states.commit(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged since the last commit, for some parameters or for all. Only swaps pointers."""
        with self._lock:
            self._num_commits += 2
            self._table.rollback(names)
            self.states.rollback(names)

    def mark(self) -> None:
        """Note what is staged now, for `return_to_mark`. Copies it."""
        with self._lock:
            self._marked, self._marked_states = self._table.copy_staged(), self.states.staged

    def return_to_mark(self, names: Collection[str]) -> None:
        """Stage what was staged at the last `mark`, for some parameters, as if no encode had staged anything since."""
        with self._lock:
            self.states.return_to(self._marked_states, names)
            if self._table.restage(self._marked, names):
                self._num_commits += 2

    @property
    def is_open(self) -> bool:
        """Whether anything was staged since the last commit or rollback."""
        return bool(self._table.open)

    @property
    def has_open_velocity(self) -> bool:
        """Whether a velocity was staged since the last commit or rollback."""
        velocities = (slices for (_, role), slices in self._table.slices.items() if role == "velocity")
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
            self._table.add(key, values)

    def holds_after_pruning(self, name: str) -> bool:
        """Delete a parameter's residuals that are zero, and return whether any other is left.

        Deleted residuals are not scanned again, so that later calls are fast.
        """
        if not any(self._table.slices.get((name, role)) for role in ROLES):
            return False
        with self._lock:
            return self._table.prune(name)

    def scale(self, factor: float) -> None:
        """Multiply all values, staged ones included: the unit of the gradients has changed. The result is finite."""
        largest = np.finfo(np.float32).max
        with self._lock, np.errstate(over="ignore"):
            for slices in self._table.slices.values():
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
            self._table.drop(name, "velocity")

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the committed state: ``{"version", role: {parameter name: {offset: float32 tensor}}}``.

        Offsets are strings, so that any container accepts them as keys. ``"velocity"``, if present, has the form of a
        role. ``"states"``, if present, is the result of `States.state_dict`.
        """
        with self._lock:
            state = saved.written(self._table.slices)
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
            self.states.load(states, merge=merge)
            if not merge:
                self._table.replace(loaded)
                return
            for (name, role), slices in loaded.items():
                for elements, each in slices.items():
                    if each.committed is not None:
                        self._table.add(ResidualKey(name, elements, role), each.committed)

    # -- reports ---------------------------------------------------------------------------------------------

    def norms(self) -> dict[str, dict[Role, float]]:
        """Return the 2-norms of the state by parameter name and role, without roles that hold nothing."""
        squares: dict[str, dict[Role, float]] = {}
        with self._lock:
            for (name, role), slices in self._table.slices.items():
                arrays = [each.committed for each in slices.values() if each.committed is not None]
                if arrays and role in ROLES:
                    total = sum(float(np.dot(values, values.astype(np.float64))) for values in arrays)
                    squares.setdefault(name, {})[role] = total**0.5
        return squares

    def total(self) -> dict[str, np.ndarray]:
        """Return the float64 sum of both roles by parameter name, up to the last element that has a residual."""
        totals: dict[str, np.ndarray] = {}
        with self._lock:
            for (name, role), slices in self._table.slices.items():
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
                for slices in self._table.slices.values()
                for each in slices.values()
                for buffer in (each.committed, each.staged, each.spare)
            )
            return sum(buffer.nbytes for buffer in buffers if buffer is not None) + self.states.nbytes

    def _expect_closed(self, call: str) -> None:
        if self._table.open:
            raise RuntimeError(
                f"{call} is not possible while {len(self._table.open)} residuals are staged. Call commit() or "
                "rollback() first."
            )
