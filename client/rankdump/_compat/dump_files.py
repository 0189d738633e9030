"""Files of an API dump of a rank, `rank{N}/{framework}_api_dump*`: their paths, and the removal of
the files of an earlier dump of the same rank. Removal never follows a link, because others may be
able to write to the folder of the tree.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump._analysis.compare.api_tables import FRAMEWORK_TITLES
from rankdump._analysis.reader.tree_files import read_long_names
from rankdump._layout.api_tree import ApiFileNames
from rankdump._layout.file_name import PACKED_SUFFIX
from rankdump._layout.tree_paths import MAPPING_FILE, METADATA_FOLDER
from rankdump.errors import CorruptedError

_INFO_ENDINGS = ("_info.pkl", "_info.csv")
_FILE_ENDINGS = (*_INFO_ENDINGS, "_stack.json")
_MAX_MANIFEST_BYTES = 1 << 20
"""Number of bytes of a manifest that are searched for its first path."""


def find_rank_folder(root: str, rank: int) -> Path:
    """Return the folder of a rank."""
    return Path(root) / f"rank{rank}"


def make_rank_folder(root: str, rank: int) -> Path:
    """Return the folder of a rank; it is created with access for its owner only."""
    Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = find_rank_folder(root, rank)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def clear_rank_folder(root: str, rank: int, framework: str) -> None:
    """Remove the tensors, info, stacks and manifests of one framework's dump; OSError
    on a failure.
    """
    folder = find_rank_folder(root, rank)
    if not _is_folder(folder):
        return
    name = f"{framework}_api_dump"
    if _is_folder(folder / name):
        shutil.rmtree(folder / name)  # rejects a link, and follows none below
    for ending in _FILE_ENDINGS:
        _remove_file(folder / f"{name}{ending}")
    metadata = folder / METADATA_FOLDER
    manifests = metadata / "manifest"
    if _is_folder(metadata) and _is_folder(manifests):
        alone = not any(any(folder.glob(f"*_api_dump{ending}")) for ending in _INFO_ENDINGS)
        for manifest in manifests.glob("*.json"):
            if _is_manifest_of(manifest, f"{folder.name}/{name}/", alone=alone):
                _remove_file(manifest)


def _is_manifest_of(manifest: Path, prefix: str, *, alone: bool) -> bool:
    """Return whether a manifest belongs to the dump whose file names have this prefix.

    A manifest that names no files belongs to it only if the folder has no other dump.
    """
    if not _is_file(manifest):
        return False
    with manifest.open(encoding="utf-8", errors="replace") as file:
        found = re.search(r'"path": "([^"]+)"', file.read(_MAX_MANIFEST_BYTES))
    return alone if found is None else found[1].startswith(prefix)


def _remove_file(path: Path) -> None:
    if _is_file(path):
        path.unlink()


def _is_file(path: Path) -> bool:
    return _has_file_type(stat.S_ISREG, path)


def _is_folder(path: Path) -> bool:
    return _has_file_type(stat.S_ISDIR, path)


def _has_file_type(kind: Callable[[int], bool], path: Path) -> bool:
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False


_RANK_FOLDER = re.compile(r"rank([0-9]{1,9})")
_NPY_ENDING = ".npy"


@dataclass(frozen=True, slots=True)
class ApiRankDump:
    """The API dump of one rank."""

    rank: int
    framework: str
    """Framework of the dump: `pytorch`, `mindspore` or `mindtorch`."""
    info: Path
    """Info file: one line, which is a JSON array, for each tensor."""
    files: Mapping[str, Path]
    """npy files by the names of their tensors; empty if only statistics were dumped."""
    counted: bool
    """Whether the dump has manifests, so that its steps are real and not guessed."""


def find_rank_dumps(path: Path, parameter: str) -> Mapping[int, ApiRankDump]:
    """Return the dump of each rank; ValueError, which names the parameter, if there is none."""
    invalid = f"{parameter} is not a valid dump path: {path}"
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ValueError(f"{invalid}: {error.strerror or 'cannot be read'}") from None
    ranks = {
        int(found[1]): path / name for name in names if (found := _RANK_FOLDER.fullmatch(name))
    }
    found = {rank: _find_rank_dump(rank, folder) for rank, folder in sorted(ranks.items())}
    dumps = {rank: dump for rank, dump in found.items() if dump is not None}
    if not dumps:
        raise ValueError(f"{invalid}: there is no rank0/*_api_dump_info.pkl or .csv")
    return dumps


def _find_rank_dump(rank: int, folder: Path) -> ApiRankDump | None:
    for framework, shown in FRAMEWORK_TITLES.items():
        forms = (ApiFileNames(framework), ApiFileNames(framework, extended=True))
        infos = [
            folder / files.info_file for files in forms if (folder / files.info_file).is_file()
        ]
        if infos:
            # Both files exist if another release dumped to the same folder and removed the npy
            # files.
            newest = max(infos, key=lambda info: info.stat().st_mtime_ns)
            counted = (folder / METADATA_FOLDER).is_dir()
            return ApiRankDump(
                rank, shown, newest, _list_npy_files(folder / forms[0].folder), counted
            )
    return None


def _list_npy_files(folder: Path) -> Mapping[str, Path]:
    """Return the npy files of a folder, packed or not, by the names of their tensors."""
    if not folder.is_dir():
        return {}
    try:
        long = read_long_names(folder / MAPPING_FILE)
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise CorruptedError(f"{folder}: cannot be read: {error.strerror}") from None
    full = ((long.get_full_name(path.name).removesuffix(PACKED_SUFFIX), path) for path in paths)
    return {
        name.removesuffix(_NPY_ENDING): path for name, path in full if name.endswith(_NPY_ENDING)
    }
