"""Arguments that a call does not have: most belong to a compressor."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta

import pytest

import gradwire as gw
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core.errors import OptionTypeError


@names_unknown_arguments
def call(what: object, method: object = "threelc", *, timeout: int = 0) -> object:
    return what, method, timeout


def test_arguments_that_there_are_go_through() -> None:
    assert call(1, "topk", timeout=2) == (1, "topk", 2)
    assert list(inspect.signature(call).parameters) == ["what", "method", "timeout"]


@pytest.mark.parametrize(
    ("arguments", "options", "advice"),
    [
        ((1, "topk"), {"ratio": 0.5}, r'"topk:ratio=0.5", or gradwire.make\("topk", ratio=0.5\)'),
        ((1, "topk:warmup=3"), {"ratio": 0.5}, '"topk:ratio=0.5"'),
        ((1,), {"sparsity": 1.5}, '"threelc:sparsity=1.5"'),
        ((1,), {"timeot": 3}, "call has no argument 'timeot'. Did you mean 'timeout'?"),
        ((1,), {"zzz": 3}, "Arguments: what, method, timeout"),
    ],
)
def test_an_argument_that_there_is_not_is_told_where_it_belongs(arguments, options, advice) -> None:
    with pytest.raises(OptionTypeError, match=advice):
        call(*arguments, **options)


def test_plans_and_synchronizers_say_so_too() -> None:
    with pytest.raises(TypeError, match=r'Plan has no argument .ratio.*"topk:ratio=0.01"'):
        gw.Plan("topk", ratio=0.01)
    with pytest.raises(TypeError, match=r'Synchronizer has no argument .ratio.*"topk:ratio=0.01"'):
        gw.Synchronizer(None, "topk", ratio=0.01)


@pytest.mark.parametrize(
    ("argument", "value", "advice"),
    [
        ("strategy", "server", "Pass method=gradwire.Plan(..., strategy='server')."),
        ("partitions", 2, "Pass method=gradwire.Plan(..., partitions=2)."),
        ("min_elements", 0, "Pass method=gradwire.Plan(..., min_elements=0)."),
        ("feedback", "none", "Pass method=gradwire.Plan(..., feedback='none')."),
        ("timeout", timedelta(1), "Pass options=gradwire.SyncOptions(timeout=datetime.timedelta(days=1))."),
        ("stall_timeout", None, "Pass options=gradwire.SyncOptions(stall_timeout=None)."),
        ("seed", 1, "Pass options=gradwire.SyncOptions(seed=1)."),
        ("dump_dir", "dumps", "Pass options=gradwire.SyncOptions(dump_dir='dumps')."),
        ("nodes", 2, "Pass options=gradwire.SyncOptions(nodes=2)."),
        ("server", "a:1", "Pass options=gradwire.SyncOptions(server='a:1')."),
    ],
)
def test_an_argument_that_attach_had_says_where_it_went(argument: str, value: object, advice: str) -> None:
    with pytest.raises(OptionTypeError, match=re.escape(f"attach has no argument {argument!r}. {advice}")):
        gw.attach(None, "thc", **{argument: value})
    advice = advice.replace("method=", "plan=")
    with pytest.raises(OptionTypeError, match=re.escape(f"Synchronizer has no argument {argument!r}. {advice}")):
        gw.Synchronizer(None, "thc", **{argument: value})
