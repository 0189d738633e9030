"""Folders whose tables may have the statistics of the records of manifests, in every layout:

    rank_{rank}/{net}/{graph}/{iteration}|constants/                 MindSpore's
    [{step}/]{YYYYmmddHHMMSS}/{device}/[{model}/{id}/{iteration}/]   CANN's
    rank{rank}/                                                      those of an api dump

A folder of CANN's belongs to the rank that an agent wrote down for its time and device; where
nobody has, as in a copy without links, to the ranks whose manifests name the device. Only folders
of the iterations of the manifests are entered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._core.manifest import Manifest
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.api_tree import make_api_rank_folder, parse_info_file_name
from rankdump._layout.dump_folders import ROOT_FOLDER, DumpFolder, NameScheme, enter_folder
from rankdump._layout.tree_layouts import format_folder_owner
from rankdump._layout.tree_paths import CONSTANT_FOLDER, MAPPING_FILE, make_rank_folder

_TABLE_SUFFIX = ".csv"


class TablePlace(NamedTuple):
    """A folder with tables of one rank."""

    folder: str
    names: tuple[str, ...]
    """Of the tables, and of files with a number in place of a long name."""
    rank: int
    iteration: int | None
    """None where the tables are of several iterations."""


def find_table_places(
    access: TreeAccess, manifests: Sequence[Manifest], *, has_constants: bool
) -> list[TablePlace]:
    """Return the folders of MindSpore's and CANN's layouts that have tables of manifests.

    The tables of a graph's constants are listed for each iteration that may have named one.
    """
    found = [*_find_in_ranks(access, manifests, has_constants)]
    found += _DeviceFolders(access, manifests).find_places()
    return [place for place in found if place.names]


def list_info_files(access: TreeAccess, rank: int) -> TablePlace:
    """Return the folder of a rank of an api dump, with its info files."""
    folder = make_api_rank_folder(rank)
    with suppress(OSError):
        names = sorted(filter(parse_info_file_name, access.listing(folder)))
        return TablePlace(folder, tuple(names), rank, None)
    return TablePlace(folder, (), rank, None)


def _find_in_ranks(
    access: TreeAccess, manifests: Sequence[Manifest], has_constants: bool
) -> Iterator[TablePlace]:
    graphs: dict[int, list[str]] = {}
    for rank, iteration in dict.fromkeys(
        (each.status.rank, each.status.iteration) for each in manifests
    ):
        if rank not in graphs:
            graphs[rank] = _list_graph_folders(access, rank)
        for graph in graphs[rank]:
            for name in (str(iteration), *([CONSTANT_FOLDER] if has_constants else [])):
                folder = f"{graph}/{name}"
                yield TablePlace(folder, _list_tables(access, folder), rank, iteration)


def _list_graph_folders(access: TreeAccess, rank: int) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        own = make_rank_folder(rank)
        models = [name for name, is_folder in access.listing(own).items() if is_folder]
        for model in models:
            graphs = access.listing(f"{own}/{model}").items()
            found += [f"{own}/{model}/{name}" for name, is_folder in graphs if is_folder]
    return [each for each in found if each.rpartition("/")[2][:1].isdecimal()]


def _list_tables(access: TreeAccess, folder: str) -> tuple[str, ...]:
    with suppress(OSError):
        return _select_tables(access.listing(folder))
    return ()


def _select_tables(listing: dict[str, bool]) -> tuple[str, ...]:
    return tuple(
        sorted(n for n, is_folder in listing.items() if not is_folder and _may_be_table(n))
    )


def _may_be_table(name: str) -> bool:
    # CANN's number for a long name has no suffix.
    return (_TABLE_SUFFIX in name and name != MAPPING_FILE) or name.isdecimal()


class _DeviceFolders:
    """Folders of the devices of manifests, in CANN's trees."""

    def __init__(self, access: TreeAccess, manifests: Sequence[Manifest]) -> None:
        self._access = access
        self._iterations = {each.status.iteration for each in manifests}
        self._owners: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """Ranks by device, and by what an agent writes down for those of each job."""
        self._places = {(each.status.rank, each.status.iteration) for each in manifests}
        for each in manifests:
            status = each.status
            owner = format_folder_owner(status.rank, status.job_id)
            self._owners[each.device][owner] = status.rank

    def find_places(self) -> Iterator[TablePlace]:
        """Yield the folders, each once for every rank that it may belong to."""
        with suppress(OSError):
            listing = self._access.listing("")
            # The others are looked at by nobody: a root may hold anything.
            names = [name for name, is_folder in listing.items() if is_folder and name.isdecimal()]
            yield from self._enter_each(ROOT_FOLDER, "", names, ())

    def _enter_each(
        self, folder: DumpFolder, path: str, names: Sequence[str], ranks: Sequence[int]
    ) -> Iterator[TablePlace]:
        for name in names:
            below = enter_folder(folder, name)
            if below is not None and self._is_wanted(below):
                yield from self._enter(below, f"{path}/{name}".lstrip("/"), ranks)

    def _enter(self, folder: DumpFolder, path: str, ranks: Sequence[int]) -> Iterator[TablePlace]:
        is_device = folder.device and folder.names is NameScheme.CANN
        if is_device and folder.base == path:
            ranks = self._find_ranks(path, folder.rank)
            if not ranks:
                return
        with suppress(OSError):
            listing = self._access.listing(path)
            tables = _select_tables(listing) if folder.names is NameScheme.CANN else ()
            for rank in ranks if tables else ():
                if folder.iteration is None or (rank, folder.iteration) in self._places:
                    yield TablePlace(path, tables, rank, folder.iteration)
            below = [name for name, is_folder in listing.items() if is_folder]
            yield from self._enter_each(folder, path, below, ranks)

    def _is_wanted(self, folder: DumpFolder) -> bool:
        for number in (folder.step, folder.iteration):
            if number is not None and number not in self._iterations:
                return False
        return folder.names is not NameScheme.CANN or folder.rank in self._owners

    def _find_ranks(self, base: str, device: int) -> Sequence[int]:
        """Return the ranks that a folder may belong to, by its path."""
        time, owners = base.split("/")[-2], self._owners[device]
        try:
            owner = self._access.read_link(STATE_FOLDER, f"{time}.{device}")
        except OSError:
            return [*dict.fromkeys(owners.values())]
        return [owners[owner]] if owner in owners else []
