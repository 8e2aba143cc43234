"""`attach`: compressed gradient synchronization for a DistributedDataParallel module.

A thin adapter on `Synchronizer`. `gradwire.ddp.handle` holds the hook.

Guarantees: Only gradient synchronization of this module changes. The hook slot is taken for good, because torch cannot
free it, and does after `detach` what DDP does without a hook. Errors keep their type.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import NoneType

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregator.strategy import NAME as SERVER
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core import torch_private
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.ddp.handle import Handle
from gradwire.ddp.hook_slot import check_attachable, slot_of
from gradwire.ddp.memory_orders import spec_in_memory
from gradwire.ddp.momentum import MomentumCheck, may_have_momentum
from gradwire.ddp.optimizers import Optimizers
from gradwire.observe.notices import tell
from gradwire.planner.fidelity import LEVELS
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Method, Plan
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.auto import Autopilot

logger = logging.getLogger("gradwire")
ALONE = "There is one process only, so no gradients are sent, and gradwire does nothing."


@names_unknown_arguments
def attach(
    ddp: DistributedDataParallel,
    method: Method | Mapping[str, Method] | Plan = "threelc",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    fidelity: str | None = None,
    register: bool = True,
    check_every: int = 100,
    options: SyncOptions = SyncOptions(),
) -> Handle:
    """Compress gradient synchronization for a DDP module, starting with the next backward pass.

    Call it on every rank with the same arguments.

    Args:
        ddp: The DDP module, on Gloo or NCCL. It may be compiled, or wrap a compiled module.
        method: How gradients are compressed: the name of a compressor, with options as in ``"topk:ratio=0.01"``; a
            compressor; ``"auto"``, which chooses while the model trains (see `gradwire.tuning.auto`); a mapping from
            patterns of parameter names to these, in which the first match counts; or a `Plan`, which also sets
            strategy, partitions and feedback.
        optimizer: Optimizer of the module's parameters, or a list of all their optimizers. If given, residuals are
            committed when the optimizer steps, so a step that a GradScaler skips leaves no trace. If not, they are
            committed when the next backward pass begins, unless the gradients of any rank were not finite. ``"gcomp"``
            requires it (see `gradwire.compressors.support.gcomp_metric`).
        scaler: GradScaler of these gradients. If given, residuals follow each change of its scale. If not, residuals
            from before a change count by the wrong scale once.
        fidelity: What ``"auto"`` may choose from: ``"exact"``, ``"near-lossless"``, ``"balanced"`` or ``"aggressive"``
            (see `gradwire.planner.fidelity`). None means ``"balanced"``. For ``"auto"`` only.
        register: If true, take the module's communication hook. If false, register a hook of your own that returns
            ``handle.hook(state, bucket)``.
        check_every: Number of backward passes after which all ranks compare a hash of their parameters. 0 means never.
            With `gradwire.Aggregator.fill_after`, number of steps after which replicas should have been synchronized:
            if they were not and differ, there is a warning.
        options: Timeouts, seed, nodes, server, and the directory of the flight recorder.

    Returns:
        The handle, with `report`, `state_dict` and `detach`.

    Raises:
        AttachError: `ddp` is not a DDP module or already attached, another hook has its hook slot, the optimizers lack
            parameters, or momentum would be applied twice.
        UnknownNameError, OptionError, OptionTypeError: A name or value does not exist or does not fit.
        DisagreementError: Ranks passed different arguments. Raised on every rank before any gradient is sent.

    On failure: If a rank dies or freezes, `backward` raises a `SyncError` on all other ranks that names rank, tensor
        and phase. Create the DDP module again after that.
    """
    ddp = torch_private.uncompiled(ddp)  # type: ignore[assignment]
    check_attachable(ddp, register)
    _check_arguments(scaler, check_every, options)
    if fidelity is not None and fidelity not in LEVELS:
        raise UnknownNameError("fidelity", fidelity, LEVELS)
    plan = method if isinstance(method, Plan) else Plan(method)
    automatic = plan.is_auto
    if fidelity is not None and not automatic:
        raise OptionError(
            f'fidelity="{fidelity}" limits what "auto" may choose, but the method is "{plan}". Pass "auto", or leave '
            "fidelity out."
        )
    fidelity = fidelity or "balanced"
    asked = str(plan)
    parameters = torch_private.trained_parameters(ddp)
    tensors = {name: spec_in_memory(parameter) for name, parameter in parameters}
    rules, plan = plan, plan.without_auto()  # until it has measured, gradients travel dense
    strategies = {plan.strategy, *(entry.strategy for entry in (plan.entries or {}).values())}
    if options.server is not None and SERVER not in strategies:
        raise OptionError(
            "The options name a server, but the plan does not use it. "
            'Pass gradwire.Plan(..., strategy="server"), or leave the server out.'
        )
    optimizers = Optimizers(optimizer, parameters, torch_private.parameter_names(ddp))
    _check_filling(options, optimizers, scaler)
    momentum = MomentumCheck(parameters)
    momentum.at_attach(plan, list(optimizers))
    _show_state(optimizers, plan, tensors, automatic and fidelity != "exact")
    aux = optimizers.aux if optimizers else None  # also without states yet: frozen parameters may be trained later
    settings = {
        "check_every": check_every,
        "auto's fidelity": fidelity if automatic else None,
        "optimizer is given": optimizer is not None,
        "scaler is given": scaler is not None,
    }
    synchronizer = Synchronizer(ddp.process_group, plan, tensors=tensors, options=options, aux=aux, settings=settings)
    try:
        handle = Handle(ddp, synchronizer, optimizers, momentum, check_every, scaler)
        if automatic:
            if options.watch_norms and synchronizer.rank == 0:
                tell("auto: watch_norms does not see steps by DDP's own all-reduce, only those of gradwire's plans.")
            commit, slices = handle.commit_without_optimizer, optimizers.slices if optimizers.states else None
            handle.autopilot = Autopilot(
                synchronizer, ddp.process_group, fidelity, plan.min_elements, commit, slices, rules,
                momentum=lambda: may_have_momentum(list(optimizers)),
            )  # fmt: skip
        slot = slot_of(ddp)
        if register:
            slot.register(ddp)
    except BaseException:
        optimizers.close()
        synchronizer.close()
        raise
    slot.handle = handle
    handle.start_status(asked, options)
    if synchronizer.world_size == 1:
        logger.info(ALONE)
    sparse = [name for name, _ in torch_private.trained_parameters(ddp, sparse=True)]
    if sparse and synchronizer.rank == 0:
        without = " Momentum correction does not reach them." if plan.has_velocity else ""
        logger.warning("Gradients of %s are sparse: DDP's own all-reduce averages them.%s", ", ".join(sparse), without)
    return handle


def _check_arguments(scaler: object, check_every: object, options: object) -> None:
    """Refuse arguments of wrong types, which would be noticed in a backward pass only."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise OptionTypeError(f"scaler must be a GradScaler, not {scaler!r}. Leave it out if there is none.")
    if type(check_every) is not int:
        raise OptionTypeError(f"check_every is a number of backward passes, or 0 for never, not {check_every!r}.")
    if check_every < 0:
        raise OptionError(f"check_every is a number of backward passes, or 0 for never, not {check_every}.")
    if not isinstance(options, SyncOptions):
        raise OptionTypeError(f"options must be gradwire.SyncOptions(...), not {options!r}.")


def _check_filling(options: SyncOptions, optimizers: Optimizers, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse what does not go together with replicas that may differ."""
    if isinstance(options.server, (str, Sequence, NoneType)) or not options.server.replicas_may_differ:
        return
    if not optimizers:
        raise OptionError(
            "With fill_after, replicas may differ, and handle.synchronize_replicas() also copies optimizer state. "
            "Pass optimizer= to attach."
        )
    if scaler is not None:
        raise OptionError(
            "With fill_after, a rank may miss that a mean is not finite, and would then scale its loss by another "
            "factor than the others. Train in bfloat16, which needs no GradScaler, or leave fill_after out."
        )


def _show_state(optimizers: Optimizers, plan: Plan, tensors: Mapping[str, TensorSpec], may_choose_gcomp: bool) -> None:
    """Show optimizer state to gcomp, for the tensors that it compresses, or may compress under auto."""
    compressors = {name: plan.entry(name, spec).compressor for name, spec in tensors.items()}
    optimizers.show_state({name: each for name, each in compressors.items() if each.needs_optimizer})
    if may_choose_gcomp:
        try:
            optimizers.show_state(dict.fromkeys(tensors))
        except OptionError as error:
            logger.info("auto leaves gcomp out: %s", error)
