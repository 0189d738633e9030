"""Index of earlier trees by digest, which tells whether a record equals its counterpart in the
baseline of its plan.

The digests come from the manifests of the baseline. The baseline is never written to, and its
tensors are not read. The counterpart of a record has the same rank and iteration; the manifests of
that iteration are read when the first record needs them, and 28 bytes are kept for each tensor, in
arrays.
"""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._core.bounded_cache import remember
from rankdump._core.manifest import Manifest, is_intact, parse_manifest_name
from rankdump._core.tree_root import check_root
from rankdump._layout.dump_folders import (
    DumpFolder,
    NameScheme,
    find_folder,
    parse_name_in_folder,
)
from rankdump._layout.file_name import LongFileNames
from rankdump._layout.tree_paths import MANIFEST_FOLDER, MAPPING_FILE
from rankdump.errors import CorruptedError, RejectedError
from rankdumpd.agent.records import (
    BaselineMatch,
    BaselineProblem,
    BaselineVerdict,
    FileDescriptor,
    TreeFile,
    format_member,
)
from rankdumpd.agent.storage.folders import UNFINISHED_MODE
from rankdumpd.agent.storage.tree import RootedFolder

MAX_HELD_RECORDS = 1 << 20
"""Largest number of tensors whose digests are kept, about 30 MB. A single iteration with more
tensors is kept all the same.
"""
MAX_HELD_ITERATIONS = 256
"""Largest number of iterations that are kept; each has an open manifest, and a rank needs one or
two at a time.
"""
_MAX_HELD_LISTINGS = 256
_LOCK_COUNT = 256
_MAX_LONG_NAME_FOLDERS = 64
_LINE_BYTES = 4096
_LINE_END = b",\n"
_USUAL_NAME_END = re.compile(
    r"\.((?:input|output)\.[0-9]{1,9})\.[^./]+(?:\.[^./]+)?\.npy(?:\.zst)?\Z"
)
_UNREADABLE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

TensorIdentity: TypeAlias = "tuple[object, ...]"
"""Properties of a tensor that are the same in every job: all but content, time, rank
and iteration.
"""
ContentFacts: TypeAlias = "tuple[str, str, tuple[int, ...]]"
"""Digest, element type and shape of a tensor."""


def make_identity(
    place: tuple[str, int, bool],
    operator: tuple[str, str, str],
    member: str,
    part: tuple[int | None, str],
    *,
    is_npy: bool,
) -> TensorIdentity:
    """Return the identity of a tensor.

    `place` is the model, the graph, and whether the tensor is a constant, as its folder tells;
    `operator` is the type, the name and the place in the call, `part` the micro-batch and the
    phase. A tensor in a `bin` file is never the counterpart of one in an npy file.
    """
    return (*place, *operator, member, *part, is_npy)


def is_npy_path(path: str) -> bool:
    """Return whether the path of a tensor's file is that of an npy file, packed or not."""
    return path.endswith((".npy", ".npy.zst"))


class _BaselineFile(NamedTuple):
    """An open manifest of a baseline."""

    file: FileDescriptor
    baselines: Sequence[str]
    """Roots of the trees that have the files of those records whose files are not in this tree."""


class _IterationDigests(NamedTuple):
    """The tensors in one iteration of a rank in a baseline, sorted by identity."""

    files: Sequence[_BaselineFile]
    identities: npt.NDArray[np.int64]
    contents: npt.NDArray[np.int64]
    file_of: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    """Position of each tensor's line in its manifest."""


_Place: TypeAlias = "tuple[str, str, int]"
"""Root of a baseline, folder of a rank, and iteration."""
_Listing: TypeAlias = "Mapping[int, Sequence[str]]"
"""Names of a rank's manifests by iteration."""


class BaselineIndex:
    """Index of the tensors in the baselines of all sessions; safe to use from several threads."""

    def __init__(
        self,
        roots: Sequence[str] = (),
        *,
        max_records: int = MAX_HELD_RECORDS,
        max_iterations: int = MAX_HELD_ITERATIONS,
    ) -> None:
        """Only baselines below `roots` are read, if any roots are given."""
        self._roots = roots
        self._max_records, self._max_iterations = max_records, max_iterations
        self._held: OrderedDict[_Place, _IterationDigests | BaselineProblem] = OrderedDict()
        self._listings: OrderedDict[tuple[str, str], _Listing] = OrderedDict()
        self.held_records = 0
        """Number of tensors whose digests are in memory."""
        self._lock = threading.Lock()
        self._place_locks = [threading.Lock() for _ in range(_LOCK_COUNT)]

    def find_match(
        self,
        root: str,
        rank_folder: str,
        iteration: int,
        identity: TensorIdentity,
        content: ContentFacts,
    ) -> BaselineMatch:
        """Compare `content` with the tensor of this identity in an iteration of a rank; return the
        result.
        """
        digests = self._load((root, rank_folder, iteration))
        if isinstance(digests, BaselineProblem):
            return BaselineMatch(BaselineVerdict.UNAVAILABLE, problem=digests)
        wanted, digest = hash(identity), hash(content)
        verdict = BaselineVerdict.ABSENT
        at = int(digests.identities.searchsorted(wanted))
        while at < len(digests.identities) and digests.identities[at] == wanted:
            if digests.contents[at] == digest:
                file = _find_file(root, digests, at, content)
                if file is not None:
                    return BaselineMatch(BaselineVerdict.SAME, file)
            verdict = BaselineVerdict.DIFFERENT
            at += 1
        return BaselineMatch(verdict)

    def _load(self, place: _Place) -> _IterationDigests | BaselineProblem:
        found = self._get(place)
        if found is not None:
            return found
        # The lock covers one iteration, because its records need the digests; other iterations go
        # on.
        with self._place_locks[hash(place) % _LOCK_COUNT]:
            found = self._get(place)
            return self._keep(place, self._read(place)) if found is None else found

    def _get(self, place: _Place) -> _IterationDigests | BaselineProblem | None:
        with self._lock:
            found = self._held.get(place)
            if found is not None:
                self._held.move_to_end(place)
            return found

    def _keep(
        self, place: _Place, found: _IterationDigests | BaselineProblem
    ) -> _IterationDigests | BaselineProblem:
        with self._lock:
            self._held[place] = found
            self.held_records += _count_records(found)
            while len(self._held) > 1 and (
                self.held_records > self._max_records or len(self._held) > self._max_iterations
            ):
                self.held_records -= _count_records(self._held.popitem(last=False)[1])
        return found

    def _read(self, place: _Place) -> _IterationDigests | BaselineProblem:
        root, rank_folder, iteration = place
        # With this mode no folder of the baseline counts as unfinished, so the mode of none is
        # changed.
        tree = RootedFolder(root, folder_mode=UNFINISHED_MODE, synced=False)
        try:
            check_root(root, self._roots, resolve=os.path.realpath)
            known = self._list_manifests(tree, place)
            if iteration not in known:
                return _explain_absence(tree, rank_folder, known)
            digests = _read_digests(tree, rank_folder, known[iteration])
        except RejectedError as error:
            return BaselineProblem("outside_roots", f"the baseline is not read: {error}")
        except CorruptedError as error:
            return BaselineProblem("damaged", f"the baseline {root}: {error}")
        except OSError as error:
            text = f"the baseline {root} cannot be read: {error.strerror or error}"
            return BaselineProblem("unreadable", text)
        if not len(digests.identities):
            text = f"the baseline {root} has no digests of tensors of {rank_folder}"
            return BaselineProblem("no_digests", f"{text}, as a dump of statistics has none")
        return digests

    def _list_manifests(self, tree: RootedFolder, place: _Place) -> _Listing:
        """Return the manifests of a rank; they are listed again when an iteration is missing."""
        root, rank_folder, iteration = place
        with self._lock:
            known = self._listings.get((root, rank_folder))
        if known is None or iteration not in known:
            known = _list_by_iteration(tree, rank_folder)
            with self._lock:
                self._listings[root, rank_folder] = known
                if len(self._listings) > _MAX_HELD_LISTINGS:
                    self._listings.popitem(last=False)
        return known


def _count_records(found: _IterationDigests | BaselineProblem) -> int:
    return 0 if isinstance(found, BaselineProblem) else len(found.identities)


def _list_by_iteration(tree: RootedFolder, rank_folder: str) -> _Listing:
    found: defaultdict[int, list[str]] = defaultdict(list)
    try:
        names = tree.listing(f"{rank_folder}/{MANIFEST_FOLDER}")
    except FileNotFoundError:
        tree.listing("")  # raises an error if there is no such tree
        return {}
    for name in sorted(names):
        iteration = parse_manifest_name(name)
        if iteration is not None:
            found[iteration].append(name)
    return dict(found)


def _explain_absence(tree: RootedFolder, rank_folder: str, known: _Listing) -> BaselineProblem:
    """Return the problem that explains why a baseline has no manifest of an iteration."""
    root = tree.root
    if known:
        there = f"it has {len(known)}, from {min(known)} to {max(known)}"
        text = f"the baseline {root} has other iterations of {rank_folder}: {there}"
        return BaselineProblem("other_iterations", text)
    folders = [name for name, is_folder in sorted(tree.listing("").items()) if is_folder]
    ranks = [name for name in folders if _has_manifests(tree, name)]
    if not ranks:
        text = f"the baseline {root} has no manifests, which have the digests"
        return BaselineProblem("no_manifests", text)
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return BaselineProblem("other_ranks", f"the baseline {root} has no {rank_folder}, but {shown}")


def _has_manifests(tree: RootedFolder, folder: str) -> bool:
    try:
        return bool(tree.listing(f"{folder}/{MANIFEST_FOLDER}"))
    except OSError:
        return False


def _read_digests(tree: RootedFolder, rank_folder: str, names: Sequence[str]) -> _IterationDigests:
    """Return the tensors in the manifests of an iteration; CorruptedError when a manifest is
    damaged.
    """
    files: list[_BaselineFile] = []
    rows = array("q")
    long_names = _LongNameFolders(tree)
    for number, name in enumerate(names):
        path = f"{rank_folder}/{MANIFEST_FOLDER}/{name}"
        file = tree.open_file(path)
        with open(file.number, "rb", closefd=False) as opened:
            data = opened.read()
        try:
            baselines, start = _read_head(data)
            for offset, line in _iter_lines(data, start):
                hashes = _hash_record(json.loads(line), long_names)
                if hashes is not None:
                    rows.extend((*hashes, number, offset))
        except _UNREADABLE_ERRORS as error:
            raise CorruptedError(f"{path} cannot be read: {error}") from None
        files.append(_BaselineFile(file, baselines))
    table: npt.NDArray[np.int64] = np.array(rows, np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return _IterationDigests(
        files,
        np.ascontiguousarray(table[:, 0]),
        np.ascontiguousarray(table[:, 1]),
        table[:, 2].astype(np.int32),
        np.ascontiguousarray(table[:, 3]),
    )


def _read_head(data: bytes) -> tuple[Sequence[str], int]:
    """Return the baselines in the head of a manifest, and the position where its records begin."""
    if not is_intact(data):
        raise ValueError("its checksum is wrong")
    start = data.find(b"\n") + 1
    if Manifest.parse_head(data[:start]) is None:
        raise ValueError("its records are not lines, as an early version wrote them")
    head: dict[str, Any] = json.loads(data[: start - 1] + b"]}")
    return head.get("baselines", ()), start


def _iter_lines(data: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the JSON of each record."""
    end = data.rfind(b"\n]")
    while start < end:
        stop = data.find(_LINE_END, start, end)
        stop = end if stop < 0 else stop
        yield start, data[start:stop]
        start = stop + len(_LINE_END)


class _LongNameFolders:
    """Reads the `mapping.csv` files of the folders of a tree."""

    def __init__(self, tree: RootedFolder) -> None:
        self._tree = tree
        self._known: dict[str, LongFileNames] = {}

    def get_full_name(self, folder: str, name: str) -> str:
        """Return the full name of a file, whose own name may be shortened."""
        known = self._known.get(folder)
        if known is None:
            known = remember(self._known, folder, self._read(folder), _MAX_LONG_NAME_FOLDERS)
        return known.get_full_name(name)

    def _read(self, folder: str) -> LongFileNames:
        try:
            return LongFileNames.parse(self._tree.read(folder, MAPPING_FILE))
        except FileNotFoundError:
            return LongFileNames()


def _hash_record(record: Mapping[str, Any], long_names: _LongNameFolders) -> tuple[int, int] | None:
    """Return hashes of a record's identity and content; None for a record without a file or a
    digest.
    """
    path, digest = record["path"], record["digest"]
    parent, _, name = path.rpartition("/")
    folder = _find_folder(parent)
    if not digest or folder is None:
        return None
    identity = make_identity(
        (folder.net_name, folder.graph, folder.constant),
        (record["op_type"], record["op_name"], record["argument"]),
        record.get("member", "")
        or _find_member(folder.names, name)
        or _find_member(folder.names, long_names.get_full_name(parent, name)),
        (record.get("microbatch"), record.get("phase", "")),
        is_npy=is_npy_path(path),
    )
    return hash(identity), hash(_get_content(record))


_find_folder = lru_cache(maxsize=1 << 10)(find_folder)


def _find_member(scheme: NameScheme, name: str) -> str:
    """Return the side and slot in the name of a tensor's file; empty for a shortened name."""
    found = _USUAL_NAME_END.search(name)
    if found is not None:  # parsing the whole name takes five times as long
        return found[1]
    file = parse_name_in_folder(DumpFolder(scheme), name)
    return format_member(file.side, file.slot) if file is not None else ""


def _get_content(record: Mapping[str, Any]) -> ContentFacts:
    return record["digest"], record["dtype"], tuple(record["shape"])


def _find_file(
    root: str, digests: _IterationDigests, at: int, content: ContentFacts
) -> TreeFile | None:
    """Return the baseline's file of a tensor; None if its content differs, which equal hashes may
    hide.

    A record without a file in this tree names the file in its own baseline.
    """
    manifest = digests.files[int(digests.file_of[at])]
    file = manifest.file
    offset, count = int(digests.offsets[at]), _LINE_BYTES
    # Read through the open descriptor, because another manifest may have replaced the one that was
    # read.
    while (end := (data := os.pread(file.number, count, offset)).find(b"\n")) < 0:
        if len(data) < count:
            return None
        count *= 2
    record = json.loads(data[:end].removesuffix(b","))
    if _get_content(record) != content:
        return None
    if "same_as" in record:
        return TreeFile(manifest.baselines[int(record["baseline"])], record["same_as"])
    return TreeFile(root, record["path"])
