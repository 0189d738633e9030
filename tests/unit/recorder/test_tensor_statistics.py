"""Statistics of tensors on host and device, their cache, and batches of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.record import MAX_FRAME_ROWS, StatisticRows, TensorKind, TensorSide
from rankdump._core.recorder_protocol import DeferredStatistics, TensorVersion
from rankdump._core.tensor_fingerprint import (
    FINGERPRINT_BYTES,
    MeasuredTensor,
    measure_with_fingerprint,
    place_fingerprint,
)
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
)
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder import tensor_statistics as module
from rankdump._recorder.iteration_state import LostTensor
from rankdump._recorder.tensor_statistics import (
    MAX_WAITING_ROWS,
    SMALL_TENSOR_BYTES,
    STATISTICS_FAILED,
    RowBatch,
    StatisticsCalculator,
    StatisticsResult,
    TensorStatisticsRow,
)

KIND = TensorKind(0, "Add", "a", TensorSide.OUTPUT, 0, "float32", (2, 3), 24)
# The Add of the example in MindSpore's Dump guide.
INPUT = np.arange(1, 7, dtype="f4").reshape(2, 3)


class FakeDeviceStatistics:
    """Statistics on a device that counts its reads."""

    reads: list[int]

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        type(self).reads.append(len(others))
        return [(each.text,) for each in others if isinstance(each, FakeDeviceStatistics)]


class OtherDeviceStatistics(FakeDeviceStatistics):
    pass


class FailingDeviceStatistics(FakeDeviceStatistics):
    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        raise RuntimeError("device lost")


class DeviceSource(ArraySource):
    def start_statistics(self, items, precision):
        return FakeDeviceStatistics(f"{precision} {' '.join(items)}")


@pytest.fixture(autouse=True)
def no_reads():
    FakeDeviceStatistics.reads, OtherDeviceStatistics.reads = [], []


def measure(*, on_device: bool = False) -> StatisticsCalculator:
    return StatisticsCalculator(
        items=("max", "min", "l2norm"), on_device=on_device, precision="low"
    )


def row(statistics: StatisticsResult, number: int = 0, **changed) -> TensorStatisticsRow:
    return TensorStatisticsRow(KIND, number, statistics, 0)._replace(**changed)


def texts(batch: RowBatch, the_measure: StatisticsCalculator) -> list[str]:
    frames = list(batch.drain_rows(the_measure))
    return [
        text for frame in frames if isinstance(frame, StatisticRows) for text in frame.statistics
    ]


LARGE = np.arange(SMALL_TENSOR_BYTES, dtype="f4")


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "packed"])
def test_large_host_tensor_is_measured_at_once(on_device: bool, turned: bool):
    array = LARGE.reshape(2, -1).T if turned else LARGE
    norm = f"{np.linalg.norm(LARGE.astype('f8')):g}"
    taken = measure(on_device=on_device).measure_tensor(ArraySource(array))
    assert taken == f"{SMALL_TENSOR_BYTES - 1:g},0,{norm}"


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "packed"])
def test_small_tensor_has_statistics_of_when_it_was_observed(on_device, turned):
    """Law: later writes by the job change nothing, although statistics are computed then."""
    array, batch, the_measure = INPUT.copy(), RowBatch(), measure(on_device=on_device)
    batch.add(row(the_measure.measure_tensor(ArraySource(array.T if turned else array))))
    array[:] = 0
    assert texts(batch, the_measure) == ["6,1,9.53939"]


def test_small_tensors_of_several_types_keep_their_order():
    batch, the_measure = RowBatch(), measure()
    arrays = [np.array([n, -n], kind) for n, kind in enumerate(["f4", "i8", "f4", "f2", "i8"])]
    for array in arrays:
        kind = KIND._replace(dtype=array.dtype.name)
        batch.add(row(the_measure.measure_tensor(ArraySource(array)), kind=kind))
    (frame,) = batch.drain_rows(the_measure)
    assert isinstance(frame, StatisticRows)
    assert [kind.dtype for kind in frame.kinds] == [array.dtype.name for array in arrays]
    assert [text.split(",")[:2] for text in frame.statistics] == [
        [f"{array.max():g}", f"{array.min():g}"] for array in arrays
    ]


def test_row_batch_reports_when_it_is_full():
    """Law: rows of a loop without steps are read before its end."""
    batch = RowBatch()
    assert [batch.add(row("1")) for _ in range(MAX_WAITING_ROWS)] == [False] * (
        MAX_WAITING_ROWS - 1
    ) + [True]
    assert len(texts(batch, measure())) == MAX_WAITING_ROWS
    assert not batch.add(row("1"))


def test_row_batch_limits_bytes_of_waiting_copies(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    batch = RowBatch()
    assert [batch.add(row(b"x" * 40)) for _ in range(3)] == [False, False, True]


def test_device_tensor_is_measured_on_the_device_if_the_plan_says_so():
    there = measure(on_device=True)
    batch = RowBatch()
    batch.add(row(there.measure_tensor(DeviceSource(INPUT))))
    assert texts(batch, there) == ["low max min l2norm"]
    batch.add(row(measure().measure_tensor(DeviceSource(INPUT))))
    assert texts(batch, measure()) == ["6,1,9.53939"]


def test_device_statistics_are_read_back_together_and_in_order():
    """Law: one read for each kind of device, and the rows stay in their order."""
    batch = RowBatch()
    kinds = [
        FakeDeviceStatistics,
        OtherDeviceStatistics,
        FakeDeviceStatistics,
        FakeDeviceStatistics,
        OtherDeviceStatistics,
    ]
    for number, kind in enumerate(kinds):
        batch.add(row(kind(str(number)), number))
    batch.add(row("known", 5))
    assert (FakeDeviceStatistics.reads, OtherDeviceStatistics.reads) == ([], [])
    assert list(batch.drain_rows(measure())) == [
        StatisticRows(0, (KIND,) * 6, tuple(range(6)), ("0", "1", "2", "3", "4", "known"))
    ]
    assert (FakeDeviceStatistics.reads, OtherDeviceStatistics.reads) == ([3], [2])
    assert list(batch.drain_rows(measure())) == []


def test_failing_device_loses_only_its_own_statistics():
    batch = RowBatch()
    for number, promise in enumerate(
        (FakeDeviceStatistics("a"), FailingDeviceStatistics("b"), OtherDeviceStatistics("c"))
    ):
        batch.add(row(promise, number))
    assert list(batch.drain_rows(measure())) == [
        LostTensor(0, "a", STATISTICS_FAILED),
        StatisticRows(0, (KIND, KIND), (0, 2), ("a", "c")),
    ]


marks = st.tuples(st.integers(0, 1), st.booleans(), st.booleans())


@given(
    st.lists(
        st.tuples(marks, st.sampled_from([1, 2, MAX_FRAME_ROWS - 1, MAX_FRAME_ROWS])), max_size=6
    )
)
def test_row_frames_hold_rows_of_one_iteration_up_to_the_limit(runs):
    """Law: each row is once in a frame of its iteration, in order; full frames are split."""
    batch, added = RowBatch(1 << 30), []
    for mark, count in runs:
        for _ in range(count):
            iteration, switched_on, degraded = mark
            stamp = len(added)
            added.append((mark, stamp))
            batch.add(
                TensorStatisticsRow(KIND, stamp, str(stamp), iteration, switched_on, degraded)
            )
    found, frames = [], list(batch.drain_rows(measure()))
    for frame in frames:
        assert isinstance(frame, StatisticRows)
        assert 0 < len(frame) <= MAX_FRAME_ROWS
        assert frame.statistics == tuple(map(str, frame.timestamps_us))
        mark = frame.iteration, frame.switched_on, frame.degraded
        found += [(mark, stamp) for stamp in frame.timestamps_us]
    assert found == added
    assert len(frames) <= len(runs) + len(added) // MAX_FRAME_ROWS


class UnreadableSource(ArraySource):
    """An array that must not be read."""

    def elements(self):
        raise AssertionError("read")

    def unordered(self):
        raise AssertionError("read")

    def copy_elements(self):
        raise AssertionError("copied")

    def locate_elements(self):
        raise AssertionError("read")


@pytest.mark.parametrize("on_device", [True, False])
def test_no_element_is_read_without_statistics(on_device: bool):
    """Rows of a plan without statistics are empty texts, for every type."""
    none = StatisticsCalculator(items=(), on_device=on_device, precision="high")
    assert "complex64" in none.measured_types
    assert "complex64" not in measure().measured_types
    for size in (1, SMALL_TENSOR_BYTES):
        assert none.measure_tensor(UnreadableSource(np.zeros(size))) == ""
    batch = RowBatch()
    batch.add(row(""))
    assert texts(batch, none) == [""]


@pytest.mark.parametrize("size", [3, SMALL_TENSOR_BYTES])
def test_exact_statistics_have_all_digits(size: int):
    """For a small tensor, measured with others, and for a large one."""
    exact = StatisticsCalculator(
        items=("max", "avg"), on_device=False, precision="high", exact=True
    )
    values = np.linspace(0.1, 0.7, size)
    batch = RowBatch()
    batch.add(row(exact.measure_tensor(ArraySource(values)), kind=KIND._replace(dtype="float64")))
    ((maximum, mean),) = [text.split(",") for text in texts(batch, exact)]
    assert float(maximum) == values.max()
    assert float(mean) == pytest.approx(values.mean(), rel=1e-14)


class TensorObject:
    """An object that an array is a view of."""


class VersionedSource(ArraySource):
    """An array with a count of changes."""

    def __init__(
        self, array: np.ndarray, thing: object, changes: int, owner: object | None = None
    ) -> None:
        super().__init__(array)
        self._standing = TensorVersion(thing, changes, owner or thing)

    def get_version(self) -> TensorVersion:
        return self._standing


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The types of the tensors that were measured."""
    found: list[str] = []
    real = module.compute_statistic_row

    def noted(items, dtype, data, **how):
        found.append(dtype)
        return real(items, dtype, data, **how)

    monkeypatch.setattr(module, "compute_statistic_row", noted)
    return found


MANY = SMALL_TENSOR_BYTES // 4 + 100


def test_statistics_cache_measures_an_unchanged_tensor_once(measured: list[str]):
    thing, array = TensorObject(), np.ones(MANY, "f4")
    once = measure()
    first = once.measure_tensor(VersionedSource(array, thing, 0))
    assert (
        once.measure_tensor(VersionedSource(array, thing, 0)) == first == f"1,1,{np.sqrt(MANY):g}"
    )
    assert measured == ["float32"]


def test_statistics_cache_measures_views_of_the_same_memory_once(measured: list[str]):
    """A view of all elements shares its owner's statistics; a view of a part has its own."""
    thing, array = TensorObject(), np.arange(4.0 * MANY, dtype="f4").reshape(2, -1)
    once = measure()
    first = once.measure_tensor(VersionedSource(array, thing, 0))
    for view in (array.reshape(-1), array.T):
        assert once.measure_tensor(VersionedSource(view, TensorObject(), 0, thing)) == first
    assert len(measured) == 1
    for view in (array[:1], array[1:], array[:, ::2], array[:, 1::2], array.view("i4")):
        own = once.measure_tensor(VersionedSource(view, TensorObject(), 0, thing))
        assert own == measure().measure_tensor(ArraySource(view)) != first
    assert len(measured) == 11
    assert (
        once.measure_tensor(VersionedSource(array.reshape(-1) * 2, TensorObject(), 1, thing))
        != first
    )


@pytest.mark.parametrize("how", ["counted", "past the count", "another thing", "array"])
def test_statistics_cache_measures_a_changed_tensor_again(how: str, measured: list[str]):
    """A write that changes no version is detected by the sample; another object never matches."""
    thing, array = TensorObject(), np.ones(MANY, "f4")
    once = measure()
    once.measure_tensor(VersionedSource(array, thing, 0))
    if how != "another thing":
        array *= 2
    if how == "array":
        again = once.measure_tensor(ArraySource(array))
    else:
        again = once.measure_tensor(
            VersionedSource(
                array, TensorObject() if how == "another thing" else thing, int(how == "counted")
            )
        )
    assert measured == ["float32"] * 2
    assert str(again).startswith("1," if how == "another thing" else "2,")


def test_statistics_cache_forgets_freed_tensors(measured: list[str]):
    """A new object may have the identity of a freed one; the cache keeps no object alive."""
    once, array = measure(), np.ones(MANY, "f4")
    for at in range(3000):
        array[:] = at
        assert str(once.measure_tensor(VersionedSource(array, TensorObject(), 0))).startswith(
            f"{at:g},"
        )
    assert len(measured) == 3000
    assert len(once._recent._known) <= 1024


def test_digest_is_of_elements_in_c_order():
    array = np.arange(MANY * 2, dtype="f4").reshape(2, -1)
    digests = StatisticsCalculator(items=("md5",), on_device=False, precision="high")
    assert digests.measure_tensor(ArraySource(array.T)) == digests.measure_tensor(
        ArraySource(array.T.copy())
    )
    assert digests.measure_tensor(ArraySource(array.T)) != digests.measure_tensor(
        ArraySource(array)
    )


@pytest.mark.parametrize("order", ["transposed", "strided", "swapped"])
def test_statistics_do_not_depend_on_memory_order(order: str):
    wide = np.random.default_rng(0).standard_normal((100, 400)).astype("f4")
    array = {"transposed": wide.T, "strided": wide[:, ::2], "swapped": wide.astype(">f4")}[order]
    found = measure().measure_tensor(ArraySource(array))
    assert found == measure().measure_tensor(ArraySource(np.ascontiguousarray(array, "<f4")))


SHARD = TensorLayout(
    LayoutSource.DTENSOR,
    (2, 2 * MANY),
    (0, MANY),
    RankMesh("", ("dp",), (2,), 0, (1,)),
    (1,),
    (MeshPlacement(PlacementKind.SHARD, 1),),
)


def measure_all() -> StatisticsCalculator:
    return StatisticsCalculator(
        items=("max", "min", "l2norm"), on_device=False, precision="high", fingerprints=True
    )


@pytest.mark.parametrize("columns", [3, MANY], ids=["small", "large"])
@pytest.mark.parametrize("turned", [False, True], ids=["packed", "turned"])
@pytest.mark.parametrize("is_shard", [False, True], ids=["whole", "shard"])
def test_row_has_a_fingerprint(columns: int, turned: bool, is_shard: bool):
    """It is of the elements in C order, at their places in the logical tensor."""
    array = np.random.default_rng(columns).standard_normal((2, columns)).astype("f4")
    layout = replace(SHARD, global_shape=(2, 2 * columns), global_offset=(0, columns))
    layout = layout if is_shard else None
    kind = KIND._replace(shape=array.shape, byte_count=array.nbytes, layout=layout)
    source = ArraySource(np.asfortranarray(array) if turned else array)
    batch, calculator = RowBatch(), measure_all()
    batch.add(row(calculator.measure_tensor(source, layout), kind=kind))
    (frame,) = batch.drain_rows(calculator)
    assert isinstance(frame, StatisticRows)
    placement = place_fingerprint("float32", array.shape, layout)
    expected = measure_with_fingerprint(
        ("max", "min", "l2norm"), "float32", array.tobytes(), placement
    )
    assert frame.statistics == (expected.statistics,)
    assert frame.fingerprints == (expected.fingerprint,)


def test_cached_fingerprint_is_of_one_layout():
    """The same memory has another fingerprint as a shard; not so in another shape."""
    thing, array = TensorObject(), np.arange(2.0 * MANY, dtype="f4").reshape(2, -1)
    calculator = measure_all()
    first = calculator.measure_tensor(VersionedSource(array, thing, 0))
    shard = calculator.measure_tensor(VersionedSource(array, thing, 0), SHARD)
    assert isinstance(first, MeasuredTensor)
    assert isinstance(shard, MeasuredTensor)
    assert first.statistics == shard.statistics
    assert first.fingerprint != shard.fingerprint
    assert calculator.measure_tensor(VersionedSource(array.reshape(-1), thing, 0)) is first
    assert calculator.measure_tensor(VersionedSource(array, thing, 0), SHARD) is shard


def test_rows_without_any_fingerprint_have_no_column():
    """Statistics of a device, and types without a kernel; beside others they have an empty one."""
    calculator, batch = measure_all(), RowBatch()
    none = KIND._replace(dtype="float8_e4m3fn")
    batch.add(row(bytes(24), kind=none))
    batch.add(row(FakeDeviceStatistics("5")))
    (frame,) = batch.drain_rows(calculator)
    assert isinstance(frame, StatisticRows)
    assert frame.fingerprints == ()
    batch.add(row(bytes(24), kind=none))
    batch.add(row(INPUT.tobytes()))
    (frame,) = batch.drain_rows(calculator)
    assert isinstance(frame, StatisticRows)
    assert list(map(len, frame.fingerprints)) == [0, FINGERPRINT_BYTES]


def test_fingerprint_without_statistics_is_measured():
    calculator = StatisticsCalculator(items=(), on_device=True, precision="high", fingerprints=True)
    large = np.ones(MANY, "f4")
    found = calculator.measure_tensor(ArraySource(large))
    assert isinstance(found, MeasuredTensor)
    assert found.statistics == ""
    assert len(found.fingerprint) == FINGERPRINT_BYTES
