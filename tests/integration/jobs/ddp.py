"""Jobs on attached DDP modules."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


def identical(rank: int, world_size: int, combinations: list[Any], steps: int) -> dict[str, Any]:
    """Train with each (method, options, strategy); return the hash of the parameters and the first and last loss."""
    found = {}
    for name, options, strategy in combinations:
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        handle = gw.attach(
            ddp,
            gw.Plan(gw.make(name, **options), strategy=strategy, min_elements=0),
            optimizer=optimizer,
            check_every=50,
        )
        losses = []
        for batch in itertools.islice(batches(rank, world_size), steps):
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        handle.detach()
        key = f"{name} {options} {strategy}"
        found[key] = {
            "hash": fingerprint(ddp.parameters()),
            "first": sum(losses[:10]) / 10,
            "last": sum(losses[-10:]) / 10,
        }
    return found


def many_buckets(rank: int, world_size: int, methods: list[str]) -> dict[str, float]:
    """Forty buckets in flight on Gloo. Returns the largest deviation from the native all-reduce."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(48, 48) for _ in range(40)]
    deviations = {}
    for method in methods:
        module = torch.nn.Sequential(*layers)
        native, compressed = wrap(module, 0.005), wrap(torch.nn.Sequential(*layers), 0.005)
        inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(rank))
        handle = gw.attach(compressed, gw.Plan(method, min_elements=0))
        worst = 0.0
        for _ in range(3):  # the layout is rebuilt after the first
            grads = []
            for ddp in (native, compressed):
                module.zero_grad()
                ddp(inputs).square().mean().backward()
                grads.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
            worst = max(worst, (grads[0] - grads[1]).abs().max().item())
        handle.detach()
        deviations[method] = worst
    return deviations


def nonfinite(rank: int, world_size: int, method: str, strategy: str, with_optimizer: bool) -> dict[str, Any]:
    """Rank 1's loss is infinite in step 5. Returns what the steps around it left behind."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = gw.attach(
        ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=optimizer if with_optimizer else None
    )
    finite, before, after, hashes = [], None, None, []
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), 10)):
        if step == 5:
            before = _residual_hash(handle)
        optimizer.zero_grad()
        loss = loss_of(ddp, batch) * (float("inf") if step == 5 and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters()))
        scaler.step(optimizer)
        scaler.update()
        if step == 5:
            after = _residual_hash(handle)
        hashes.append(fingerprint(ddp.parameters()))
    handle.detach()
    return {"finite": finite, "before": before, "after": after, "hashes": hashes}


def momentum_returns(rank: int, world_size: int) -> dict[str, str]:
    """Bring momentum back into an optimizer whose momentum is corrected. Returns what the steps after it raise."""
    ddp = wrap(model(), find_unused_parameters=True)
    frozen = ddp.module[0].requires_grad_(False)
    trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)
    uncorrected = torch.optim.SGD(trained, 0.05, momentum=0.9).state_dict()
    feedback = gw.MomentumCorrection.of(optimizer)
    handle = gw.attach(ddp, gw.Plan("topk:ratio=0.1", feedback=feedback, min_elements=0), optimizer=optimizer)
    own = batches(rank, world_size)

    def step() -> str:
        loss_of(ddp, next(own)).backward()
        try:
            optimizer.step()
        except AttachError as error:
            handle.rollback()
            return str(error)
        return ""

    found = {"at first": step()}
    optimizer.load_state_dict(uncorrected)
    found["loaded"] = step()
    optimizer.param_groups[0]["momentum"] = 0
    found["set to 0"] = step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    found["cycled"] = step()
    optimizer.param_groups[0]["momentum"] = 0
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": frozen.parameters(), "momentum": 0.9})
    found["unfrozen"] = step()
    handle.detach()
    found["detached"] = step()
    return found


def two_backwards(rank: int, world_size: int) -> dict[str, str]:
    """Accumulate gradients under momentum correction, and throw some away. Returns what the last backward raises."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    feedback = gw.MomentumCorrection.of(optimizer)
    handle = gw.attach(ddp, gw.Plan("topk:ratio=0.1", feedback=feedback, min_elements=0), optimizer=optimizer)
    own = batches(rank, world_size)
    with ddp.no_sync():
        loss_of(ddp, next(own)).backward()
    loss_of(ddp, next(own)).backward()
    optimizer.step()
    loss_of(ddp, next(own)).backward()
    handle.rollback()

    def closure() -> float:
        for _ in range(2):
            loss_of(ddp, next(own)).backward()
        return 0.0

    try:
        optimizer.step(closure)
    except OptionError as error:
        return {"raised": str(error)}
    return {}


def clipped(rank: int, world_size: int, clips: list[float], scales: list[float]) -> dict[str, str]:
    """Train with momentum correction for each clip and loss scale (0: no scaler); return hashes of the parameters."""
    found = {}
    for clip, scale in itertools.product(clips, scales):
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        feedback = gw.MomentumCorrection.of(optimizer, clip=clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
        plan = gw.Plan("topk:ratio=0.1", feedback=feedback, min_elements=0)
        handle = gw.attach(ddp, plan, optimizer=optimizer, scaler=scaler)
        for batch in itertools.islice(batches(rank, world_size), 6):
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        handle.detach()
        found[f"{clip} {scale}"] = fingerprint(ddp.parameters())
    return found


def broken_rank(rank: int, world_size: int, method: str) -> dict[str, Any]:
    """The memory of rank 1 is broken from step 24 on. Returns what each rank reports of it."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-8)
    options = gw.SyncOptions(watch_norms=1)
    handle = gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer, options=options)
    name, victim = next(iter(ddp.module.named_parameters()))
    broken = False
    victim.register_hook(lambda grad: grad * 2.0**16 if broken else grad)
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), 28), start=1):
        broken = rank == 1 and step >= 24
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    found = [event for event in handle.synchronizer.events.latest() if event.kind == "norm_jump"]
    notes = handle.report().notes
    handle.detach()
    return {"victim": name, "notes": notes, "jumps": [[each.peer, each.tensor] for each in found]}


def _residual_hash(handle: gw.Handle) -> str:
    state = handle.state_dict()["residuals"]
    return fingerprint(
        tensor for role in ("local", "aggregate") for _, ranges in sorted(state[role].items())
        for _, tensor in sorted(ranges.items())
    )  # fmt: skip


def train_and_save(
    rank: int, world_size: int, method: str, strategy: str, steps: int, save_at: int, folder: str
) -> dict[str, Any]:
    """An unbroken run that leaves a checkpoint of every rank on the way."""
    ddp, optimizer, handle = _resumable(method, strategy, bucket_cap_mb=0.02)
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), steps)):
        if step == save_at:
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gw": handle.state_dict()}
            torch.save(state, f"{folder}/{rank}.pt")
        _one_step(ddp, optimizer, batch)
    return {"hash": fingerprint(ddp.parameters())}


def resume(
    rank: int, world_size: int, method: str, strategy: str, steps: int, save_at: int, folder: str, bucket_cap_mb: float
) -> dict[str, Any]:
    """Go on from the checkpoint in a new process, under another bucket layout."""
    ddp, optimizer, handle = _resumable(method, strategy, bucket_cap_mb=bucket_cap_mb)
    state = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["gw"])
    for batch in itertools.islice(batches(rank, world_size), save_at, steps):
        _one_step(ddp, optimizer, batch)
    return {"hash": fingerprint(ddp.parameters())}


def _resumable(method: str, strategy: str, bucket_cap_mb: float) -> Any:
    ddp = wrap(model(), bucket_cap_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=optimizer)
    return ddp, optimizer, handle


def _one_step(ddp: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(ddp, batch).backward()
    optimizer.step()


def non_iid(rank: int, world_size: int, method: str, strategy: str, steps: list[int]) -> list[float]:
    """Every rank has its own constant gradient, learning rate 0. Returns residual norms over gradient norm."""
    ddp = wrap(model())
    handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0))
    batch = next(batches(rank, world_size, seed=rank))
    norms = []
    for step in range(max(steps) + 1):
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
        if step in steps:
            grads = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
            norms.append(handle.report().total.residual_norm / grads.norm().item())
    handle.detach()
    return norms


def bfloat16(rank: int, world_size: int, methods: list[str]) -> dict[str, Any]:
    """Gradients of bfloat16, and bfloat16 on the wire, on Gloo."""
    found = {}
    for method, dtype in itertools.product(methods, (torch.bfloat16, torch.float32)):
        ddp = wrap(model(dtype=dtype))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
        handle = gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer)
        losses = []
        for batch in itertools.islice(batches(rank, world_size), 60):
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        handle.detach()
        found[f"{method} {dtype}"] = [sum(losses[:10]), sum(losses[-10:]), fingerprint(ddp.parameters())]
    return found


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        # Large enough that every rank encodes a range of each.
        self.always, self.sometimes, self.never = (torch.nn.Linear(64, 160) for _ in range(3))

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(inputs) + (self.sometimes(inputs) if both else 0)


def unused(rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    """`never` is used by no rank, `sometimes` by rank 0 alone in odd steps and by all in even ones."""
    ddp = wrap(_Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    handle = gw.attach(ddp, gw.Plan("threelc", strategy=strategy, min_elements=0), optimizer=optimizer)
    kept = []
    for step, (images, labels) in enumerate(itertools.islice(batches(rank, world_size), 6)):
        optimizer.zero_grad()
        before = _local(handle, "module.sometimes.weight")
        both = step % 2 == 0 or rank == 0
        torch.nn.functional.cross_entropy(ddp(images, both), labels).backward()
        none = ddp.module.never.weight.grad is None
        used = ddp.module.sometimes.weight.grad is not None
        optimizer.step()
        after = _local(handle, "module.sometimes.weight")
        kept.append({
            "both": both, "never_is_none": none, "sometimes_has_grad": used, "residual_kept": before == after,
            "owned": after == fingerprint([]),
        })  # fmt: skip
    everything = fingerprint(ddp.parameters())
    handle.detach()
    return {"steps": kept, "hash": everything}


def _local(handle: gw.Handle, name: str) -> str:
    ranges = handle.state_dict()["residuals"]["local"].get(name.removeprefix("module."), {})
    return fingerprint(tensor for _, tensor in sorted(ranges.items()))


def mistakes(rank: int, world_size: int) -> dict[str, list[str]]:
    """Calls that must be refused. Returns error type and message of each."""
    found = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]

    ddp = wrap(model())
    hooked = wrap(model())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    refused("not ddp", lambda: gw.attach(model(), "threelc"))
    refused("unknown", lambda: gw.attach(ddp, "threeLC"))
    refused("option", lambda: gw.attach(ddp, gw.make("threelc", sparsity=2.5)))
    refused("strategy", lambda: gw.attach(ddp, gw.Plan("threelc", strategy="rings")))
    refused("no rule", lambda: gw.attach(ddp, {"nothing": "threelc"}))
    refused("taken", lambda: gw.attach(hooked, "threelc"))
    refused("method differs", lambda: gw.attach(ddp, gw.Plan("threelc" if rank == 0 else "onebit", min_elements=0)))
    refused(
        "option differs", lambda: gw.attach(ddp, gw.Plan(gw.make("threelc", sparsity=1.0 + rank / 10), min_elements=0))
    )
    refused("seed differs", lambda: gw.attach(ddp, "threelc", options=gw.SyncOptions(seed=rank)))
    refused("check differs", lambda: gw.attach(ddp, "threelc", check_every=100 * rank))
    refused("auto differs", lambda: gw.attach(ddp, gw.Plan("auto" if rank == 0 else "none")))
    refused("fidelity differs", lambda: gw.attach(ddp, "auto", fidelity="exact" if rank == 0 else "balanced"))
    given = torch.optim.SGD(ddp.parameters(), 0.1) if rank == 0 else None
    refused("optimizer differs", lambda: gw.attach(ddp, "threelc", optimizer=given))
    scaler = torch.amp.GradScaler("cpu") if rank == 0 else None
    refused("scaler differs", lambda: gw.attach(ddp, "threelc", scaler=scaler))
    handle = gw.attach(ddp, "threelc")
    refused("twice", lambda: gw.attach(ddp, "threelc"))
    refused("state", lambda: handle.load_state_dict(handle.state_dict() | {"world_size": 99}))
    synchronizer = gw.Synchronizer(None, "threelc")
    refused("shape differs", lambda: synchronizer.register({"w": gw.TensorSpec((100 + rank, 10))}))
    refused("order differs", lambda: synchronizer.register({"ab"[rank % 2]: gw.TensorSpec((5,))}))
    synchronizer.close()
    handle.detach()
    return found


def detach(rank: int, world_size: int) -> dict[str, Any]:
    """After `detach`, gradients are those of plain DDP, bit for bit; attaching again works."""
    module = model()
    ddp, native = wrap(module), wrap(model())
    batch = next(batches(rank, world_size))
    sources = itertools.cycle(["threelc", "onebit"])
    same = []
    for _ in range(4):
        handle = gw.attach(ddp, gw.Plan(next(sources), min_elements=0))
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
        handle.detach()
        for each in (ddp, native):
            each.zero_grad()
            loss_of(each, batch).backward()
        pairs = zip(ddp.parameters(), native.parameters(), strict=True)
        same.append(all(torch.equal(left.grad, right.grad) for left, right in pairs))
    return {"same": same}


def entry(rank: int, world_size: int) -> dict[str, Any]:
    """`Synchronizer` without DDP: ranges of a registered tensor, several submissions in flight."""
    synchronizer = gw.Synchronizer(dist.group.WORLD, gw.Plan("none", min_elements=0))
    synchronizer.register({"weight": gw.TensorSpec((64, 100))})
    values = torch.full((6400,), float(rank))
    synchronizer.begin_step()
    futures = [
        synchronizer.submit([gw.GradientSlice("weight", values[start : start + 1600], offset=start)])
        for start in range(0, 6400, 1600)
    ]
    for future in futures:
        future.wait()
    synchronizer.commit()
    synchronizer.close()
    return {"mean": values.unique().tolist()}


def accumulate(rank: int, world_size: int, method: str) -> dict[str, Any]:
    """Several backwards for one optimizer step, with and without `no_sync`; a residual is committed once a step."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    handle = gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer)
    source = batches(rank, world_size)
    commits = []
    handle.synchronizer.events.listen(lambda event: commits.append(event.kind) if event.kind == "commit" else None)
    for step in range(6):
        optimizer.zero_grad()
        if step % 2:
            with ddp.no_sync():
                loss_of(ddp, next(source)).backward()
        else:
            loss_of(ddp, next(source)).backward()
        loss_of(ddp, next(source)).backward()
        optimizer.step()
    everything = fingerprint(ddp.parameters())
    handle.detach()
    return {"commits": len(commits), "hash": everything}


def throws_a_pass_away(rank: int, world_size: int) -> dict[str, Any]:
    """Two optimizers. The gradients of one pass are thrown away, those of another by the second optimizer only."""
    torch.manual_seed(0)
    modules = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)]
    ddp = wrap(torch.nn.Sequential(*modules))
    first, second = (torch.optim.SGD(module.parameters(), 0.1) for module in modules)
    handle = gw.attach(ddp, gw.Plan("topk", min_elements=0), optimizer=[first, second])

    def run(step: int) -> None:
        for optimizer in (first, second):
            optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()

    def held() -> dict[str, list[float]]:
        return {name: values.tolist() for name, values in handle.synchronizer.residuals.total().items()}

    run(0)
    first.step()
    second.step()
    before = held()
    run(1)
    handle.rollback()
    thrown_away = held()
    run(2)
    first.step()
    handle.rollback()
    after = held()
    changed = sorted(name for name in before if before[name] != after[name])
    found = {"unchanged": before == thrown_away, "changed": changed, "open": handle.synchronizer.residuals.is_open}
    handle.detach()
    return found
