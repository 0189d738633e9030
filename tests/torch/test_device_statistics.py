"""Statistics on a tensor's device: values, texts, and number of copies to the host.

The functions accept tensors of any device, so they are compared on host tensors with the host's own
statistics, and on an accelerator if there is one.
"""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankdump._core import statistics
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import StatisticPrecision
from rankdump._core.statistics import DEVICE_STATISTICS
from rankdump._frameworks.torch import device_tensors
from rankdump._frameworks.torch.device_tensors import DeviceStatistics, start_statistics
from rankdump._frameworks.torch.tensors import TorchTensor, make_torch_source
from rankdump.errors import ProtocolError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
REAL = [name for name in ELEMENT_TYPES if not name.startswith("complex")]


def texts(
    tensor: Tensor, items=DEVICE_STATISTICS, precision: StatisticPrecision = "high"
) -> tuple[str, ...]:
    measured = start_statistics(tensor, items, precision)
    return measured.read([measured])[0]


def on_host(tensor: Tensor, items=DEVICE_STATISTICS) -> tuple[str, ...]:
    """Statistics that the host computes for the same elements."""
    source = make_torch_source(tensor.cpu())
    assert isinstance(source, TorchTensor)
    data = bytearray(source.byte_count)
    source.copy_into(memoryview(data))
    return statistics.compute_statistic_texts(items, source.dtype, memoryview(data))


def same(device: str, host: str, scale: float) -> bool:
    """Equal, or as near as sums in float32 come to sums in float64."""
    one, other = float(device), float(host)
    if not math.isfinite(other):
        return device == host
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5 * scale)


inf, nan = math.inf, math.nan


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([[1, 2, 3], [4, 5, 6]], ("6", "1", "3.5", "9.53939")),
        ([[7, 8, 9], [10, 11, 12]], ("12", "7", "9.5", "23.6432")),
        ([[8, 10, 12], [14, 16, 18]], ("18", "8", "13", "32.9242")),
        ([[7.5, 8.56, -9.78], [10, -11, 0]], ("10", "-11", "0.88", "21.1228")),
        ([[1, -inf, inf, -inf, inf], [inf, 1, -inf, inf, inf]], ("inf", "-inf", "nan", "inf")),
        ([-2.175, 1.990, nan, nan, -1.809], ("nan", "nan", "nan", "nan")),
        (3.0, ("3", "3", "3", "3")),
    ],
)
def test_device_statistics_equal_golden_rows(device, elements, expected) -> None:
    """Functions for devices give the rows that MindSpore's own tests expect."""
    assert texts(torch.tensor(elements, device=device)) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["high", "low"])
@pytest.mark.parametrize("name", REAL)
def test_device_statistics_of_every_type_equal_those_of_the_host(device, precision, name) -> None:
    """Each real type has all four statistics, close to the host's; extremes are equal."""
    tensor = torch.tensor([1.0, 0.0, 4.0, 2.0, 2.0]).to(getattr(torch, name)).to(device)
    found, host = texts(tensor, precision=precision), on_host(tensor)
    if name == "bool":
        assert found[:2] == ("True", "False")
    else:
        assert found[:2] == host[:2]
    near = 1e-2 if precision == "low" else 1e-5
    for one, other in zip(found[2:], host[2:], strict=True):
        assert math.isclose(float(one), float(other), rel_tol=near), (found, host)


SPECIAL = st.sampled_from([inf, -inf, nan, 0.0, -0.0])


def floats(width: Literal[16, 32, 64], low: int, high: int) -> st.SearchStrategy[float]:
    """Of such a size that no square of one is lost in float32, or float64."""
    positive = st.floats(2.0**low, 2.0**high, width=width)
    return positive | positive.map(lambda value: -value) | SPECIAL


FLOATS = {
    "float16": floats(16, -14, 15),
    "bfloat16": floats(32, -40, 50),
    "float32": floats(32, -40, 50),
    "float64": floats(64, -400, 400),
    "int8": st.integers(-128, 127),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "uint16": st.integers(0, 2**16 - 1),
}


@pytest.mark.parametrize("name", FLOATS)
def test_device_statistics_of_random_elements_equal_those_of_the_host(name) -> None:
    """For random elements, NaN and infinities among them, device and host agree."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(FLOATS[name], min_size=1, max_size=40))
    def agree(elements) -> None:
        tensor = torch.tensor(elements, dtype=getattr(torch, name))
        scale = max(map(abs, tensor.double().nan_to_num(0, 0, 0).tolist()))
        for one, other in zip(texts(tensor), on_host(tensor), strict=True):
            assert same(one, other, scale), (elements, texts(tensor), on_host(tensor))

    agree()


def test_device_statistics_follow_the_precision() -> None:
    """`high` sums half precision in float32, `low` in its own type, where it may overflow."""
    tensor = torch.full((4096,), 300.0, dtype=torch.float16)
    assert texts(tensor, ("l2norm", "avg"), "high") == ("19200", "300")
    tensor = torch.full((4096,), 3000.0, dtype=torch.float16)
    assert float(texts(tensor, ("l2norm",), "high")[0]) == pytest.approx(192000, rel=1e-5)
    assert texts(tensor, ("l2norm",), "low") == ("inf",)
    wide = torch.tensor([1e200, 1.0], dtype=torch.float64)
    assert texts(wide, ("max", "avg"), "high") == ("1e+200", "5e+199")


def test_device_norm_of_large_integers_is_summed_in_blocks(monkeypatch) -> None:
    """The norm of integers does not depend on how many are converted at a time."""
    tensor = torch.arange(1000, dtype=torch.int32)
    whole = texts(tensor)
    monkeypatch.setattr(device_tensors, "_BLOCK_ELEMENTS", 7)
    assert texts(tensor) == whole == on_host(tensor)


def test_device_statistics_that_cannot_be_computed_are_null() -> None:
    """A complex tensor, or an item that only the host computes, gives null, not an error."""
    assert texts(torch.ones(2, dtype=torch.complex64)) == ("null",) * 4
    assert texts(torch.ones(2), ("md5", "max", "nan count")) == ("null", "1", "null")
    assert texts(torch.ones(2), ()) == ()


def test_device_statistics_leave_views_and_graphs_alone() -> None:
    """Strides do not matter, and neither autograd nor a user's autocast takes part."""
    tensor = torch.randn(6, 8, requires_grad=True)
    view = (tensor * 2).t()[1:, ::2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert texts(view) == texts(view.detach().contiguous().clone())
        half = torch.full((3,), 0.5, dtype=torch.float16)
        assert texts(half, ("l2norm",), "low") == ("0.866211",)
    assert tensor.grad is None
    assert tensor._version == 0


@pytest.mark.parametrize("device", DEVICES)
def test_device_statistics_are_read_with_one_copy(device) -> None:
    """The rows of many tensors, in any order and of any types, are fetched together."""
    tensors = [
        torch.full((4,), float(i + 1), device=device).to(dtype)
        for i, dtype in enumerate((torch.float32, torch.bool, torch.complex64, torch.int64) * 5)
    ]
    measured = [start_statistics(tensor, ("min", "md5", "max"), "high") for tensor in tensors]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiled:
        read = measured[3].read(measured[::-1])
    assert read == [texts(tensor, ("min", "md5", "max")) for tensor in tensors[::-1]]
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["aten::cat"] == 1
    assert counts.get("aten::item", 0) == 0
    assert device == "cpu" or counts["aten::_to_copy"] == 1


def test_device_statistics_reject_another_kind() -> None:
    """Statistics of another framework among the others are an error."""

    class Foreign:
        def read(self, others):
            return []

    measured = start_statistics(torch.ones(1), ("max",), "high")
    with pytest.raises(ProtocolError, match="are a Foreign, not DeviceStatistics"):
        measured.read([measured, Foreign()])


def test_host_tensors_have_no_device_statistics() -> None:
    """Only a tensor on an accelerator is measured by torch; the host measures its own."""
    for device in DEVICES:
        source = make_torch_source(torch.ones(2, device=device))
        assert isinstance(source, TorchTensor)
        measured = source.start_statistics(("max",), "high")
        assert isinstance(measured, DeviceStatistics) == (device != "cpu")
