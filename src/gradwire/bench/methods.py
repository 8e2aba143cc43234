"""The methods to compare: those of DDP itself and gradwire's compressors, behind one interface."""
# Shapes: W = ranks

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from gradwire.bench.statistics import ring_bytes
from gradwire.core.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.compressors.base import Compressor
    from gradwire.planner import PlanTable
    from gradwire.residuals import Policy

DDP_FP32 = "ddp-fp32"
DDP_FP16 = "ddp-fp16"
DDP_BF16 = "ddp-bf16"
SILENT = "no-communication"
"""Sends nothing, to measure the step without communication. Replicas diverge."""

TRAMPOLINE = "ddp-trampoline"
"""DDP's all-reduce through the hook that gradwire leaves after detaching, to measure its cost."""

DDP_POWERSGD = "ddp-powersgd"
"""torch's PowerSGD hook with rank 4, which compresses every matrix from the third step on.

All gradients share one bucket: on Gloo, the hook does not end with several.
"""

AUTO = "auto"
"""`attach(ddp, "auto")`. ``auto:fidelity=LEVEL`` selects a level other than balanced, ``auto/momentum`` has momentum
correction.
"""

DEFAULT_METHODS = (DDP_FP32, DDP_FP16, "none", "int8", "onebit", "topk", "threelc", "threelc:sparsity=1.75")

PLAN = "plan"
"""``plan:FILE``: `attach` with a plan from a file, as `gradwire plan --save` writes it."""

_LABELS = {
    DDP_FP32: "DDP fp32",
    DDP_FP16: "DDP fp16 hook",
    DDP_BF16: "DDP bf16 hook",
    DDP_POWERSGD: "DDP PowerSGD hook",
    TRAMPOLINE: "DDP fp32, trampoline",
    SILENT: "no communication",
}
_HALVES = {DDP_FP16: "fp16_compress_hook", DDP_BF16: "bf16_compress_hook"}
_POWERSGD_RANK = 4
_ONE_BUCKET_MB = 1e5


@dataclass(frozen=True)
class MethodCosts:
    """Totals of one rank."""

    sent_bytes: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __sub__(self, earlier: MethodCosts) -> MethodCosts:
        return MethodCosts(*(now - before for now, before in zip(astuple(self), astuple(earlier))))


class ConnectedMethod(Protocol):
    """A DDP module whose gradients are synchronized by one method, until it is closed."""

    def costs(self, steps: int) -> MethodCosts:
        """Totals after `steps` steps."""
        ...

    def settle(self, step: Callable[[], object], restart: bool = True) -> str | None:
        """Take steps at a rate until the method has adapted to it. All ranks call it.

        Args:
            step: Takes a step.
            restart: Whether ``auto`` forgets what it knows, like a job that starts at this rate.

        Returns:
            What ``auto`` has settled on: one of DDP's own methods, or a plan as JSON. None for all other methods.
        """
        ...

    def close(self) -> None:
        """Stop the method."""
        ...


def is_native(method: str) -> bool:
    """Whether a method is one of DDP's own."""
    return method in _LABELS


def tries_buckets(method: str) -> bool:
    """Whether a method is run with every bucket size and the best one counts: most of DDP's own methods."""
    return is_native(method) and method != DDP_POWERSGD


def bucket_sizes(method: str, sizes: Sequence[float]) -> Sequence[float]:
    """Bucket sizes in MB to run a method with, out of those to try. gradwire's methods have the first."""
    if method == DDP_POWERSGD:
        return (_ONE_BUCKET_MB,)
    return sizes if tries_buckets(method) else sizes[:1]


def is_auto(method: str) -> bool:
    """Whether a method is `AUTO`, at any fidelity."""
    return re.split("[:/]", method)[0] == AUTO


def is_plan(method: str) -> bool:
    """Whether a method is a `PLAN` from a file."""
    return method.startswith(f"{PLAN}:")


def label(method: str) -> str:
    """Display name of a method."""
    if is_native(method):
        return _LABELS[method]
    if is_plan(method):
        return f"gradwire plan {Path(method).stem}"
    method, _, policy = method.partition("/")
    spec, _, strategy = method.partition("@")
    name, _, options = spec.partition(":")
    label = f"gradwire {name}" + (f" {options.replace('=', ' ').replace(':', ', ')}" if options else "")
    strategy = strategy.replace(":", ", ").replace("=", " ")
    return ", ".join(part for part in (label, strategy, policy.partition(":")[0]) if part)


def check(methods: list[str]) -> None:
    """Check methods before anything starts.

    Raises:
        UnknownNameError: A method is unknown.
        OptionError: An option is invalid, or a method is given twice.
    """
    for method in methods:
        if is_auto(method):
            fidelity(method)
            feedback(method)
        elif is_plan(method):
            plan_table(method)
        elif not is_native(method):
            compressor(method)
            strategy(method)
            mtu(method)
            feedback(method)
    if len(set(methods)) < len(methods):
        raise OptionError(f"A method is given twice: {', '.join(methods)}. Give each method once.")


def compressor(method: str) -> Compressor:
    """The compressor of ``NAME:option=value:option=value@STRATEGY/FEEDBACK``, where all but NAME is optional."""
    from gradwire.compressors.base.registry import make, names

    spec = re.split("[@/]", method)[0]
    name = spec.partition(":")[0]
    if name not in names():
        raise UnknownNameError("method", name, [DDP_FP32, DDP_FP16, *names()])
    return make(spec)


def needs_optimizer(method: str) -> bool:
    """Whether a method's compressor looks at parameters and at the state of their optimizer."""
    return not (is_native(method) or is_auto(method) or is_plan(method)) and compressor(method).needs_optimizer


def strategy(method: str) -> str | None:
    """The strategy of ``NAME@STRATEGY``, or None if the plan decides."""
    import gradwire.aggregator.strategy  # noqa: F401  # registers itself
    from gradwire.sync.strategies import STRATEGIES

    _, at, place = method.partition("/")[0].partition("@")
    name = place.partition(":")[0]
    if at and name not in STRATEGIES:
        raise UnknownNameError("strategy", name, STRATEGIES)
    return name or None


def mtu(method: str) -> int:
    """Bytes of ``NAME@server:mtu=BYTES``, which no packet to or from the aggregator exceeds; 0 for no bound."""
    options = method.partition("/")[0].partition("@")[2].partition(":")[2]
    key, _, value = options.partition("=")
    if options and (key != "mtu" or not value.isdigit() or strategy(method) != "server"):
        raise OptionError(f"Cannot read {method!r}. The only option of a strategy is NAME@server:mtu=BYTES.")
    return int(value or 0)


def feedback(method: str) -> Policy | None:
    """The residual policy of ``NAME@STRATEGY/FEEDBACK``, or None for the compressor's default."""
    from gradwire.residuals import policies

    _, slash, policy = method.partition("/")
    return policies.get(policy) if slash else None


def fidelity(method: str) -> str:
    """The fidelity of ``auto`` or ``auto:fidelity=LEVEL``."""
    from gradwire.planner.fidelity import LEVELS

    option = method.partition("/")[0].partition(":")[2] or "fidelity=balanced"
    key, _, level = option.partition("=")
    if key != "fidelity" or level not in LEVELS:
        raise OptionError(f"Cannot read {method!r}. Write auto:fidelity=LEVEL, with one of {', '.join(LEVELS)}.")
    return level


def plan_table(method: str) -> PlanTable:
    """The plan of ``plan:FILE``.

    Raises:
        OptionError: There is no such file, or it holds no plan.
    """
    from gradwire.planner import PlanTable

    path = Path(method.partition(":")[2])
    if not path.is_file():
        raise OptionError(f"There is no plan file {str(path)!r}. Write one with gradwire plan --save FILE.")
    return PlanTable.load(path)


def flat_name(name: str) -> str:
    """Name of a parameter in a replay, where one module has all of them."""
    return name.replace(".", "/")


def full_name(name: str) -> str:
    """Name of a parameter in its model, from its name in a replay."""
    return name.replace("/", ".")


def connect(method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> ConnectedMethod:
    """Let `method` synchronize the gradients of a new DDP module."""
    if is_native(method):
        return _Native(method, ddp)
    if is_auto(method):
        return Automatic(method, ddp, optimizer, seed)
    if is_plan(method):
        return Planned(method, ddp, optimizer, seed)
    return Attached(method, ddp, optimizer, seed)


class _Native:
    """DDP's own all-reduce. Its bytes are those of Gloo's ring, computed because the process cannot count them."""

    def __init__(self, method: str, ddp: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        num_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        self._dense = ring_bytes(num_bytes, dist.get_world_size())
        self._sent = self._dense
        if method in _HALVES:
            self._sent = ring_bytes(num_bytes // 2, dist.get_world_size())
            hook = getattr(default_hooks, _HALVES[method])
            ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # DDP wants NCCL for that of bf16
        elif method == DDP_POWERSGD:
            self._sent = ring_bytes(_powersgd_bytes(ddp), dist.get_world_size())
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2, min_compression_rate=1
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method == TRAMPOLINE:
            from gradwire.ddp.attach import attach

            attach(ddp, "none").detach()
        elif method == SILENT:
            self._sent = 0
            # A lambda, because torch compares annotations as objects, and here they are strings.
            ddp.register_comm_hook(None, lambda state, bucket: completed(bucket.buffer()))

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        return MethodCosts(self._sent * steps, self._dense * steps)

    def settle(self, step: Callable[[], object], restart: bool = True) -> None:
        """Take one step, which fills the queues of the links."""
        step()

    def close(self) -> None:
        """Do nothing: the hook belongs to the module."""


def _powersgd_bytes(ddp: DistributedDataParallel) -> int:
    """Bytes of the factors and of what is not compressed."""
    from gradwire.compressors.powersgd import PowerSGD
    from gradwire.core.spec import TensorSpec

    compressor = PowerSGD(_POWERSGD_RANK)
    return sum(compressor.max_encoded_bytes(TensorSpec.of(p)) for p in ddp.parameters() if p.requires_grad)


def _taken_from(optimizer: torch.optim.Optimizer, policy: Policy | None) -> Policy | None:
    """The policy, which takes the momentum of the optimizer if it is a momentum correction."""
    from gradwire.residuals.momentum import MomentumCorrection

    if not isinstance(policy, MomentumCorrection):
        return policy
    return MomentumCorrection.of(optimizer, masking=policy.masking, clip=policy.clip)


class Attached:
    """`gradwire.attach`, with costs from its report. Momentum correction uses the optimizer's momentum."""

    def __init__(self, method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        from gradwire.aggregator.service import Aggregator
        from gradwire.ddp.attach import attach
        from gradwire.sync.options import SyncOptions
        from gradwire.sync.plan import Plan

        policy = _taken_from(optimizer, feedback(method))
        plan = Plan(compressor(method), strategy=strategy(method), feedback=policy)
        bound, server = mtu(method), Aggregator.of(None)
        bounded = replace(server, mtu=bound) if bound and server else None  # None: as the environment says
        options = SyncOptions(seed=seed, server=bounded)
        self.handle = attach(ddp, plan, optimizer=optimizer, options=options)

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        total = self.handle.report().total
        return MethodCosts(total.sent_bytes, total.dense_bytes, total.encode_seconds, total.decode_seconds)

    def settle(self, step: Callable[[], object], restart: bool = True) -> str | None:
        """See `_Native.settle`."""
        step()
        return None

    def close(self) -> None:
        """Detach."""
        self.handle.detach()


class Planned(Attached):
    """`gradwire.attach` with a plan from a file."""

    def __init__(self, method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        from gradwire.ddp.attach import attach
        from gradwire.residuals import policies
        from gradwire.sync.options import SyncOptions
        from gradwire.sync.plan import Plan

        table = plan_table(method)
        entries = table.entries()
        if table.feedback:
            _taken_from(optimizer, policies.get(table.feedback))
        entries |= {flat_name(name): entry for name, entry in entries.items()}  # the step may be a replay
        self.handle = attach(ddp, Plan.of_entries(entries), optimizer=optimizer, options=SyncOptions(seed=seed))


class Automatic(Attached):
    """`gradwire.attach(ddp, "auto")`, with costs from its report, which counts DDP's all-reduce as `_Native` does."""

    def __init__(self, method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        from gradwire.ddp.attach import attach
        from gradwire.sync.options import SyncOptions
        from gradwire.sync.plan import Plan

        options, plan = SyncOptions(seed=seed), Plan(AUTO, feedback=_taken_from(optimizer, feedback(method)))
        self.handle = attach(ddp, plan, optimizer=optimizer, fidelity=fidelity(method), options=options)
        assert self.handle.autopilot is not None, "auto has one"
        self.autopilot = self.handle.autopilot

    def settle(self, step: Callable[[], object], restart: bool = True) -> str | None:
        """Take steps until a decision is made."""
        if restart:
            self.autopilot.restart()
        step()
        while not self.autopilot.settled:
            step()
        current = self.autopilot.current
        if not current.gradwire:
            return f"ddp-{current.hook}"
        assert current.table is not None, "auto plans by tables"
        return current.table.to_json()

    def close(self) -> None:
        """Detach."""
        for decision in self.autopilot.decisions:
            print(f"auto on rank {dist.get_rank()}: {decision}", file=sys.stderr)
        super().close()


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that holds a tensor."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
