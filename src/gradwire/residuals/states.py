"""States of compressors: results of `StatefulCompressor.next_state`, by parameter and element range.

States are staged, committed, rolled back and saved with the residuals. A state is a hint: losing it loses no gradient.
Therefore states are not added or re-sliced. A state belongs to exactly one range, and is dropped when a state of an
overlapping range is committed.
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
    step: int  # the step that staged it
    values: np.ndarray
    before: np.ndarray | None  # the state that this step uses


class States:
    """Arrays by parameter name and element range."""

    def __init__(self) -> None:
        self._committed: dict[Key, np.ndarray] = {}
        self._staged: dict[Key, _Staged] = {}

    def get(self, name: str, elements: ElementRange, step: int) -> np.ndarray | None:
        """Return the state for a step: the last one that an earlier step staged, else the committed one. Read only."""
        staged = self._staged.get((name, elements))
        if staged is None:
            return self._committed.get((name, elements))
        return staged.values if staged.step < step else staged.before

    def stage(self, name: str, elements: ElementRange, values: np.ndarray | None, step: int) -> None:
        """Stage the state of a range for the steps after this one. None keeps the state.

        The first state of a step counts. Otherwise, if a tensor is averaged twice in one step, the state would depend
        on the order in which a rank finishes.
        """
        staged = self._staged.get((name, elements))
        if values is not None and (staged is None or staged.step != step):
            self._staged[name, elements] = _Staged(step, values, self.get(name, elements, step))

    def commit(self, names: Collection[str] | None = None) -> None:
        """Commit the staged states, for some parameters or for all."""
        for name, elements in [key for key in self._staged if names is None or key[0] in names]:
            staged = self._staged.pop((name, elements))
            if (name, elements) not in self._committed:
                for old in [old for old in self._committed if old[0] == name and overlap(old[1], elements)]:
                    del self._committed[old]
            self._committed[name, elements] = staged.values

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop the staged states, for some parameters or for all."""
        self._staged = {} if names is None else {key: each for key, each in self._staged.items() if key[0] not in names}

    @property
    def staged(self) -> dict[Key, _Staged]:
        """The staged states now, for `return_to`."""
        return dict(self._staged)

    def return_to(self, staged: Mapping[Key, _Staged], names: Collection[str]) -> None:
        """Stage again what was staged then, for some parameters."""
        self.rollback(names)
        self._staged |= {key: each for key, each in staged.items() if key[0] in names}

    def drop(self, name: str) -> None:
        """Drop all states of a parameter."""
        self._committed = {key: values for key, values in self._committed.items() if key[0] != name}
        self._staged = {key: staged for key, staged in self._staged.items() if key[0] != name}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the committed states: ``{parameter name: {"offset:count": tensor}}``."""
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for (name, elements), values in sorted(self._committed.items()):
            saved.setdefault(name, {})[f"{elements.offset}:{elements.count}"] = torch.from_numpy(values.copy())
        return saved

    def load(self, states: Mapping[str, Mapping[str, Any]], *, merge: bool) -> None:
        """Replace all states by the result of `state_dict`. With `merge`, add only missing ones."""
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
    """Return the states that are equal on all ranks. A rank that joins them must have these."""
    first, *others = saved
    return {
        name: kept
        for name, ranges in first.items()
        if (kept := {key: values for key, values in ranges.items() if all(_same(o, name, key, values) for o in others)})
    }


def _same(saved: Mapping[str, Mapping[str, torch.Tensor]], name: str, key: str, values: torch.Tensor) -> bool:
    other = saved.get(name, {}).get(key)
    return other is not None and torch.equal(other, values)
