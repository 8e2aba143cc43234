from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.core.errors import OptionTypeError
from gradwire.core.optimizers import optimizers_of


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class Subclass(torch.optim.Optimizer):
    """A wrapper as in Accelerate: a subclass of the optimizer that never calls its constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


class Wrapper:
    """A wrapper as in Lightning."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class WithInner(torch.optim.SGD):
    """An optimizer with an update of its own on top of another one: not a wrapper."""

    def __init__(self, parameters, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(parameters, lr=1.0)
        self.optimizer = optimizer


def test_one_or_several_are_a_list_in_which_each_is_once() -> None:
    one, other = sgd(), sgd()
    assert optimizers_of(one) == [one]
    assert optimizers_of([one, other]) == optimizers_of((one, other, one)) == [one, other]


def test_wrappers_are_looked_through() -> None:
    one, other = sgd(), sgd()
    assert optimizers_of([Subclass(one), Wrapper(Subclass(other))]) == [one, other]
    whole = WithInner(nn.Linear(2, 2).parameters(), one)
    assert optimizers_of(whole) == [whole]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (torch.optim.SGD, r"the class SGD, not an optimizer. Make one: SGD\(ddp.parameters\(\)\)"),
        (torch.optim.lr_scheduler.StepLR(sgd(), 1), "a scheduler, StepLR. Pass scheduler.optimizer"),
        (nn.Linear(2, 2), "but this is of type Linear"),
        ({"a": sgd()}, "but this is of type dict"),
        ([sgd(), "adam"], "but this is of type str"),
        (Wrapper(None), "but this is of type Wrapper"),
        ([], "The list of optimizers is empty"),
        (None, "of type NoneType"),
    ],
)
def test_what_is_no_optimizer_is_told_what_to_pass(given: object, advice: str) -> None:
    with pytest.raises(OptionTypeError, match=advice):
        optimizers_of(given)
