"""CANN's trees written by hand: bin files, plain or compressed, with or without manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, Shape
from rankdump._codec.file_codec import get_codec
from rankdump._core.cann_types import DATA_TYPE_NUMBERS, FORMAT_NUMBERS
from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.status import IterationStatus
from rankdump._layout import tree_paths
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MAPPING_FILE, FilePlace, TreeContext

STARTED = "20261121175901"
Slots = Mapping[int, np.ndarray]
Part = TypeVar("Part", OpInput, OpOutput)


def bin_parts(
    op_name: str,
    stamp: int,
    inputs: Slots,
    outputs: Slots,
    *,
    word: str = "ND",
    original: tuple[int, ...] = (),
) -> list[bytes]:
    """Return header and payloads of an operator; slots that are not there are placeholders.

    `original` is the original shape of all, where it is not the device's.
    """
    facts = (FORMAT_NUMBERS[word], original)
    header = DumpData(
        dump_time=stamp,
        op_name=op_name,
        input=tuple(_part(OpInput, array, *facts) for array in _with_gaps(inputs)),
        output=tuple(_part(OpOutput, array, *facts) for array in _with_gaps(outputs)),
    )
    payloads = [slots[slot].tobytes() for slots in (inputs, outputs) for slot in sorted(slots)]
    return [serialize_bin_head(header), *payloads]


def _with_gaps(slots: Slots) -> list[np.ndarray | None]:
    return [slots.get(slot) for slot in range(max(slots, default=-1) + 1)]


def _part(kind: type[Part], array: np.ndarray | None, word: int, original: tuple[int, ...]) -> Part:
    if array is None:
        return kind()
    number, shape = DATA_TYPE_NUMBERS[array.dtype.name], Shape(array.shape)
    before = Shape(original or array.shape)
    return kind(number, word, shape, original_shape=before, size=array.nbytes)


def write(path: Path, parts: list[bytes]) -> Path:
    """Write a file, packed where its name reports it: a frame for each part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".zst"):
        parts = [bytes(b) for part in parts for b in get_codec("zstd").encode([part])]
    path.write_bytes(b"".join(parts))
    return path


@dataclass
class CannTree:
    """Writes operators the way an agent or CANN would leave them."""

    root: Path
    layout: str = "cann"
    device: int = 0
    rank: int = 0
    net_name: str = "Net"
    packed: bool = False
    clock_us: int = 1_700_000_000_000_000
    records: dict[int, list[ManifestRecord]] = field(default_factory=dict)

    @property
    def stand(self) -> TreeContext:
        """What all paths have in common."""
        return TreeContext(str(self.root), self.device, STARTED)

    def key(self, iteration: int, op_name: str) -> TensorKey:
        """Return the key of an operator's next call."""
        self.clock_us += 10
        op_type = op_name.rpartition("/")[2].partition("-")[0]
        unknown = LAYOUTS[self.layout].unknown_id
        where = (self.rank, self.net_name, 1, iteration, self.clock_us)
        return TensorKey(*where, op_type, op_name, TensorSide.INPUT, 0, task=7, stream=unknown)

    def operator(
        self,
        iteration: int,
        op_name: str,
        inputs: Slots,
        outputs: Slots,
        *,
        word: str = "ND",
        original: tuple[int, ...] = (),
    ) -> Path:
        """Write an operator's file, and remember what a manifest says of it."""
        key, layout = self.key(iteration, op_name), LAYOUTS[self.layout]
        place = layout.place_operator(key, self.stand, ".zst" * self.packed)
        both = inputs, outputs
        parts = bin_parts(op_name, key.timestamp_us, *both, word=word, original=original)
        path = self._written(place, parts)
        sides = (("input", inputs), ("output", outputs))
        members = [(f"{side}.{slot}", slots[slot]) for side, slots in sides for slot in slots]
        size = path.stat().st_size
        rest = [0 if self.packed else array.nbytes for _, array in members[1:]]
        for (member, array), taken in zip(members, [size - sum(rest), *rest], strict=True):
            self.remember(key, place.path, member, array, taken)
        return path

    def single(self, key: TensorKey, side: TensorSide, slot: int, array: np.ndarray) -> Path:
        """Write a file with one tensor of an operator, as it stands until they are joined."""
        layout, slots = LAYOUTS[self.layout], {slot: array}
        one = TensorKey(
            *(key.rank, key.net_name, key.graph, key.iteration, key.timestamp_us),
            *(key.op_type, key.op_name, side, slot, key.task, key.stream),
        )
        both = (slots, {}) if side is TensorSide.INPUT else ({}, slots)
        place = layout.place_member(one, self.stand, ".zst" * self.packed)
        return self._written(place, bin_parts(key.op_name, key.timestamp_us, *both))

    def table(self, iteration: int, op_name: str, lines: list[str]) -> Path:
        """Write the table of an operator."""
        place = LAYOUTS[self.layout].place_operator(
            self.key(iteration, op_name), self.stand, ".csv"
        )
        return self._written(place, ["\n".join([*lines, ""]).encode()])

    def _written(self, place: FilePlace, parts: list[bytes]) -> Path:
        path = write(self.root / place.path, parts)
        if place.mapped_from:
            with (path.parent / MAPPING_FILE).open("a") as mapping:
                mapping.write(f"{place.name},{place.mapped_from}\n" * 2)  # as CANN: one a block
        return path

    def remember(
        self, key: TensorKey, path: str, member: str, array: np.ndarray, taken: int
    ) -> None:
        """Remember what the manifest says of a tensor."""
        self.records.setdefault(key.iteration, []).append(
            ManifestRecord(
                path=path,
                timestamp_us=key.timestamp_us,
                op_type=key.op_type,
                op_name=key.op_name,
                argument="",
                dtype=array.dtype.name,
                shape=array.shape,
                bytes_in=array.nbytes,
                bytes_stored=taken,
                digest=xxhash.xxh3_128_hexdigest(array.tobytes()),
                member=member,
            )
        )

    def complete(self, iteration: int, *, world_size: int = 1) -> None:
        """Write the manifest of an iteration."""
        records = self.records.get(iteration, [])
        name = f"session{self.rank}"
        status = IterationStatus(
            job_id="job",
            session_id=name,
            rank=self.rank,
            iteration=iteration,
            complete=True,
            expected=len(records),
            stored=len(records),
            bytes_in=sum(record.bytes_in for record in records),
            bytes_stored=sum(record.bytes_stored for record in records),
        )
        manifest = Manifest(status, world_size, self.device, "host", tuple(records))
        rank = self.root / tree_paths.make_rank_folder(self.rank) / tree_paths.MANIFEST_FOLDER
        rank.mkdir(parents=True, exist_ok=True)
        (rank / make_manifest_name(iteration, name)).write_bytes(manifest.to_json())
