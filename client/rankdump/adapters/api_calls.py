"""What API dumps of every framework have in common: options, numbers, places and LAYER marks.

Pure but for the counters, and without a framework. Names: `contract.layout.api_name`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import LAYER, ApiCall, ApiPlace
from rankdump.hook import Leaf, leaves_of_call, leaves_of_result

MARK_PLACE = ApiPlace(Side.INPUT)
"""Where the one tensor of a LAYER mark stands: it has no index."""
_UNSAFE = re.compile(r"[:/\\\s\0]")
"""Separates the marks of a place, or would lead into another folder."""


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


class LayerMarks:
    """Which LAYER marks are still to be made."""

    def __init__(self, *, once: bool) -> None:
        self._once = once
        self._made: set[str] = set()

    def due(self, path: str) -> bool:
        """Return whether a call of the module at that path gets a mark now."""
        if not self._once:
            return True
        if path in self._made:
            return False
        self._made.add(path)
        return True


def layer_call(path: str) -> ApiCall:
    """Return the mark of a module, by its path with dots.

    >>> layer_call("blocks.0.conv").name
    'LAYER_blocks_0_conv_forward'
    """
    return ApiCall(LAYER, path.replace(".", "_"), 0)


def layer_value() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return what a LAYER mark holds: one zero."""
    return np.zeros(1, np.float32)


class ApiLeaf(NamedTuple):
    """One argument of a call, or one part of its result, and where it stood."""

    slot: int
    """Its number among the leaves of its side, tensors and others alike."""
    place: str
    """Its path behind `input` or `output`: `0`, `1.0`, `dim`; empty for a lone result."""
    value: object


def leaves_of_input(args: Sequence[object], kwargs: Mapping[str, object]) -> list[ApiLeaf]:
    """Return the leaves of a call's arguments: positional first, then by keyword."""
    return [_leaf(leaf) for leaf in leaves_of_call(args, kwargs)]


def leaves_of_output(result: object) -> list[ApiLeaf]:
    """Return the leaves of what a call returned."""
    return [_leaf(leaf) for leaf in leaves_of_result(result)]


# Places repeat from call to call, names of calls never do. Keys of dictionaries may be anything.
@lru_cache(maxsize=1 << 12)
def argument_of(side: Side, place: str, scalar: str = "", *, recomputed: bool = False) -> str:
    """Return what the observation of a leaf carries: `input.0`, `output`, `input.1:int`.

    >>> argument_of(Side.INPUT, "dim", "int", recomputed=True)
    'input.dim:int:recompute'
    """
    return ApiPlace(side, place, scalar, recomputed).argument


def scalar_of(value: object) -> str:
    """Return the mark of a number of Python: `int`, `float` or `bool`; empty for what is none."""
    return _SCALARS.get(type(value), "")


_SCALARS: dict[type, str] = {int: "int", float: "float", bool: "bool"}


def _leaf(leaf: Leaf) -> ApiLeaf:
    return ApiLeaf(leaf.slot, _path(leaf.argument), leaf.value)


@lru_cache(maxsize=1 << 12)
def _path(argument: str) -> str:
    """Return a place without the container it is counted from: `args.0`, `kwargs.dim`, `out.1`."""
    return _UNSAFE.sub("_", argument.partition(".")[2])
