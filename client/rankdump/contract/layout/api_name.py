"""The names of calls of an API, and of their tensors: troubleshooter's `api_dump`. Pure.

    {kind}_{api}_{number}_{forward|backward}_{input|output}[.{path}]     a tensor of a call
    LAYER_{module path with _}_forward_input                             a module was called here

Source: api-dump.md A.2. A path is one number or two: an input's place among the arguments, those by
keyword behind the others in the order given; then, of a list, tuple or mapping, which of its leaves
it is. The tool's own reader fails at anything else. An output has a path only when the call
returned several. What the program says instead of such a number is a mark of the tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rankdump.contract.key import Side

Direction = Literal["forward", "backward"]

LAYER = "LAYER"
"""Kind of a mark that says which module the calls before it, or behind it, belong to."""
KINDS = ("NN", "Functional", "Tensor", "Torch", "VF", "NPU", "Distributed", LAYER)
RECOMPUTED = "recompute"
"""Mark of a tensor whose call repeats a forward within the backward."""
_WORD = "="
"""Begins the mark that says a path as the program does."""

_REMEMBERED = 1 << 14
_CALL = re.compile(
    rf"(?P<kind>{'|'.join(KINDS[:-1])})_(?P<api>.+)_(?P<number>[0-9]{{1,18}})"
    r"_(?P<direction>forward|backward)"
)
_LAYER = re.compile(rf"{LAYER}_(?P<api>.+)_(?P<direction>forward|backward)")
_PLACE = r"(?P<side>input|output)(?:\.(?P<path>[^/\\\0]+))?"
_TENSOR = re.compile(rf"(?P<call>.+_(?:forward|backward))_(?P<place>{_PLACE})")


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One call of an API, or its backward."""

    kind: str
    api: str
    """Name of the function, method or class; of a LAYER the path of the module with `_`."""
    number: int
    """Counts the calls of that API from the start of the process; 0 for a LAYER."""
    direction: Direction = "forward"

    @property
    def op_type(self) -> str:
        """What all calls of that API have in common: `NN_Conv2d`."""
        return f"{self.kind}_{self.api}"

    @property
    def stem(self) -> str:
        """Its name without the direction: `NN_Conv2d_0`."""
        return self.op_type if self.kind == LAYER else f"{self.op_type}_{self.number}"

    @property
    def name(self) -> str:
        """Its whole name: `NN_Conv2d_0_forward`; an operator's name in a dump."""
        return f"{self.stem}_{self.direction}"


@dataclass(frozen=True, slots=True)
class ApiPlace:
    """Where in its call a tensor stood, as `TensorKind.argument` carries it."""

    side: Side
    path: str = ""
    """Behind the first dot: `0`, `1.0`; empty for the only output of a call."""
    word: str = ""
    """How the program says the path: `other`, `extra.bias`, `1.0.0`; empty where it says that."""
    scalar: str = ""
    """`int`, `float` or `bool` when it was a number of Python, which is dumped as a tensor."""
    recomputed: bool = False

    @property
    def name(self) -> str:
        """`input.0`, `output`, `output.1.0`."""
        return f"{self.side.value}.{self.path}" if self.path else self.side.value

    @property
    def argument(self) -> str:
        """Its name with what else is known of it: `input.1:=dim:int`, `input.0:recompute`."""
        word = f"{_WORD}{self.word}" if self.word else ""
        marks = (word, self.scalar, RECOMPUTED if self.recomputed else "")
        return ":".join((self.name, *filter(None, marks)))


# The same calls come again in every iteration, and in the dump that one is compared with.
@lru_cache(maxsize=_REMEMBERED)
def call_of(name: str) -> ApiCall | None:
    """Return the call that has a name, `NN_Conv2d_0_forward`; None when it is none of these."""
    found = _CALL.fullmatch(name)
    if found is not None:
        number = int(found["number"])
        return ApiCall(found["kind"], found["api"], number, _direction(found["direction"]))
    found = _LAYER.fullmatch(name)
    if found is not None:
        return ApiCall(LAYER, found["api"], 0, _direction(found["direction"]))
    return None


def place_of(argument: str) -> ApiPlace | None:
    """Return what `ApiPlace.argument` says; None when it is none."""
    name, *marks = argument.split(":")
    found = re.fullmatch(_PLACE, name)
    if found is None:
        return None
    words = [mark.removeprefix(_WORD) for mark in marks if mark.startswith(_WORD)]
    scalars = [mark for mark in marks if mark != RECOMPUTED and not mark.startswith(_WORD)]
    return ApiPlace(
        Side(found["side"]),
        found["path"] or "",
        "".join(words[:1]),
        "".join(scalars[:1]),
        RECOMPUTED in marks,
    )


def tensor_name(op_name: str, place: ApiPlace) -> str:
    """Return the name of a tensor: in the info file, and of its file without `.npy`."""
    return f"{op_name}_{place.name}"


def tensor_of(name: str) -> tuple[ApiCall, ApiPlace] | None:
    """Return the call and the place that a tensor's name says; None when it is none of these."""
    found = _TENSOR.fullmatch(name)
    call = call_of(found["call"]) if found is not None else None
    if found is None or call is None:
        return None
    return call, ApiPlace(Side(found["side"]), found["path"] or "")


def _direction(text: str) -> Direction:
    return "backward" if text == "backward" else "forward"
