"""Chunks of a model: rows of large parameters, and vectors that are joined."""

from __future__ import annotations

import pytest
import torch

from gradwire.core.errors import AttachError
from gradwire.parameter_server.chunks import ParameterChunk, assign, join_vectors, split


def model() -> dict[str, torch.Tensor]:
    shapes = {"a.weight": (10, 7), "a.bias": (10,), "b.weight": (3, 2), "b.bias": (3,), "c": (), "d": (4,), "e": (4,)}
    values = torch.arange(200.0)
    return {
        name: values[: torch.Size(shape).numel()].view(shape) + 100 * k
        for k, (name, shape) in enumerate(shapes.items())
    }


def joined(elements: int = 100, kinds: dict[str, str] | None = None) -> list[tuple[str, ...]]:
    parameters = model()
    chunks = join_vectors(
        split(parameters, 35), parameters, elements, lambda chunk: (kinds or {}).get(chunk.parameters[0], "usual")
    )
    return [chunk.parameters for chunk in chunks]


def test_vectors_are_joined_in_the_order_of_the_model_and_nothing_else_is() -> None:
    assert joined() == [("a.weight",)] * 2 + [("a.bias", "b.bias", "d", "e"), ("b.weight",), ("c",)]


def test_a_joined_chunk_has_at_most_so_many_elements() -> None:
    assert joined(elements=8) == [("a.weight",)] * 2 + [("a.bias",), ("b.weight",), ("b.bias", "d"), ("c",), ("e",)]


def test_vectors_of_other_kinds_are_apart_and_those_without_a_kind_alone() -> None:
    parameters = model()
    kinds = {"a.bias": None, "b.bias": "fast", "d": "slow", "e": "fast"}
    chunks = join_vectors(split(parameters, 99), parameters, 99, lambda chunk: kinds.get(chunk.parameters[0]))
    vectors = [chunk.parameters for chunk in chunks if parameters[chunk.parameters[0]].dim() == 1]
    assert vectors == [("a.bias",), ("b.bias", "e"), ("d",)]


@pytest.mark.parametrize(
    "chunk", [ParameterChunk(("a.bias", "d", "e")), ParameterChunk(("a.weight",), (3, 6)), ParameterChunk(("c",))]
)
def test_what_is_written_is_what_was_read(chunk: ParameterChunk) -> None:
    values, other = model(), {name: torch.zeros_like(each) for name, each in model().items()}
    found = chunk.of(values)
    chunk.write(found.reshape(-1), other)
    assert torch.equal(chunk.of(other), found)
    assert sum(int(each.count_nonzero()) for each in other.values()) == int(found.count_nonzero())


def test_names_differ_and_tell_what_a_chunk_has() -> None:
    names = [chunk.name for chunk in join_vectors(split(model(), 35), model(), 8, lambda chunk: "usual")]
    assert names == ["a.weight[0:5]", "a.weight[5:10]", "a.bias", "b.weight", "b.bias to d", "c", "e"]


def test_vectors_that_travel_together_need_gradients_in_the_same_steps() -> None:
    chunk, gradients = ParameterChunk(("a.bias", "d")), {"a.bias": torch.ones(10), "d": torch.ones(4)}
    assert torch.equal(chunk.gradient(gradients), torch.ones(14))
    assert chunk.gradient({"a.bias": None, "d": None}) is None
    with pytest.raises(AttachError, match=r"'d' has no gradient.*join_vectors=False.*on all workers"):
        chunk.gradient({**gradients, "d": None})


def test_a_chunk_is_complete_with_all_its_vectors() -> None:
    chunk = ParameterChunk(("a", "b", "c"))
    assert chunk.is_complete({"a", "b", "c", "d"})
    assert not any(chunk.is_complete({"a", "b", "c"} - {name}) for name in "abc")


def test_servers_get_about_the_same_bytes() -> None:
    parameters = model()
    shares = assign(join_vectors(split(parameters, 35), parameters, 99, lambda chunk: "usual"), parameters, 2)
    sizes = [sum(chunk.of(parameters).nbytes for chunk in share) for share in shares]
    assert sorted(sizes) == [168, 224]
