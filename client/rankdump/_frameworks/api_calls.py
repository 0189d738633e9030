"""Options, call numbers, argument places, LAYER marks and call stacks that API dumps of every
framework share. Pure except for the counters and the stack cache; imports no framework.

Call stacks have the form of `torch_api_dump_stack.json` (troubleshooter 1.0.17), innermost frame
first: `File <path>, line <number>, in <function>,` and the source line on the next line. Every call
of every step reads its stack, so a known stack costs only one lookup per frame.
"""

from __future__ import annotations

import itertools
import linecache
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from rankdump._core.bounded_cache import remember
from rankdump._core.record import TensorSide
from rankdump._frameworks.model_observer import RANKDUMP_FOLDER
from rankdump._frameworks.operator_names import list_parts, list_result_leaves
from rankdump._layout.api_tree import LAYER_KIND, ApiCall, ApiPlace

LAYER_MARK_PLACE = ApiPlace(TensorSide.INPUT)
"""Place of the one tensor of a LAYER mark: it has no index."""
_UNSAFE_CHARACTER = re.compile(r"[:\s\0]")
"""Characters that separate the marks of a place, or lines."""
_MAX_WORD_CHARACTERS = 255
"""Limit to the length of an argument's name; the rest is cut off."""
_OUT_PREFIX_CHARACTERS = len("out.")
"""Prefix of the places of `list_result_leaves`."""


def select_every_call(call: ApiCall) -> bool:
    """Select every call."""
    return True


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Options of an API dump: which parts of a program's calls are recorded."""

    retain_backward: bool = False
    """Also record the gradients of results of calls."""
    filter_data: bool = True
    """Record only floating-point tensors with a shape and elements; no Python numbers."""
    filter_stack: bool = True
    """Keep only the user's own lines of a stack."""
    layers_once: bool = False
    """Record a LAYER mark only at the first call of its module: its file never changes."""
    scope: Callable[[ApiCall], bool] = select_every_call
    """Called once for each forward call; its backward is recorded if the forward is."""


class StepListener(Protocol):
    """Receives model calls and optimizer steps, from any thread, before they are observed."""

    def called(self, manner: str, *, trains: bool) -> None:
        """Receive an outermost call of the model that is not a recomputation.

        `manner` is the same for calls of one kind; `trains` is whether gradients can follow.
        """
        ...

    def stepped(self) -> None:
        """Receive the end of an optimizer step, or of a skipped one."""
        ...


_MAX_SEARCHING_CALLS = 64
"""Model calls after which the search for an optimizer ends, if none has made a step."""


class ApiStepWatch(ABC):
    """Reports the calls of one model and the steps of its optimizers to a listener."""

    def __init__(self, model: Any, listener: StepListener) -> None:
        self._model = model
        self._listener = listener
        self._calls = 0
        self._optimizer_found = False

    def has_optimizer(self) -> bool:
        """Return whether there is an optimizer whose steps can be observed."""
        if not self._optimizer_found and self._calls < _MAX_SEARCHING_CALLS:
            self._optimizer_found = self._search_optimizer()
        return self._optimizer_found

    @abstractmethod
    def _search_optimizer(self) -> bool:
        """Search the process for an optimizer; return whether it has one."""

    def _report_call(self, *, trains: bool) -> None:
        self._calls += 1
        manner = f"{'training' if self._model.training else 'evaluation'}, gradients {trains}"
        self._listener.called(manner, trains=trains)

    def _report_step(self) -> None:
        self._optimizer_found = True
        self._listener.stepped()


class ApiCallCounter:
    """Counts the calls of each API, over the whole run; safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = {}

    def next_number(self, op_type: str) -> int:
        """Return the number of a call that begins now: 0 for the first one of its type."""
        count = self._counts.get(op_type)
        if count is None:
            # Both steps are atomic: a second thread counts with the first thread's counter.
            count = self._counts.setdefault(op_type, itertools.count())
        return next(count)


# A step has the marks of all its modules, the same ones in each step.
@lru_cache(maxsize=1 << 12)
def make_layer_mark(path: str) -> ApiCall:
    """Return the mark of a module, by its path with dots.

    >>> make_layer_mark("blocks.0.conv").name
    'LAYER_blocks_0_conv_forward'
    """
    return ApiCall(LAYER_KIND, path.replace(".", "_"), 0)


@lru_cache(maxsize=1 << 12)
def format_layer_name(path: str) -> str:
    """Return the name of a module's mark with the dots of its path, as the stack file has it.

    >>> format_layer_name("blocks.0.conv")
    'LAYER_blocks.0.conv_forward'
    """
    return ApiCall(LAYER_KIND, path, 0).name


def make_layer_value() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the value of a LAYER mark: one zero."""
    return np.zeros(1, np.float32)


class ApiLeaf(NamedTuple):
    """One argument of a call, or one part of its result, with its place."""

    slot: int
    """Its number among the leaves of its side, tensors and others alike."""
    path: str
    """Path after `input` or `output`: `0`, `1.0`; empty for a single result."""
    word: str
    """Path as the program writes it, such as `dim` or `1.0.0`; empty where it is the same."""
    value: object


def list_input_leaves(args: Sequence[object], kwargs: Mapping[str, object]) -> list[ApiLeaf]:
    """Return the leaves of a call's arguments: positional first, then by keyword."""
    found: list[ApiLeaf] = []
    for at, value in enumerate(args):
        _collect_leaves(found, at, "", value)
    for at, (word, value) in enumerate(kwargs.items(), len(args)):
        _collect_leaves(found, at, word, value)
    return found


def list_output_leaves(result: object) -> list[ApiLeaf]:
    """Return the leaves of a call's result."""
    # Parts of a tuple are identified by position, even if the tuple has named fields.
    whole = tuple(cast("tuple[object, ...]", result)) if isinstance(result, tuple) else result
    parts = list_parts(whole)
    if parts is None:
        return [ApiLeaf(0, "", "", result)]
    found: list[ApiLeaf] = []
    for at, (word, value) in enumerate(parts):
        _collect_leaves(found, at, word, value)
    return found


def _collect_leaves(found: list[ApiLeaf], at: int, word: str, value: object) -> None:
    """Add the leaves of one argument, or of one part of a result."""
    number = str(at)
    word = "" if word == number else word
    if list_parts(value) is None:
        found.append(ApiLeaf(len(found), number, word, value))
        return
    for inner, leaf in enumerate(list_result_leaves(value)):
        path, under = f"{number}.{inner}", leaf.argument[_OUT_PREFIX_CHARACTERS:]
        spelled = f"{word or number}.{under}"
        found.append(ApiLeaf(len(found), path, "" if spelled == path else spelled, leaf.value))


# Places repeat from call to call, names of calls do not. Dictionary keys may be anything.
@lru_cache(maxsize=1 << 12)
def format_api_argument(
    side: TensorSide, path: str, word: str = "", scalar: str = "", recomputed: bool = False
) -> str:
    """Return the argument of an observed leaf: `input.0`, `output`, `input.1:int`.

    >>> format_api_argument(TensorSide.INPUT, "1", "dim", "int", True)
    'input.1:=dim:int:recompute'
    """
    return ApiPlace(
        side, path, _UNSAFE_CHARACTER.sub("_", word)[:_MAX_WORD_CHARACTERS], scalar, recomputed
    ).argument


def find_scalar_type(value: object) -> str:
    """Return the mark of a Python number: `int`, `float` or `bool`; empty for other values."""
    return _SCALAR_TYPES.get(type(value), "")


_SCALAR_TYPES: dict[type, str] = {int: "int", float: "float", bool: "bool"}


MAX_STACK_LINES = 100
"""Frames of a stack that are kept, the innermost ones."""
_MAX_FRAMES = 400
"""Frames that are searched for them."""
_MAX_LINE_CHARACTERS = 1000
_MAX_CACHED_ITEMS = 1 << 14
"""Limit for code that is created anew in every step."""
_FROZEN_PREFIX = "<frozen "
"""Begins the file names of the interpreter's own start."""


class CallStackCache:
    """The stacks of one process, each built once; safe to use from several threads."""

    def __init__(self, *foreign: str, users_only: bool) -> None:
        """`foreign` are prefixes of files that are not the user's; rankdump's are never shown."""
        self._hidden = (
            (RANKDUMP_FOLDER, _FROZEN_PREFIX, *foreign) if users_only else (RANKDUMP_FOLDER,)
        )
        # Code objects are keyed by identity, which hashes fastest, and kept alive.
        self._shown: dict[int, tuple[CodeType, bool]] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._stacks: dict[tuple[int, ...], tuple[str, ...]] = {}

    def read_stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a frame and of its callers."""
        key: list[int] = []
        # Runs at every call, over a dozen frames or more: most of the cost is this loop.
        at = frame
        while at is not None and len(key) < 2 * _MAX_FRAMES:
            # Reading the line number costs more than the instruction, which determines it.
            key += (id(at.f_code), at.f_lasti)
            at = at.f_back
        place = tuple(key)
        known = self._stacks.get(place)
        if known is None:
            return remember(self._stacks, place, self._read_frames(frame), _MAX_CACHED_ITEMS)
        return known

    def clear(self) -> None:
        """Forget all stacks."""
        # Entries keyed by the identity of a code object must go with the object.
        self._stacks.clear()
        self._lines.clear()
        self._shown.clear()

    def _read_frames(self, frame: FrameType | None) -> tuple[str, ...]:
        frames: list[FrameType] = []
        while frame is not None and len(frames) < _MAX_FRAMES:
            frames.append(frame)
            frame = frame.f_back
        # All frames are part of the key, shown or not, and their code stays alive with it.
        if len(self._shown) + len(frames) > _MAX_CACHED_ITEMS:
            self.clear()
        shown = [each for each in frames if self._is_shown(each.f_code)]
        return tuple(map(self._format_line, shown[:MAX_STACK_LINES]))

    def _is_shown(self, code: CodeType) -> bool:
        known = self._shown.get(id(code))
        if known is None:
            shown = not code.co_filename.startswith(self._hidden)
            known = self._shown[id(code)] = (code, shown)
        return known[1]

    def _format_line(self, frame: FrameType) -> str:
        code = frame.f_code
        place = (id(code), frame.f_lasti)
        known = self._lines.get(place)
        if known is None:
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
            # Code without a source has no line to show.
            shown = f" {text[:_MAX_LINE_CHARACTERS]}" if text else ""
            where = f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
            known = self._lines[place] = f"{where}, \n{shown}"
        return known
