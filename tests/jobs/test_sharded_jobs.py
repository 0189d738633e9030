"""Jobs whose parameters are sharded: losses, drops, the shards of every rank, and their layouts."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenario_jobs import run_scenarios

import rankdump
from rankdump._analysis.compare.card_findings import MergedParameters, merge_parameters
from rankdump._analysis.reader.tree import Entry
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import (
    LayoutSource,
    PlacementKind,
    TensorLayout,
    find_ranges,
    list_cuts,
    order_cuts,
)
from rankdump._kernels.shard_fingerprint import compute_fingerprint
from rankdump.reader import status

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

TWO_RANKS = (
    "ddp",
    "ddp_unreduced",
    "ddp_accumulation",
    "ddp_static_graph",
    "fsdp1_flat",
    "fsdp1_orig",
    "fsdp1_unreduced",
    "fsdp1_accumulation",
    "fsdp1_mixed",
    "fsdp2",
    "fsdp2_bf16",
    "fsdp2_unsharded",
    "fsdp2_accumulation",
    "fsdp2_checkpointing",
    "tp",
    "tp_sp",
    "redistribute",
)
FOUR_RANKS = ("fsdp1_hybrid", "hsdp", "fsdp2_tp")
PARAMETERS = {
    "ddp_static_graph": 6,
    "fsdp1_flat": 3,
    "fsdp1_unreduced": 3,
    "redistribute": 2,
}
"""Parameters of a scenario's model; 14 by default."""
WITH_STATES = ("ddp_unreduced", "fsdp2", "fsdp2_tp")
"""Scenarios with the states of their optimizers."""

JOB = Path(__file__).with_name("sharded_job.py")


class ShardedRun:
    """What the ranks of a scenario said, and what is in its tree."""

    def __init__(self, folder: Path, name: str, world: int) -> None:
        self.name, self.world = name, world
        self.reports: list[dict[str, Any]] = [
            json.loads((folder / name / f"rank_{rank}.json").read_text()) for rank in range(world)
        ]
        self.full = dict(np.load(folder / name / "full.npz"))
        self.tree = folder / name / "tree"
        self.dump = rankdump.open(self.tree)
        self.source = LayoutSource.FSDP1 if "fsdp1" in name else LayoutSource.DTENSOR
        self.parameters = PARAMETERS.get(name, 14)
        self.is_replicated = name.startswith("ddp")

    def entries(self) -> Iterator[Entry]:
        """Yield the values and gradients of parameters, and states of optimizers."""
        for entry in self.dump.tensors(side="output"):
            if entry.op_type not in ("Parameter", "OptimizerState"):
                continue
            if entry.record is not None and entry.key.side is TensorSide.OUTPUT:
                yield entry

    def last_shards(self) -> dict[str, list[tuple[np.ndarray, TensorLayout]]]:
        """Return the shards of each tensor in the last iteration."""
        found: dict[str, list[tuple[np.ndarray, TensorLayout]]] = defaultdict(list)
        for entry in self.entries():
            if entry.key.iteration == 1 and entry.record is not None and entry.record.layout:
                found[entry.op_name].append((self.dump.load(entry), entry.record.layout))
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_scenarios(JOB, tmp_path_factory.mktemp("sharded"), {2: TWO_RANKS, 4: FOUR_RANKS})


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    return folder / "2"


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> Path:
    return folder / "4"


@pytest.fixture(params=[*((name, 2) for name in TWO_RANKS), *((name, 4) for name in FOUR_RANKS)])
def run(request: pytest.FixtureRequest) -> ShardedRun:
    name, world = request.param
    folder: Path = request.getfixturevalue("two_ranks" if world == 2 else "four_ranks")
    return ShardedRun(folder, name, world)


def test_training_is_the_same_with_a_dump(run: ShardedRun) -> None:
    """Losses, parameters and gradients are bit-identical on every rank."""
    for report in run.reports:
        assert report["plain"] == report["dumped"]
        assert len(report["plain"]) == 2
        assert report["same"]


def test_nothing_is_dropped(run: ShardedRun) -> None:
    found = status(run.tree).iterations
    assert len(found) == 2 * run.world
    assert all(each.complete and each.is_balanced and not each.dropped for each in found)


def test_every_shard_is_what_the_job_computed(run: ShardedRun) -> None:
    """Each parameter and gradient of each rank and iteration, and no other."""
    found = {
        (entry.key.rank, entry.key.iteration, entry.op_name): hashlib.sha256(
            run.dump.load(entry).tobytes()
        ).hexdigest()
        for entry in run.entries()
    }
    expected = {
        (rank, iteration, name): digest
        for rank, report in enumerate(run.reports)
        for iteration, name, _, digest in report["digests"]
    }
    assert found == expected
    assert {name for _, _, name in found} == set(run.full)
    assert len(run.full) == (4 if run.name in WITH_STATES else 2) * run.parameters


def find_places(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return where a local tensor lies in the whole one, as an index."""
    ranges = []
    for dimension, extent in enumerate(layout.global_shape):
        cuts = list_cuts(dimension, layout.mesh.shape, layout.coordinate, layout.placements)
        held = find_ranges(extent, order_cuts(cuts) or cuts)
        assert len(held) == 1
        assert held[0].start == layout.global_offset[dimension]
        ranges.append(slice(held[0].start, held[0].start + shape[dimension]))
    return tuple(ranges)


def test_shards_tile_the_whole_tensor(run: ShardedRun) -> None:
    """Every element is written as often as there are replicas, and equals the gathered one."""
    found = run.last_shards()
    # Parameters that no style of tensor parallelism names stay plain; DDP's all are.
    plain = len(run.full) if run.is_replicated else {"tp": 12}.get(run.name, 0)
    assert len(run.full) - len(found) == plain
    for name, shards in found.items():
        whole = run.full[name]
        joined, count = np.zeros_like(whole), np.zeros(whole.shape, int)
        for array, layout in shards:
            assert layout.source is run.source
            assert layout.global_shape == whole.shape
            if layout.is_partial:
                joined += array
                count += 1
                continue
            if layout.flat_range:
                begin, end = layout.flat_range
                joined.ravel()[begin:end] = array[: end - begin]
                count.ravel()[begin:end] += 1
                assert len(array) == end - begin + layout.padding
                continue
            place = find_places(layout, array.shape)
            joined[place] = array
            count[place] += 1
        assert len(set(count.ravel())) == 1, name
        assert count.min() >= 1
        if not any(layout.is_partial for _, layout in shards):
            np.testing.assert_array_equal(joined, whole, name)
        else:
            np.testing.assert_allclose(joined, whole, rtol=1e-6)


def read_fingerprints(tree: Path) -> dict[tuple[Any, ...], tuple[int, list[float]]]:
    """Return digest and sketch by rank, iteration, name, side and slot, as the table has them."""
    rows = rankdump.open(tree).sql(
        "SELECT rank, iteration, name, side, slot, fingerprint, sketch FROM tensors"
        " WHERE fingerprint IS NOT NULL"
    )
    return {
        tuple(place): (fingerprint, sketch)
        for *place, fingerprint, sketch in (row.values() for row in rows.to_pylist())
    }


def test_fingerprints_are_those_of_the_dumped_tensors(run: ShardedRun) -> None:
    """Digests of the shards of a parameter add up to that of the whole, and so do sketches."""
    found = read_fingerprints(run.tree)
    entries = [entry for entry in run.dump.tensors() if entry.record is not None]
    assert len(found) == len(entries)
    sums: defaultdict[str, dict[Any, tuple[int, np.ndarray, bool]]] = defaultdict(dict)
    for entry in entries:
        key, layout = entry.key, entry.record and entry.record.layout
        place = key.rank, key.iteration, entry.op_name, key.side.value, key.slot
        array = run.dump.load(entry)
        digest, sketch = find_fingerprint(array, entry, layout)
        assert found[place][0] == digest, place
        np.testing.assert_array_equal(found[place][1], sketch)
        is_summed = key.side is TensorSide.OUTPUT and entry.op_name in run.full
        if is_summed and layout is not None and key.iteration == 1 and _is_first_replica(layout):
            # Ranks of another dimension have it too, where that is not in the mesh of the tensor.
            part = layout.coordinate, layout.global_offset, layout.flat_range
            sums[entry.op_name][part] = digest, sketch, layout.is_partial
    for name, found_parts in sums.items():
        parts = list(found_parts.values())
        expected = compute_fingerprint(run.full[name])
        sketch = sum(each[1].astype(np.float64) for each in parts)
        scale = np.abs(expected.sketch).max() + 1e-6
        np.testing.assert_allclose(sketch, expected.sketch, atol=1e-5 * scale, err_msg=name)
        if not parts[0][2]:  # summands have other bits than their sum
            assert sum(each[0] for each in parts) % (1 << 64) == expected.digest, name
    assert sums.keys() == run.last_shards().keys()


def find_fingerprint(
    array: np.ndarray, entry: Entry, layout: TensorLayout | None
) -> tuple[int, np.ndarray]:
    """Return the fingerprint of a loaded tensor, by the kernel alone."""
    dtype = None
    # A file holds float32 of the same values.
    if entry.record is not None and entry.record.dtype == "bfloat16":
        array, dtype = (array.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"
    place: dict[str, Any] = {}
    if layout is not None and layout.flat_range:
        begin, end = layout.flat_range
        array = array.ravel()[: end - begin]
        place = {"global_shape": (int(np.prod(layout.global_shape)),), "offset": (begin,)}
    elif layout is not None:
        place = {"global_shape": layout.global_shape, "offset": layout.global_offset}
    found = compute_fingerprint(array, dtype, **place)
    return found.digest, found.sketch.astype(np.float32)


def _is_first_replica(layout: TensorLayout) -> bool:
    return not any(
        at
        for at, placement in zip(layout.coordinate, layout.placements, strict=True)
        if placement.kind is PlacementKind.REPLICATE
    )


@pytest.mark.parametrize("name", ["fsdp1_flat", "fsdp2"])
def test_rank_and_agent_compute_the_same_fingerprints(name: str, two_ranks: Path) -> None:
    """With statistics alone the rank does it, of the same tensors of the same training."""
    tensors, rows = (read_fingerprints(two_ranks / name / each) for each in ("tree", "rows"))
    assert tensors == rows
    assert len(tensors) > 100


WITH_STAGES = (
    "ddp_unreduced",
    "ddp_accumulation",
    "ddp_static_graph",
    "fsdp1_unreduced",
    "fsdp1_accumulation",
    "fsdp1_mixed",
    "fsdp2_unsharded",
    "fsdp2_accumulation",
)
"""Scenarios with what data parallelism gathers and reduces."""


def merge_cards(folder: Path, name: str, iteration: int) -> MergedParameters:
    cards = rankdump.open(folder / name / "tree").where(iteration=iteration).cards
    merged = merge_parameters(cards)
    assert not merged.incomplete
    assert not merged.unequal
    return merged


def test_run_cards_of_all_shardings_merge_to_the_same_weights(
    two_ranks: Path, four_ranks: Path
) -> None:
    """Before the first step of one seed, and before the second one where the sums are the same."""
    first = merge_cards(two_ranks, "ddp", 0).whole
    assert len(first) == 14
    for name in ("fsdp1_orig", "fsdp1_mixed", "fsdp2", "fsdp2_bf16"):
        assert merge_cards(two_ranks, name, 0).whole == first
    for name in ("fsdp1_hybrid", "hsdp"):
        assert merge_cards(four_ranks, name, 0).whole == first
    second = merge_cards(two_ranks, "ddp", 1).whole
    assert merge_cards(two_ranks, "fsdp2", 1).whole == second
    assert 0 < len(second) < 14
    assert merge_cards(two_ranks, "fsdp2_bf16", 1).whole != second


@pytest.mark.parametrize("name", WITH_STAGES)
def test_stages_agree_with_parameters_and_gradients(name: str, two_ranks: Path) -> None:
    """A forward reads what the step before wrote; reduction averages what the ranks computed."""
    run = ShardedRun(two_ranks, name, 2)
    inputs = list(run.dump.tensors(op_type="Parameter", side="input"))
    # DistributedDataParallel gathers no parameters.
    assert len(inputs) == (1 if run.is_replicated else 2) * 2 * 2 * run.parameters
    assert {entry.key.slot for entry in inputs} == {0}
    whole: dict[tuple[str, int], np.ndarray] = {}
    for entry in run.entries():
        place = entry.op_name, entry.key.iteration
        # A rank has no part of some parameters, but one part is enough to find the others.
        if place not in whole and entry.record is not None:
            whole[place] = run.dump.load(entry.key, full=entry.record.layout is not None)
    unreduced: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    for entry in inputs:
        name, iteration = entry.op_name, entry.key.iteration
        if name.startswith("Gradients/"):
            unreduced[name, iteration].append(run.dump.load(entry))
        elif iteration == 1:
            rounding = 2**-8 if run.name == "fsdp1_mixed" else 0
            read = np.asarray(run.dump.load(entry), np.float32)
            np.testing.assert_allclose(read, whole[name, 0], rtol=rounding)
    assert len(unreduced) == 2 * run.parameters
    for place, (first, second) in unreduced.items():
        assert not np.array_equal(first, second), place
        np.testing.assert_allclose((first + second) / 2, whole[place], rtol=1e-5, atol=1e-7)
