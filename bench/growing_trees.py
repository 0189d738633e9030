"""Trees of layouts whose statistics are one growing file a rank, for `table`: `statistic.csv` of a
device of CANN's, and the info file of an api dump. Written without an agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.status import IterationStatus
from rankdump._layout import tree_paths as layout
from rankdump._layout.api_tree import make_api_rank_folder
from rankdump._layout.tree_layouts import format_folder_owner

RANKS, ROWS = 8, 1000
"""Rows of an iteration of a rank."""
_STARTED_US = 1_700_000_000_000_000
_JOB = "bench"
_HEADER = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,"
    "Max Value,Min Value,Avg Value,L2Norm Value\n"
)
_SOURCE = "train.py"


def write_device_tree(root: Path, iterations: int, *, ranks: int = RANKS, rows: int = ROWS) -> None:
    """Write a tree of single operators of CANN's."""
    (root / ".rankdump").mkdir(parents=True)
    for rank in range(ranks):
        started = f"{20260101000000 + rank}"
        (root / ".rankdump" / f"{started}.{rank}").symlink_to(format_folder_owner(rank, _JOB))
        (root / started / str(rank)).mkdir(parents=True)
        with (root / started / str(rank) / layout.STATISTIC_FILE).open("w") as table:
            table.write(_HEADER)
            for iteration in range(iterations):
                records: list[ManifestRecord] = []
                for row in range(rows):
                    operator, side, slot = row // 4, ("input", "output")[row % 4 // 2], row % 2
                    name = f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"
                    stamp_us = _find_stamp(iteration, row // 4 * 4, rows)
                    records.append(_make_record(stamp_us, ("Linear", name, "x"), f"{side}.{slot}"))
                    norm = 1 + (row * 7 + iteration) % 1000 / 100
                    table.write(
                        f"Linear,{name.replace('/', '_')},65535,65535,{stamp_us},{side},{slot},"
                        f'4096,float32,"(16,64)",{norm},{-norm},0,{norm * 16:.6g},\n'
                    )
                _write_manifest(root, layout.make_rank_folder(rank), rank, iteration, records)


def write_api_tree(root: Path, iterations: int, *, ranks: int = RANKS, rows: int = ROWS) -> None:
    """Write an api dump of torch's calls, with the stacks of one iteration's."""
    for rank in range(ranks):
        folder = root / make_api_rank_folder(rank)
        folder.mkdir(parents=True)
        with (folder / "torch_api_dump_info.pkl").open("w") as table:
            for iteration in range(iterations):
                records: list[ManifestRecord] = []
                for row in range(rows):
                    place = ("input.0", "input.1", "output.0", "output.1")[row % 4]
                    call = f"NN_Linear_{iteration * (rows // 4) + row // 4}_forward"
                    records.append(
                        _make_record(_find_stamp(iteration, row, rows), (call, call, place), "")
                    )
                    norm = 1 + (row * 7 + iteration) % 1000 / 100
                    table.write(
                        f'["{call}_{place}", {iteration}, [], "torch.float32", [16, 64], '
                        f"[{norm}, {-norm}, 0.0]]\n"
                    )
                _write_manifest(root, folder.name, rank, iteration, records)
        stacks = ",\n".join(
            f'    "torch.nn.Linear({number}) forward": [\n        "File {_SOURCE}, line '
            f'{number + 1}, in forward, \\n x = self.fc{number}(x)"\n    ]'
            for number in range(rows // 4)
        )
        (folder / "torch_api_dump_stack.json").write_text(f"{{\n{stacks}\n}}")


def _find_stamp(iteration: int, row: int, rows: int) -> int:
    return _STARTED_US + iteration * rows + row


def _make_record(stamp_us: int, names: tuple[str, str, str], member: str) -> ManifestRecord:
    return ManifestRecord("", stamp_us, *names, "float32", (16, 64), 4096, 0, "", member)


def _write_manifest(
    root: Path, folder: str, rank: int, iteration: int, records: Sequence[ManifestRecord]
) -> None:
    status = IterationStatus(
        job_id=_JOB,
        session_id=f"session{rank}",
        rank=rank,
        iteration=iteration,
        complete=True,
        expected=len(records),
        stored=len(records),
        bytes_in=len(records) * 4096,
    )
    manifests = root / folder / layout.METADATA_FOLDER / "manifest"
    manifests.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(status, RANKS, rank, "host", tuple(records))
    name = make_manifest_name(iteration, status.session_id)
    (manifests / name).write_bytes(manifest.to_json())
