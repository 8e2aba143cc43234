"""What a compressor carries from one step to the next, by parameter, as a transaction like the residuals.

It comes from what all ranks decoded, so all hold the same; it is a hint, and losing it loses no gradient. So nothing
is added or re-sliced: a state is taken as it is, and that of a rank that has left only where there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch


class Carried:
    """Arrays by parameter name, staged until the step commits. Owned by `Residuals`; between threads as these."""

    def __init__(self) -> None:
        self._committed: dict[str, np.ndarray] = {}
        self._staged: dict[str, np.ndarray] = {}

    def get(self, name: str) -> torch.Tensor | None:
        """What was staged last in this chain, else the state; to be read only."""
        found = self._staged.get(name, self._committed.get(name))
        return None if found is None else torch.from_numpy(found)

    def stage(self, name: str, values: np.ndarray) -> None:
        """Keep float32 values, which nobody writes to any more, for the next step."""
        self._staged[name] = values

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make what was staged the state, of these parameters or of all."""
        for name in [name for name in self._staged if names is None or name in names]:
            self._committed[name] = self._staged.pop(name)

    def rollback(self) -> None:
        """Forget what was staged since the last commit."""
        self._staged.clear()

    def drop(self, name: str) -> None:
        """Forget a parameter."""
        self._committed.pop(name, None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the committed state."""
        return {name: torch.from_numpy(values.copy()) for name, values in sorted(self._committed.items())}

    def load(self, state: Mapping[str, torch.Tensor], *, merge: bool) -> None:
        """Take over a checked state; with `merge`, only what is missing."""
        copies = {name: values.detach().cpu().numpy().copy() for name, values in state.items()}
        self._staged.clear()
        self._committed = copies | self._committed if merge else copies

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        return sum(values.nbytes for held in (self._committed, self._staged) for values in held.values())
