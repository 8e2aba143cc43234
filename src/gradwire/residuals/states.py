"""States of compressors: what `StatefulCompressor.next_state` returns, by parameter and element range.

A state is staged, committed, rolled back and saved with the residuals, which own this store. It is a hint: losing one
loses no gradient. So nothing is added or re-sliced. A state belongs to exactly one range, and is dropped when a state
of a range that overlaps it is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire.core.spec import ElementRange
from gradwire.residuals.saved import state_of
from gradwire.residuals.slices import overlap

Key = tuple[str, ElementRange]


class _Staged(NamedTuple):
    step: int  # that staged it
    values: np.ndarray
    before: np.ndarray | None  # state for that step


class States:
    """Arrays by parameter name and range."""

    def __init__(self) -> None:
        self._committed: dict[Key, np.ndarray] = {}
        self._staged: dict[Key, _Staged] = {}

    def get(self, name: str, where: ElementRange, step: int) -> np.ndarray | None:
        """State for a step: the one that an earlier step has staged last, else the committed one; read only."""
        staged = self._staged.get((name, where))
        if staged is None:
            return self._committed.get((name, where))
        return staged.values if staged.step < step else staged.before

    def stage(self, name: str, where: ElementRange, values: np.ndarray | None, step: int) -> None:
        """Stage the state of a range for the steps after this one; None leaves it as it is.

        The first state of a step counts, and is used from the next step on. If a tensor is averaged twice in one step,
        it would otherwise depend on the order in which a rank finishes.
        """
        staged = self._staged.get((name, where))
        if values is not None and (staged is None or staged.step != step):
            self._staged[name, where] = _Staged(step, values, self.get(name, where, step))

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the staged states the committed ones, of these parameters or of all."""
        for name, where in [key for key in self._staged if names is None or key[0] in names]:
            staged = self._staged.pop((name, where))
            if (name, where) not in self._committed:
                for old in [old for old in self._committed if old[0] == name and overlap(old[1], where)]:
                    del self._committed[old]
            self._committed[name, where] = staged.values

    def rollback(self) -> None:
        """Drop the staged states."""
        self._staged.clear()

    def drop(self, name: str) -> None:
        """Drop all states of a parameter."""
        self._committed = {key: values for key, values in self._committed.items() if key[0] != name}
        self._staged = {key: staged for key, staged in self._staged.items() if key[0] != name}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of the committed states: ``{parameter name: {"offset:count": tensor}}``."""
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for (name, where), values in sorted(self._committed.items()):
            saved.setdefault(name, {})[f"{where.offset}:{where.count}"] = torch.from_numpy(values.copy())
        return saved

    def load(self, states: Mapping[str, Mapping[str, Any]], *, merge: bool) -> None:
        """Replace everything by the result of `state_dict`; with `merge`, add only what is missing."""
        loaded = dict(state_of(name, key, values) for name, ranges in states.items() for key, values in ranges.items())
        self._staged.clear()
        self._committed = loaded | self._committed if merge else loaded

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        return sum(
            values.nbytes for values in (*self._committed.values(), *(each.values for each in self._staged.values()))
        )


def common_states(saved: Iterable[Mapping[str, Mapping[str, torch.Tensor]]]) -> dict[str, dict[str, torch.Tensor]]:
    """The states that several ranks have saved alike: those that a rank which joins them must have."""
    first, *others = saved
    return {
        name: kept
        for name, ranges in first.items()
        if (kept := {key: values for key, values in ranges.items() if all(_same(o, name, key, values) for o in others)})
    }


def _same(saved: Mapping[str, Mapping[str, torch.Tensor]], name: str, key: str, values: torch.Tensor) -> bool:
    other = saved.get(name, {}).get(key)
    return other is not None and torch.equal(other, values)
