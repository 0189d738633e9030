"""Trees written by hand, with nothing of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rankdump.codec import codec_named
from rankdump.contract import npy
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.manifest import Manifest, ManifestRecord, manifest_name
from rankdump.contract.status import IterationStatus


@dataclass
class TreeBuilder:
    """Writes tensors and manifests the way an agent would leave them."""

    root: Path
    records: dict[tuple[int, int], list[ManifestRecord]] = field(default_factory=dict)
    clock_us: int = 1_700_000_000_000_000

    def tensor(
        self,
        rank: int,
        iteration: int,
        op_name: str,
        values: np.ndarray,
        *,
        side: Side = Side.OUTPUT,
        slot: int = 0,
        codec: str = "zstd",
        dtype: str = "",
    ) -> Path:
        """Write one tensor; `dtype` is the original type where it differs from the stored one."""
        self.clock_us += 10
        op_type = op_name.rsplit("/", 1)[-1].rsplit("-", 1)[0]
        key = TensorKey(
            rank, "Net", 0, iteration, self.clock_us, op_type, op_name, side=side, slot=slot
        )
        packer = codec_named(codec)
        place = layout.place_of(key, packer.suffix)
        path = self.root / place.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if place.mapped_from:
            with (path.parent / layout.MAPPING_FILE).open("a") as mapping:
                mapping.write(f"{place.name},{place.mapped_from}\n")
        parts = packer.encode([npy.header(values.dtype.str, values.shape), values.tobytes()])
        path.write_bytes(b"".join(parts))
        self.records.setdefault((rank, iteration), []).append(
            ManifestRecord(
                path=place.path,
                op_type=op_type,
                op_name=op_name,
                argument="",
                dtype=dtype or values.dtype.name,
                shape=values.shape,
                bytes_in=values.nbytes,
                bytes_stored=path.stat().st_size,
                digest="",
            )
        )
        return path

    def complete(
        self,
        rank: int,
        iteration: int,
        *,
        world_size: int = 2,
        session: str = "",
        expected: int | None = None,
        linked: int = 0,
        dropped: dict[str, int] | None = None,
    ) -> Manifest:
        """Write the manifest of what was written for that iteration."""
        records = self.records.get((rank, iteration), [])
        name = session or f"session{rank}"
        status = IterationStatus(
            job_id="job",
            session_id=name,
            rank=rank,
            iteration=iteration,
            complete=True,
            expected=len(records) if expected is None else expected,
            stored=len(records),
            linked=linked,
            dropped=dropped or {},
            bytes_in=sum(record.bytes_in for record in records),
            bytes_stored=sum(record.bytes_stored for record in records),
        )
        manifest = Manifest(status, world_size, rank, "host", tuple(records))
        folder = self.root / layout.rank_folder(rank) / layout.MANIFEST_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / manifest_name(iteration, name)).write_bytes(manifest.to_json())
        return manifest
