"""Specs, ranges, and conversion between tensors and arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ELEMENT_TYPES, ElementRange, TensorSpec, as_array, as_tensor

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def test_codes_of_element_types_never_change() -> None:
    assert {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float64: 4} == ELEMENT_TYPES


@given(shape=SHAPES, dtype=st.sampled_from(list(ELEMENT_TYPES)))
def test_a_spec_says_what_torch_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec(shape, dtype)
    assert spec.numel == tensor.numel()
    assert spec.nbytes == tensor.numel() * tensor.element_size()


def test_sizes_do_not_wrap() -> None:
    assert TensorSpec((1 << 31, 1 << 31, 4)).nbytes == 1 << 66


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_element_types_are_refused_with_the_list_of_known_ones(dtype: torch.dtype) -> None:
    with pytest.raises(UnknownNameError, match=r"Known: torch.bfloat16, torch.float16, torch.float32, torch.float64"):
        TensorSpec((3,), dtype)


def test_specs_are_keys() -> None:
    assert len({TensorSpec((3, 2)), TensorSpec((3, 2)), TensorSpec((2, 3))}) == 2
    with pytest.raises(AttributeError):
        TensorSpec((3,)).shape = (4,)  # type: ignore[misc]


def test_ranges_are_ordered_by_offset_and_half_open() -> None:
    assert ElementRange(4, 3).end == 7
    assert sorted([ElementRange(5, 1), ElementRange(0, 9), ElementRange(0, 2)]) == [
        ElementRange(0, 2),
        ElementRange(0, 9),
        ElementRange(5, 1),
    ]


@given(shape=SHAPES, dtype=st.sampled_from(list(ELEMENT_TYPES)), seed=st.integers(0, 100))
def test_arrays_and_back_give_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    array = as_array(tensor)
    assert (array.ndim, array.size) == (1, tensor.numel())
    assert array.nbytes == tensor.numel() * tensor.element_size()
    again = as_tensor(array, TensorSpec.of(tensor))
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor)


@pytest.mark.parametrize("dtype", list(ELEMENT_TYPES))
def test_a_contiguous_tensor_is_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    array = as_array(tensor)
    array[5] = as_array(torch.tensor([2.5], dtype=dtype))[0]
    assert tensor[1, 1] == 2.5
    as_tensor(array, TensorSpec.of(tensor))[2, 3] = 1.5
    assert tensor[2, 3] == 1.5


def test_a_strided_tensor_is_copied_in_row_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    np.testing.assert_array_equal(as_array(tensor), [0, 3, 1, 4, 2, 5])
    as_array(tensor)[0] = 9
    assert tensor[0, 0] == 0
    np.testing.assert_array_equal(as_array(torch.arange(8.0)[::2]), [0, 2, 4, 6])


def test_a_tensor_that_records_gradients_is_taken_as_it_is() -> None:
    np.testing.assert_array_equal(as_array(torch.ones(2, requires_grad=True)), [1, 1])


def test_bfloat16_comes_as_its_bits() -> None:
    array = as_array(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert array.dtype == np.uint16
    assert array.tolist() == [0x3F80, 0xC000]
