"""A rank that dies, freezes, stays away or strays: every other rank ends with one typed error that names it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradwire.core.errors import NO_TENSOR
from tests.integration.jobs.faults import PATIENCE, TIMEOUT
from tests.integration.launch import launch, results

pytestmark = pytest.mark.timeout(400)
SLACK = 3.0  # seconds, for a machine that starts six processes


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("kill", "scatter_reduce"),
        pytest.param("kill", "allgather", marks=pytest.mark.ci),
        pytest.param("freeze", "ring", marks=pytest.mark.ci),
        pytest.param("kill", "ring", marks=pytest.mark.ci),
        pytest.param("freeze", "scatter_reduce", marks=pytest.mark.ci),
        pytest.param("freeze", "allgather", marks=pytest.mark.ci),
    ],
)
def test_a_lost_rank_ends_the_step_everywhere(how: str, strategy: str) -> None:
    outcomes = launch("faults.lose_a_rank", 3, doomed=(2,), how=how, strategy=strategy)
    for outcome in outcomes[:2]:
        found = outcome.result
        assert found is not None, outcome.output
        assert found["type"] in (
            ["PeerLostError", "PeerFailedError"] if how == "kill" else ["PeerTimeoutError", "PeerFailedError"]
        )
        assert found["rank"] == 2, "the error names the rank"
        assert found["tensor"] == NO_TENSOR or found["tensor"] in found["message"], "and the tensor, if it was one"
        assert found["phase"] in found["message"], "and the phase"
        assert "Create the DDP module again" in found["message"], "and says what to do"
        assert found["seconds"] < 2 * TIMEOUT
        assert found["dump_rank"] == 2, "the flight recorder's file names the dead rank"
        assert found["dump_events"] > 0
        assert found["again"] is not None, "a second backward must not seem to work"


def both_ways(job: str, world_size: int, folder: Path, **parameters: Any) -> list[dict[str, Any]]:
    """How all other ranks end where the last one is killed, and where it is frozen. Both jobs run at the same time."""

    def lose(how: str) -> list[dict[str, Any]]:
        (folder / how).mkdir()
        shared = {"how": how, "folder": str(folder / how)}
        outcomes = launch(job, world_size, doomed=(world_size - 1,), **shared, **parameters)[:-1]
        for outcome in outcomes:
            assert outcome.result is not None, outcome.output
        return [{"how": how, **outcome.result} for outcome in outcomes]

    with ThreadPoolExecutor(2) as pool:
        return [found for jobs in pool.map(lose, ["kill", "freeze"]) for found in jobs]


@pytest.mark.ci
@pytest.mark.parametrize("call", ["agreement", "rendezvous", "connect", "replan", "detach"])
def test_a_rank_lost_in_a_call_that_all_make_ends_the_others(tmp_path: Path, call: str) -> None:
    for found in both_ways("faults.lose_a_rank_in_a_call", 3, tmp_path, call=call):
        assert found["seconds"] < 2 * TIMEOUT + SLACK, found
        if call == "detach":  # which needs nothing of the others
            assert found["message"] == "NotImplementedError('no error')", found
        else:
            assert (found["typed"], found["rank"]) == (True, 2), found


@pytest.mark.ci
@pytest.mark.parametrize("during", ["links", "codecs", "plan", "trial"])
def test_a_rank_lost_under_auto_ends_the_others(tmp_path: Path, during: str) -> None:
    for found in both_ways("faults.lose_a_rank_under_auto", 2, tmp_path, during=during):
        assert (found["typed"], found["rank"]) == (True, 1), found
        assert found["seconds"] < 2 * PATIENCE, found
        assert (found["way"] == "DDP's all-reduce") == (during != "trial"), found


@pytest.mark.ci
@pytest.mark.parametrize("during", ["timing DDP's all-reduce", "measuring links", "planning", "timing gradwire"])
def test_a_rank_lost_in_a_probe_ends_the_others(tmp_path: Path, during: str) -> None:
    for found in both_ways("faults.lose_a_rank_in_a_probe", 2, tmp_path, during=during):
        assert (found["typed"], found["rank"]) == (True, 1), found
        assert found["seconds"] < 2 * PATIENCE, found


@pytest.mark.ci
def test_a_rank_that_does_not_come_is_named() -> None:
    for outcome in results(launch("faults.late_rank", 3))[:2]:
        assert outcome["type"] == "PeerTimeoutError"
        assert outcome["rank"] == 2
        assert PATIENCE <= outcome["seconds"] < 5 * PATIENCE  # with what attach does before, on a busy machine


@pytest.mark.ci
def test_a_rank_that_attaches_alone_ends_with_advice_and_the_others_with_it() -> None:
    alone, *others = launch("faults.lonely_attach", 3)
    assert alone.exit_code == 1
    assert "PeerTimeoutError: Ranks 1, 2 did not reach this call" in alone.output
    assert "Make the same gradwire calls on every rank, including attach" in alone.output
    for outcome in others:
        assert outcome.exit_code, f"still running, or ended well: {outcome}"
        assert "Connection closed by peer" in outcome.output


@pytest.mark.ci
def test_a_live_rank_that_does_not_join_the_step_is_named() -> None:
    for outcome in results(launch("faults.stalled_rank", 3)):
        assert outcome["type"] in ("PeerTimeoutError", "PeerFailedError")
        assert outcome["rank"] == 2
        assert outcome["seconds"] < 12


@pytest.mark.ci
def test_a_strayed_replica_is_found_and_named() -> None:
    for outcome in results(launch("faults.strayed_replica", 3)):
        # A rank that hears of the failure before it has all hashes passes the message on.
        assert outcome["type"] in ("ReplicaError", "PeerFailedError")
        assert (outcome["rank"], outcome["step"]) == (1, 5)


def test_ranks_that_have_loaded_states_of_different_steps_learn_it_in_their_first_step() -> None:
    for outcome in results(launch("faults.other_step", 3)):
        assert outcome["type"] in ("ReplicaError", "PeerFailedError")
        assert outcome["rank"] == 1
        assert "Rank 1 is in step 9, and rank 0 in step 8" in outcome["said"]
