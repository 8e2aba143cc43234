"""The optimizers of an attached module: which parameters each one has, and what its steps say.

A step of an optimizer commits the residuals of its own parameters, for it is what applies their gradients. So the
optimizers of one module may take turns or step at different rates: what an optimizer has not applied stays staged, as
under gradient accumulation, and the others are not held up by it.

Guarantees that every trained parameter has an optimizer, where any is given. Warns, once each, of an optimizer that
does not step, and of a GradScaler that `attach` was not told of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradwire.core import torch_private
from gradwire.core.errors import AttachError, OptionError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import ElementRange
from gradwire.ddp.clipping import AfterAveraging
from gradwire.ddp.optimizer_state import OptimizerState

logger = logging.getLogger("gradwire")

MAX_BACKWARDS = 20  # without a step: who accumulates over more does so under `no_sync`, or should
_NUM_NAMED = 3

Parameters = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Owner:
    """One optimizer.

    Attributes:
        optimizer: the optimizer.
        names: names of the parameters it has of the module.
        state: its state for gcomp; None where no parameter of it needs that.
        averaged: finds what becomes of gradients before its steps, for `state`.
        backwards: synchronized backwards since its last step.
    """

    optimizer: torch.optim.Optimizer
    names: frozenset[str]
    state: OptimizerState | None = None
    averaged: AfterAveraging = field(default_factory=AfterAveraging)
    backwards: int = 0

    def __str__(self) -> str:
        return f"{type(self.optimizer).__name__} of {_some(sorted(self.names))}"


class Optimizers:
    """All optimizers of an attached module; false where none are given.

    Args:
        given: what `attach` got: one, several, wrapped ones, or None.
        parameters: the trained parameters of the module, by name.
        names: names of all its parameters, by their ids: those that are frozen now may be trained later.

    Raises:
        OptionTypeError: something else than optimizers.
        AttachError: parameters that none of them has.
    """

    def __init__(self, given: object, parameters: Parameters, names: Mapping[int, str]) -> None:
        self._parameters = parameters
        optimizers = [] if given is None else optimizers_of(given)
        owners = [Owner(each, _names(each, names)) for each in optimizers]
        self._owners = [owner for owner in owners if owner.names]
        self._owner_of = {name: owner for owner in self._owners for name in owner.names}
        self._state_of: dict[str, OptimizerState] = {}
        self._on_step: Callable[[frozenset[str] | None], None] = lambda names: None
        self._hooks: list[RemovableHandle] = []
        self._warns = self._expects_scaler = False
        lacking = [name for name, _ in parameters if name not in self._owner_of]
        if optimizers and lacking:
            raise _not_owned(lacking, len(parameters))

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (owner.optimizer for owner in self._owners)

    # -- steps -----------------------------------------------------------------------------------------------

    def listen(self, on_step: Callable[[frozenset[str] | None], None], *, expects_scaler: bool, warns: bool) -> None:
        """Call `on_step` after each step of an optimizer, with the names of its parameters, or None for all.

        Args:
            on_step: is held on to by the optimizers, until `close`.
            expects_scaler: whether a GradScaler is known of, so that there is nothing to warn of.
            warns: whether warnings are logged, as is enough on one rank.
        """
        self._on_step, self._expects_scaler, self._warns = on_step, expects_scaler, warns
        for owner in self._owners:
            self._hooks.append(owner.optimizer.register_step_pre_hook(partial(self._before_step, owner)))
            self._hooks.append(owner.optimizer.register_step_post_hook(partial(self._after_step, owner)))

    def close(self) -> None:
        """Hear of no more steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_backward(self, joined: bool) -> None:
        """A synchronized backward begins; `joined` on a rank that has none of its own, and takes no steps."""
        for owner in self._owners:
            if owner.state is not None:
                owner.state.begin_backward()
            owner.backwards += not joined
            if owner.backwards == MAX_BACKWARDS:
                self._warn(
                    f"{MAX_BACKWARDS} backwards were synchronized without a step of {owner}. Until it steps, what "
                    "compression keeps back is not committed, and not saved. If another optimizer was made after "
                    "attach, detach and attach with that one. To accumulate gradients, run all backwards but the last "
                    "under ddp.no_sync()."
                )

    def _before_step(self, owner: Owner, *_: Any) -> None:
        if not self._expects_scaler and torch_private.stepping_scaler() is not None:
            self._expects_scaler = True  # said once
            self._warn(
                "A GradScaler scales these gradients, and attach was not told. Pass scaler=: what compression keeps "
                "back counts by the wrong scale otherwise, whenever the scale changes."
            )
        if owner.state is not None:
            owner.state.before_step(owner.averaged.factors())

    def _after_step(self, owner: Owner, *_: Any) -> None:
        owner.backwards = 0
        self._on_step(owner.names if len(self._owners) > 1 else None)

    def _warn(self, text: str) -> None:
        if self._warns:
            logger.warning("%s", text)

    # -- gcomp -----------------------------------------------------------------------------------------------

    def show_state(self, needed: Container[str]) -> None:
        """Let gcomp see the state that optimizers have of some parameters.

        Raises:
            OptionError: gcomp does not know what such an optimizer does; or several have a parameter.
        """
        state_of: dict[str, OptimizerState] = {}
        for owner in self._owners:
            parameters = [(name, each) for name, each in self._parameters if name in needed and name in owner.names]
            for name, _ in parameters:
                if self._owner_of[name] is not owner:
                    raise OptionError(
                        f"gcomp looks at the state of the optimizer of a parameter, but {name!r} has two: "
                        f'{type(owner.optimizer).__name__} and {self._owner_of[name]}. Use "lossless" for it.'
                    )
            state_of |= (
                dict.fromkeys(dict(parameters), OptimizerState(owner.optimizer, parameters)) if parameters else {}
            )
        self._state_of = state_of
        for owner in self._owners:
            owner.state = next((state_of[name] for name in owner.names if name in state_of), None)

    @property
    def states(self) -> list[OptimizerState]:
        """The states that gcomp sees, of the optimizers that have any."""
        return [owner.state for owner in self._owners if owner.state is not None]

    def aux(self, name: str, elements: ElementRange) -> Mapping[str, torch.Tensor]:
        """See `OptimizerState`; nothing of a parameter that was frozen when its state was shown."""
        state = self._state_of.get(name)
        return {} if state is None else state(name, elements)

    def slices(self, name: str, elements: ElementRange) -> Mapping[str, torch.Tensor]:
        """See `OptimizerState`; likewise."""
        state = self._state_of.get(name)
        return {} if state is None else state.slices(name, elements)

    def watch(
        self, future: torch.futures.Future[torch.Tensor], bucket: torch_private.GradBucket, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """Keep some of the largest mean that a bucket has of each optimizer, to see what becomes of it; for gcomp."""
        parameters = torch_private.bucket_parameters(bucket)
        largest: dict[int, int] = {}
        for index, name in enumerate(names):
            owner = self._owner_of.get(name)
            if owner is not None and owner.state is not None:
                before = largest.setdefault(id(owner), index)
                if parameters[index].numel() > parameters[before].numel():
                    largest[id(owner)] = index
        if not largest:
            return future
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


def _names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> frozenset[str]:
    ids = (id(each) for group in optimizer.param_groups for each in group["params"])
    return frozenset(names[each] for each in ids if each in names)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(map(repr, names[:_NUM_NAMED])) + (f" and {more} more" if more > 0 else "")


def _not_owned(lacking: Sequence[str], num_trained: int) -> AttachError:
    whose = (
        "If it was made before the model was changed, or of another model, make it of ddp.parameters(). "
        if len(lacking) == num_trained
        else "Pass all optimizers of the module, optimizer=[first, second]; or, where nothing trains these parameters, "
        "call requires_grad_(False) on them before DDP wraps the model. "
    )
    return AttachError(
        f"optimizer= lacks {len(lacking)} of the {num_trained} parameters that this module trains: {_some(lacking)}. "
        f"What compression keeps back of them would never be committed. {whose}Or leave optimizer= out: residuals are "
        "then committed when the next backward begins."
    )
