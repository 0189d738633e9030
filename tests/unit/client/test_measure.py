"""Figures are computed where the tensor is, and read back once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side, TensorKey
from rankdump.measure import MAX_WAITING, SMALL_BYTES, Batch, Measure, Measured, Unread
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


LARGE = np.arange(SMALL_BYTES, dtype="f4")


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "packed"])
def test_a_large_tensor_of_the_host_is_measured_at_once(on_device: bool, turned: bool):
    array = LARGE.reshape(2, -1).T if turned else LARGE
    record = measure(on_device=on_device).take(HEAD, ArraySource(array))
    assert isinstance(record, Staged)
    norm = f"{np.linalg.norm(LARGE.astype('f8')):g}"
    assert record.head.figures == (f"{SMALL_BYTES - 1:g}", "0", norm)
    assert (record.head.data_bytes, record.head.byte_count, len(record.data)) == (0, 24, 0)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_small_tensor_has_the_figures_of_the_moment_it_was_taken(on_device):
    """Law: what the job writes later changes nothing, though figures are computed then."""
    array, batch = INPUT.copy(), Batch()
    record = measure(on_device=on_device).take(HEAD, ArraySource(array))
    assert isinstance(record, Measured)
    batch.add(record)
    array[:] = 0
    (found,) = batch.read()
    assert isinstance(found, Staged)
    assert found.head.figures == ("6", "1", "9.53939")
    assert (found.head.data_bytes, found.head.byte_count, len(found.data)) == (0, 24, 0)


def test_small_tensors_of_several_types_keep_their_order():
    batch, taken = Batch(), measure(on_device=False)
    arrays = [np.array([n, -n], kind) for n, kind in enumerate(["f4", "i8", "f4", "f2", "i8"])]
    heads = [replace(HEAD, dtype=array.dtype.name) for array in arrays]
    for head, array in zip(heads, arrays, strict=True):
        batch.add(taken.take(head, ArraySource(array)))
    found = [record.head for record in batch.read()]
    assert [head.dtype for head in found] == [head.dtype for head in heads]
    assert [(head.figures or ())[:2] for head in found] == [
        (f"{array.max():g}", f"{array.min():g}") for array in arrays
    ]


def test_a_batch_says_when_it_should_be_read():
    """Law: a loop without steps is not waited for."""
    batch, record = Batch(), Staged(HEAD, memoryview(b""))
    assert [batch.add(record) for _ in range(MAX_WAITING)] == [False] * (MAX_WAITING - 1) + [True]
    assert len(batch.read()) == MAX_WAITING
    assert not batch.add(record)


def test_copies_and_promises_are_not_read_together():
    copied = measure(on_device=False).take(HEAD, ArraySource(INPUT))
    assert isinstance(copied, Measured)
    with pytest.raises(ProtocolError, match="Promise"):
        copied.figures.read([copied.figures, Promise("a")])


def test_a_tensor_of_a_device_is_measured_there_if_the_plan_says_so():
    record = measure(on_device=True).take(HEAD, OnDevice(INPUT))
    assert isinstance(record, Measured)
    assert record.figures.read([record.figures]) == [("low max,min,l2norm",)]
    on_host = measure(on_device=False).take(HEAD, OnDevice(INPUT))
    assert isinstance(on_host, Measured)
    assert on_host.figures.read([on_host.figures]) == [("6", "1", "9.53939")]


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
