"""The methods that are compared: DDP's own, and each compressor of gradwire, behind one small interface."""
# Shapes: W = ranks

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from gradwire.bench.statistics import ring_bytes
from gradwire.core.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.compressors.base import Compressor
    from gradwire.residuals import Policy

DDP_FP32 = "ddp-fp32"
DDP_FP16 = "ddp-fp16"
SILENT = "no-communication"
"""Computes and sends nothing: what the ideal step is measured with. Ranks drift apart."""

TRAMPOLINE = "ddp-trampoline"
"""DDP's all-reduce through the hook that gradwire leaves in place: what attaching costs when it does nothing."""

AUTO = "auto"
"""`attach(ddp, "auto")`; ``auto:fidelity=near-lossless`` for other levels than balanced."""

DEFAULT_METHODS = (DDP_FP32, DDP_FP16, "none", "int8", "onebit", "topk", "threelc", "threelc:sparsity=1.75")

_LABELS = {
    DDP_FP32: "DDP fp32",
    DDP_FP16: "DDP fp16 hook",
    TRAMPOLINE: "DDP fp32, trampoline",
    SILENT: "no communication",
}


@dataclass(frozen=True)
class MethodCosts:
    """Running totals of one rank."""

    sent_bytes: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __sub__(self, earlier: MethodCosts) -> MethodCosts:
        return MethodCosts(
            self.sent_bytes - earlier.sent_bytes,
            self.dense_bytes - earlier.dense_bytes,
            self.encode_seconds - earlier.encode_seconds,
            self.decode_seconds - earlier.decode_seconds,
        )


class ConnectedMethod(Protocol):
    """A DDP module whose gradients are synchronized by one method, until it is closed."""

    def costs(self, steps: int) -> MethodCosts:
        """Totals after so many steps."""
        ...

    def settle(self, step: Callable[[], object]) -> None:
        """Take steps at a new rate until the method has adapted to it; all ranks call it."""
        ...

    def close(self) -> None:
        """End what the method started."""
        ...


def is_native(method: str) -> bool:
    """Whether it is one of DDP's own."""
    return method in _LABELS


def tries_buckets(method: str) -> bool:
    """Whether it is run with every bucket size, of which the best counts: DDP's own methods, and auto, which may be."""
    return is_native(method) or is_auto(method)


def is_auto(method: str) -> bool:
    """Whether it is `AUTO`, at any fidelity."""
    return method.split(":")[0] == AUTO


def label(method: str) -> str:
    """How a reader sees it."""
    if is_native(method):
        return _LABELS[method]
    method, _, policy = method.partition("/")
    spec, _, way = method.partition("@")
    name, _, options = spec.partition(":")
    label = f"gradwire {name}" + (f" {options.replace('=', ' ').replace(':', ', ')}" if options else "")
    return ", ".join(part for part in (label, way, policy.partition(":")[0]) if part)


def check(methods: list[str]) -> None:
    """Refuse what is unknown before anything starts.

    Raises:
        UnknownNameError: a method that there is none of.
        OptionError: an option that does not parse or fit, or the same method twice.
    """
    for method in methods:
        if is_auto(method):
            fidelity(method)
        elif not is_native(method):
            compressor(method)
            strategy(method)
            feedback(method)
    if len(set(methods)) < len(methods):
        raise OptionError(f"Expected each method once, got {', '.join(methods)}. Do: leave the second out.")


def compressor(method: str) -> Compressor:
    """The compressor of ``NAME`` or ``NAME:option=value:option=value``, whatever ``@STRATEGY/FEEDBACK`` follows."""
    from gradwire.compressors.base.registry import make, names

    spec = re.split("[@/]", method)[0]
    name = spec.partition(":")[0]
    if name not in names():
        raise UnknownNameError("method", name, [DDP_FP32, DDP_FP16, *names()])
    return make(spec)


def strategy(method: str) -> str | None:
    """The strategy of ``NAME@STRATEGY``; None where the plan decides."""
    import gradwire.aggregator.strategy  # noqa: F401  # registers itself
    from gradwire.sync.strategies import STRATEGIES

    _, at, way = method.partition("/")[0].partition("@")
    if at and way not in STRATEGIES:
        raise UnknownNameError("strategy", way, STRATEGIES)
    return way or None


def feedback(method: str) -> Policy | None:
    """The policy of residuals of ``NAME@STRATEGY/FEEDBACK``; None where the compressor's own counts."""
    from gradwire.residuals import policies

    _, slash, policy = method.partition("/")
    return policies.get(policy) if slash else None


def fidelity(method: str) -> str:
    """The level of ``auto`` or ``auto:fidelity=LEVEL``."""
    from gradwire.planner.fidelity import LEVELS

    option = method.partition(":")[2] or "fidelity=balanced"
    key, _, level = option.partition("=")
    if key != "fidelity" or level not in LEVELS:
        raise OptionError(f"Expected auto:fidelity={'|'.join(LEVELS)}, got {method!r}. Do: write one of these levels.")
    return level


def connect(method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> ConnectedMethod:
    """Let `method` synchronize the gradients of a fresh DDP module."""
    if is_native(method):
        return _Native(method, ddp)
    if is_auto(method):
        return Automatic(method, ddp, optimizer, seed)
    return Attached(method, ddp, optimizer, seed)


class _Native:
    """DDP's own all-reduce. Gloo sums in a ring, whose bytes are computed: nothing counts them in the process."""

    def __init__(self, method: str, ddp: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        num_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        self._dense = ring_bytes(num_bytes, dist.get_world_size())
        self._sent = self._dense
        if method == DDP_FP16:
            self._sent = ring_bytes(num_bytes // 2, dist.get_world_size())
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method == TRAMPOLINE:
            from gradwire.ddp.attach import attach

            attach(ddp, "none").detach()
        elif method == SILENT:
            self._sent = 0
            # Unannotated: torch compares annotations as objects, and here they are strings.
            ddp.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        return MethodCosts(self._sent * steps, self._dense * steps)

    def settle(self, step: Callable[[], object]) -> None:
        """One step fills the links' queues as all others do."""
        step()

    def close(self) -> None:
        """Nothing to end: the hook goes with its module."""


class Attached:
    """`gradwire.attach`, with the accounts of its `handle`. Momentum correction takes the optimizer's momentum."""

    def __init__(self, method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        from gradwire.ddp.attach import attach
        from gradwire.residuals.momentum import MomentumCorrection
        from gradwire.sync.options import SyncOptions
        from gradwire.sync.plan import Plan

        policy = feedback(method)
        if isinstance(policy, MomentumCorrection):
            policy = MomentumCorrection.of(optimizer, masking=policy.masking, clip=policy.clip)
        plan = Plan(compressor(method), strategy=strategy(method), feedback=policy)
        self.handle = attach(ddp, plan, optimizer=optimizer, options=SyncOptions(seed=seed))

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        total = self.handle.report().total
        return MethodCosts(total.sent_bytes, total.dense_bytes, total.encode_seconds, total.decode_seconds)

    def settle(self, step: Callable[[], object]) -> None:
        """See `_Native.settle`."""
        step()

    def close(self) -> None:
        """Detach."""
        self.handle.detach()


class Automatic:
    """`gradwire.attach(ddp, "auto")`, with its report's accounts, which have DDP's own all-reduce as `_Native` does."""

    def __init__(self, method: str, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        from gradwire.ddp.attach import attach
        from gradwire.sync.options import SyncOptions

        options = SyncOptions(seed=seed)
        self._handle = attach(ddp, "auto", optimizer=optimizer, fidelity=fidelity(method), options=options)
        assert self._handle.autopilot is not None, "auto has one"
        self.autopilot = self._handle.autopilot

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        total = self._handle.report().total
        return MethodCosts(total.sent_bytes, total.dense_bytes, total.encode_seconds, total.decode_seconds)

    def settle(self, step: Callable[[], object]) -> None:
        """Begin anew, as a job that starts at this rate would, and go on until it has decided."""
        self.autopilot.restart()
        step()
        while not self.autopilot.settled:
            step()

    def close(self) -> None:
        """Detach."""
        for decision in self.autopilot.decisions:
            print(f"auto on rank {dist.get_rank()}: {decision}", file=sys.stderr)
        self._handle.detach()


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
