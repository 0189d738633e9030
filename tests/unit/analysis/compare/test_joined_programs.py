"""Programs of all ranks as one: calls of replicas, shards, pipeline stages and micro-batches."""

from __future__ import annotations

from pathlib import Path

from rankdump._analysis.compare.joined_programs import (
    count_microbatches,
    have_same_layout,
    join_programs,
)
from rankdump._analysis.compare.report import DumpedCall, DumpedProgram, DumpedTensor
from rankdump._analysis.reader.tree import Entry
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)

IN, OUT = TensorSide.INPUT, TensorSide.OUTPUT


def make_layout(rank: int, world: int) -> TensorLayout:
    mesh = make_rank_mesh("", ("tp",), (world,), range(world))
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


def make_call(name: str, *tensors: DumpedTensor, position: int = 0) -> DumpedCall:
    inputs = tuple(each for each in tensors if each.side is IN)
    outputs = tuple(each for each in tensors if each.side is OUT)
    return DumpedCall(position, "Linear", name, inputs, outputs)


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


def test_statistics_that_differ_are_noted():
    programs = [
        DumpedProgram(
            rank, 0, (make_call("fc-op0", make_tensor(OUT, "", rank, statistics={"max": rank})),)
        )
        for rank in range(2)
    ]
    [program], _, notes = join(*programs)
    assert program.calls[0].outputs[0].statistics == {"max": 0}
    assert notes == [
        "tensors compared as the first of their ranks has them, because ranks have different "
        "statistics, and no elements: 1"
    ]
    [program], _, notes = join(programs[0], DumpedProgram(1, 0, programs[0].calls))
    assert notes == []
