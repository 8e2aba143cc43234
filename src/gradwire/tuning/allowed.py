"""What `auto` may choose from in a job: by the user's rules, the optimizer, and the range of the gradients.

What suffers from momentum is allowed only while the optimizer has none, and fp16 only while gradients fit its range.
Both can change while a model trains: a scheduler may give momentum to an optimizer, and gradients shrink or grow.
Tensors that were frozen at attach may come, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gradwire.compressors.base.registry import DENSE_NAME, names, spec_of
from gradwire.core import torch_private
from gradwire.core.spec import TensorSpec
from gradwire.planner import fidelity as levels
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry, is_small
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.candidates import NATIVE, NATIVE_BF16, NATIVE_FP16, Candidate
from gradwire.tuning.change import MISFIT, MOMENTUM, MORE_TENSORS, Reason
from gradwire.tuning.fp16_range import HEADROOM, misfit

STATE = 4
"""Length of `Allowed.state`."""
MISFIT_IN_USE = 4.0
"""Misfit from which on fp16 is given up; above 1, so that what was chosen is not given up at once."""


class Allowed:
    """What is allowed. All ranks `update` it with the same figures.

    Args:
        synchronizer: Synchronizer of the module.
        rules: The user's plan, in which the rule of some tensors is ``"auto"``.
        fidelity: Level of fidelity; see `gradwire.planner.fidelity`.
        knows_optimizer: Whether `gcomp` may be used.
        has_momentum: Returns whether the optimizer applies momentum, as far as one knows.

    Attributes:
        undecided: The rules, with dense tensors where `auto` decides.
        feedback: Momentum correction, or None.
        methods: Compressors that are allowed.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        rules: Plan,
        fidelity: str,
        knows_optimizer: bool,
        has_momentum: Callable[[], bool],
    ) -> None:
        self.undecided = rules.without_auto()
        self.feedback = self.undecided.feedback
        self._synchronizer = synchronizer
        self._rules = rules
        self._fidelity = fidelity
        self._knows_optimizer = knows_optimizer and self.feedback is None
        self._has_momentum = has_momentum
        self._misfit = 0.0  # of this rank's gradients, when they were last looked at
        # Whether all were finite then; None if there were none. True before the first look, which decisions wait for.
        self._looked: bool | None = True
        self._momentum, self._num_tensors = False, 0  # at the last update
        self._in_use = frozenset[str]()  # compressors that need not be given up
        self.update(self.state())

    @property
    def given(self) -> dict[str, PlanEntry]:
        """Entries of the tensors that the user has given a method."""
        return self._rules.given_entries(self._synchronizer.tensors)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Tensors to decide about. Those that were frozen at attach come later."""
        given = self.given
        return {name: spec for name, spec in self._synchronizer.tensors.items() if name not in given}

    @property
    def largest(self) -> int:
        """Elements of the largest tensor to decide about."""
        return max((spec.numel for spec in self.tensors.values()), default=1)

    def to_measure(self, min_elements: int | None) -> list[str]:
        """Compressors that a tensor has or is large enough for, and the casts of small ones.

        Args:
            min_elements: The user's smallest size of a tensor to compress; None for that of each compressor.
        """
        shapes = [spec.shape for spec in self.tensors.values()]
        given = {spec_of(entry.compressor) for entry in self.given.values() if entry.compressor.name in names()}
        return sorted(given) + [
            method.spec
            for method in self.methods
            if method.spec in (*levels.CASTS, levels.DENSE.spec)
            or not all(is_small(s, method.min_elements if min_elements is None else min_elements) for s in shapes)
        ]

    @property
    def unchosen(self) -> Candidate:
        """What needs no decision: nothing is compressed but what the user has named."""
        if self.feedback is not None:
            return Candidate("gradwire, dense with velocities", plan=self.undecided, baseline=True)
        if any(not entry.compressor.dense for entry in self.given.values()):
            return Candidate("gradwire, dense where auto decides", plan=self.undecided, baseline=True)
        return NATIVE

    @property
    def native_halves(self) -> list[Candidate]:
        """DDP's hooks that are allowed of those that round whole buckets to 16 bits.

        A bias before a normalization is enough to leave out that of fp16, since its gradients are rounding errors.
        """
        specs = {each.spec for each in self.methods} if self._rounds_all else set()
        return [each for each in (NATIVE_FP16, NATIVE_BF16) if each.hook in specs]

    @property
    def _rounds_all(self) -> bool:
        return not self.given and self.feedback is None

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate that is in use may stay."""
        if candidate == self.unchosen:
            return True
        if candidate.table is None:
            return candidate in (NATIVE_FP16, NATIVE_BF16) and self._rounds_all and candidate.hook in self._in_use
        return all(row.spec in self._in_use | {DENSE_NAME} for row in candidate.table.rows)

    def begin_look(self) -> None:
        """Begin a step whose gradients are looked at."""
        self._misfit, self._looked = 0.0, None

    def look(self, bucket: torch_private.GradBucket) -> None:
        """Look at the range of a bucket's gradients."""
        # A GradScaler skips steps whose gradients are too large.
        headroom = HEADROOM if self._synchronizer.residuals.loss_scale == 1.0 else 1.0
        found, finite = misfit(bucket.gradients(), self._synchronizer.world_size, headroom)
        self._misfit, self._looked = max(self._misfit, found), finite and self._looked is not False

    def state(self) -> np.ndarray:
        """What it depends on, on this rank, float64[STATE].

        Momentum, misfit to fp16, whether that is unknown because not all gradients were finite, and number of tensors.
        """
        unknown = self._looked is not True
        return np.array([self._has_momentum(), self._misfit, unknown, len(self._synchronizer.tensors)], np.float64)

    @staticmethod
    def knows_range(state: np.ndarray) -> bool:
        """Whether all ranks have seen the range of their gradients, by the largest `state` of all ranks."""
        return not state[2]

    def update(self, state: np.ndarray) -> None:
        """Update it by the largest `state` of all ranks."""
        has_momentum, worst, unknown, self._num_tensors = state.tolist()
        self._momentum = bool(has_momentum)
        found = levels.methods(self._fidelity, optimizer=self._knows_optimizer, momentum=self._momentum)
        worst = math.inf if unknown else worst
        self.methods = [method for method in found if worst <= 1 or method.spec != "fp16"]
        self._in_use = frozenset(method.spec for method in found if worst <= MISFIT_IN_USE or method.spec != "fp16")

    def change(self, state: np.ndarray, current: Candidate) -> Reason | None:
        """Return what has changed since the last update, by the largest `state` of all ranks; None if nothing has."""
        has_momentum, worst, _, num_tensors = state.tolist()
        if has_momentum and not self._momentum:
            return MOMENTUM
        if worst > MISFIT_IN_USE and current.casts_to_fp16:
            return MISFIT
        return MORE_TENSORS if num_tensors > self._num_tensors else None
