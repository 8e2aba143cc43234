"""Residuals: what compression has kept back, by parameter and range, as a transaction. Their only owner.

A residual is float32 and in *mean units*: what is still to be applied to the mean gradient. That holds for
both roles, `local` (this rank's own gradient) and `aggregate` (a sum that this rank re-encoded), so that any
residual may be added to any other of the same elements and nothing is lost.

A third role, `velocity`, holds what momentum correction accumulates of this rank's own gradient. It is staged, cut and
saved as the residuals are, but it is not among what is still to be applied: conservation is about the other two.

Encodes *stage* the next residual; `commit` makes all that is staged the state, `rollback` forgets it and
leaves the state of the last commit, bit for bit. Stages chain: until then, an encode compensates with what
the one before it staged. The cost is two buffers an element range, the second from its first stage on.

Guarantees: asking for other ranges than those stored re-slices without loss, also in an open chain; threads
may stage different keys at once. Does not guarantee anything to threads that use one key at once, or ask for
another range of a parameter while one of its buffers is being written: `commit`, `rollback`, re-slicing and
everything that reads or moves state belong between steps.
"""
# Shapes: N = elements of a range

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals.saved import mapping_of, offset_of, size_of
from gradwire.residuals.slices import ResidualSlice, any_of, cut, intersection, join, overlap, sum_of
from gradwire.residuals.states import States

Role = Literal["local", "aggregate", "velocity"]
ROLES: tuple[Role, ...] = ("local", "aggregate")
STORED: tuple[Role, ...] = (*ROLES, "velocity")
STATE_VERSION = 2


@dataclass(frozen=True)
class ResidualKey:
    """Which residual: a range of a parameter, in one of the roles."""

    name: str
    range: ElementRange
    role: Role = "local"


class Residuals:
    """All residuals of one rank, and the states of its compressors, which share their fate."""

    def __init__(self) -> None:
        # Pieces of one (name, role) never overlap; gaps between them are zeros.
        self._pieces: dict[tuple[str, Role], dict[ElementRange, ResidualSlice]] = {}
        self._open: list[ResidualSlice] = []
        self._lock = threading.Lock()
        self.states = States()

    # -- the step --------------------------------------------------------------------------------------------

    def source(self, key: ResidualKey) -> np.ndarray | None:
        """The residual to compensate with: what was staged last in this chain, else the state. None is zero.

        To be asked for before `stage`, which may hand out the same memory.
        """
        with self._lock:
            return self._piece(key).latest()

    def stage(self, key: ResidualKey) -> np.ndarray:
        """The float32 buffer to write the next residual to. All of it must be written before `commit`.

        Where the key has been staged before in this chain, it is the memory that `source` gives.
        """
        with self._lock:
            piece = self._piece(key)
            if piece.staged is None:
                piece.staged = np.empty(key.range.count, np.float32) if piece.spare is None else piece.spare
                piece.spare = None
                self._open.append(piece)
            return piece.staged

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make what was staged the state, of these parameters or of all. Pointer swaps only."""
        with self._lock:
            if names is None:
                chosen = self._open
            else:
                chosen = [piece for key, held in self._pieces.items() if key[0] in names for piece in held.values()]
            for piece in chosen:
                if piece.staged is not None:
                    piece.committed, piece.staged, piece.spare = piece.staged, None, piece.committed
            self._open = [piece for piece in self._open if piece.staged is not None]
            self.states.commit(names)

    def rollback(self) -> None:
        """Forget what was staged since the last commit. Pointer swaps only."""
        with self._lock:
            for piece in self._open:
                piece.staged, piece.spare = None, piece.staged
            self._open.clear()
            self.states.rollback()

    @property
    def is_open(self) -> bool:
        """Whether anything has been staged since the last commit or rollback."""
        return bool(self._open)

    # -- moving state ----------------------------------------------------------------------------------------

    def add(self, key: ResidualKey, values: np.ndarray) -> None:
        """Add float32 values to the state: what another rank, or another role, hands over."""
        with self._lock:
            self._expect_closed("add")
            if values.shape != (key.range.count,):
                raise ValueError(
                    f"Expected {key.range.count} values for {key.name}, got shape {values.shape}. "
                    "Do: pass one value an element of the range."
                )
            self._add(key, values)

    def migrate(self, ranges: Mapping[str, Iterable[ElementRange]]) -> None:
        """Fold aggregate residuals that have lost their encoder into local ones.

        Args:
            ranges: by parameter name, the ranges whose aggregate this rank encodes from now on. What it holds
                outside of them is added to its local residual of the same elements.
        """
        with self._lock:
            self._expect_closed("migrate")
            for name in [name for name, role in self._pieces if role == "aggregate"]:
                for kept in ranges.get(name, ()):
                    self._piece(ResidualKey(name, kept, "aggregate"))
                pieces = self._pieces[name, "aggregate"]
                kept_ranges = set(ranges.get(name, ()))
                for orphan in [found for found in pieces if found not in kept_ranges]:
                    values = pieces.pop(orphan).committed
                    if values is not None:
                        self._add(ResidualKey(name, orphan), values)

    def holds(self, name: str) -> bool:
        """Whether the state of a parameter is not all zeros. Forgets what is, so that asking again costs nothing."""
        with self._lock:
            for role in ROLES:
                pieces = self._pieces.get((name, role), {})
                if any(piece.staged is not None for piece in pieces.values()):
                    return True
                for where in [where for where, piece in pieces.items() if not any_of(piece.committed)]:
                    del pieces[where]
                if pieces:
                    return True
            return False

    def scale(self, factor: float) -> None:
        """Multiply all values, those staged too: for gradients in another unit from now on."""
        with self._lock:
            for pieces in self._pieces.values():
                for piece in pieces.values():
                    for values in (piece.committed, piece.staged):
                        if values is not None:
                            np.multiply(values, np.float32(factor), out=values)

    def drop(self, name: str) -> None:
        """Forget a parameter, whose residuals are then lost: for parameters that have left the model."""
        with self._lock:
            self._expect_closed("drop")
            for role in STORED:
                self._pieces.pop((name, role), None)
            self.states.drop(name)

    def drop_velocity(self, name: str) -> None:
        """Forget the velocity of a parameter, whose gradients are no longer momentum-corrected."""
        with self._lock:
            self._expect_closed("drop_velocity")
            self._pieces.pop((name, "velocity"), None)

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The committed state: ``{"version", role: {parameter name: {offset: float32 tensor}}}``.

        Offsets are strings, so that any container takes them as keys. The tensors are copies. ``"velocity"``, if there
        is one, has the form of a role; ``"states"``, if there are any, is what `States.state_dict` returns.
        """
        with self._lock:
            state: dict[str, Any] = {"version": STATE_VERSION}
            for role in STORED:
                by_name = {
                    name: {
                        str(where.offset): torch.from_numpy(piece.committed.copy())
                        for where, piece in sorted(pieces.items())
                        if piece.committed is not None and where.count
                    }
                    for (name, found), pieces in self._pieces.items()
                    if found == role and any(piece.committed is not None for piece in pieces.values())
                }
                if by_name or role in ROLES:
                    state[role] = by_name
            states = self.states.state_dict()
            return state | ({"states": states} if states else {})

    def load_state_dict(
        self, state: Mapping[str, Any], specs: Mapping[str, TensorSpec], *, merge: bool = False
    ) -> None:
        """Replace everything by `state`, after it has been checked as a whole.

        Args:
            state: what `state_dict` gave.
            specs: the model's parameters by name.
            merge: add to what is there instead: for the state of a rank that has left.

        Raises:
            ValueError: another version, a piece beyond its parameter, pieces that overlap, values that are
                not finite.
            UnknownNameError: a parameter that the model has not.
            TypeError: something else than float32 tensors in the form of `state_dict`.
        """
        loaded = Residuals()
        if merge:
            self._expect_closed("load_state_dict with merge")
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"Expected residual state of version {STATE_VERSION}, got {found!r}. "
                "Do: load what this version's state_dict() gave."
            )
        for field in state:
            if field not in ("version", "states", *STORED):
                raise UnknownNameError("field of the residual state", field, ("version", "states", *STORED))
        for role in STORED:
            for name, pieces in mapping_of(role, state.get(role, {})).items():
                if name not in specs:
                    raise UnknownNameError("parameter in the residual state", name, specs)
                for offset, values in mapping_of(name, pieces).items():
                    key = ResidualKey(name, ElementRange(offset_of(name, offset), size_of(name, values)), role)
                    loaded._load(key, values, specs[name].numel)
        states = mapping_of("states", state.get("states", {}))
        for name, ranges in states.items():
            if name not in specs:
                raise UnknownNameError("parameter in the residual state", name, specs)
            mapping_of(name, ranges)
        with self._lock:
            self.states.load(states, merge=merge)
            if not merge:
                self._open.clear()
                self._pieces = loaded._pieces
                return
            for (name, role), held in loaded._pieces.items():
                for where, piece in held.items():
                    if piece.committed is not None:
                        self._add(ResidualKey(name, where, role), piece.committed)

    def _load(self, key: ResidualKey, values: torch.Tensor, numel: int) -> None:
        where, pieces = key.range, self._pieces.setdefault((key.name, key.role), {})
        if where.offset < 0 or where.end > numel:
            raise ValueError(
                f"Expected a residual within the {numel} elements of {key.name}, got elements "
                f"{where.offset} to {where.end}. Do: load the state of a model with the same shapes."
            )
        if any(overlap(where, other) for other in pieces):
            raise ValueError(
                f"Expected residuals of {key.name} that do not overlap, got a second one at element "
                f"{where.offset}. Do: load the state of one rank, then that of others with merge=True."
            )
        pieces[where] = ResidualSlice(values.detach().cpu().numpy().copy())

    # -- reports ---------------------------------------------------------------------------------------------

    def norms(self) -> dict[str, dict[Role, float]]:
        """Euclidean norm of the state, by parameter name and role; roles that hold nothing are absent."""
        squares: dict[str, dict[Role, float]] = {}
        with self._lock:
            for (name, role), pieces in self._pieces.items():
                held = [piece.committed for piece in pieces.values() if piece.committed is not None]
                if held and role in ROLES:
                    total = sum(float(np.dot(values, values.astype(np.float64))) for values in held)
                    squares.setdefault(name, {})[role] = total**0.5
        return squares

    def total(self) -> dict[str, np.ndarray]:
        """By parameter name, the float64 sum over both roles of the state, up to the last element held."""
        totals: dict[str, np.ndarray] = {}
        with self._lock:
            for (name, role), pieces in self._pieces.items():
                for where, piece in pieces.items():
                    if piece.committed is None or role not in ROLES:
                        continue
                    before = totals.get(name, np.empty(0))
                    totals[name] = np.zeros(max(where.end, before.size))
                    totals[name][: before.size] = before
                    totals[name][where.offset : where.end] += piece.committed
        return totals

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, in bytes, and of the states."""
        with self._lock:
            return (
                sum(
                    buffer.nbytes
                    for pieces in self._pieces.values()
                    for piece in pieces.values()
                    for buffer in (piece.committed, piece.staged, piece.spare)
                    if buffer is not None
                )
                + self.states.nbytes
            )

    # -- helpers; the lock is held ---------------------------------------------------------------------------

    def _piece(self, key: ResidualKey) -> ResidualSlice:
        """The piece of exactly this range, re-sliced from what overlaps it if there is none."""
        pieces = self._pieces.setdefault((key.name, key.role), {})
        found = pieces.get(key.range)
        if found is None:
            assert key.range.offset >= 0 and key.range.count >= 0, f"not a range: {key.range}"
            found = pieces[key.range] = self._reslice(pieces, key.range)
        self._take_over(key, found)
        return found

    def _take_over(self, key: ResidualKey, found: ResidualSlice) -> None:
        """Add what the other role holds of the range, for its encoder there is gone.

        A rank encodes each element once a step, in one role; a role that is asked for has taken the other's place
        (after a resume, or a re-plan, under another strategy).
        """
        if key.role not in ROLES:
            return
        other: Role = "local" if key.role == "aggregate" else "aggregate"
        pieces = self._pieces.get((key.name, other), {})
        if not any(overlap(old, key.range) for old in pieces):
            return
        left = self._reslice(pieces, key.range)
        self._open = [piece for piece in self._open if piece is not left]
        if left.staged is not None or found.staged is not None:
            self._open = [piece for piece in self._open if piece is not found] + [found]
            found.staged = sum_of(found.latest(), left.latest())
        found.committed = sum_of(found.committed, left.committed)

    def _reslice(self, pieces: dict[ElementRange, ResidualSlice], where: ElementRange) -> ResidualSlice:
        """Cut `where` out of the pieces that overlap it; what they hold outside of it remains as pieces."""
        overlapping = [(old, pieces.pop(old)) for old in [old for old in pieces if overlap(old, where)]]
        wanted = join(overlapping, where)
        for old, piece in overlapping:
            for rest in (
                ElementRange(old.offset, where.offset - old.offset),
                ElementRange(where.end, old.end - where.end),
            ):
                if rest.count > 0:
                    pieces[rest] = join([(old, piece)], rest)
                    self._note(pieces[rest])
            self._open = [found for found in self._open if found is not piece]
        self._note(wanted)
        return wanted

    def _note(self, piece: ResidualSlice) -> None:
        if piece.staged is not None:
            self._open.append(piece)

    def _add(self, key: ResidualKey, values: np.ndarray) -> None:
        """Add to the state, into the pieces that are there; only what none covers makes new ones."""
        pieces = self._pieces.setdefault((key.name, key.role), {})
        at = key.range.offset
        for old in sorted(old for old in pieces if overlap(old, key.range)):
            if at < old.offset:
                gap = ElementRange(at, old.offset - at)
                pieces[gap] = ResidualSlice(cut(values, key.range, gap).copy())
            shared = intersection(old, key.range)
            piece = pieces[old]
            if piece.committed is None:
                piece.committed = np.zeros(old.count, np.float32)
            cut(piece.committed, old, shared)[:] += cut(values, key.range, shared)
            at = shared.end
        if at < key.range.end:
            gap = ElementRange(at, key.range.end - at)
            pieces[gap] = ResidualSlice(cut(values, key.range, gap).copy())

    def _expect_closed(self, action: str) -> None:
        if self._open:
            raise RuntimeError(
                f"Expected no staged residuals in {action}, got {len(self._open)}. Do: commit() or rollback() first."
            )
