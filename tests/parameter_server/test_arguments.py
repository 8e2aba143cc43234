from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.arguments import log_notes, one_optimizer
from gradwire.sync.plan import Plan
from tests.core.test_optimizers import Subclass, sgd

NOBODY = "127.0.0.1:1"


def test_one_optimizer_is_taken_wrapped_or_not_and_several_are_refused() -> None:
    one = sgd()
    assert one_optimizer(one) is one_optimizer([Subclass(one)]) is one
    with pytest.raises(OptionError, match=r"step one optimizer, but here are 2\. Make one, with a group"):
        one_optimizer([one, sgd()])


@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        ({"optimizer": torch.optim.SGD}, OptionTypeError, "Make one: SGD"),
        ({"compressor": ["topk"]}, OptionTypeError, "Pass 'topk'"),
        ({"compressor": "3lc"}, UnknownNameError, "Did you mean 'threelc'"),
        ({"ratio": 0.01, "compressor": "topk"}, OptionTypeError, '"topk:ratio=0.01"'),
    ],
)
def test_a_client_checks_what_it_is_given_before_it_calls_anybody(
    arguments: dict[str, object], error: type[Exception], advice: str
) -> None:
    model = nn.Linear(2, 2)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "worker": 0, "workers": 1, **arguments}
    with pytest.raises(error, match=advice):
        gw.ParameterClient(model, servers=NOBODY, **given)


def test_notes_of_both_plans_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan({"embd": "topk", "*": "none"})
    log_notes({"embed": TensorSpec((400, 400))}, plan, plan)
    (record,) = caplog.records
    assert "'embd' matches no parameter. Did you mean 'embed'?" in record.getMessage()
