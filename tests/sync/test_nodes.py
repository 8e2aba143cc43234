"""Which ranks share a node: by the launcher's environment, by names, by number."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from gradwire.core.errors import DisagreementError, OptionError
from gradwire.sync.nodes import NodeMap, current_node, grouped
from gradwire.sync.plan import Plan
from tests.sync.harness import ranks


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"GROUP_RANK": "3", "RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "node 3"),
        ({"RANK": "5", "LOCAL_WORLD_SIZE": "4"}, "node 1"),
        ({"RANK": "5"}, socket.gethostname()),
        ({}, socket.gethostname()),
    ],
)
def test_the_launcher_says_which_node_this_is(environment: dict[str, str], name: str) -> None:
    assert current_node(environment) == name


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        (2, ((0, 1), (2, 3), (4,))),
        (9, ((0, 1, 2, 3, 4),)),
        (["b", "a", "b", "a", "b"], ((0, 2, 4), (1, 3))),
        ([0, 0, 0, 1, 1], ((0, 1, 2), (3, 4))),
    ],
)
def test_the_user_names_nodes_or_says_how_many_ranks_they_have(given: Any, nodes: Any) -> None:
    assert NodeMap(5, given)() == nodes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "A node cannot have 0 ranks. Pass nodes=8"),
        (["a", "b"], "Pass one name per rank"),
        ("aaabb", "Pass one name per rank"),
    ],
)
def test_what_does_not_fit_the_group_is_refused_with_advice(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        NodeMap(5, given)


def test_ranks_of_one_name_share_a_node() -> None:
    assert grouped(["node 1", "node 0", "node 0", "node 1"]) == ((0, 3), (1, 2))
    assert grouped(["x"]) == ((0,),)


def test_all_on_one_node_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = NodeMap(3, 4)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert found() == found() == ((0, 1, 2),)
    (record,) = caplog.records
    assert "Pass SyncOptions(nodes=...) if there are slow links" in record.getMessage()


def test_ranks_that_name_other_nodes_all_learn_of_it() -> None:
    plan = Plan({"w": "onebit"}, strategy="hierarchical")
    with pytest.raises(DisagreementError, match="nodes"), ranks(2, plan, nodes=lambda rank: 1 + rank):
        pass


def test_a_group_that_says_nothing_asks_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    with ranks(2, Plan({"w": "onebit"}, strategy="hierarchical"), nodes=None) as group:
        assert group.each(lambda one: one._nodes()) == [((0, 1),)] * 2
