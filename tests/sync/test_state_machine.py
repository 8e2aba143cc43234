"""All layers under any sequence of steps, plans, faults, restarts and sizes.

After each move, what was produced is what was applied plus all residuals, and all ranks have the same model.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ANY, Ranks, ranks

SHAPES = {"a": (60, 50), "b": (900,), "c": (3,)}
# Exact, or with feedback: of these nothing may be lost.
METHODS = ("none", "lossless", "onebit", "threelc", "topk:ratio=0.05", "tbq", "powersgd:rank=2", "thc")
LISTED = ("topk:ratio=0.05", "dragonn:ratio=0.1:carry=True")
WAYS = [(method, strategy) for method in METHODS for strategy in ANY] + [(method, "sparse_reduce") for method in LISTED]
Tensors = dict[str, torch.Tensor]


def zeros(dtype: torch.dtype) -> Tensors:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


class Job:
    """Everything that a checkpoint holds: models of all ranks, and the sums of what was produced and applied."""

    def __init__(self, world_size: int) -> None:
        self.models = [zeros(torch.float32) for _ in range(world_size)]
        self.produced, self.applied = zeros(torch.float64), zeros(torch.float64)
        self.states: list[dict[str, Any]] = []
        self.steps = 0

    def copy(self, states: list[dict[str, Any]]) -> Job:
        made = Job(len(self.models))
        made.models = [{name: value.clone() for name, value in model.items()} for model in self.models]
        made.produced = {name: value.clone() for name, value in self.produced.items()}
        made.applied = {name: value.clone() for name, value in self.applied.items()}
        made.states, made.steps = states, self.steps
        return made


class AllLayers(RuleBasedStateMachine):
    """A job that is moved about."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.dumps = tempfile.TemporaryDirectory()

    @initialize(world_size=st.integers(1, 4), way=st.sampled_from(WAYS))
    def begin(self, world_size: int, way: tuple[str, str]) -> None:
        self.plan = Plan(way[0], strategy=way[1], min_elements=0)
        self.job, self.draws = Job(world_size), 0
        self._connect(world_size, [])
        self.checkpoint()

    def teardown(self) -> None:
        self.stack.close()
        self.dumps.cleanup()

    def _connect(self, world_size: int, states: list[dict[str, Any]]) -> None:
        """Set up a new group that continues from the states of the last."""
        self.stack.close()
        specs = {name: TensorSpec(shape) for name, shape in SHAPES.items()}
        nodes = 2 if world_size == 4 else 1
        self.group: Ranks = self.stack.enter_context(
            ranks(world_size, self.plan, timeout=30.0, nodes=nodes, tensors=specs, dump_dir=self.dumps.name)
        )
        if states:
            same = len(states) == world_size
            self.group.each(lambda one: one.load_state_dict(states[one.rank] if same else states))

    def _gradients(self, rank: int) -> Tensors:
        draw = torch.Generator().manual_seed(100 * self.draws + rank)
        return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}

    # -- moves -----------------------------------------------------------------------------------------------

    @rule(fate=st.sampled_from(("apply", "apply", "apply", "roll back", "nan", "unused")), victim=st.integers(0, 3))
    def step(self, fate: str, victim: int) -> None:
        """All ranks average; the step is applied, rolled back, or skipped because one rank has a NaN."""
        self.draws += 1
        world_size = len(self.job.models)
        given = [self._gradients(rank) for rank in range(world_size)]
        victim %= world_size
        if fate == "unused":  # by one rank
            given[victim]["b"].zero_()
        exact = [{name: grad.double() for name, grad in each.items()} for each in given]
        if fate == "nan":
            given[victim]["a"][0, 0] = float("nan")

        def run(one: Synchronizer) -> None:
            mine = given[one.rank]
            one.begin_step()
            used = {name: not (fate == "unused" and name == "b" and one.rank == victim) for name in mine}
            one.submit([GradientSlice(name, grad, used=used[name]) for name, grad in mine.items()])
            one.wait()
            if fate == "roll back":
                one.rollback()
            else:
                one.commit()
            if fate in ("apply", "unused"):
                for name, mean in mine.items():
                    self.job.models[one.rank][name] -= 0.1 * mean

        self.group.each(run)
        if fate == "nan":
            assert not all(bool(each["a"].isfinite().all()) for each in given)
        if fate in ("apply", "unused"):
            self.job.steps += 1
            for name in SHAPES:
                self.job.produced[name] += sum(each[name] for each in exact) / world_size
                self.job.applied[name] += given[0][name].double()

    @rule(way=st.sampled_from(WAYS))
    def change_plan(self, way: tuple[str, str]) -> None:
        """All ranks go on with another plan."""
        self.plan = Plan(way[0], strategy=way[1], min_elements=0)
        self.group.each(lambda one: one.replan(self.plan))

    @rule()
    def checkpoint(self) -> None:
        """All ranks save."""
        self.saved = self.job.copy(self.group.each(lambda one: one.state_dict()))

    @rule()
    def restart(self) -> None:
        """The job ends and resumes, with nothing lost."""
        self._connect(len(self.job.models), self.group.each(lambda one: one.state_dict()))

    @rule(world_size=st.integers(1, 4))
    def resize(self, world_size: int) -> None:
        """The job goes on with another number of ranks."""
        states = self.group.each(lambda one: one.state_dict())
        self.job.models = [self.job.models[0] for _ in range(world_size)]
        self.job = self.job.copy([])
        self._connect(world_size, states)
        self.checkpoint()

    @precondition(lambda self: len(self.job.models) > 1)
    @rule(victim=st.integers(0, 3))
    def lose_a_rank(self, victim: int) -> None:
        """A rank dies in a step. All others end with one error, and the job resumes from its last checkpoint."""
        world_size = len(self.job.models)
        victim %= world_size

        def run(one: Synchronizer) -> None:
            one.begin_step()
            mine = self._gradients(one.rank)
            if one.rank == victim:
                self.group.network.kill(victim)
                return
            one.submit([GradientSlice(name, grad) for name, grad in mine.items()])
            one.wait()

        found = self.group.outcomes(run)
        assert all(isinstance(found[rank], SyncError) for rank in range(world_size) if rank != victim)
        self.job = self.saved.copy(self.saved.states)
        self._connect(world_size, self.saved.states)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        held = zeros(torch.float64)
        for state in self.group.each(lambda one: one.state_dict()):
            for role in ("local", "aggregate"):
                for name, pieces in state["residuals"][role].items():
                    flat = held[name].view(-1)
                    for start, values in pieces.items():
                        flat[int(start) : int(start) + values.numel()] += values.double()
        for name in SHAPES:
            missing = self.job.produced[name] - self.job.applied[name] - held[name]
            assert float(missing.abs().max()) <= 1e-4 * (1 + self.job.steps), name  # of numbers of about 1 a step

    @invariant()
    def replicas_are_identical(self) -> None:
        for model in self.job.models[1:]:
            for name, value in model.items():
                assert torch.equal(value, self.job.models[0][name]), name


def run(examples: int, moves: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    chosen = settings(max_examples=examples, stateful_step_count=moves, suppress_health_check=checks)
    run_state_machine_as_test(AllLayers, settings=chosen)


def test_any_sequence_of_moves() -> None:
    run(6, 8)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_many_sequences_of_moves() -> None:
    run(60, 20)
