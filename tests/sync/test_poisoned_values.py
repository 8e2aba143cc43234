"""Values that are not finite, or that overflow: all ranks skip the same steps, and a skipped step leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.fusion import FUSION_FLAG
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.wire.frame import FrameKind, Header
from tests.sync.harness import ANY, Ranks, ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions

WORLD_SIZE = 3
SHAPES = {"w.matrix": (40, 30), "w.vector": (515,), "w.one": (1,), "w.scalar": (), "w.empty": (0, 4), "w.odd": (17, 9)}
SKIP, TAKE, EITHER = "skip", "take", "either"
Gradients = dict[str, torch.Tensor]
Change = Callable[[int, Gradients], object]
"""Changes the gradients of a rank, before they are submitted."""


class Poison(NamedTuple):
    """What the ranks submit in a step.

    Attributes:
        outcome: Whether the step must be skipped or taken; "either" depends on the compressor.
        change: What is done to the gradients.
    """

    outcome: str
    change: Change


def put(value: float, victims: tuple[int, ...], name: str = "w.matrix", at: int = -3) -> Change:
    return lambda rank, grads: grads[name].view(-1)[at:].fill_(value) if rank in victims else None


def fill(*values: float) -> Change:
    """Fill all gradients of rank r with the r-th value."""
    return lambda rank, grads: [grad.fill_(values[rank % len(values)]) for grad in grads.values()]


def scale(factor: float) -> Change:
    return lambda rank, grads: [grad.mul_(factor) for grad in grads.values()]


CLEAN = Poison(TAKE, lambda rank, grads: None)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float16, torch.bfloat16)}
POISONS: dict[str, Poison] = {
    "nan": Poison(SKIP, put(torch.nan, (1,))),
    "infinity": Poison(SKIP, put(torch.inf, (2,))),
    "negative infinity": Poison(SKIP, put(-torch.inf, (0,), "w.vector", 400)),
    "opposite infinities": Poison(SKIP, lambda rank, grads: grads["w.odd"][3].fill_((-1) ** rank * torch.inf)),
    "nan on all ranks": Poison(SKIP, fill(torch.nan)),
    "nan as a scalar": Poison(SKIP, put(torch.nan, (2,), "w.scalar", 0)),
    "infinity as one element": Poison(SKIP, put(torch.inf, (1,), "w.one", 0)),
    "zeros": Poison(TAKE, fill(0.0)),
    "constants": Poison(TAKE, fill(0.5, 0.25, 0.75)),
    "denormals": Poison(TAKE, scale(1e-39)),
}


def overflows(dtype: torch.dtype) -> dict[str, Poison]:
    """Finite gradients whose sum, residual or decoded value may be beyond the element type."""
    largest = LARGEST[dtype]
    return {
        "largest": Poison(EITHER, fill(largest)),
        "largest again": Poison(EITHER, fill(largest)),
        "nearly": Poison(EITHER, fill(0.9 * largest, 0.95 * largest, largest)),
        "opposite": Poison(EITHER, fill(largest, -largest)),
        "a few": Poison(EITHER, put(0.99 * largest, (0, 1, 2), "w.vector", -9)),
        "wide": Poison(EITHER, lambda rank, grads: [grad.mul_(largest / 8) for grad in grads.values()]),
    }


def gradients(rank: int, step: int, dtype: torch.dtype) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def submitted(grads: Gradients) -> list[GradientSlice]:
    """The gradients as they are submitted, one of them not contiguous."""
    views = {name: grad.t().contiguous().t() if name == "w.odd" else grad for name, grad in grads.items()}
    grads.update(views)
    return [GradientSlice(name, grad) for name, grad in views.items()]


class Outcome(NamedTuple):
    skipped: list[bool]
    means: list[Gradients]
    state: dict[str, Any]


def was_skipped(one: Synchronizer) -> bool:
    return [each.kind for each in one.events.latest() if each.kind in ("commit", "rollback")][-1] == "rollback"


def run(one: Synchronizer, poisons: list[Poison], dtype: torch.dtype, left_out: list[bool] | None = None) -> Outcome:
    """Take a step with each poison, and a clean one after it. Of steps that are left out, only the number counts."""
    steps = [poison for each in poisons for poison in (each, CLEAN)]
    skipped, means = [], []
    for step, poison in enumerate(steps):
        one.begin_step()
        if left_out is not None and left_out[step]:
            skipped.append(True)
            means.append({})
            continue
        grads = gradients(one.rank, step, dtype)
        poison.change(one.rank, grads)
        one.submit(submitted(grads))
        one.commit()
        skipped.append(was_skipped(one))
        finite = all(bool(mean.isfinite().all()) for mean in grads.values())
        assert finite != skipped[-1], f"step {step}: a mean is finite if and only if the step is taken"
        means.append(grads)
        assert all(kept.isfinite().all() for kept in tensors_of(one.residuals.state_dict())), f"step {step}: residuals"
    return Outcome(skipped, means, one.state_dict()["residuals"])


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    values = [value for _, value in sorted(state.items())] if isinstance(state, dict) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(left, right, strict=True)
    )


def group_of(method: Any, strategy: str, partitions: int | None, dtype: torch.dtype) -> Any:
    plan = Plan({"w.*": method}, strategy=strategy, partitions=partitions)
    options: dict[str, Any] = {"tensors": {name: TensorSpec(shape, dtype) for name, shape in SHAPES.items()}}
    if strategy == "server":
        options["server"] = LocalOptions("local:1", packet_elements=2048, aggregator=LocalAggregator())
    return ranks(WORLD_SIZE, plan, **options)


def each(group: Ranks, function: Callable[[Synchronizer], Outcome]) -> list[Outcome]:
    """`Ranks.each`, where the first rank that fails takes the others with it."""

    def ended(one: Synchronizer) -> Outcome:
        try:
            return function(one)
        except BaseException:
            group.network.kill(one.rank)
            raise

    found = group.outcomes(ended)
    errors = [outcome for outcome in found if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, SyncError)):  # the others' follow from the first
        raise error
    return found


def check(method: Any, strategy: str, partitions: int | None, dtype: torch.dtype, poisons: dict[str, Poison]) -> None:
    chosen = list(poisons.values())
    with group_of(method, strategy, partitions, dtype) as group:
        found = each(group, lambda one: run(one, chosen, dtype))
    skipped = found[0].skipped
    for name, is_skipped in zip(poisons, skipped[::2], strict=True):
        assert poisons[name].outcome in (EITHER, SKIP if is_skipped else TAKE), name
    for other in found[1:]:
        assert other.skipped == skipped
        for mine, theirs in zip(found[0].means, other.means, strict=True):
            assert same(tensors_of(mine), tensors_of(theirs))
    with group_of(method, strategy, partitions, dtype) as group:
        again = each(group, lambda one: run(one, chosen, dtype, left_out=skipped))
    for mine, theirs in zip(found, again, strict=True):
        for step, mean in enumerate(theirs.means):
            assert skipped[step] or same(tensors_of(mine.means[step]), tensors_of(mean)), f"step {step}"
        assert same(tensors_of(mine.state), tensors_of(theirs.state))


STRATEGIES = ANY
METHODS = ["none", "threelc", "int8shared"]
MORE = ["fp16", "lossless", "onebit", "qsgd", "natural", "signsgd", "topk:ratio=0.1", "powersgd", "thc"]
QUICK = [("none", each) for each in STRATEGIES] + [("threelc", each) for each in STRATEGIES]
QUICK += [("topk:ratio=0.1", "sparse_reduce"), ("int8shared", "scatter_reduce"), ("natural", "allgather")]


def combinations(methods: list[str], quick: list[tuple[str, str]], rest: Any = pytest.mark.ci) -> Any:
    """All strategies with these methods; those that are not `quick` have another mark."""
    found = [(method, strategy) for method in methods for strategy in STRATEGIES]
    found += [(method, "sparse_reduce") for method in methods if gw.make(method).sparse]
    return pytest.mark.parametrize(
        ("method", "strategy"), [pytest.param(*each, marks=[] if each in quick else rest) for each in found]
    )


@combinations([*METHODS, *MORE, "dragonn:carry=True"], QUICK)
def test_a_step_that_is_not_finite_might_as_well_not_have_been(method: str, strategy: str) -> None:
    check(method, strategy, None, torch.float32, POISONS | overflows(torch.float32))


@combinations(METHODS, [("threelc", "scatter_reduce")])
def test_so_might_one_of_16_bits(method: str, strategy: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check(method, strategy, None, dtype, overflows(dtype) | {"nan": POISONS["nan"]})


@pytest.mark.slow
@combinations([*METHODS, *MORE], [])
def test_so_might_one_whose_tensors_are_cut_into_ranges(method: str, strategy: str) -> None:
    for dtype in LARGEST:
        check(method, strategy, 4, dtype, POISONS | overflows(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.ci)])
@pytest.mark.parametrize("method", ["thc", pytest.param("uthc:bits=4", marks=pytest.mark.ci)])
def test_the_same_through_an_aggregator(method: str, dtype: torch.dtype) -> None:
    check(method, "server", None, dtype, {"nan": POISONS["nan"]} | overflows(dtype))


def test_a_sum_that_overflows_costs_the_step() -> None:
    """Each payload is finite, and so is the mean of the gradients. Powers of two above them add up to 2¹²⁸."""
    grads = {name: torch.full(shape, 3e38) for name, shape in SHAPES.items()}

    def step(one: Synchronizer) -> torch.Tensor:
        one.begin_step()
        own = {name: grad.clone() for name, grad in grads.items()}
        one.submit(submitted(own))
        one.commit()
        assert was_skipped(one)
        return own["w.matrix"]

    with ranks(2, Plan({"w.*": "natural"}, strategy="allgather")) as group:
        for mean in group.each(step):
            assert mean.isinf().any()


@pytest.mark.ci
@pytest.mark.parametrize(("method", "strategy"), [("none", "ring"), ("threelc", "scatter_reduce")])
def test_the_last_of_many_elements_costs_the_step(method: str, strategy: str) -> None:
    def step(one: Synchronizer) -> bool:
        one.begin_step()
        grad = torch.ones(2**24 + 1)
        grad[-1] = torch.nan if one.rank == 1 else 1.0
        one.submit([GradientSlice("w", grad)])
        one.commit()
        return was_skipped(one)

    with ranks(2, Plan({"w": method}, strategy=strategy)) as group:
        assert group.each(step) == [True, True]


# -- scalars of payloads -------------------------------------------------------------------------------------------


SCALED = ["onebit", "qsgd", "int8", "minmax"]  # their payloads begin with a float


def break_payloads(group: Ranks, victim: int, value: float) -> None:
    """From now on, the first number in each payload of a rank is `value`, with a valid checksum."""
    transport = group.network.transports[victim]
    send = transport.send

    def broken(peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        if header.kind in (FrameKind.PAYLOAD, FrameKind.STATS):
            body = body.copy()
            start = 4 if header.tensor & FUSION_FLAG else 0
            body[start : start + 4] = np.array([value], "<f4").view(np.uint8)
        send(peer, header, body, on_sent)

    transport.send = broken  # type: ignore[method-assign]


def step_of_one(one: Synchronizer, step: int) -> torch.Tensor:
    one.begin_step()
    grad = torch.randn(60, 50, generator=torch.Generator().manual_seed(1000 * one.rank + step))
    one.submit([GradientSlice("w", grad)])
    one.commit()
    return grad


@pytest.mark.parametrize(
    "value", [torch.nan, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.inf, -torch.inf))]
)
@pytest.mark.parametrize("partitions", [None, pytest.param(3, marks=pytest.mark.slow)])
@combinations(["threelc", *SCALED], [("threelc", each) for each in STRATEGIES])
def test_a_scalar_that_is_not_finite_ends_the_step_on_all_ranks(
    method: str, strategy: str, value: float, partitions: int | None
) -> None:
    """An error names the rank that sent it, and the others keep nothing of the step.

    On a ring, rank 0 hands a mean of rank 2 on before it decodes it, so the error may name rank 0. In an all-gather,
    the sender may be through before the others notice. It fails at its next step then.
    """
    blamed = (2, 0) if strategy == "ring" else (2,)
    with ranks(WORLD_SIZE, Plan({"w": method}, strategy=strategy, partitions=partitions)) as group:
        group.each(lambda one: step_of_one(one, 0))
        before = group.each(lambda one: tensors_of(one.state_dict()["residuals"]))
        break_payloads(group, 2, value)
        errors = group.outcomes(lambda one: step_of_one(one, 1))
        assert any(isinstance(error, SyncError) and error.rank in blamed for error in errors), errors
        said = [f"Rank {rank} sent bytes that are not a payload" for rank in blamed]
        assert any(text in str(error) for text in said for error in errors), errors
        for one, error, kept in zip(group.synchronizers, errors, before, strict=True):
            assert isinstance(error, SyncError) or (strategy == "allgather" and one.rank == 2), errors
            if isinstance(error, SyncError):
                assert same(tensors_of(one.residuals.state_dict()), kept)
        assert all(isinstance(error, SyncError) for error in group.outcomes(lambda one: step_of_one(one, 2)))


@pytest.mark.parametrize("value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.ci)])
@combinations(["int8shared", "thc"], [("int8shared", "scatter_reduce"), ("int8shared", "ring")])
def test_statistics_that_are_not_finite_cost_all_ranks_the_step(method: str, strategy: str, value: float) -> None:
    """Ranks cannot tell them from those of a gradient that is not finite."""
    with ranks(WORLD_SIZE, Plan({"w": gw.make(method)}, strategy=strategy)) as group:
        group.each(lambda one: step_of_one(one, 0))
        before = group.each(lambda one: tensors_of(one.state_dict()["residuals"]))
        break_payloads(group, 2, value)
        for mean in group.each(lambda one: step_of_one(one, 1)):
            assert mean.isnan().any()
        assert all(map(same, before, group.each(lambda one: tensors_of(one.state_dict()["residuals"]))))


@pytest.mark.parametrize("partitions", [1, 3])
def test_an_optimizer_without_a_poisoned_tensor_commits_its_own(partitions: int) -> None:
    """A scaler skips only the optimizer whose gradients are not finite, and steps the other one."""
    shapes = {"bad.w": (60, 70), "bad.b": (8,), "good.w": (70, 60), "good.b": (8,)}
    good = {name for name in shapes if name.startswith("good")}

    def grads_of(rank: int, step: int) -> Gradients:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def run(one: Synchronizer) -> tuple[Gradients, dict[str, np.ndarray], int]:
        applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for step in range(4):
            one.begin_step([good])  # the others belong to an optimizer that is not known
            grads = grads_of(one.rank, step)
            if step == 2 and one.rank == 1:
                for name in shapes.keys() - good:
                    grads[name].view(-1)[0] = torch.inf
            one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
            one.wait()
            stepped = good if step == 2 else set(shapes)
            for owned in (stepped - good, stepped & good):
                if owned:
                    one.commit(owned)
            for name in stepped:
                applied[name] += grads[name].double()
        one.begin_step()  # rolls back what no optimizer has applied
        return applied, one.residuals.total(), one.report().rollbacks

    with ranks(2, Plan("threelc", partitions=partitions, min_elements=0)) as group:
        found = group.each(run)
    for name, shape in shapes.items():
        steps = [step for step in range(4) if step != 2 or name in good]
        produced = sum(grads_of(rank, step)[name].double() / 2 for step in steps for rank in range(2))
        held = sum(
            torch.from_numpy(np.resize(totals.get(name, np.zeros(1)), produced.numel())).view(shape)
            for _, totals, _ in found
        )
        assert torch.allclose(found[0][0][name] + held, produced, rtol=0, atol=1e-4), name
    assert [rollbacks for _, _, rollbacks in found] == [1, 1]


def test_a_second_pass_goes_on_with_the_residuals_of_the_optimizer_that_is_not_poisoned() -> None:
    """Gradients accumulate over two passes. The means of the first stay in `.grad`, with what they left out staged."""
    owned = {"bad"}, {"good"}

    def grads_of(rank: int, step: int) -> Gradients:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return {name: torch.randn(60, 70, generator=generator) for name in ("bad", "good")}

    def run(one: Synchronizer) -> tuple[torch.Tensor, np.ndarray]:
        applied = torch.zeros(60, 70, dtype=torch.float64)
        for step, passes in enumerate([(0,), (1, 2)]):
            accumulated = {name: torch.zeros(60, 70) for name in ("bad", "good")}
            for number in passes:
                one.begin_step(owned)
                for name, grad in grads_of(one.rank, number).items():
                    accumulated[name] += grad
                if step:
                    accumulated["bad"][0, 0] = torch.inf
                one.submit([GradientSlice(name, grad) for name, grad in accumulated.items()])
                one.wait()
            for names in owned[step:]:
                one.commit(names)
            applied += accumulated["good"].double()
        return applied, one.residuals.total()["good"]

    with ranks(2, Plan("threelc", min_elements=0)) as group:
        found = group.each(run)
    produced = sum(grads_of(rank, number)["good"].double() / 2 for number in range(3) for rank in range(2))
    held = sum(torch.from_numpy(np.resize(held, 4200)).view(60, 70) for _, held in found)
    assert torch.allclose(found[0][0] + held, produced, rtol=0, atol=1e-4)


@pytest.mark.parametrize("commits", [False, True])
def test_a_step_is_counted_once_however_many_optimizers_roll_it_back(commits: bool) -> None:
    """A finite step whose gradients the user throws away is not counted."""
    owned = ["first"], ["second"]

    def run(one: Synchronizer) -> int:
        for step in range(3):
            one.begin_step(owned)
            value = torch.inf if step == 1 and one.rank == 1 else 1.0
            one.submit([GradientSlice(name, torch.full((9,), value)) for (name,) in owned])
            if step == 2:
                one.rollback()
            elif commits:
                for names in owned:
                    one.commit(names)
        one.begin_step(owned)
        return one.report().rollbacks

    with ranks(2, Plan("threelc", min_elements=0)) as group:
        assert group.each(run) == [1, 1]
