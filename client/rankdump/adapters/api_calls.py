"""What API dumps of every framework have in common: options, numbers, places and LAYER marks.

Pure but for the counters, and without a framework. Names: `contract.layout.api_name`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import numpy as np

from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import LAYER, ApiCall, ApiPlace
from rankdump.hook import leaves_of_result, parts_of

MARK_PLACE = ApiPlace(Side.INPUT)
"""Where the one tensor of a LAYER mark stands: it has no index."""
_UNSAFE = re.compile(r"[:\s\0]")
"""Separates the marks of a place, or lines."""
_MOST = 255
"""Characters of a word that are kept."""
_OUT = len("out.")
"""Begins the places of `hook.leaves_of_result`."""


def everything(call: ApiCall) -> bool:
    """Select every call."""
    return True


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What of the calls of a model's program is recorded."""

    retain_backward: bool = False
    """Also the gradients of what calls returned."""
    filter_data: bool = True
    """Only tensors of floating point with a shape and elements; no numbers of Python."""
    filter_stack: bool = True
    """Only the user's own lines of a stack."""
    layers_once: bool = False
    """A LAYER mark only the first time its module is called: its file would be the same."""
    scope: Callable[[ApiCall], bool] = everything
    """Asked once for each forward call; its backward follows the answer."""


class StepListener(Protocol):
    """Hears of what steps are told by; from any thread, and before anything of it is observed."""

    def called(self, manner: str, *, trains: bool) -> None:
        """Hear that the model is called, not inside another of its calls, nor to recompute.

        `manner` is the same for calls of one kind; `trains` when gradients can come of it.
        """
        ...

    def stepped(self) -> None:
        """Hear that an optimizer of the model is done with its step, or was made to skip it."""
        ...


class CallNumbers:
    """Counts the calls of each API, over the whole run; safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = {}

    def next(self, op_type: str) -> int:
        """Return the number of a call that begins now: 0 for the first one of its type."""
        count = self._counts.get(op_type)
        if count is None:
            # Both steps are atomic: whoever comes second counts with the first one's counter.
            count = self._counts.setdefault(op_type, itertools.count())
        return next(count)


def layer_call(path: str) -> ApiCall:
    """Return the mark of a module, by its path with dots.

    >>> layer_call("blocks.0.conv").name
    'LAYER_blocks_0_conv_forward'
    """
    return ApiCall(LAYER, path.replace(".", "_"), 0)


def layer_name(path: str) -> str:
    """Return the same with the dots, which its stack keeps.

    >>> layer_name("blocks.0.conv")
    'LAYER_blocks.0.conv_forward'
    """
    return ApiCall(LAYER, path, 0).name


def layer_value() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return what a LAYER mark holds: one zero."""
    return np.zeros(1, np.float32)


class ApiLeaf(NamedTuple):
    """One argument of a call, or one part of its result, and where it stood."""

    slot: int
    """Its number among the leaves of its side, tensors and others alike."""
    path: str
    """Behind `input` or `output`: `0`, `1.0`; empty for a lone result."""
    word: str
    """How the program says the path, `dim` or `1.0.0`; empty where it says that."""
    value: object


def leaves_of_input(args: Sequence[object], kwargs: Mapping[str, object]) -> list[ApiLeaf]:
    """Return the leaves of a call's arguments: positional first, then by keyword."""
    found: list[ApiLeaf] = []
    for at, value in enumerate(args):
        _gather(found, at, "", value)
    for at, (word, value) in enumerate(kwargs.items(), len(args)):
        _gather(found, at, word, value)
    return found


def leaves_of_output(result: object) -> list[ApiLeaf]:
    """Return the leaves of what a call returned."""
    # Parts of a tuple are known by their places, also where they have names of their own.
    whole = tuple(cast("tuple[object, ...]", result)) if isinstance(result, tuple) else result
    parts = parts_of(whole)
    if parts is None:
        return [ApiLeaf(0, "", "", result)]
    found: list[ApiLeaf] = []
    for at, (word, value) in enumerate(parts):
        _gather(found, at, word, value)
    return found


def _gather(found: list[ApiLeaf], at: int, word: str, value: object) -> None:
    """Add the leaves of one argument, or of one part of a result."""
    number = str(at)
    word = "" if word == number else word
    if parts_of(value) is None:
        found.append(ApiLeaf(len(found), number, word, value))
        return
    for inner, leaf in enumerate(leaves_of_result(value)):
        path, under = f"{number}.{inner}", leaf.argument[_OUT:]
        said = f"{word or number}.{under}"
        found.append(ApiLeaf(len(found), path, "" if said == path else said, leaf.value))


# Places repeat from call to call, names of calls never do. Keys of dictionaries may be anything.
@lru_cache(maxsize=1 << 12)
def argument_of(
    side: Side, path: str, word: str = "", scalar: str = "", recomputed: bool = False
) -> str:
    """Return what the observation of a leaf carries: `input.0`, `output`, `input.1:int`.

    >>> argument_of(Side.INPUT, "1", "dim", "int", True)
    'input.1:=dim:int:recompute'
    """
    return ApiPlace(side, path, _UNSAFE.sub("_", word)[:_MOST], scalar, recomputed).argument


def scalar_of(value: object) -> str:
    """Return the mark of a number of Python: `int`, `float` or `bool`; empty for what is none."""
    return _SCALARS.get(type(value), "")


_SCALARS: dict[type, str] = {int: "int", float: "float", bool: "bool"}
