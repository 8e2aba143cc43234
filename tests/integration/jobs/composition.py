"""Jobs that combine gradwire with other features of torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from tests.integration.jobs.auto import Product
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

Batch = tuple[torch.Tensor, torch.Tensor]
# Of FEATURES, those that have several in one training, and what their results are compared with.
COMBINED = ("plain", "scaler", "all", "static graph, bucket views")


def of_two(rank: int, world_size: int) -> dict[str, Any]:
    """All that two ranks can show, in one launch."""
    return {job.__name__: job(rank, world_size) for job in (features, modules, own_hook, unused, branches_in_turns)}


def features(rank: int, world_size: int, names: Sequence[str] = COMBINED) -> dict[str, Any]:
    """Train with one feature after another; by its name, hash of the parameters, first and last losses."""
    return {name: train(rank, world_size, **FEATURES[name]) for name in names}


def train(
    rank: int,
    world_size: int,
    method: str = "threelc",
    module: Callable[[], nn.Module] = model,
    around: Callable[[nn.Module], nn.Module] = lambda ddp: ddp,
    autocast: torch.dtype | None = None,
    scaler_options: dict[str, Any] | None = None,
    tell_scaler: bool = True,
    clip: float | None = None,
    accumulate: int = 1,
    steps: int = 40,
    **ddp_options: Any,
) -> dict[str, Any]:
    ddp = around(wrap(module(), **ddp_options))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaler_options is not None, **(scaler_options or {}))
    handle = gw.attach(
        ddp, gw.Plan(method, min_elements=0), optimizer=optimizer, scaler=scaler if tell_scaler else None
    )
    source, losses, norms, scales = batches(rank, world_size), [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with (
                ddp.no_sync() if micro < accumulate - 1 else nullcontext(),
                torch.autocast("cpu", autocast, enabled=autocast is not None),
            ):
                loss = loss_of(ddp, next(source))
                scaler.scale(loss / accumulate).backward()
        scales.append(scaler.get_scale())
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    names = sorted(handle.state_dict()["residuals"]["local"])
    report = handle.report()
    handle.detach()
    return {
        "hash": fingerprint(ddp.parameters()),
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "norms": norms,
        "names": names,
        "scales": len(set(scales)),
        "steps": report.steps,
    }


# torch cannot split a compiled model into buckets smaller than its first, of 1 MiB.
LARGE_BUCKETS = {"bucket_cap_mb": 25.0}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"autocast": torch.bfloat16},
    "bfloat16 module": {"module": lambda: model(dtype=torch.bfloat16)},
    "accumulation": {"accumulate": 3, "steps": 25},
    "clipping": {"clip": 0.5},
    "scaler": {"scaler_options": {"init_scale": 4.0, "growth_interval": 7}},
    "scaler, not told": {"scaler_options": {"init_scale": 4.0, "growth_interval": 7}, "tell_scaler": False},
    "all": {
        "autocast": torch.bfloat16,
        "scaler_options": {"init_scale": 4.0, "growth_interval": 7},
        "clip": 0.5,
        "accumulate": 2,
        "gradient_as_bucket_view": True,
    },
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused search": {"find_unused_parameters": True},
    "compiled inside": {"module": lambda: torch.compile(model(), backend="aot_eager"), **LARGE_BUCKETS},
    "compiled outside": {"around": lambda ddp: torch.compile(ddp, backend="aot_eager"), **LARGE_BUCKETS},
}


def inductor(rank: int, world_size: int) -> dict[str, Any]:
    """`torch.compile` with its default backend, which needs a C++ compiler."""
    return {
        "plain": train(rank, world_size),
        "compiled inside": train(rank, world_size, module=lambda: torch.compile(model()), **LARGE_BUCKETS),
        "compiled outside": train(rank, world_size, around=torch.compile, **LARGE_BUCKETS),
    }


# -- several modules -----------------------------------------------------------------------------------------------


def modules(rank: int, world_size: int) -> dict[str, Any]:
    """Three attached modules: two in one backward, of which one feeds the other, and one with an optimizer alone."""
    torch.manual_seed(1)
    parts = [nn.Linear(64, 96), nn.Sequential(nn.ReLU(), nn.Linear(96, 10)), nn.Linear(64, 10)]
    body, head, other = (wrap(part, 0.001) for part in parts)
    first = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.2)
    second = torch.optim.SGD(other.parameters(), 0.2)
    handles = [
        gw.attach(body, gw.Plan("threelc", min_elements=0), optimizer=first),
        gw.attach(head, gw.Plan("onebit", strategy="ring", min_elements=0), optimizer=first),
        gw.attach(other, gw.Plan("topk", strategy="allgather", min_elements=0), optimizer=second),
    ]
    losses = []
    for step, (images, labels) in enumerate(itertools.islice(batches(rank, world_size), 40)):
        first.zero_grad()
        second.zero_grad()
        loss = nn.functional.cross_entropy(head(body(images)), labels)
        loss = loss + nn.functional.cross_entropy(other(images), labels)
        loss.backward()
        first.step()
        if step % 2:
            second.step()
        losses.append(loss.item())
    found = {
        "hash": fingerprint(itertools.chain(body.parameters(), head.parameters(), other.parameters())),
        "first": sum(losses[:10]),
        "last": sum(losses[-10:]),
        "steps": [handle.report().steps for handle in handles],
    }
    handles[0].detach()
    head(body(next(batches(rank, world_size))[0])).sum().backward()
    found["after"] = [handle.report().steps for handle in handles]
    for handle in handles[1:]:
        handle.detach()
    return found


# -- hooks of the user's own ---------------------------------------------------------------------------------------


def own_hook(rank: int, world_size: int) -> dict[str, Any]:
    """A user's hook that scales what goes in and counts what comes out, around gradwire's; then without gradwire."""
    ddp, native = wrap(model()), wrap(model())
    handle = gw.attach(ddp, gw.Plan("fp16", min_elements=0), register=False)
    came_out = []

    def hook(state: object, bucket: Any) -> Any:
        bucket.buffer().mul_(2)
        averaged = handle.hook(state, bucket)
        return averaged.then(lambda future: _counted(came_out, future.value()))

    ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # torch dislikes annotations as strings
    source, ratios = batches(rank, world_size), []
    for step in range(3):
        if step == 2:
            handle.detach()
        batch = next(source)
        for each in (ddp, native):
            each.zero_grad()
            loss_of(each, batch).backward()
        pairs = zip(ddp.parameters(), native.parameters(), strict=True)
        ratios.append(max((left.grad - 2 * right.grad).abs().max().item() for left, right in pairs))
    again = gw.attach(ddp, "threelc", register=False)
    loss_of(ddp, next(source)).backward()
    steps = again.report().steps
    again.detach()
    refused = {}
    for name, register in (("own hook", True), ("gradwire's", False)):
        target = ddp if register else _once_attached()
        try:
            gw.attach(target, "threelc", register=register)
        except gw.errors.AttachError as error:
            refused[name] = str(error)
    return {"deviations": ratios, "came_out": len(came_out), "steps": steps, "refused": refused}


def _counted(found: list[int], buffer: torch.Tensor) -> torch.Tensor:
    found.append(buffer.numel())
    return buffer


def _once_attached() -> DistributedDataParallel:
    ddp = wrap(model())
    gw.attach(ddp, "threelc").detach()
    return ddp


# -- join ----------------------------------------------------------------------------------------------------------


def join(rank: int, world_size: int, cases: list[Any]) -> dict[str, Any]:
    """Rank r has 4 + 3r inputs."""
    found: dict[str, Any] = {"divisor": {}, "training": {}}
    for attached, by_initial in itertools.product((False, True, None), (True, False)):
        found["divisor"][f"{attached} {by_initial}"] = _ones(rank, attached, by_initial)
    for method, strategy, with_optimizer in cases:
        key = f"{method} {strategy} {with_optimizer}"
        found["training"][key] = _join_training(rank, world_size, method, strategy, with_optimizer)
    return found


def _ones(rank: int, attached: bool | None, by_initial: bool) -> list[float]:
    """Gradients of a rank whose inputs are all 6, plain (False), attached (True), or detached again (None)."""
    ddp = wrap(nn.Linear(1, 1, bias=False))
    handle = None if attached is False else gw.attach(ddp, "none")
    if attached is None:
        assert handle is not None
        handle.detach()
    grads = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(1 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.tensor([[6.0]])).sum().backward()
            grads.append(ddp.module.weight.grad.item())
    if attached:
        assert handle is not None
        handle.detach()
    return grads


def _join_training(rank: int, world_size: int, method: str, strategy: str, with_optimizer: bool) -> dict[str, Any]:
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    handle = gw.attach(
        ddp,
        gw.Plan(method, strategy=strategy, min_elements=0),
        optimizer=optimizer if with_optimizer else None,
        check_every=1,
    )
    produced = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in ddp.parameters()]
    applied = [tensor.clone() for tensor in produced]
    source = batches(rank, world_size)
    own_model = model()  # what this rank's gradients are without anybody else
    with ddp.join():
        for _ in range(4 + 3 * rank):
            batch = next(source)
            optimizer.zero_grad()
            own_model.load_state_dict(ddp.module.state_dict())
            own_model.zero_grad()
            loss_of(own_model, batch).backward()
            loss_of(ddp, batch).backward()
            for total, parameter in zip(produced, own_model.parameters(), strict=True):
                total += parameter.grad.double() / world_size
            for total, parameter in zip(applied, ddp.parameters(), strict=True):
                total += parameter.grad.double()
            optimizer.step()
        local = _residual(handle, "local")
    kept = all(torch.equal(local[name], found) for name, found in _residual(handle, "local").items())
    for total, (name, _) in zip(produced, ddp.module.named_parameters(), strict=True):
        for role in ("local", "aggregate"):
            values = _residual(handle, role).get(name)
            if values is not None:
                total.view(-1)[: values.numel()] -= values
        dist.all_reduce(total)
    # The last rank has seen every mean that was applied.
    error = max((a - b).abs().max().item() for a, b in zip(produced, applied, strict=True))
    finished = {"hash": fingerprint(ddp.parameters()), "steps": handle.synchronizer.step}
    loss_of(ddp, next(source)).backward()  # all ranks again
    after = fingerprint(parameter.grad for parameter in ddp.parameters())
    handle.detach()
    return {**finished, "error": error, "kept": kept, "after": after}


def join_with_two_optimizers(rank: int, world_size: int) -> dict[str, float]:
    """Rank 0 leaves early. In a later step one of two tensors has no number, so that its optimizer does not step."""
    tensors = nn.ParameterDict({name: torch.zeros(64, 64) for name in "ab"})
    ddp = DistributedDataParallel(Product(tensors))
    optimizers = {name: torch.optim.SGD([parameter], 1.0) for name, parameter in tensors.items()}
    plan = gw.Plan("threelc", strategy="scatter_reduce", partitions=2, min_elements=0)
    handle = gw.attach(ddp, plan, optimizer=list(optimizers.values()))
    produced = torch.zeros(64, 64, dtype=torch.float64)
    with ddp.join():
        for step in range(2 + 4 * rank):
            generator = torch.Generator().manual_seed(10 * step + rank)
            grads = {name: torch.randn(64, 64, generator=generator) for name in optimizers}
            if step == 3:
                grads["a"][0, 0] = torch.nan
            produced += grads["b"].double() / world_size
            ddp.zero_grad()
            ddp(grads).backward()
            for name, optimizer in optimizers.items():
                if tensors[name].grad.isfinite().all():
                    optimizer.step()
    for role in ("local", "aggregate"):
        left = _residual(handle, role).get("parameters_.b", torch.zeros(0))
        produced.view(-1)[: left.numel()] -= left
    dist.all_reduce(produced)
    handle.detach()
    return {
        "error": float((produced + tensors["b"].double()).norm() / produced.norm())
    }  # of rank 1, which saw all steps


def _residual(handle: gw.Handle, role: str) -> dict[str, torch.Tensor]:
    """By parameter, this rank's residual of a role, with zeros where it holds none."""
    found = {}
    for name, pieces in handle.state_dict()["residuals"][role].items():
        found[name] = torch.zeros(max(int(offset) + values.numel() for offset, values in pieces.items())).double()
        for offset, values in pieces.items():
            found[name][int(offset) : int(offset) + values.numel()] = values
    return found


def lost(rank: int, world_size: int) -> dict[str, Any]:
    """Where torch calls no end of backward, rank 0 hears of a lost peer all the same: of rank 1, then of rank 2."""
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    found = {}
    for (name, job), group, peer in zip(LOST.items(), pairs, (1, 2), strict=True):
        if rank in (0, peer):
            try:
                job(rank, group)
            except gw.errors.SyncError as error:
                found[name] = {"type": type(error).__name__, "rank": error.rank}
    return found


def _first_static_backward(rank: int, group: Any) -> None:
    """A static graph's reducer waits for the hooks in its first backward before any callback."""
    ddp = wrap(model(), static_graph=True, process_group=group)
    gw.attach(ddp, gw.Plan("threelc", min_elements=0), options=gw.SyncOptions(timeout=timedelta(seconds=5)))
    batch = next(batches(rank, 2))
    if rank:
        _die_in_backward(ddp, batch)
    loss_of(ddp, batch).backward()


def _joined(rank: int, group: Any) -> None:
    """Rank 0 has no inputs left and shadows the step in which the other one dies."""
    ddp = wrap(model(), process_group=group)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), options=gw.SyncOptions(timeout=timedelta(seconds=5)))
    store = dist.distributed_c10d._get_default_store()
    with ddp.join():
        for step, batch in enumerate(itertools.islice(batches(rank, 3), 3)):
            if rank and step == 2:
                _die_in_backward(ddp, batch, lambda: store.wait(["in the hook"]))
            loss_of(ddp, batch).backward()
            if rank == 0 and step == 1:
                handle.synchronizer.events.listen(lambda _: store.set("in the hook", "yes"))
                break


def _die_in_backward(ddp: nn.Module, batch: Batch, after: Callable[[], object] = lambda: None) -> None:
    """`after` the others are where only gradwire waits for this rank."""
    loss = loss_of(ddp, batch)
    loss.register_hook(lambda _: (after(), os._exit(9)))
    loss.backward()


LOST = {"first static backward": _first_static_backward, "joined": _joined}


# -- unused parameters ---------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(64, 160), nn.Linear(64, 160)

    def forward(self, inputs: torch.Tensor, both: bool | str) -> torch.Tensor:
        if isinstance(both, str):
            return getattr(self, both)(inputs)
        return self.always(inputs) + (self.sometimes(inputs) if both else 0)


def unused(rank: int, world_size: int) -> dict[str, Any]:
    """A branch that no rank uses in odd steps keeps its residual, also if its gradient stays.

    If gradients are views of buckets, those that stay become means again, so their residuals count.
    """
    found = {}
    for clears, as_view in itertools.product(("to none", "to zero", "in even steps"), (True, False)):
        ddp = wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
        handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
        kept: list[bool | None] = []  # None: this rank owns the branch, and only merges it
        for step, (images, labels) in enumerate(itertools.islice(batches(rank, world_size), 6)):
            cleared = ddp if clears != "in even steps" or step % 2 == 0 else ddp.module.always
            cleared.zero_grad(set_to_none=clears == "to none")
            before = _sometimes(handle)
            nn.functional.cross_entropy(ddp(images, step % 2 == 0), labels).backward()
            after = _sometimes(handle)
            if after == fingerprint([]):
                kept.append(None)
            else:
                rests = bool(step % 2) and not (as_view and clears == "in even steps")
                kept.append(step == 0 or (before == after) == rests)
        handle.detach()
        found[f"{clears} {as_view}"] = kept
    return found


def branches_in_turns(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """Two backwards a step, each of one branch. By branch: what was produced and applied, and the residuals' sum."""
    found = {}
    for as_view, strategy in itertools.product((True, False), ("allgather", "scatter_reduce")):
        torch.manual_seed(rank)
        inputs = torch.randn(1, 64)
        ddp = wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
        plan = gw.Plan("topk:ratio=0.1", strategy=strategy, min_elements=0)
        handle = gw.attach(ddp, plan, optimizer=optimizer)
        parts = {"always.weight": ddp.module.always, "sometimes.weight": ddp.module.sometimes}
        before = {name: part.weight.detach().clone() for name, part in parts.items()}
        for _ in range(10):
            optimizer.zero_grad()
            for branch in ("always", "sometimes"):
                ddp(inputs, branch).sum().backward()
            optimizer.step()
        kept = handle.synchronizer.residuals.total()
        for name, part in parts.items():
            produced = 10 * inputs.expand(160, 64) / world_size
            applied = (before[name] - part.weight.detach()) / world_size
            left = torch.zeros(produced.numel(), dtype=torch.float64)
            left[: kept[name].size] = torch.from_numpy(kept[name])
            found[f"{as_view} {strategy} {name}"] = [
                values.double().view(160, 64).sum(0).tolist() for values in (produced, applied, left)
            ]
        handle.detach()
    return found


def _sometimes(handle: gw.Handle) -> str:
    state = handle.state_dict()["residuals"]
    return fingerprint(_tensors(state["local"]))


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for name, pieces in sorted(state.items()):
        if name.startswith("sometimes"):
            yield from (values for _, values in sorted(pieces.items()))
