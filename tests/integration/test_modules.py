"""DDP modules out of the ordinary keep the meaning that they have without gradwire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import launch, results


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found, by rank: one launch for several tests."""
    folder: Path = tmp_path_factory.mktemp("rpc")
    return results(launch("modules.of_two", 2, folder=str(folder)))


def test_sparse_gradients_travel_by_ddps_own_all_reduce(of_two: list[dict[str, Any]]) -> None:
    for found in (rank["sparse"] for rank in of_two):
        for case, trained in found.items():
            assert max(trained["deviations"]) < 1e-6, case
            assert trained["names"] == ([] if case == "auto, nothing else" else ["head.weight", "head.bias"])


def test_replicas_are_compared_with_their_sparse_parameters(of_two: list[dict[str, Any]]) -> None:
    assert [rank["strayed"] for rank in of_two] == ["rank 1", "rank 1"]


def test_parameters_frozen_after_ddp_was_made_wait_and_then_train(of_two: list[dict[str, Any]]) -> None:
    for found in (rank["frozen"] for rank in of_two):
        for method, trained in found.items():
            assert max(trained["deviations"]) < 1e-6, method
            assert trained["names"] == ["head.weight", "head.bias", "body.weight", "body.bias"], (
                "auto plans for them too"
            )


def test_parameters_that_ddp_synchronizes_in_spite_of_its_list_are_averaged(of_two: list[dict[str, Any]]) -> None:
    for rank in of_two:
        assert max(rank["ignored_root"]["deviations"]) < 1e-6


def test_gradients_of_distributed_autograd_are_averaged(of_two: list[dict[str, Any]]) -> None:
    for rank in of_two:
        assert rank["distributed_autograd"] == dict.fromkeys(rank["distributed_autograd"], 0.0)


def test_a_copy_of_an_attached_module_is_plain_ddp(of_two: list[dict[str, Any]]) -> None:
    for found in (rank["copies"] for rank in of_two):
        assert found["plain"] == 0.0
        assert found["attached"] < 1e-6
        assert found["steps"] == 1


def test_a_dropped_module_takes_threads_and_descriptors_with_it(of_two: list[dict[str, Any]]) -> None:
    for found in (rank["dropped"] for rank in of_two):
        assert found["started"] >= 2
        assert found["left"] == [0, 0, False], "threads, descriptors, the synchronizer with its residuals"
        assert found["steps"] == 3, "the other ranks' work goes on"


def test_a_replaced_process_group_is_refused_until_detached(of_two: list[dict[str, Any]]) -> None:
    for found in (rank["another_group"] for rank in of_two):
        assert "Call handle.detach() before the group is replaced and attach again after it" in found["refused"]
        assert found["native"] == 0.0
        assert found["attached again"] == 0.0
