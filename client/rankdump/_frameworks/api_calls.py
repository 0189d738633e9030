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
"""Place of the only tensor of a LAYER mark, which has no index."""
_UNSAFE_CHARACTER = re.compile(r"[:\s\0]")
"""Characters that separate the parts of a place, or lines."""
_MAX_WORD_CHARACTERS = 255
"""Maximum characters of an argument's name; the rest is cut off."""
_OUT_PREFIX_CHARACTERS = len("out.")
"""Length of the prefix of the places of `list_result_leaves`."""


def select_every_call(call: ApiCall) -> bool:
    """Return True: the default scope selects every call."""
    return True


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Options of an API dump: which parts of a program's calls are recorded."""

    retain_backward: bool = False
    """Whether the gradients of the results of calls are recorded too."""
    filter_data: bool = True
    """Whether only floating-point tensors with dimensions and elements are recorded, and no Python
    numbers.
    """
    filter_stack: bool = True
    """Whether call stacks contain only lines of the user's own code."""
    layers_once: bool = False
    """Whether a LAYER mark is recorded only at the first call of its module, because its file never
    changes.
    """
    scope: Callable[[ApiCall], bool] = select_every_call
    """Decides for each forward call, once, whether it is recorded; its backward is recorded too
    then.
    """


class StepListener(Protocol):
    """Receives the calls of a model and the steps of its optimizers, from any thread, before they
    are observed.
    """

    def called(self, manner: str, *, trains: bool) -> None:
        """Receive an outermost call of the model that is not a recomputation.

        `manner` is equal for calls of the same kind; `trains` says whether a backward may follow.
        """
        ...

    def stepped(self) -> None:
        """Receive the end of an optimizer step, also of a step that was skipped."""
        ...


_MAX_SEARCHING_CALLS = 64
"""Number of model calls without an optimizer step after which the search for an optimizer ends."""


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
        """Search the process for an optimizer; return whether there is one."""

    def _report_call(self, *, trains: bool) -> None:
        self._calls += 1
        manner = f"{'training' if self._model.training else 'evaluation'}, gradients {trains}"
        self._listener.called(manner, trains=trains)

    def _report_step(self) -> None:
        self._optimizer_found = True
        self._listener.stepped()


class ApiCallCounter:
    """Counts the calls of each API over the whole run; safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = {}

    def next_number(self, op_type: str) -> int:
        """Return the number of a call that begins now: 0 for the first one of its type."""
        count = self._counts.get(op_type)
        if count is None:
            # `setdefault` and `next` are each atomic: a second thread uses the counter of the first
            # one.
            count = self._counts.setdefault(op_type, itertools.count())
        return next(count)


# The cache is worthwhile because every step has the same marks.
@lru_cache(maxsize=1 << 12)
def make_layer_mark(path: str) -> ApiCall:
    """Return the mark of a module, by its path with dots.

    >>> make_layer_mark("blocks.0.conv").name
    'LAYER_blocks_0_conv_forward'
    """
    return ApiCall(LAYER_KIND, path.replace(".", "_"), 0)


@lru_cache(maxsize=1 << 12)
def format_layer_name(path: str) -> str:
    """Return the name of a module's mark with the dots of the path, as the stack file spells it.

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
    """Number of the leaf among all leaves of its side, tensors and others alike."""
    path: str
    """Path of the leaf after `input` or `output`, such as `0` or `1.0`; empty for a
    single result.
    """
    word: str
    """Path as the program writes it, such as `dim` or `1.0.0`; empty if it equals `path`."""
    value: object


def list_input_leaves(args: Sequence[object], kwargs: Mapping[str, object]) -> list[ApiLeaf]:
    """Return the leaves of a call's arguments: positional arguments first, then keyword
    arguments.
    """
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


# The cache has places and not names of calls, because only places repeat. Keys of dictionaries,
# which are part of a place, may be anything.
@lru_cache(maxsize=1 << 12)
def format_api_argument(
    side: TensorSide, path: str, word: str = "", scalar: str = "", recomputed: bool = False
) -> str:
    """Return the text of the argument of an observed leaf, such as `input.0`, `output` or
    `input.1:int`.

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
"""Maximum number of frames that are kept of a stack, the innermost ones."""
_MAX_FRAMES = 400
"""Maximum number of frames that are searched for frames to keep."""
_MAX_LINE_CHARACTERS = 1000
_MAX_CACHED_ITEMS = 1 << 14
"""Limit for programs that create new code in every step."""
_FROZEN_PREFIX = "<frozen "
"""Prefix of the file names of the interpreter's own startup code."""


class CallStackCache:
    """Cache of the call stacks of one process, each of which is built once; safe to use from
    several threads.
    """

    def __init__(self, *foreign: str, users_only: bool) -> None:
        """`foreign` are prefixes of the paths of files that are not the user's; rankdump's own
        files are never shown.
        """
        self._hidden = (
            (RANKDUMP_FOLDER, _FROZEN_PREFIX, *foreign) if users_only else (RANKDUMP_FOLDER,)
        )
        # Code objects are keyed by identity, because that hashes fastest; the cache keeps them
        # alive.
        self._shown: dict[int, tuple[CodeType, bool]] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._stacks: dict[tuple[int, ...], tuple[str, ...]] = {}

    def read_stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of the stack that consists of a frame and its callers."""
        key: list[int] = []
        # This runs at every call, over a dozen frames or more: most of the cost is this loop.
        at = frame
        while at is not None and len(key) < 2 * _MAX_FRAMES:
            # The index of the instruction determines the line, and costs less to read than the line
            # number.
            key += (id(at.f_code), at.f_lasti)
            at = at.f_back
        place = tuple(key)
        known = self._stacks.get(place)
        if known is None:
            return remember(self._stacks, place, self._read_frames(frame), _MAX_CACHED_ITEMS)
        return known

    def clear(self) -> None:
        """Remove all stacks from the cache."""
        # Entries that are keyed by the identity of a code object must be removed together with the
        # object.
        self._stacks.clear()
        self._lines.clear()
        self._shown.clear()

    def _read_frames(self, frame: FrameType | None) -> tuple[str, ...]:
        frames: list[FrameType] = []
        while frame is not None and len(frames) < _MAX_FRAMES:
            frames.append(frame)
            frame = frame.f_back
        # Frames that are not shown are part of the key too, and their code stays alive with it.
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
