from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.net.client import ConnectionOptions
from gradwire.parameter_server.arguments import log_notes, one_optimizer
from gradwire.parameter_server.options import JobOptions, TransferOptions, server_addresses
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
        ({"job": "mine"}, OptionTypeError, r"job=gradwire\.JobOptions\(name='mine'\)"),
        ({"transfer": {"overlap": False}}, OptionTypeError, r"transfer=gradwire\.TransferOptions\(overlap=False\)"),
        ({"transfer": 512}, OptionTypeError, r"transfer=gradwire\.TransferOptions\(min_elements=512\)"),
        ({"connection": "my.key"}, OptionTypeError, r"connection=gradwire\.ConnectionOptions\(key_file='my\.key'\)"),
        ({"piece_elements": 99}, OptionTypeError, r"is now chunk_elements: .*TransferOptions\(chunk_elements=99\)"),
        ({"job": JobOptions(worker=2, workers=2)}, OptionError, "There is no worker 2 of 2"),
        ({"job": JobOptions(worker=0, workers=2, backups=2)}, OptionError, "Pass 0 to 1"),
        ({"job": JobOptions(worker=0, workers=2, staleness=33)}, OptionError, "Pass 0 to 32"),
        ({"job": JobOptions(worker=0, workers=2, late="lose")}, OptionError, "Pass one of 'keep', 'drop'"),
        ({"job": JobOptions(worker=0, workers=2, late="drop")}, OptionError, r"Pass backups=1, or more\."),
        ({"job": JobOptions(worker=0, workers=2, local_steps=0)}, OptionError, "Pass 1 to push"),
        ({"job": JobOptions(worker=0)}, OptionError, r"JobOptions\(workers=\.\.\.\), or set WORLD_SIZE"),
    ],
)
def test_a_client_checks_what_it_is_given_before_it_calls_anybody(
    arguments: dict[str, object], error: type[Exception], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(2, 2)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "job": JobOptions(worker=0, workers=1)}
    with pytest.raises(error, match=advice):
        gw.ParameterClient(model, servers=NOBODY, **given | arguments)


def test_servers_come_from_an_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SERVERS", "10.0.0.1:7070, 10.0.0.2:7071")
    assert server_addresses(None) == [("10.0.0.1", 7070), ("10.0.0.2", 7071)]
    assert server_addresses(["[::1]:7070"]) == [("::1", 7070)]
    monkeypatch.delenv("GRADWIRE_SERVERS")
    with pytest.raises(OptionError, match="or set GRADWIRE_SERVERS"):
        server_addresses(None)


MOVED = {
    "job": (JobOptions, ("worker", "workers", "backups", "local_steps", "seed")),
    "transfer": (TransferOptions, ("min_elements", "feedback", "overlap", "fine_grained")),
    "connection": (ConnectionOptions, ("key_file", "insecure", "timeout", "stall_timeout")),
}


@pytest.mark.parametrize(
    ("parameter", "keyword"), [(each, name) for each, (_, names) in MOVED.items() for name in names]
)
def test_an_old_keyword_says_where_it_went(parameter: str, keyword: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionTypeError, match=rf"{parameter}=gradwire\.{MOVED[parameter][0].__name__}\({keyword}=1\)"):
        gw.ParameterClient(model, optimizer, NOBODY, **{keyword: 1})


def test_notes_of_both_plans_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan({"embd": "topk", "*": "none"})
    log_notes({"embed": TensorSpec((400, 400))}, plan, plan)
    (record,) = caplog.records
    assert "'embd' matches no parameter. Did you mean 'embed'?" in record.getMessage()
