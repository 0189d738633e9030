"""Reading torch tensors: every element type and layout, and reasons for unreadable ones."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.record import TensorSide
from rankdump._frameworks.arrays import ArrayOperatorRecorder
from rankdump._frameworks.torch.tensors import TorchTensor, make_torch_source
from rankdump._session.framework_adapters import make_array_source as source_of_array
from rankdump.errors import ProtocolError


def read(tensor: Tensor) -> bytes:
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor), source
    data = bytearray(source.byte_count)
    source.copy_into(memoryview(data))
    return bytes(data)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_tensor_source_reads_every_element_type(name: str) -> None:
    """The bytes are those of the tensor in C order, whatever its type and strides."""
    dtype = getattr(torch, name)
    size = ELEMENT_TYPES[name].item_bytes
    patterns = torch.arange(24 * size, dtype=torch.uint8)
    if name == "bool":
        patterns %= 2
    tensor = patterns.view(dtype).reshape(4, 6)
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor)
    assert (source.dtype, source.shape, source.byte_count) == (name, (4, 6), 24 * size)
    assert read(tensor) == patterns.numpy().tobytes()
    turned = tensor.t()[1:, ::2]
    by_bytes = patterns.reshape(4, 6, size).transpose(0, 1)[1:, ::2]
    assert read(turned) == by_bytes.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(1.5), np.float32(1.5).tobytes()),
        (torch.tensor(True), b"\1"),
        (torch.ones(1).expand(3), np.ones(3, "<f4").tobytes()),
        (torch.empty(0, 3), b""),
        (torch.tensor([1 + 2j]).conj(), np.array([1 - 2j], "<c8").tobytes()),
        (torch.tensor([1 + 2j]).conj().imag, np.array([-2], "<f4").tobytes()),
        (torch.nn.Parameter(torch.ones(2)), np.ones(2, "<f4").tobytes()),
        ((torch.ones(2, requires_grad=True) * 2), np.full(2, 2, "<f4").tobytes()),
    ],
    ids=["0-d", "bool", "expanded", "empty", "conj", "neg", "parameter", "in graph"],
)
def test_tensor_source_reads_every_memory_layout(tensor: Tensor, expected: bytes) -> None:
    """Views that share or flip elements are read with their own values."""
    assert read(tensor) == expected


def test_tensor_source_copies_into_any_offset() -> None:
    """The target may start anywhere: shared memory is not aligned for us."""
    target = bytearray(13)
    source = make_torch_source(torch.tensor([1.0, 2.0]))
    assert isinstance(source, TorchTensor)
    source.copy_into(memoryview(target)[3:11])
    assert np.frombuffer(target, "<f4", 2, 3).tolist() == [1, 2]
    assert target[:3] + target[11:] == bytes(5)


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_tensor_source_rejects_a_target_of_another_size(count: int) -> None:
    """Small and large tensors alike never write past or short of their target."""
    source = make_torch_source(torch.ones(count))
    assert isinstance(source, TorchTensor)
    for size in (0, 4 * count - 1, 4 * count + 1):
        with pytest.raises(ProtocolError, match=f"{4 * count} bytes into a target of {size}"):
            source.copy_into(memoryview(bytearray(size)))
    with pytest.raises(ProtocolError):
        source.copy_into(memoryview(bytes(4 * count)))


@pytest.mark.parametrize("threads", [1, 3])
def test_tensor_source_reads_large_tensors(threads: int, monkeypatch) -> None:
    """One thread streams what is packed, torch copies the rest, and all with more threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensor = torch.randn(300, 700)
    for each in (tensor, tensor.t(), tensor[1:], tensor[:, 1:], tensor.bfloat16(), tensor > 0):
        expected = each.contiguous().view(torch.uint8).numpy().tobytes()
        assert read(each) == expected
    imaginary = torch.complex(tensor, tensor).conj().imag
    assert imaginary.is_neg()
    assert read(imaginary) == (-tensor).numpy().tobytes()


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop quantized tensors
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "no_data"),
        (torch.nn.UninitializedParameter, "no_data"),
        (fake, "unsupported_tensor_class"),
        (lambda: torch.eye(2).to_sparse(), "unsupported_sparse"),
        (lambda: torch.eye(2).to_sparse_csr(), "unsupported_sparse"),
        (quantized, "unsupported_quantized"),
        (lambda: nested(torch.strided), "unsupported_nested"),
        (lambda: nested(torch.jagged), "unsupported_tensor_class"),
        (lambda: torch.ones(2, dtype=torch.complex32), "unsupported_dtype"),
        (freed, "storage_freed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensor_source_gives_a_reason_for_unreadable_tensors(make, reason: str) -> None:
    """A tensor without plain elements in memory is rejected with a reason, before it is read."""
    assert make_torch_source(make()) == reason


def test_unreadable_tensors_are_counted_as_lost(recorder, observed) -> None:
    """A sparse argument is a counted loss; the operator's other tensors are kept."""

    class Second(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return second

    model = Second()
    with observed(model, recorder):
        model(torch.eye(2).to_sparse(), torch.ones(2))
    (name, side, reason) = recorder.lost[0]
    assert (side.value, reason) == ("input", "unsupported_sparse")
    assert recorder.one(name, "input", 1).shape == (2,)
    assert len(recorder.lost) == 1


def test_reading_changes_neither_tensor_nor_autograd() -> None:
    """Version, gradient, graph and random state of the job are untouched by a read."""
    tensor = torch.ones(3, requires_grad=True)
    result = tensor * 2
    state = torch.get_rng_state()
    before = (tensor._version, result._version, result.grad_fn, tensor.grad)
    for each in (tensor, result):
        read(each)
    assert (tensor._version, result._version, result.grad_fn, tensor.grad) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_reading_is_hidden_from_user_modes() -> None:
    """Dispatch modes, default devices and function modes of the script see no read of rankdump."""
    seen: list[str] = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor)
    target = memoryview(bytearray(8))
    with FlopCounterMode(display=False) as flops, torch.device("meta"), Watching():
        seen.clear()
        source.copy_into(target)
        assert not seen
    assert flops.get_total_flops() == 0
    assert np.frombuffer(target, "<f4").tolist() == [1, 1]


def test_hooks_are_hidden_from_user_modes(recorder, observed) -> None:
    """A function mode sees the model's calls and nothing of ours, gradients included."""

    class Watching(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model, x = nn.Tanh(), torch.ones(1, requires_grad=True)

    def run() -> list[str]:
        with Watching() as mode:
            model(x).sum().backward()
        return mode.seen

    expected = run()
    with observed(model, recorder):
        assert run() == expected
    assert len(recorder.taken) == 4


def test_tensor_source_reads_a_plain_subclass() -> None:
    """A subclass that keeps its elements itself is read as a tensor."""

    class Marked(Tensor):
        pass

    assert read(torch.ones(2).as_subclass(Marked)) == np.ones(2, "<f4").tobytes()


def test_calls_inside_torch_func_are_recorded(recorder, observed) -> None:
    """Inside grad and vmap the tensors below the wrappers are read; results are unchanged."""
    model = nn.Linear(3, 1)
    x = torch.randn(5, 3)

    def loss(row: Tensor) -> Tensor:
        return model(row).square().sum()

    with torch.no_grad():
        expected = torch.func.vmap(torch.func.grad(loss))(x)
    with observed(model, recorder):
        got = torch.func.vmap(torch.func.grad(loss))(x)
    assert torch.equal(got, expected)
    assert recorder.one("Default/network-Linear/Linear-op0", "input").array.shape == (5, 3)
    assert not recorder.warnings


@pytest.mark.parametrize(
    ("tensor", "packed"),
    [
        (torch.arange(6.0).reshape(2, 3), True),
        (torch.tensor(2.5), True),
        (torch.empty(0, 3), True),
        (torch.ones(4, dtype=torch.bfloat16), True),
        (torch.arange(6.0)[2:], True),
        (torch.arange(6.0).reshape(2, 3).t(), False),
        (torch.ones(1).expand(3), False),
        (torch.tensor([1 + 2j]).conj(), False),
        (torch.tensor([1 + 2j]).conj().imag, False),
    ],
)
def test_elements_in_place_equal_the_copy(tensor: Tensor, packed: bool) -> None:
    """Law: elements in place equal those of a copy, or there are none."""
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor)
    lent = source.elements()
    assert (lent is not None) is packed
    assert lent is None or bytes(lent) == read(tensor)


@pytest.mark.parametrize("name", ELEMENT_TYPES)
@pytest.mark.parametrize("rows", [4, 4000])
def test_copies_of_strided_tensors_are_in_c_order(name: str, rows: int) -> None:
    """Law: in any memory layout and size, a copy has the bits of torch's own."""
    kind = getattr(torch, name)
    size = ELEMENT_TYPES[name].item_bytes
    bits = torch.arange(rows * 6 * size).reshape(rows, 6 * size) % (2 if name == "bool" else 251)
    whole = bits.to(torch.uint8).view(kind)
    views = (whole.t(), whole[:, 1::2], whole[1:2].expand(3, 6), whole[:, :1].t(), whole[:0].t())
    for tensor in views:
        source = make_torch_source(tensor)
        assert isinstance(source, TorchTensor)
        expected = raw(tensor.clone(memory_format=torch.contiguous_format))
        assert source.copy_elements() == read(tensor) == expected


def test_memory_source_keeps_memory_and_releases_the_graph() -> None:
    """Law: a memory source reads the current elements, and keeps no gradients."""
    tensor = torch.ones(2, 2, requires_grad=True) * 2
    source = make_torch_source(tensor.t())
    assert isinstance(source, TorchTensor)
    lasting = source.make_memory_source()
    assert lasting.tensor.grad_fn is None
    with torch.no_grad():
        tensor[0, 1] = 7
    again = lasting.read_again()
    assert isinstance(again, TorchTensor)
    assert np.frombuffer(again.copy_elements(), "f4").tolist() == [2, 2, 7, 2]
    assert tensor.grad_fn is not None


@pytest.mark.parametrize(
    ("view", "left_bytes", "readable"),
    [
        (lambda t: t, 64, True),
        (lambda t: t, 60, False),
        (lambda t: t, 0, False),
        (lambda t: t[2:], 60, False),
        (lambda t: t[:2], 32, True),
        (lambda t: t[:2].t(), 28, False),
        (lambda t: t[:, :1], 52, True),
        (lambda t: t[:0], 4, True),
        (lambda t: t[0, 0].expand(1000), 4, True),
    ],
)
def test_freed_memory_is_not_read(view, left_bytes: int, readable: bool) -> None:
    """Law: no byte beyond the end of the storage is read."""
    tensor = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    source = make_torch_source(view(tensor))
    assert isinstance(source, TorchTensor)
    lasting = source.make_memory_source()
    tensor.untyped_storage().resize_(left_bytes)
    again = lasting.read_again()
    assert isinstance(again, TorchTensor) is readable
    if not isinstance(again, TorchTensor):
        assert again == "storage_freed"


DENSE = {
    "contiguous": (lambda: torch.arange(24.0).reshape(2, 3, 4), True),
    "transposed": (lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), True),
    "channels last": (
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        True,
    ),
    "extent of one": (lambda: torch.arange(6.0).reshape(2, 1, 3).transpose(0, 2), True),
    "part of a batch": (lambda: torch.arange(24.0).reshape(4, 6)[1:3].t(), True),
    "with gaps": (lambda: torch.arange(24.0).reshape(4, 6)[:, :3], False),
    "repeated": (lambda: torch.arange(3.0).expand(4, 3), False),
    "overlapping": (lambda: torch.arange(8.0).as_strided((3, 4), (2, 1)), False),
    "negated": (lambda: torch.randn(4, dtype=torch.complex64).conj().imag, False),
    "elsewhere": (lambda: torch.empty(3, device="meta"), False),
}


@pytest.mark.parametrize(("make", "dense"), DENSE.values(), ids=DENSE)
def test_dense_elements_are_read_in_place_in_any_order(make, dense: bool) -> None:
    """Every element is read once and nothing else, so sums and extremes stay the same."""
    tensor = make()
    lent = TorchTensor(tensor).unordered()
    assert (lent is not None) is dense
    if lent is not None:
        kind = tensor.numpy().dtype
        assert np.array_equal(np.sort(np.frombuffer(lent, kind)), np.sort(tensor.numpy().ravel()))


def standing(tensor: Tensor) -> tuple[int, int] | None:
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor)
    known = source.get_version()
    return None if known is None else (id(known.tensor_object), known.change_count)


def test_version_stays_until_the_tensor_changes() -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    before = standing(tensor)
    assert before == standing(tensor)
    assert before != standing(other)
    tensor.add_(1)
    assert before != standing(tensor)
    with torch.inference_mode():
        assert standing(torch.ones(4)) is None


def test_version_of_a_view_changes_with_its_base() -> None:
    """Law: a view shares memory and change count with its base."""
    base = torch.ones(2, 4, requires_grad=True) * 1
    view = base.t()[1:]
    whole, part = TorchTensor(base, 0).get_version(), TorchTensor(view, 0).get_version()
    assert whole is not None
    assert whole.owner is whole.tensor_object is base
    assert part is not None
    assert (part.owner is base, part.tensor_object is view) == (True, True)
    before = standing(base)
    view.detach().add_(1)
    assert before != standing(base)


class TestHandedOver:
    """Tensors that a script gives to `Session.dump`."""

    TENSORS: ClassVar[dict[str, Tensor]] = {
        "bfloat16": torch.arange(4.0, dtype=torch.bfloat16),
        "float8_e4m3fn": torch.ones(3).to(torch.float8_e4m3fn),
        "float32": torch.ones(2, requires_grad=True),
        "complex64": torch.ones(2, dtype=torch.complex64).conj(),
    }

    def test_dump_reads_each_type(self, recorder) -> None:
        """Also types that numpy does not know, and tensors that it refuses to view."""
        calls = ArrayOperatorRecorder(recorder, source_of_array)
        for name, tensor in self.TENSORS.items():
            calls.record_array("Op", f"Default/{name}-op0", TensorSide.OUTPUT, 0, tensor, 0)
        calls.record_constant("weight", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), 0)
        calls.end_operators()
        assert [taken.dtype for taken in recorder.taken] == [*self.TENSORS, "bfloat16"]
        for taken, tensor in zip(recorder.taken, self.TENSORS.values(), strict=False):
            assert taken.data == raw(tensor.detach().resolve_conj())
        assert not recorder.lost

    def test_dump_counts_a_tensor_without_data_with_its_reason(self, recorder) -> None:
        calls = ArrayOperatorRecorder(recorder, source_of_array)
        calls.record_array("Op", "Default/a-op0", TensorSide.OUTPUT, 0, torch.eye(2).to_sparse(), 0)
        calls.end_operators()
        assert [lost[-1] for lost in recorder.lost] == ["unsupported_sparse"]
