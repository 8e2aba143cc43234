"""The models' sizes against the paper's table."""

import pytest

from gradwire.core.errors import UnknownNameError
from gradwire.simulate import models

MB = 2**20


@pytest.mark.parametrize("name", [name for name, (_, published) in models.MODELS.items() if published])
def test_totals_are_those_of_table_6(name):
    model = models.get(name)
    assert model.published is not None
    assert 4 * model.num_elements / MB == pytest.approx(model.published.total_mb, abs=0.006)  # the table's rounding
    largest = max(tensor.numel for tensor in model.tensors)
    assert 4 * largest / MB == pytest.approx(model.published.largest_mb, abs=0.006)
    tied = name.startswith("bert")  # the table has one gradient more: see the module
    assert len(model.tensors) == model.published.num_gradients - tied


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("vgg16", 138_357_544),
        ("roberta-base", 124_647_170),
        ("roberta-large", 355_361_794),
        ("bart-large", 407_343_106),
        ("gpt2", 124_441_344),
    ],
)
def test_others_have_the_parameters_of_public_implementations(name, numel):
    assert models.get(name).num_elements == numel


@pytest.mark.parametrize(("name", "numel"), [("resnet101", 44_549_160), ("resnet152", 60_192_808)])
def test_larger_resnets_have_nearly_the_parameters_of_torchvision(name, numel):
    # Pre-activation normalizes the input of a unit, which has other channels, and no shortcut.
    assert models.get(name).num_elements == pytest.approx(numel, rel=1e-3)


@pytest.mark.parametrize("name", models.MODELS)
def test_names_are_unique_and_backward_ends_with_one(name):
    model = models.get(name)
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors)
    shares = [share for _, share in model.backward()]
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] == pytest.approx(1)


def test_the_large_matrices_of_vgg_are_there_early_in_backward():
    shares = {tensor.name: share for tensor, share in models.get("vgg19").backward()}
    assert shares["fc6.weight"] < 0.02
    assert shares["conv1_2.weight"] > 0.9


def test_work_is_that_of_the_published_architectures():
    # Multiply-adds of one image, as commonly published: 19.6 G for VGG19, about 4 G for ResNet50.
    assert sum(tensor.work for tensor in models.get("vgg19").tensors) == pytest.approx(19.6e9, rel=0.02)
    assert sum(tensor.work for tensor in models.get("resnet50").tensors) == pytest.approx(4.0e9, rel=0.1)


def test_an_unknown_model_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'vgg1.'.*bert-base"):
        models.get("vgg18")
