"""Trees whose statistics are one growing file a rank, written by hand: `statistic.csv` of a device
of CANN's, and the info file of an API dump.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.status import IterationStatus
from rankdump._layout.tree_layouts import format_folder_owner

STARTED_US = 1_700_000_000_000_000
HEADER = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,"
    "Max Value,Min Value\n"
)
FOLDERS = {"device": "2026010100000{0}/0/statistic.csv", "api": "rank{0}/torch_api_dump_info.pkl"}


@dataclass
class GrowingTree:
    """One tree; an operator has an input and an output in each iteration."""

    root: Path
    kind: str
    """`device` or `api`."""

    def get_table(self, rank: int = 0) -> Path:
        """Return the growing file of a rank."""
        path = self.root / FOLDERS[self.kind].format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def name_operator(self, iteration: int, operator: int) -> str:
        """Return the name in manifests; calls of an API are counted over all iterations."""
        if self.kind == "api":
            return f"NN_Linear_{iteration * 2 + operator}_forward"
        return f"Default/fc{operator}-Dense/MatMul-op{operator}"

    def add(
        self, iteration: int, *, rank: int = 0, attempt: int = 0, is_killed: bool = False
    ) -> None:
        """Add two operators; without a manifest where the rank `is_killed`."""
        records: list[ManifestRecord] = []
        for operator in range(2):
            for slot, side in enumerate(("input", "output")):
                stamp_us = STARTED_US + attempt * 1000 + iteration * 10 + operator
                # A time is that of an operator in CANN's trees, and of a tensor in others.
                stamp_us = stamp_us * 2 + (slot if self.kind == "api" else 0)
                name = self.name_operator(iteration, operator)
                value = 100 * attempt + 10 * iteration + 2 * operator + slot
                self.add_line(rank, iteration, name, side, stamp_us, str(float(value)))
                member = f"{side}.0" if self.kind == "device" else ""
                names = "Linear", name, side
                record = ManifestRecord("", stamp_us, *names, "float32", (1,), 4, 0, "", member)
                records.append(record)
        if not is_killed:
            self.complete(rank, iteration, records, attempt)

    def add_line(
        self, rank: int, iteration: int, name: str, side: str, stamp_us: int, value: str
    ) -> None:
        """Add a line with a value for all statistics."""
        table = self.get_table(rank)
        if self.kind == "device":
            before = "" if table.exists() else HEADER
            spelled = name.replace("/", "_")
            line = f'Linear,{spelled},0,0,{stamp_us},{side},0,4,float32,"(1)",{value},{value},'
        else:
            before, summary = "", f"[{value}, {value}, {value}]"
            line = f'["{name}_{side}", {iteration}, [], "torch.float32", [1], {summary}]'
        with table.open("a") as file:
            file.write(f"{before}{line}\n")

    def complete(
        self, rank: int, iteration: int, records: list[ManifestRecord], attempt: int = 0
    ) -> None:
        """Write the manifest of an iteration."""
        status = IterationStatus(
            *("job", f"s{attempt}{rank}", rank, iteration),
            complete=True,
            expected=len(records),
            stored=len(records),
            attempt=attempt,
        )
        folder = self.root / f"rank{'_' * (self.kind == 'device')}{rank}/.dump_metadata/manifest"
        folder.mkdir(parents=True, exist_ok=True)
        name = make_manifest_name(iteration, status.session_id)
        (folder / name).write_bytes(Manifest(status, 2, 0, "here", tuple(records)).to_json())
        if self.kind == "device":
            owner = self.root / f".rankdump/2026010100000{rank}.0"
            owner.parent.mkdir(exist_ok=True)
            owner.unlink(missing_ok=True)
            owner.symlink_to(format_folder_owner(rank, "job"))
