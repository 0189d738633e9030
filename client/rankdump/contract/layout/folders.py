"""Which folders of a root hold dumped files, and what their names say of them. Pure.

    rank_{rank}/{net}/{graph}/{iteration}|constants/                       MindSpore's, all releases
    rank{rank}/{framework}_api_dump/                                       api_dump's, beside tables
    [{step}/]{YYYYmmddHHMMSS}/{device}/                                    CANN: single operators
    [{step}/]{YYYYmmddHHMMSS}/{device}/{iteration}/                        CANN: collectives
    [{step}/]{YYYYmmddHHMMSS}/{device}/[{model}/]{model id}/{iteration}/   CANN: models
    {device}/                                                              CANN: captured streams
    extra-info/data-dump/{device}/                                         CANN: exceptions

Source: mindspore-dump.md 2.1 and 2.13; ascend-formats.md 2.1, 4.5, 5 and 7. They may stand side by
side; a tree is entered folder by folder, so that nothing else below a root is looked into.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce

from rankdump.contract.layout.api_tree import is_tensor_folder
from rankdump.contract.layout.file_name import NUMBER
from rankdump.contract.layout.mindspore_sync import (
    CONSTANT_FOLDER,
    GRAPH_FOLDER,
    ORDER_FOLDER,
)

RANK_FOLDER = re.compile(rf"rank(_?)({NUMBER})")
FORMS = (
    "rank_0/ (MindSpore), rank0/ (api_dump), [STEP/]YYYYmmddHHMMSS/DEVICE/ (CANN), DEVICE/ (its "
    "captured streams) or extra-info/data-dump/DEVICE/ (its exceptions)"
)
"""What a root can hold, in one line."""
DEEPEST = 6
"""Folders below a root at most: a step's, time, device, model and its two numbers."""
_DIGITS = re.compile(NUMBER)
_TIME = re.compile(r"[0-9]{14}")
_NET = re.compile(r"[A-Za-z0-9_-]+")
_MODEL = re.compile(r"[^./\\ ]+")
_EXCEPTIONS = ("extra-info", "data-dump")
_MODEL_LEVELS = 3
"""Model, number of the model, iteration."""


class Names(Enum):
    """How the files of a folder are named."""

    NONE = "it holds no dumped files"
    RANK = "MindSpore's"
    API = "by calls of APIs"
    API_TABLES = "it holds the tables of a dump of APIs"
    CANN = "CANN's"
    CAPTURED = "CANN's, with the number of the iteration"
    EXCEPTION = "CANN's, of exceptions"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on the way to dumped files, or one that holds them."""

    names: Names = Names.NONE
    rank: int = 0
    """The rank, or the number of the device."""
    device: bool = False
    """The rank's number is the device's."""
    net_name: str = ""
    graph: int = 0
    """Number of the graph, or of the model."""
    iteration: int | None = None
    """None where no folder says it, and for constants."""
    constant: bool = False
    base: str = ""
    """Path of the folder of the rank or device."""
    enter: Callable[[Folder, str], Folder | None] | None = None
    """What the folders in it are; no function where nothing in it matters."""
    step: int | None = None
    """The folder in front says the iteration."""
    levels: tuple[str, ...] = ()
    """Names below the device's folder."""


def inside(folder: Folder, name: str) -> Folder | None:
    """Return the folder of that name in a folder; None when no dumped files can be below it."""
    return folder.enter(folder, name) if folder.enter is not None else None


def folder_at(path: str) -> Folder | None:
    """Return the folder at a path below the root; None when no tree has such a one."""

    def deeper(folder: Folder | None, name: str) -> Folder | None:
        return inside(folder, name) if folder is not None else None

    return reduce(deeper, path.split("/"), ROOT)


def is_number(name: str) -> bool:
    """Return whether a name is a number as trees write it."""
    return _DIGITS.fullmatch(name) is not None


def _in_root(folder: Folder, name: str) -> Folder | None:
    rank = RANK_FOLDER.fullmatch(name)
    if rank:
        number = int(rank[2])
        if rank[1]:
            return Folder(rank=number, base=name, enter=_in_rank)
        return Folder(Names.API_TABLES, rank=number, base=name, enter=_in_api_rank)
    if _TIME.fullmatch(name):
        return Folder(base=name, enter=_in_time)
    if is_number(name):
        number = int(name)
        return Folder(
            Names.CAPTURED, rank=number, device=True, base=name, enter=_in_step, step=number
        )
    return Folder(base=name, enter=_in_extra) if name == _EXCEPTIONS[0] else None


def _in_rank(folder: Folder, name: str) -> Folder | None:
    known = _NET.fullmatch(name) and name not in (ORDER_FOLDER, GRAPH_FOLDER)
    return replace(folder, net_name=name, enter=_in_net) if known else None


def _in_api_rank(folder: Folder, name: str) -> Folder | None:
    return replace(folder, names=Names.API, enter=None) if is_tensor_folder(name) else None


def _in_net(folder: Folder, name: str) -> Folder | None:
    return replace(folder, graph=int(name), enter=_in_graph) if is_number(name) else None


def _in_graph(folder: Folder, name: str) -> Folder | None:
    if name == CONSTANT_FOLDER:
        return replace(folder, names=Names.RANK, constant=True, enter=None)
    if not is_number(name):
        return None
    return replace(folder, names=Names.RANK, iteration=int(name), enter=None)


def _in_step(folder: Folder, name: str) -> Folder | None:
    if not _TIME.fullmatch(name):
        return None
    return Folder(base=f"{folder.base}/{name}", enter=_in_time, step=folder.step)


def _in_time(folder: Folder, name: str) -> Folder | None:
    if _TIME.fullmatch(name) and folder.step is None:  # a step that looks like a time
        return Folder(base=f"{folder.base}/{name}", enter=_in_time, step=int(folder.base))
    if not is_number(name):
        return None
    return Folder(
        Names.CANN,
        rank=int(name),
        device=True,
        iteration=folder.step,
        base=f"{folder.base}/{name}",
        enter=_in_device,
        step=folder.step,
    )


def _in_device(folder: Folder, name: str) -> Folder | None:
    levels = (*folder.levels, name)
    first, *numbers = levels
    if not _MODEL.fullmatch(first) or not all(map(is_number, numbers)):
        return None
    numbered = is_number(first)
    if len(levels) == 1 and not numbered:
        return replace(folder, names=Names.NONE, levels=levels)
    if len(levels) == _MODEL_LEVELS or not numbered:
        model, rest = first, numbers
    else:
        model, rest = "", list(levels)
    # A single number is the iteration's, and a single one behind a model the model's.
    graph = int(rest[0]) if model or len(rest) > 1 else 0
    last = int(rest[-1]) if not model or len(rest) > 1 else None
    return replace(
        folder,
        names=Names.CANN,
        net_name=model,
        graph=graph,
        iteration=last if folder.step is None else folder.step,
        enter=_in_device if len(levels) < _MODEL_LEVELS else None,
        levels=levels,
    )


def _in_extra(folder: Folder, name: str) -> Folder | None:
    known = name == _EXCEPTIONS[1]
    return Folder(base=f"{folder.base}/{name}", enter=_in_exceptions) if known else None


def _in_exceptions(folder: Folder, name: str) -> Folder | None:
    if not is_number(name):
        return None
    return Folder(Names.EXCEPTION, rank=int(name), device=True, base=f"{folder.base}/{name}")


ROOT = Folder(enter=_in_root)
