"""Programs of all ranks as one: calls of replicas, shards, pipeline stages and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankdump._analysis.compare.joined_programs import (
    count_microbatches,
    have_same_layout,
    join_programs,
)
from rankdump._analysis.compare.merged_shards import merge_shards
from rankdump._analysis.compare.pair_comparison import compute_statistics, decide_without_reading
from rankdump._analysis.compare.report import (
    ComparisonSettings,
    DumpedCall,
    DumpedProgram,
    DumpedTensor,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._analysis.reader.tree import Entry
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.tensor_fingerprint import measure_with_fingerprint, place_fingerprint
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)

IN, OUT = TensorSide.INPUT, TensorSide.OUTPUT


def make_layout(rank: int, world: int, *, first: int = 0) -> TensorLayout:
    mesh = make_rank_mesh("", ("tp",), (world,), range(first, first + world))
    shard = MeshPlacement(PlacementKind.SHARD, 0)
    return TensorLayout(LayoutSource.DTENSOR, (2 * world,), (2 * rank,), mesh, (rank,), (shard,))


def make_tensor(
    side: TensorSide,
    digest: str,
    rank: int = 0,
    *,
    microbatch: int | None = None,
    layout: TensorLayout | None = None,
    time: int = 0,
    statistics: dict[str, float] | None = None,
) -> DumpedTensor:
    key = TensorKey(rank, "net", 0, 0, time, "Linear", "fc", side, 0)
    facts = "a.npy", time, "Linear", "fc", "", "float32", (2,), 8, 8, digest
    record = ManifestRecord(*facts, microbatch=microbatch, layout=layout)
    entry = Entry(Path("tree"), f"{rank}/{time}.npy", key, 8, record)
    tensor = DumpedTensor(side, 0, "", "float32", (2,), digest)
    if statistics is not None:
        return tensor._replace(statistics=statistics)
    return tensor._replace(entry=entry)


def make_call(
    name: str, *tensors: DumpedTensor, position: int = 0, op_type: str = "Linear"
) -> DumpedCall:
    inputs = tuple(each for each in tensors if each.side is IN)
    outputs = tuple(each for each in tensors if each.side is OUT)
    return DumpedCall(position, op_type, name, inputs, outputs)


def join(*programs: DumpedProgram, microbatches: bool = False):
    notes: list[str] = []
    joined, outside = join_programs(programs, notes, joins_microbatches=microbatches)
    assert [each.rank for each in joined] == [0] * len(joined)
    return joined, outside, notes


def test_replicas_are_the_tensor_of_the_first_rank():
    calls = [make_call("fc-op0", make_tensor(OUT, "same", rank)) for rank in range(3)]
    [program], _, notes = join(*(DumpedProgram(at, 0, (call,)) for at, call in enumerate(calls)))
    assert program.calls == (calls[0],)
    assert notes == []


def test_other_tensors_have_the_files_of_all_ranks():
    tensors = [make_tensor(OUT, f"d{rank}", rank) for rank in range(2)]
    [program], *_ = join(
        *(DumpedProgram(at, 0, (make_call("fc-op0", each),)) for at, each in enumerate(tensors))
    )
    (joined,) = program.calls[0].outputs
    assert [entry.key.rank for entry in joined.parts] == [0, 1]
    assert (joined.shape, joined.digest) == (None, "")


def test_shards_have_the_shape_of_the_whole_also_when_a_rank_is_missing():
    for ranks in ((0, 1), (1,)):
        programs = [
            DumpedProgram(
                rank, 0, (make_call("w", make_tensor(OUT, "d", rank, layout=make_layout(rank, 2))),)
            )
            for rank in ranks
        ]
        joined, _ = join_programs(programs, [])
        (tensor,) = joined[0].calls[0].outputs
        assert (tensor.shape, len(tensor.parts)) == ((4,), len(ranks))


def test_meshes_and_microbatches_decide_whether_layouts_are_the_same():
    def program(world: int, microbatch: int | None = None) -> list[DumpedProgram]:
        tensor = make_tensor(OUT, "d", layout=make_layout(0, world), microbatch=microbatch)
        return [DumpedProgram(0, 0, (make_call("w", tensor),))]

    assert have_same_layout(program(2), program(2))
    assert not have_same_layout(program(2), program(4))
    assert not have_same_layout(program(2), program(2, 1))
    assert [count_microbatches(program(2, last)) for last in (None, 0, 3)] == [0, 1, 4]


def test_calls_of_all_ranks_are_in_the_order_of_their_times():
    first = DumpedProgram(0, 0, (make_call("a", make_tensor(OUT, "a", 0, time=1)),))
    second = DumpedProgram(
        1,
        0,
        (
            make_call("b", make_tensor(OUT, "b", 1, time=2)),
            make_call("c", make_tensor(OUT, "c", 1, time=0), position=1),
        ),
    )
    [program], *_ = join(second, first)
    assert [(call.position, call.op_name) for call in program.calls] == [
        (0, "c"),
        (1, "a"),
        (2, "b"),
    ]


def test_stages_of_a_pipeline_are_one_call():
    """Its inputs are those of the first rank, its outputs those of the last; backwards in turn."""
    programs = [
        DumpedProgram(
            rank,
            0,
            (
                make_call(
                    "net-op0",
                    make_tensor(IN, f"x{rank}", rank),
                    make_tensor(OUT, f"x{rank + 1}", rank),
                ),
                make_call(
                    "Gradients/net-op0",
                    make_tensor(IN, f"g{rank + 1}", rank),
                    make_tensor(OUT, f"g{rank}", rank),
                ),
            ),
        )
        for rank in range(3)
    ]
    [program], *_ = join(*programs)
    forward, backward = program.calls
    assert [each.digest for each in forward.tensors] == ["x0", "x3"]
    assert [each.digest for each in backward.tensors] == ["g3", "g0"]


def test_microbatches_are_one_call_and_calls_outside_are_left_out():
    def call(number: int, microbatch: int | None) -> DumpedCall:
        tensor = make_tensor(OUT, f"d{number}", microbatch=microbatch, time=number)
        return make_call(f"net/fc-op{number}", tensor, position=number)

    weights = make_call("net.weight", make_tensor(OUT, "w", time=9))
    program = DumpedProgram(0, 0, (call(0, None), call(1, 1), call(2, 0), weights))
    [joined], outside, _ = join(program, microbatches=True)
    assert outside == 1
    fc, weight = joined.calls
    assert fc.op_name == "net/fc-op0"
    assert [entry.record.microbatch for entry in fc.outputs[0].parts if entry.record] == [0, 1]
    assert weight == weights._replace(position=1)
    [apart], outside, _ = join(program)
    assert (len(apart.calls), outside) == (4, 0)


def make_programs(*statistics: dict[str, float], name: str, op_type: str) -> list[DumpedProgram]:
    tensors = [make_tensor(OUT, "", at, statistics=each) for at, each in enumerate(statistics)]
    calls = [make_call(name, each, op_type=op_type) for each in tensors]
    return [DumpedProgram(rank, 0, (call,)) for rank, call in enumerate(calls)]


def test_statistics_of_a_parameter_that_differ_are_noted():
    programs = make_programs({"max": 0}, {"max": 1}, name="fc.weight", op_type="Parameter")
    [program], _, notes = join(*programs)
    assert program.calls[0].outputs[0].statistics == {"max": 0}
    assert notes == [
        "tensors compared as the first of their ranks has them, because ranks have different "
        "statistics, and no elements: 1"
    ]
    [program], _, notes = join(programs[0], DumpedProgram(1, 0, programs[0].calls))
    assert notes == []


HALVES = (
    {"max": 3.0, "min": -1.0, "avg": 1.0, "l2norm": 3.0},
    {"max": 2.0, "min": -4.0, "avg": 0.0, "l2norm": 4.0},
)
WHOLE = {"max": 3.0, "min": -4.0, "avg": 0.5, "l2norm": 5.0}


def compare_statistics_of_ranks(
    name: str, whole: dict[str, float], *, size: int = 4
) -> PairOutcome | None:
    """Two ranks with HALVES of two elements against one rank."""
    [program], _, notes = join(*make_programs(*HALVES, name=name, op_type="Linear"))
    assert notes == []
    (joined,) = program.calls[0].outputs
    other = make_tensor(OUT, "", statistics=whole)._replace(shape=(size,))
    return decide_without_reading(TensorPair(joined, other), ComparisonSettings())


def test_statistics_of_activations_are_those_of_the_ranks_together():
    outcome = compare_statistics_of_ranks("fc-op0", WHOLE)
    assert outcome is not None
    assert outcome.verdict is TensorVerdict.SAME
    assert outcome.findings == ("a: statistics of all ranks together, inferred from statistics",)
    outcome = compare_statistics_of_ranks("fc-op0", WHOLE | {"l2norm": 6.0})
    assert outcome is not None
    assert outcome.statistic_differences["l2norm"] == 1.0
    assert outcome.verdict is TensorVerdict.DIFFERENT


def test_statistics_of_gradients_may_be_as_many_times_larger_as_there_are_ranks():
    half = {item: value / 2 for item, value in WHOLE.items()}
    outcomes = [compare_statistics_of_ranks(each, half) for each in ("Gradients/fc-op0", "fc-op0")]
    verdicts = [each.verdict for each in outcomes if each is not None]
    assert verdicts == [TensorVerdict.SAME, TensorVerdict.DIFFERENT]


def test_the_first_of_ranks_with_other_statistics_is_not_all_of_them():
    outcome = compare_statistics_of_ranks("fc-op0", HALVES[0], size=2)
    assert outcome is not None
    assert outcome.verdict is TensorVerdict.UNKNOWN
    assert outcome.findings == (
        "a: ranks have different statistics, and those of the first one are compared",
    )


def test_statistics_of_other_numbers_of_elements_are_unknown():
    outcome = compare_statistics_of_ranks("fc-op0", WHOLE, size=5)
    assert outcome is not None
    assert outcome.verdict is TensorVerdict.UNKNOWN
    assert "another number of elements" in outcome.findings[0]


def test_stages_without_tensors_are_known_by_their_fingerprints():
    def make(side: TensorSide, number: int) -> DumpedTensor:
        known = RecordedFingerprint(number, b"")
        return make_tensor(side, "", statistics={"max": number})._replace(fingerprint=known)

    programs = [
        DumpedProgram(rank, 0, (make_call("net-op0", make(IN, rank), make(OUT, rank + 1)),))
        for rank in range(3)
    ]
    [program], *_ = join(*programs)
    assert [each.statistics["max"] for each in program.calls[0].tensors] == [0, 3]


def test_meshes_have_a_part_of_the_batch_each():
    """Each mesh has a tensor of its own, which are two halves of that of the whole model."""
    halves = [
        make_tensor(OUT, "", rank, layout=make_layout(rank % 2, 2, first=rank // 2 * 2))
        for rank in range(4)
    ]
    tensors = [
        each._replace(entry=None, row_record=each.record, statistics={"max": float(rank)})
        for rank, each in enumerate(halves)
    ]
    [program], _, notes = join(
        *(DumpedProgram(rank, 0, (make_call("fc-op0", each),)) for rank, each in enumerate(tensors))
    )
    (joined,) = program.calls[0].outputs
    assert notes == []
    assert [(each.shape, each.statistics) for each in (joined, *joined.guesses)] == [
        ((4,), {"max": 1.0}),
        ((8,), {"max": 3.0}),
    ]


def test_statistics_and_fingerprints_of_shards_are_those_of_the_whole():
    """Also where some ranks are replicas; not where one is missing, or replicas differ."""
    whole = np.arange(8, dtype=np.float32)

    def make(rank: int, change: float = 0.0) -> DumpedTensor:
        layout = make_layout(rank // 2, 4)
        mesh = make_rank_mesh("", ("tp", "dp"), (4, 2), range(8))
        replicate = MeshPlacement(PlacementKind.REPLICATE)
        layout = replace(
            layout,
            mesh=mesh,
            coordinate=(rank // 2, rank % 2),
            placements=(*layout.placements, replicate),
        )
        values = whole[rank // 2 * 2 :][:2] + np.float32(change)
        found = make_tensor(OUT, "", rank, layout=layout)
        placement = place_fingerprint("float32", (2,), layout)
        packed = measure_with_fingerprint((), "float32", values.tobytes(), placement).fingerprint
        known = RecordedFingerprint(int.from_bytes(packed[:8], "little"), packed[8:])
        return found._replace(
            statistics=compute_statistics(values),
            fingerprint=known,
            entry=None,
            row_record=found.record,
        )

    merged = merge_shards([make(rank) for rank in range(8)])
    assert merged is not None
    assert merged.statistics == pytest.approx(compute_statistics(whole))
    placement = place_fingerprint("float32", (8,), None)
    packed = measure_with_fingerprint((), "float32", whole.tobytes(), placement).fingerprint
    other = RecordedFingerprint(int.from_bytes(packed[:8], "little"), packed[8:])
    assert merged.fingerprint == other
    assert (merged.shape, merged.entry) == ((8,), None)
    assert merge_shards([make(rank) for rank in range(6)]) is None
    assert merge_shards([make(rank, change=rank == 7) for rank in range(8)]) is None
    # Micro-batches have a tensor each.
    other = make(7)
    assert other.row_record is not None
    numbered = other._replace(row_record=other.row_record._replace(microbatch=1))
    assert merge_shards([*(make(rank) for rank in range(7)), numbered]) is None
