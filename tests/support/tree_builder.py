"""Trees written by hand, without code of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from support.record_heads import head_of

from rankdump._codec.file_codec import get_codec
from rankdump._core import npy_format
from rankdump._core.manifest import (
    FingerprintSeal,
    Manifest,
    ManifestRecord,
    make_fingerprint_name,
    make_manifest_name,
)
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.session_protocol import RecordHead
from rankdump._core.statistics import DEFAULT_STATISTICS, compute_statistic_texts
from rankdump._core.status import IterationStatus
from rankdump._core.tensor_fingerprint import (
    format_fingerprint_file,
    measure_with_fingerprint,
    place_fingerprint,
)
from rankdump._core.tensor_layout import TensorLayout
from rankdump._layout import statistic_tables
from rankdump._layout import tree_paths as layout
from rankdump._layout.profile import DEFAULT_PROFILE, Profile
from rankdump._layout.tree_paths import MAPPING_FILE


@dataclass
class TreeBuilder:
    """Writes tensors, tables, graphs and manifests the way an agent would leave them."""

    root: Path
    profile: Profile = DEFAULT_PROFILE
    items: tuple[str, ...] = DEFAULT_STATISTICS
    """Columns of the tables."""
    device_target: str = "CPU"
    job: str = "job"
    fingerprints: bool = False
    """Whether each tensor has a fingerprint."""
    records: dict[tuple[int, int], list[ManifestRecord]] = field(default_factory=dict)
    prints: dict[tuple[int, int], list[tuple[int, bytes]]] = field(default_factory=dict)
    """Fingerprints by the number of their record."""
    clock_us: int = 1_700_000_000_000_000
    attempt: int = 0
    """One builder writes one attempt; a later one needs a later clock."""

    def tensor(
        self,
        rank: int,
        iteration: int,
        op_name: str,
        values: np.ndarray,
        *,
        side: TensorSide = TensorSide.OUTPUT,
        slot: int = 0,
        graph: int = 0,
        codec: str = "zstd",
        dtype: str = "",
        op_type: str = "",
        constant: bool = False,
        tabled: bool = False,
        tensor_layout: TensorLayout | None = None,
        microbatch: int | None = None,
        phase: str = "",
        argument: str = "",
    ) -> Path:
        """Write one tensor; `dtype` is the original type where it differs from the stored one.

        With `tabled` its row as well, as `saved_data: full` does.
        """
        head = self._head(rank, iteration, op_name, values, side, slot, graph, dtype, op_type)
        parallel = {"layout": tensor_layout, "microbatch": microbatch, "phase": phase}
        head = head._replace(kind=head.kind._replace(constant=constant, **parallel))
        if argument:
            head = head._replace(kind=head.kind._replace(argument=argument))
        element = self.profile.make_element_token(head.kind.dtype, self.device_target)
        packer = get_codec(codec)
        place = layout.make_mindspore_place(
            head.key._replace(element=element), packer.suffix, self.profile
        )
        path = self.root / place.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if place.mapped_from:
            with (path.parent / MAPPING_FILE).open("a") as mapping:
                mapping.write(f"{place.name},{place.mapped_from}\n")
        parts = packer.encode(
            [npy_format.format_npy_header(values.dtype.str, values.shape), values.tobytes()]
        )
        path.write_bytes(b"".join(parts))
        digest = xxhash.xxh3_128_hexdigest(values.tobytes())
        size = path.stat().st_size
        self._remember(head, values, path=place.path, bytes_stored=size, digest=digest)
        if tabled:
            self._append_row(head, values)
        return path

    def row(
        self,
        rank: int,
        iteration: int,
        op_name: str,
        values: np.ndarray,
        *,
        side: TensorSide = TensorSide.OUTPUT,
        slot: int = 0,
        graph: int = 0,
        op_type: str = "",
        constant: bool = False,
        tensor_layout: TensorLayout | None = None,
    ) -> Path:
        """Write one row and no tensor, as `saved_data: statistic` does; return the table."""
        head = self._head(rank, iteration, op_name, values, side, slot, graph, "", op_type)
        head = head._replace(kind=head.kind._replace(constant=constant, layout=tensor_layout))
        self._remember(head, values, path="", bytes_stored=0)
        return self._append_row(head, values)

    def graph(self, rank: int, text: str, *, graph: int = 0) -> Path:
        """Write a graph as `.ir` text."""
        folder = self.root / layout.make_rank_folder(rank) / layout.GRAPH_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"ms_output_trace_code_graph_{graph}.ir"
        path.write_text(text)
        return path

    def _head(
        self,
        rank: int,
        iteration: int,
        op_name: str,
        values: np.ndarray,
        side: TensorSide,
        slot: int,
        graph: int,
        dtype: str,
        op_type: str,
    ) -> RecordHead:
        self.clock_us += 10
        held = dtype or values.dtype.name
        key = TensorKey(
            rank,
            "Net",
            graph,
            iteration,
            self.clock_us,
            op_type or op_name.rsplit("/", 1)[-1].rsplit("-", 1)[0],
            op_name,
            side=side,
            slot=slot,
        )
        return head_of(key, held, values.shape, values.nbytes)

    def _remember(
        self,
        head: RecordHead,
        values: np.ndarray,
        *,
        path: str,
        bytes_stored: int,
        digest: str = "",
    ) -> None:
        key = head.key
        if self.fingerprints:
            placement = place_fingerprint(values.dtype.name, values.shape, head.kind.layout)
            found = measure_with_fingerprint((), values.dtype.name, values.tobytes(), placement)
            number = len(self.records.get((key.rank, key.iteration), ()))
            self.prints.setdefault((key.rank, key.iteration), []).append(
                (number, found.fingerprint)
            )
        self.records.setdefault((key.rank, key.iteration), []).append(
            ManifestRecord(
                path=path,
                timestamp_us=key.timestamp_us,
                op_type=key.op_type,
                op_name=key.op_name,
                argument=head.kind.argument,
                dtype=head.kind.dtype,
                shape=head.kind.shape,
                bytes_in=head.byte_count,
                bytes_stored=bytes_stored,
                digest=digest,
                microbatch=head.kind.microbatch,
                phase=head.kind.phase,
                layout=head.kind.layout,
            )
        )

    def _append_row(self, head: RecordHead, values: np.ndarray) -> Path:
        items = statistic_tables.select_table_items(self.items, self.profile)
        texts = compute_statistic_texts(items, values.dtype.name, memoryview(values.tobytes()))
        path = self.root / layout.make_tensor_folder(head.key) / layout.STATISTIC_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        with path.open("a") as table:
            if fresh:
                table.write(statistic_tables.format_statistic_header(items) + "\n")
            table.write(statistic_tables.format_statistic_line(head, texts, self.profile) + "\n")
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
        card: object = None,
    ) -> Manifest:
        """Write the manifest of what was written for that iteration; `card` is a value of JSON."""
        records = self.records.get((rank, iteration), [])
        name = session or f"session{rank}{'' if not self.attempt else f'-{self.attempt}'}"
        status = IterationStatus(
            job_id=self.job,
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
            attempt=self.attempt,
        )
        own = self.root / layout.make_rank_folder(rank)
        file, seal = make_manifest_name(iteration, name), None
        if (rank, iteration) in self.prints:
            (own / layout.FINGERPRINT_FOLDER).mkdir(parents=True, exist_ok=True)
            data = format_fingerprint_file(self.prints[rank, iteration])
            (own / layout.FINGERPRINT_FOLDER / make_fingerprint_name(file)).write_bytes(data)
            seal = FingerprintSeal(len(data), xxhash.xxh3_128_hexdigest(data))
        manifest = Manifest(
            status, world_size, rank, "host", tuple(records), fingerprints=seal, card=card
        )
        (own / layout.MANIFEST_FOLDER).mkdir(parents=True, exist_ok=True)
        (own / layout.MANIFEST_FOLDER / file).write_bytes(manifest.to_json())
        return manifest
