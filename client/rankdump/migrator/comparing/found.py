"""Where the parts of an API dump are: `rank{N}/{framework}_api_dump*`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_tree import ApiFiles
from rankdump.contract.layout.file_name import PACKED
from rankdump.contract.layout.mindspore_sync import METADATA_FOLDER
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.diff.api_tables import FRAMEWORKS
from rankdump.reader.names import long_names

_RANK = re.compile(r"rank([0-9]{1,9})")
_NPY = ".npy"


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank dumped."""

    rank: int
    framework: str
    """`pytorch`, `mindspore` or `mindtorch`."""
    info: Path
    """One JSON array a line, one line a tensor."""
    files: Mapping[str, Path]
    """npy files by the names of their tensors; empty when only figures were dumped."""
    counted: bool
    """Whether it was written with manifests, so that its steps are real ones."""


def find(path: Path, parameter: str) -> Mapping[int, RankDump]:
    """Return what each rank dumped; ValueError that names the parameter when nobody did."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ValueError(_refusal(parameter, path, error.strerror or "cannot be read")) from None
    ranks = {int(found[1]): path / name for name in names if (found := _RANK.fullmatch(name))}
    found = {rank: _rank_dump(rank, folder) for rank, folder in sorted(ranks.items())}
    dumps = {rank: dump for rank, dump in found.items() if dump is not None}
    if not dumps:
        raise ValueError(_refusal(parameter, path, "there is no rank0/*_api_dump_info.pkl or .csv"))
    return dumps


def _refusal(parameter: str, path: Path, why: str) -> str:
    return f"{parameter} is not a valid dump path: {path}: {why}"


def _rank_dump(rank: int, folder: Path) -> RankDump | None:
    for framework, shown in FRAMEWORKS.items():
        forms = (ApiFiles(framework), ApiFiles(framework, extended=True))
        infos = [folder / files.info for files in forms if (folder / files.info).is_file()]
        if infos:
            # Both are there when another release dumped into the same folder: it cleared the npys.
            newest = max(infos, key=lambda info: info.stat().st_mtime_ns)
            counted = (folder / METADATA_FOLDER).is_dir()
            return RankDump(rank, shown, newest, _files(folder / forms[0].folder), counted)
    return None


def _files(folder: Path) -> Mapping[str, Path]:
    """Return the npy files of a folder, packed or not, by the names of their tensors."""
    if not folder.is_dir():
        return {}
    try:
        long = long_names(folder / MAPPING_FILE)
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DamagedError(f"{folder}: cannot be read: {error.strerror}") from None
    full = ((long.full(path.name).removesuffix(PACKED), path) for path in paths)
    return {name.removesuffix(_NPY): path for name, path in full if name.endswith(_NPY)}
