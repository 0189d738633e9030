"""Folders below a root that hold dumped files, and the tensors that a file of any tree may hold,
determined by its path alone. Pure.

    rank_{rank}/{net}/{graph}/{iteration}|constants/                       MindSpore's, all releases
    rank{rank}/{framework}_api_dump/                                       api_dump's, beside tables
    [{step}/]{YYYYmmddHHMMSS}/{device}/                                    CANN: single operators
    [{step}/]{YYYYmmddHHMMSS}/{device}/{iteration}/                        CANN: collectives
    [{step}/]{YYYYmmddHHMMSS}/{device}/[{model}/]{model id}/{iteration}/   CANN: models
    {device}/                                                              CANN: captured streams
    extra-info/data-dump/{device}/                                         CANN: exceptions

Source: MindSpore 2.3, Dump guide; CANN, dump folders. A root may hold several of them; a tree is
entered folder by folder, so that nothing else below a root is examined. `parse_tensor_path` is
the inverse of every layout's paths; a file that holds several tensors has a key for each side and
slot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce

from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout import api_tree, tree_paths
from rankdump._layout.api_tree import is_api_tensor_folder
from rankdump._layout.file_name import (
    ACLNN_PREFIX,
    NUMBER_PATTERN,
    FileKind,
    FileName,
    LongFileNames,
    parse_exception_name,
    parse_file_name,
)
from rankdump._layout.tree_paths import CONSTANT_FOLDER, EXECUTION_ORDER_FOLDER, GRAPH_FOLDER

RANK_FOLDER_PATTERN = re.compile(rf"rank(_?)({NUMBER_PATTERN})")
ROOT_FORMS = (
    "rank_0/ (MindSpore), rank0/ (api_dump), [STEP/]YYYYmmddHHMMSS/DEVICE/ (CANN), DEVICE/ (its "
    "captured streams) or extra-info/data-dump/DEVICE/ (its exceptions)"
)
"""Text that describes the contents of a root in one line."""
MAX_TREE_DEPTH = 6
"""Maximum number of nested folders below a root: step, time, device, model and the model's two
numbers.
"""
_NUMBER_NAME = re.compile(NUMBER_PATTERN)
_TIME_NAME = re.compile(r"[0-9]{14}")
_NET_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MODEL_NAME = re.compile(r"[^./\\ ]+")
_EXCEPTION_FOLDERS = ("extra-info", "data-dump")
_MODEL_LEVELS = 3
"""Number of folders for a model: model, number of the model, iteration."""


class NameScheme(Enum):
    """Scheme by which files in a folder are named."""

    NONE = "it holds no dumped files"
    RANK = "MindSpore's"
    API = "by calls of APIs"
    API_TABLES = "it holds the tables of a dump of APIs"
    CANN = "CANN's"
    CAPTURED = "CANN's, with the number of the iteration"
    EXCEPTION = "CANN's, of exceptions"


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """A folder that holds dumped files, or through which a path to them leads."""

    names: NameScheme = NameScheme.NONE
    rank: int = 0
    """Number of the rank, or of the device."""
    device: bool = False
    """Whether `rank` is the number of a device."""
    net_name: str = ""
    graph: int = 0
    """Number of the graph or of the model."""
    iteration: int | None = None
    """Iteration; None if no folder names it, and for constants."""
    constant: bool = False
    base: str = ""
    """Path of the folder of the rank or device."""
    enter: Callable[[DumpFolder, str], DumpFolder | None] | None = None
    """Returns the folder with a name in this folder; None if the name does not belong to a tree."""
    step: int | None = None
    """Iteration in the name of the outermost folder; None if it names none."""
    levels: tuple[str, ...] = ()
    """Names of the folders below that of the device."""


def enter_folder(folder: DumpFolder, name: str) -> DumpFolder | None:
    """Return the folder with this name in a folder; None if it cannot contain dumped files."""
    return folder.enter(folder, name) if folder.enter is not None else None


def find_folder(path: str) -> DumpFolder | None:
    """Return the folder at a path below the root; None if no tree has a folder there."""

    def deeper(folder: DumpFolder | None, name: str) -> DumpFolder | None:
        return enter_folder(folder, name) if folder is not None else None

    return reduce(deeper, path.split("/"), ROOT_FOLDER)


def is_tree_number(name: str) -> bool:
    """Return whether a name is a number in the spelling of trees."""
    return _NUMBER_NAME.fullmatch(name) is not None


def _enter_root(folder: DumpFolder, name: str) -> DumpFolder | None:
    rank = RANK_FOLDER_PATTERN.fullmatch(name)
    if rank:
        number = int(rank[2])
        if rank[1]:
            return DumpFolder(rank=number, base=name, enter=_enter_rank)
        return DumpFolder(NameScheme.API_TABLES, rank=number, base=name, enter=_enter_api_rank)
    if _TIME_NAME.fullmatch(name):
        return DumpFolder(base=name, enter=_enter_time)
    if is_tree_number(name):
        number = int(name)
        return DumpFolder(
            NameScheme.CAPTURED, rank=number, device=True, base=name, enter=_enter_step, step=number
        )
    return DumpFolder(base=name, enter=_enter_extra_info) if name == _EXCEPTION_FOLDERS[0] else None


def _enter_rank(folder: DumpFolder, name: str) -> DumpFolder | None:
    known = _NET_FOLDER_NAME.fullmatch(name) and name not in (EXECUTION_ORDER_FOLDER, GRAPH_FOLDER)
    return replace(folder, net_name=name, enter=_enter_net) if known else None


def _enter_api_rank(folder: DumpFolder, name: str) -> DumpFolder | None:
    return replace(folder, names=NameScheme.API, enter=None) if is_api_tensor_folder(name) else None


def _enter_net(folder: DumpFolder, name: str) -> DumpFolder | None:
    return replace(folder, graph=int(name), enter=_enter_graph) if is_tree_number(name) else None


def _enter_graph(folder: DumpFolder, name: str) -> DumpFolder | None:
    if name == CONSTANT_FOLDER:
        return replace(folder, names=NameScheme.RANK, constant=True, enter=None)
    if not is_tree_number(name):
        return None
    return replace(folder, names=NameScheme.RANK, iteration=int(name), enter=None)


def _enter_step(folder: DumpFolder, name: str) -> DumpFolder | None:
    if not _TIME_NAME.fullmatch(name):
        return None
    return DumpFolder(base=f"{folder.base}/{name}", enter=_enter_time, step=folder.step)


def _enter_time(folder: DumpFolder, name: str) -> DumpFolder | None:
    if _TIME_NAME.fullmatch(name) and folder.step is None:  # a step may look like a time
        return DumpFolder(base=f"{folder.base}/{name}", enter=_enter_time, step=int(folder.base))
    if not is_tree_number(name):
        return None
    return DumpFolder(
        NameScheme.CANN,
        rank=int(name),
        device=True,
        iteration=folder.step,
        base=f"{folder.base}/{name}",
        enter=_enter_device,
        step=folder.step,
    )


def _enter_device(folder: DumpFolder, name: str) -> DumpFolder | None:
    levels = (*folder.levels, name)
    first, *numbers = levels
    if not _MODEL_NAME.fullmatch(first) or not all(map(is_tree_number, numbers)):
        return None
    numbered = is_tree_number(first)
    if len(levels) == 1 and not numbered:
        return replace(folder, names=NameScheme.NONE, levels=levels)
    if len(levels) == _MODEL_LEVELS or not numbered:
        model, rest = first, numbers
    else:
        model, rest = "", list(levels)
    # A single number is that of the iteration; a single number after a model is that of the model.
    graph = int(rest[0]) if model or len(rest) > 1 else 0
    last = int(rest[-1]) if not model or len(rest) > 1 else None
    return replace(
        folder,
        names=NameScheme.CANN,
        net_name=model,
        graph=graph,
        iteration=last if folder.step is None else folder.step,
        enter=_enter_device if len(levels) < _MODEL_LEVELS else None,
        levels=levels,
    )


def _enter_extra_info(folder: DumpFolder, name: str) -> DumpFolder | None:
    known = name == _EXCEPTION_FOLDERS[1]
    return DumpFolder(base=f"{folder.base}/{name}", enter=_enter_exceptions) if known else None


def _enter_exceptions(folder: DumpFolder, name: str) -> DumpFolder | None:
    if not is_tree_number(name):
        return None
    return DumpFolder(
        NameScheme.EXCEPTION, rank=int(name), device=True, base=f"{folder.base}/{name}"
    )


ROOT_FOLDER = DumpFolder(enter=_enter_root)


_SYNCHRONOUS_FORMAT = "DefaultFormat"


def parse_tensor_path(path: str) -> TensorKey | None:
    """Return the key of a file that holds one tensor; None for any other file.

    If the name was shortened, the full name from `mapping.csv` must be passed.
    """
    parent, _, name = path.rpartition("/")
    folder = find_folder(parent)
    file = parse_name_in_folder(folder, name) if folder is not None else None
    if folder is None or file is None or file.kind not in (FileKind.TENSOR, FileKind.MEMBER):
        return None
    return make_tensor_key(folder, file, file.side, file.slot)


def parse_name_in_folder(folder: DumpFolder, name: str) -> FileName | None:
    """Return the parts of a file name in a folder; None if it is not the name of a dumped file."""
    if folder.names is NameScheme.RANK:
        return _parse_name_in_rank(name)
    if folder.names in (NameScheme.API, NameScheme.API_TABLES):
        return api_tree.parse_api_file_name(name) if folder.names is NameScheme.API else None
    if folder.names is NameScheme.EXCEPTION:
        return parse_exception_name(name)
    file = parse_file_name(name) if folder.names is not NameScheme.NONE else None
    if folder.names is NameScheme.CAPTURED and (file is None or file.number is None):
        return None
    return file


def find_absent_names(
    folder: DumpFolder, names: LongFileNames, there: Collection[str]
) -> list[str]:
    """Return those names in the `mapping.csv` of a folder whose files are missing.

    Files of single tensors of an operator are removed when they are joined, but their rows stay.
    """
    files = (
        (name, parse_name_in_folder(folder, names.get_full_name(name)))
        for name in names.list_absent_names(there)
    )
    return [name for name, file in files if file is None or file.kind is not FileKind.MEMBER]


def make_tensor_key(
    folder: DumpFolder,
    file: FileName,
    side: TensorSide,
    slot: int,
    *,
    rank: int | None = None,
    iteration: int | None = None,
) -> TensorKey:
    """Return the key of a tensor in a file.

    `rank` replaces that of the folder; `iteration` is used if neither folder nor name has one.
    """
    dated = file.number if folder.iteration is None else folder.iteration
    _, op_type, op_name, task, stream, timestamp_us, _, _, laid, element, *_, argument = file
    # Arguments are positional, because keywords would take longer than creating the key.
    return TensorKey(
        folder.rank if rank is None else rank,
        folder.net_name,
        folder.graph,
        (iteration if dated is None else dated) or 0,
        timestamp_us,
        op_type,
        op_name,
        side,
        slot,
        task,
        stream,
        laid,
        folder.constant,
        element,
        argument,
    )


def _parse_name_in_rank(name: str) -> FileName | None:
    file = tree_paths.parse_mindspore_name(name)
    if file is None:
        # Names of tensors by MindSpore always contain the stream.
        other = parse_file_name(name)
        return None if other is not None and other.kind is FileKind.TENSOR else other
    # Names in asynchronous dumps are CANN's; names of parameters in synchronous dumps have dots.
    is_cann = file.tensor_format != _SYNCHRONOUS_FORMAT and "." not in file.op_name
    return parse_file_name(name) if is_cann and file.op_type.startswith(ACLNN_PREFIX) else file
