"""What a function for the probe may return, and what is said where it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parameter import Parameter

from gradwire.bench.probe_job import builtin, from_user, loss_of
from gradwire.core.errors import GradwireError, OptionError


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(3))

    def forward(self, x, y=0.0):
        return {"loss": (self.weight * (x + y)).sum()}


@pytest.mark.parametrize(
    ("batch", "gradient"), [(torch.ones(3), 1.0), ((torch.ones(3), 2.0), 3.0), ({"y": 4.0, "x": torch.ones(3)}, 5.0)]
)
def test_batches_are_handed_to_a_copy(batch, gradient):
    model = Sum()
    job = from_user("a:b", lambda: (model, batch))
    copy = job.copy()
    job.step(copy)
    assert copy.weight.grad.tolist() == [gradient] * 3
    assert model.weight.grad is None
    assert list(job.specs) == ["weight"]
    assert not job.means_squares


def test_losses_in_outputs():
    two = torch.tensor(2.0)
    assert loss_of(two) == loss_of(SimpleNamespace(loss=two)) == loss_of({"loss": two}) == (2.0, False)
    assert loss_of(torch.tensor([1.0, 3.0])) == (5.0, True)
    with pytest.raises(OptionError, match="Let the model return its loss"):
        loss_of({"logits": two})


@pytest.mark.parametrize("made", [None, (1, 2), (Sum(), 1), (nn.ReLU(), torch.ones(1))])
def test_anything_else_is_refused_with_the_contract(made):
    with pytest.raises(OptionError, match="Return model, batch"):
        from_user("a:b", lambda: made)


def test_what_is_no_function_is_refused():
    with pytest.raises(OptionError, match="a:b must be a function, not int"):
        from_user("a:b", 3)


def test_a_model_that_cannot_be_copied_says_so():
    model = Sum()
    model.kept = model.weight * 2
    with pytest.raises(GradwireError, match=r"copy\.deepcopy cannot copy the model \(RuntimeError"):
        from_user("a:b", lambda: (model, torch.ones(3))).copy()


def test_built_in_workloads_differ_by_rank_in_data_alone():
    first, second = (builtin("digits", rank, 2) for rank in range(2))
    assert not torch.equal(first.batch[0], second.batch[0])
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name))
    copy = first.copy()
    first.step(copy)
    assert all(parameter.grad is not None for parameter in copy.parameters())
