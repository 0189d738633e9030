"""Sources of torch tensors: first elements, finiteness, and changes."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._frameworks.torch.tensors import TorchTensor, make_torch_source


def source(tensor: Tensor) -> TorchTensor:
    found = make_torch_source(tensor)
    assert isinstance(found, TorchTensor), found
    return found


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.permutations(range(4)),
    st.integers(1, 700),
)
def test_head_source_has_the_first_elements_in_c_order(shape, order, count) -> None:
    """The head of a tensor in any memory layout has its first elements in C order."""
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    tensor = tensor.permute([axis for axis in order if axis < len(shape)])
    head = source(tensor).make_head_source(count)
    expected = tensor.flatten().tolist()[:count]
    assert head.shape == (len(expected),)
    data = bytearray(head.byte_count)
    head.copy_into(memoryview(data))
    assert memoryview(data).cast("q").tolist() == expected


def test_head_source_copies_no_more_than_its_rows() -> None:
    """A packed tensor's head is a view, another one's is a copy of no more than its rows."""
    tensor = torch.ones(1000, 10)
    head = source(tensor).make_head_source(25)
    assert head.tensor.data_ptr() == tensor.data_ptr()
    turned = source(tensor.t())
    assert turned.make_head_source(25).tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    assert turned.make_head_source(1500).tensor.untyped_storage().nbytes() == 2 * 1000 * 4
    assert source(torch.tensor([1 + 2j, 3j]).conj()).make_head_source(1).tensor.tolist() == [1 - 2j]


FINITE = [name for name in ELEMENT_TYPES if not name.startswith(("float", "bfloat", "complex"))]


@pytest.mark.parametrize("name", FINITE)
def test_is_finite_is_true_for_types_without_infinity(name) -> None:
    """Integers and truth values are finite, whatever their bits are."""
    assert source(
        torch.ones(3, dtype=torch.uint8).view(torch.int8).to(getattr(torch, name))
    ).is_finite()


@pytest.mark.parametrize(
    "name", [name for name in ELEMENT_TYPES if name.startswith(("float", "bfloat"))]
)
def test_is_finite_agrees_with_float64_for_every_bit_pattern(name) -> None:
    """The result for every bit pattern of a float type is that for its value in float64."""
    dtype = getattr(torch, name)
    size = ELEMENT_TYPES[name].item_bytes
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(256, (512, size), generator=generator, dtype=torch.uint8)
    patterns[:256, -1] = torch.arange(256, dtype=torch.uint8)
    for element in patterns.view(dtype).reshape(-1):
        expected = math.isfinite(element.to(torch.float64).item())
        assert source(element).is_finite() == expected, element
    largest = torch.finfo(dtype).max
    everywhere = torch.full((64,), largest, dtype=torch.float64).to(dtype)
    assert source(everywhere).is_finite()  # though their sum is not


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_is_finite_finds_a_single_bad_element(bad, dtype) -> None:
    """A bad element is found at any place, and in either part of a complex number."""
    tensor = torch.zeros(3, 5, 7, dtype=dtype)
    assert source(tensor).is_finite()
    tensor[1, 2, 3] = bad
    assert not source(tensor.transpose(0, 2)).is_finite()
    if dtype.is_complex:
        tensor.imag[1, 2, 3] = bad
        tensor.real[1, 2, 3] = 0
        assert not source(tensor.conj()).is_finite()
    assert source(torch.empty(0)).is_finite()


def test_has_changed_detects_writes_in_place() -> None:
    """A write in place is detected, also through views and without gradients; a read is not."""
    tensor = torch.ones(4)
    before = source(tensor)
    before.is_finite()
    before.make_head_source(2)
    assert not before.has_changed()
    with torch.no_grad():
        tensor[1:].mul_(2)
    assert before.has_changed()
    assert not source(tensor).has_changed()
    with torch.inference_mode():
        unknown = source(torch.ones(4))
        unknown.tensor.add_(1)
        assert not unknown.has_changed()


def test_head_source_of_a_changed_tensor_counts_as_changed() -> None:
    """A head that shares memory changes with it; a copy keeps what it was made with."""
    tensor = torch.ones(4, 4)
    shared, copied = source(tensor).make_head_source(6), source(tensor.t()).make_head_source(6)
    before = source(tensor.t())
    tensor.add_(1)
    assert shared.has_changed()
    assert not copied.has_changed()
    assert before.make_head_source(6).has_changed()
