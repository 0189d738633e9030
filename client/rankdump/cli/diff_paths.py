"""What a path of `rankdump diff` means: a tree, or the folder of a rank or an iteration in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.layout.folders import DEEPEST, RANK_FOLDER, Folder, folder_at


@dataclass(frozen=True, slots=True)
class Place:
    """A tree, and what part of it a path says."""

    root: Path
    rank: int | None = None
    graph: int | None = None
    iteration: int | None = None


def place_of(path: Path) -> Place:
    """Return what a path means; one that is no rank's folder, and no iteration's, is a tree."""
    full = path.absolute()
    if any(RANK_FOLDER.fullmatch(inner.name) and inner.is_dir() for inner in full.iterdir()):
        return Place(path)
    for above in (full, *full.parents)[:DEEPEST]:
        folder = folder_at(full.relative_to(above.parent).as_posix())
        if folder is not None and RANK_FOLDER.fullmatch(above.name):
            return _in_tree(above.parent, folder) if _whole(folder, above, full) else Place(path)
    return Place(path)


def _whole(folder: Folder, above: Path, full: Path) -> bool:
    # Between them stand nets and graphs, of which a part would be compared.
    return full == above or folder.iteration is not None


def _in_tree(root: Path, folder: Folder) -> Place:
    graph = None if folder.iteration is None else folder.graph
    return Place(root, folder.rank, graph, folder.iteration)
