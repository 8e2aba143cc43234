"""The optimizers of an attached module: which parameters each one has, and what follows from its steps.

The step of an optimizer commits the residuals of its own parameters, because it applies their gradients. Optimizers of
one module may take turns or step at different rates: residuals of gradients that no step has applied stay staged, as
under gradient accumulation, and do not hold up the others.

Guarantees: If optimizers are given, every trained parameter has one. A warning is logged once if an optimizer does not
step, or if a GradScaler steps that `attach` was not given.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradwire.compressors.base import Compressor
from gradwire.core import torch_private
from gradwire.core.errors import AttachError, OptionError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import ElementRange
from gradwire.ddp.clipping import AfterAveraging
from gradwire.ddp.optimizer_state import OptimizerState

logger = logging.getLogger("gradwire")

MAX_BACKWARDS = 20  # without a step; longer accumulation should run under `no_sync`
_NUM_NAMED = 3

Parameters = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Owner:
    """One optimizer.

    Attributes:
        optimizer: The optimizer.
        known: Names of the module's parameters, by id.
        state: State for gcomp. None if none of its parameters needs it.
        averaged: Finds changes of gradients before its steps, for `state`.
        backwards: Number of synchronized backward passes since its last step, without those of a closure.
        steps_now: Whether it is stepping.
        has_warned: Whether a warning has said that it does not step.
        skips: Whether its next step is skipped, unless its gradients have become finite by then.
    """

    optimizer: torch.optim.Optimizer
    known: Mapping[int, str]
    state: OptimizerState | None = None
    averaged: AfterAveraging = field(default_factory=AfterAveraging)
    backwards: int = 0
    steps_now: bool = False
    has_warned: bool = False
    skips: bool = False
    _sizes: tuple[int, ...] = ()  # of its groups
    _names: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of the module's parameters that it has now: some may have been added to it."""
        groups = self.optimizer.param_groups
        sizes = tuple(len(group["params"]) for group in groups)
        if sizes != self._sizes:
            self._sizes = sizes
            ids = (id(each) for group in groups for each in group["params"])
            self._names = frozenset(self.known[each] for each in ids if each in self.known)
        return self._names

    def __str__(self) -> str:
        return f"{type(self.optimizer).__name__} of {_some(sorted(self.names))}"


class Optimizers:
    """All optimizers of an attached module. False if none were given.

    Attributes:
        have_scaler: Whether a GradScaler steps them, as far as is known.
        any_step: Whether any of them has stepped since the last synchronized backward pass.

    Args:
        given: The argument of `attach`: an optimizer, several, wrapped ones, or None.
        parameters: Trained parameters of the module, by name.
        names: Names of all parameters by id. Parameters that are frozen now may be trained later.

    Raises:
        OptionTypeError: `given` has something else than optimizers.
        AttachError: No optimizer has some of the parameters.
    """

    def __init__(self, given: object, parameters: Parameters, names: Mapping[int, str]) -> None:
        self._parameters = parameters
        optimizers = [] if given is None else optimizers_of(given)
        owners = [Owner(each, names) for each in optimizers]
        self._owners = [owner for owner in owners if owner.names]
        self._owner_of = {name: owner for owner in self._owners for name in owner.names}
        self._before: weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]] | None = None
        self._after: weakref.WeakMethod[Callable[[frozenset[str] | None], None]] | None = None
        self._hooks: list[RemovableHandle] = []
        self._warns = self.have_scaler = self.any_step = False
        lacking = [name for name, _ in parameters if name not in self._owner_of]
        if optimizers and lacking:
            raise _not_owned(lacking, len(parameters))

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (owner.optimizer for owner in self._owners)

    @property
    def owned(self) -> Sequence[frozenset[str]]:
        """Names of the parameters of each optimizer, if there are several."""
        return [owner.names for owner in self._owners] if len(self._owners) > 1 else ()

    @property
    def waiting(self) -> Sequence[frozenset[str]]:
        """Names of the parameters of each optimizer that has not stepped since a synchronized backward pass."""
        return [owner.names for owner in self._owners if owner.backwards]

    # -- steps -----------------------------------------------------------------------------------------------

    def listen(
        self,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[frozenset[str] | None], None],
        *,
        has_scaler: bool,
        warns: bool,
    ) -> None:
        """Call two methods at each step of an optimizer. They are held weakly: an optimizer may outlive the module.

        Args:
            before: Called before the step, with the optimizer.
            after: Called after the step, with the names of the optimizer's parameters, or None for all.
            has_scaler: Whether `attach` was given a GradScaler. If not, a warning is logged when one steps.
            warns: If true, log warnings. One rank is enough.
        """
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self.have_scaler, self._warns = has_scaler, warns
        for owner in self._owners:
            self._hooks.append(owner.optimizer.register_step_pre_hook(partial(self._before_step, owner)))
            self._hooks.append(owner.optimizer.register_step_post_hook(partial(self._after_step, owner)))

    def close(self) -> None:
        """Stop listening to steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_backward(self, joined: bool) -> None:
        """Count a synchronized backward pass. A rank that has `joined` runs none itself and takes no steps."""
        self.any_step = self.any_step and joined
        for owner in self._owners:
            owner.averaged.begin_backward()
            if owner.state is not None:
                owner.state.begin_backward()
            owner.backwards += not (joined or owner.steps_now)
            if owner.backwards == MAX_BACKWARDS and not owner.has_warned:
                owner.has_warned = True
                self._warn(
                    f"{MAX_BACKWARDS} backwards were synchronized without a step of {owner}. Residuals are neither "
                    "committed nor saved until it steps. If another optimizer was created after attach, detach and "
                    "attach with that one. To accumulate gradients, run all backwards but the last under ddp.no_sync()."
                )

    def _before_step(
        self, owner: Owner, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before a step. A closure makes the gradients within the step: they are looked at when it returns."""
        owner.steps_now = True
        before = self._before() if self._before is not None else None
        if before is not None:
            before(optimizer)
        if not self.have_scaler and torch_private.stepping_scaler() is not None:
            self.have_scaler = True  # warn once
            self._warn(
                "A GradScaler scales these gradients, but attach was not given it. Pass scaler=. Otherwise residuals "
                "count by the wrong scale whenever the scale changes."
            )
        if not self.states:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            _check_gradients(owner)
            return None

        def checked() -> Any:
            loss = closure()
            _check_gradients(owner)
            return loss

        return args[:1], kwargs | {"closure": checked}

    def _after_step(self, owner: Owner, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch_private.skips_within_step(optimizer):
            owner.steps_now = False
            return
        owner.backwards, owner.steps_now, self.any_step = 0, False, True
        after = self._after() if self._after is not None else None
        if after is not None:
            after(owner.names if self.owned else None)

    def _warn(self, text: str) -> None:
        if self._warns:
            logger.warning("%s", text)

    # -- gcomp -----------------------------------------------------------------------------------------------

    def throw_away(self, names: Collection[str] | None) -> None:
        """Note that gradients were thrown away, by parameter name; None means all."""
        for state in self.states:
            state.throw_away(names)

    def note_mismatch(self) -> None:
        """Ranks turned out to have different parameters or optimizer states: skip the next step, then rely on none."""
        if any(state.common for state in self.states):
            self._warn(
                "Ranks have different parameters or optimizer states, or compute differently with them (on different "
                "processors?). This step of the optimizer is skipped on all ranks. From the next one on, gcomp sends "
                "levels and does not derive them, which takes about a third more bytes. Make ranks equal before "
                'training, or use gw.make("gcomp", levels="sent").'
            )
        for state in self.states:
            state.common = False
        for owner in self._owners:
            owner.skips = True

    def show_state(self, needed: Mapping[str, Compressor | None]) -> None:
        """Let gcomp see the state that optimizers have of the parameters in `needed`, each with its compressor.

        Raises:
            OptionError: gcomp does not know the update of an optimizer, or two optimizers have a parameter.
        """
        states = [self._state(owner, needed) for owner in self._owners]
        for owner, state in zip(self._owners, states, strict=True):
            owner.state = state

    def _state(self, owner: Owner, needed: Mapping[str, Compressor | None]) -> OptimizerState | None:
        parameters = [(name, each) for name, each in self._parameters if name in needed and name in owner.names]
        for name, _ in parameters:
            if self._owner_of[name] is not owner:
                raise OptionError(
                    f"gcomp needs the one optimizer of a parameter, but {name!r} has two: "
                    f'{type(owner.optimizer).__name__} and {self._owner_of[name]}. Use "lossless" for it.'
                )
        lasting = [name for name, each in needed.items() if getattr(each, "rate", "") == "lasting"]
        return OptimizerState(owner.optimizer, parameters, lasting) if parameters else None

    @property
    def states(self) -> list[OptimizerState]:
        """States that gcomp sees."""
        return [owner.state for owner in self._owners if owner.state is not None]

    def aux(self, name: str, elements: ElementRange) -> Mapping[str, torch.Tensor]:
        """Slices of one range for an encode.

        Also notes for which hyperparameters gradients are cut, which the next step checks.
        """
        state = self._state_of(name)
        return {} if state is None else state(name, elements)

    def slices(self, name: str, elements: ElementRange) -> Mapping[str, torch.Tensor]:
        """Slices of one range for calibration. Read only."""
        state = self._state_of(name)
        return {} if state is None else state.slices(name, elements)

    def _state_of(self, name: str) -> OptimizerState | None:
        owner = self._owner_of.get(name)
        return None if owner is None else owner.state

    def watch(
        self,
        future: torch.futures.Future[torch.Tensor],
        bucket: torch_private.GradBucket,
        names: Sequence[str],
        cut: Collection[str],
    ) -> torch.futures.Future[torch.Tensor]:
        """Sample the largest mean of each optimizer among those that gcomp has `cut`, to see how it is changed.

        Args:
            future: The means of a bucket.
            bucket: The bucket.
            names: Names of its parameters.
            cut: Names of all parameters that travel by gcomp.
        """
        parameters = torch_private.bucket_parameters(bucket)
        largest: dict[int, int] = {}
        for index in sorted(range(len(names)), key=lambda index: parameters[index].numel()):
            if names[index] in cut and self._state_of(names[index]) is not None:
                largest[id(self._owner_of[names[index]])] = index
        kept = [
            (
                self._owner_of[names[index]].averaged,
                parameters[index],
                torch_private.bucket_gradient(bucket, parameters, index),
            )
            for index in largest.values()
        ]

        def arrived(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            for averaged, parameter, grad in kept:
                averaged.take(parameter, grad)
            return done.value()

        return future.then(arrived)


def _check_gradients(owner: Owner) -> None:
    """Check that the gradients of a step are those for which gcomp has cut them, or skip the step."""
    factors = owner.averaged.factors()
    skipped = owner.skips and _drop_if_nan(owner.optimizer)
    owner.skips = False
    if owner.state is not None and skipped:
        owner.state.skip_step()
    elif owner.state is not None:
        owner.state.before_step(factors)


def _drop_if_nan(optimizer: torch.optim.Optimizer) -> bool:
    """Drop all gradients of an optimizer if any is NaN, so that its step changes nothing. Returns whether one was."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if not any(bool(each.grad.isnan().any()) for each in parameters):
        return False
    for each in parameters:
        each.grad = None
    return True


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(map(repr, names[:_NUM_NAMED])) + (f" and {more} more" if more > 0 else "")


def _not_owned(lacking: Sequence[str], num_trained: int) -> AttachError:
    advice = (
        "If it was created before the model was changed, or for another model, create it from ddp.parameters(). "
        if len(lacking) == num_trained
        else "Pass all optimizers of the module, optimizer=[first, second]. If nothing trains these parameters, call "
        "requires_grad_(False) on them before DDP wraps the model. "
    )
    return AttachError(
        f"optimizer= lacks {len(lacking)} of the {num_trained} parameters that this module trains: {_some(lacking)}. "
        f"Their residuals would never be committed. {advice}Or leave optimizer= out: residuals are then committed when "
        "the next backward begins."
    )
