"""Figures are computed where the tensor is, and read back once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side, TensorKey
from rankdump.measure import Batch, Measure, Measured, Unread
from rankdump.values import Deferred, Staged

HEAD = RecordHead(TensorKey(0, "Net", 0, 0, 1, "Add", "a", Side.OUTPUT, 0), "float32", (2, 3), 24)
# The Add of the tutorial (mindspore-dump.md 3.4).
INPUT = np.arange(1, 7, dtype="f4").reshape(2, 3)


class Promise:
    """Figures of a tensor on a device that counts how often it is asked."""

    asked: list[int]

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, others: Sequence[Deferred]) -> list[tuple[str, ...]]:
        type(self).asked.append(len(others))
        return [(each.text,) for each in others if isinstance(each, Promise)]


class Another(Promise):
    pass


class Broken(Promise):
    def read(self, others: Sequence[Deferred]) -> list[tuple[str, ...]]:
        raise RuntimeError("device lost")


class OnDevice(ArraySource):
    def figures(self, items, precision):
        return Promise(f"{precision} {','.join(items)}")


@pytest.fixture(autouse=True)
def nothing_asked():
    Promise.asked, Another.asked = [], []


def measure(*, on_device: bool) -> Measure:
    return Measure(items=("max", "min", "l2norm"), on_device=on_device, precision="low")


@pytest.mark.parametrize("on_device", [True, False])
def test_a_tensor_of_the_host_is_measured_at_once(on_device):
    record = measure(on_device=on_device).take(HEAD, ArraySource(INPUT))
    assert isinstance(record, Staged)
    assert record.head.figures == ("6", "1", "9.53939")
    assert (record.head.data_bytes, record.head.byte_count, len(record.data)) == (0, 24, 0)


def test_a_tensor_of_a_device_is_measured_there_if_the_plan_says_so():
    record = measure(on_device=True).take(HEAD, OnDevice(INPUT))
    assert isinstance(record, Measured)
    assert record.figures.read([record.figures]) == [("low max,min,l2norm",)]
    assert isinstance(measure(on_device=False).take(HEAD, OnDevice(INPUT)), Staged)


def test_a_step_is_read_back_at_once_and_in_order():
    """Law: one read for each kind of device, and the records stay in their order."""
    batch = Batch()
    kinds = [Promise, Another, Promise, Promise, Another]
    for number, kind in enumerate(kinds):
        batch.add(Measured(HEAD, kind(str(number))))
    batch.add(Staged(HEAD, memoryview(b"")))
    assert (Promise.asked, Another.asked) == ([], [])
    records = batch.read()
    assert (Promise.asked, Another.asked) == ([3], [2])
    assert [record.head.figures for record in records[:-1]] == [(str(n),) for n in range(5)]
    assert records[-1] == Staged(HEAD, memoryview(b""))
    assert batch.read() == []


def test_a_device_that_fails_loses_its_own_figures_alone():
    batch = Batch()
    for promise in (Promise("a"), Broken("b"), Another("c")):
        batch.add(Measured(HEAD, promise))
    good, bad, also_good = batch.read()
    assert good.head.figures == ("a",)
    assert bad == Unread(HEAD)
    assert also_good.head.figures == ("c",)
