"""`attach`: compressed gradient synchronization for a DistributedDataParallel module.

A thin adapter on `Synchronizer`; see `gradwire.ddp.handle`.

Guarantees: nothing but this module's gradient synchronization changes; one hook slot is taken for good (torch offers
no way back), and after `detach` it does exactly what DDP does without a hook; an error keeps its type.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregator.service import Aggregator
from gradwire.aggregator.strategy import NAME as SERVER
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core import torch_private
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.ddp.handle import Handle
from gradwire.ddp.hook_slot import check_attachable, slot_of
from gradwire.ddp.momentum import check_momentum
from gradwire.ddp.optimizers import Optimizers, Parameters
from gradwire.planner.fidelity import LEVELS
from gradwire.residuals import Policy
from gradwire.sync.plan import Method, Plan
from gradwire.sync.synchronizer import DEFAULT_TIMEOUT, Synchronizer
from gradwire.tuning.auto import Autopilot

logger = logging.getLogger("gradwire")


@names_unknown_arguments
def attach(
    ddp: DistributedDataParallel,
    method: Method | Mapping[str, Method] | Plan = "threelc",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    register: bool = True,
    strategy: str | None = None,
    partitions: int = 1,
    min_elements: int = 16_384,
    feedback: str | Policy | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    stall_timeout: timedelta | None = None,
    seed: int = 0,
    check_every: int = 100,
    dump_dir: str | Path | None = None,
    nodes: int | Sequence[str | int] | None = None,
    server: str | Aggregator | None = None,
    fidelity: str = "balanced",
) -> Handle:
    """Synchronize the gradients of `ddp` compressed, from the next backward on. Every rank calls it alike.

    Args:
        ddp: any DDP module, on Gloo or NCCL; compiled or not, inside or outside.
        method: a compressor's name, with options as in ``"topk:ratio=0.01"``, a compressor, a mapping from parameter
            name patterns to either (first match counts), a whole `Plan`, or ``"auto"``, which decides while training
            (see `gradwire.tuning.auto`).
        optimizer: the optimizer of these parameters, or a list of all optimizers that have some of them. With it,
            residuals are committed when the optimizer of their parameters steps, so that steps skipped by a GradScaler
            leave no trace; without it, when the next backward begins, unless any rank's gradients were not finite.
            ``"gcomp"`` needs it: see `gradwire.compressors.support.gcomp_metric`.
        scaler: the GradScaler of these gradients, if there is one. With it, residuals follow when it changes its scale;
            without it, what was kept back before a change counts by the wrong scale once.
        register: take the module's communication hook. With False it stays yours: register a hook of your own that
            calls ``handle.hook(state, bucket)`` and returns its future.
        strategy: ``"scatter_reduce"``, ``"ring"``, ``"allgather"``, ``"hierarchical"`` (dense within a node,
            compressed between nodes) or ``"server"`` (a stand-alone aggregator, for ``"thc"`` and ``"uthc"``); None
            takes the ring for large dense tensors and scatter-reduce for all others.
        partitions: ranges a rank's share of a tensor is cut into.
        min_elements: under a blanket method, vectors and tensors of fewer elements stay dense, in one message.
        feedback: ``"error"``, ``"none"`` or ``"momentum"``, or a `MomentumCorrection`, which needs `optimizer`; None
            leaves it to each compressor's default.
        timeout: a rank that gives no sign of life for so long ends the backward of all others with an error.
        stall_timeout: how long a live rank may take to join a step; default ten times `timeout`.
        seed: seed of all random streams.
        check_every: every so many backwards, all ranks compare a hash of their parameters; 0 for never.
        dump_dir: folder of the flight recorder's file, written on a failure.
        nodes: for ``"hierarchical"``: the name of each rank's node in a list, or how many ranks a node has; None takes
            what torchrun says, else the hosts' names.
        server: for ``"server"``: the aggregator, as ``"host:port"`` or a `gradwire.Aggregator`; None takes the address
            in ``GRADWIRE_AGGREGATOR``.
        fidelity: what ``"auto"`` may choose from: ``"exact"``, ``"near-lossless"``, ``"balanced"`` or
            ``"aggressive"``; see `gradwire.planner.fidelity`.

    Returns:
        The handle: report, state, detach.

    Raises:
        AttachError: not a DDP module, already attached, its hook slot is taken by another hook, the optimizers lack
            parameters, or momentum would be applied twice.
        UnknownNameError, OptionError, OptionTypeError: a name or value that does not exist or fit.
        DisagreementError: ranks ask for different things; on every rank, before data is sent.

    On failure: a rank that dies or freezes makes `backward` raise a `SyncError` on every other rank, which names rank,
        tensor and phase. The DDP module must then be built anew.
    """
    ddp = torch_private.uncompiled(ddp)  # type: ignore[assignment]
    check_attachable(ddp, register)
    automatic = method == "auto"
    if automatic:
        _check_automatic(strategy, partitions, feedback, fidelity)
        method = Plan("none", min_elements=min_elements)
    if server is not None and strategy != SERVER and not isinstance(method, Plan):
        raise OptionError(
            f'server= goes with strategy="server", but the strategy is {strategy!r}. Pass both, or leave server= out.'
        )
    plan = method if isinstance(method, Plan) else Plan(
        method, strategy=strategy, partitions=partitions, min_elements=min_elements, feedback=feedback
    )  # fmt: skip
    parameters = torch_private.trained_parameters(ddp)
    optimizers = Optimizers(optimizer, parameters, torch_private.parameter_names(ddp))
    check_momentum(plan, list(optimizers), parameters)
    _show_state(optimizers, plan, parameters, automatic and fidelity != "exact")
    synchronizer = Synchronizer(
        ddp.process_group,
        plan,
        tensors={name: TensorSpec.of(parameter) for name, parameter in parameters},
        timeout=timeout,
        stall_timeout=stall_timeout,
        seed=seed,
        dump_dir=dump_dir,
        nodes=nodes,
        server=server,
        aux=optimizers.aux if optimizers.states else None,
    )
    try:
        handle = Handle(ddp, synchronizer, optimizers, check_every, scaler)
        if automatic:
            settle, aux = handle._settle, optimizers.slices if optimizers.states else None
            handle.autopilot = Autopilot(synchronizer, ddp.process_group, fidelity, min_elements, settle, aux)
        slot = slot_of(ddp)
        if register:
            slot.register(ddp)
    except BaseException:
        synchronizer.close()
        raise
    slot.handle = handle
    sparse = [name for name, _ in torch_private.trained_parameters(ddp, sparse=True)]
    if sparse and synchronizer.rank == 0:
        logger.warning("Gradients of %s are sparse: DDP's own all-reduce averages them.", ", ".join(sparse))
    return handle


def _show_state(optimizers: Optimizers, plan: Plan, parameters: Parameters, automatic: bool) -> None:
    """Show the state of optimizers to compressors that look at it, if there is one of them, or may be."""
    if automatic:
        try:
            optimizers.show_state({name for name, _ in parameters})
        except OptionError as error:
            logger.info("auto leaves gcomp out: %s", error)
        return
    specs = {name: TensorSpec.of(parameter) for name, parameter in parameters}
    optimizers.show_state({name for name in specs if plan.entry(name, specs[name]).compressor.needs_optimizer})


def _check_automatic(strategy: str | None, partitions: int, feedback: object, fidelity: str) -> None:
    if fidelity not in LEVELS:
        raise UnknownNameError("fidelity", fidelity, LEVELS)
    if strategy is not None or partitions != 1 or feedback is not None:
        raise OptionError(
            f"Expected strategy, partitions and feedback to be left to auto, got {strategy!r}, {partitions} and "
            f'{feedback!r}. Do: attach(ddp, "auto", fidelity="balanced"), or name a compressor.'
        )
