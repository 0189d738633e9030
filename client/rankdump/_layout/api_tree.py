"""Trees of troubleshooter's `api_dump`, and the names of API calls and their tensors in them
(troubleshooter 1.0.17 and 1.0.18). Pure.

    rank{rank}/{framework}_api_dump/{tensor name}.npy[.zst]
    rank{rank}/{framework}_api_dump_info.pkl        or `.csv`, as 1.0.18 calls it
    rank{rank}/{framework}_api_dump_stack.json
    {kind}_{api}_{number}_{forward|backward}_{input|output}[.{path}]     a tensor of a call
    LAYER_{module path with _}_forward_input                             a module was called here

The name of a tensor is the name of its call, followed by its place; it is the same in the info
file, and no other tensor of a dump has it. A name over 255 bytes is replaced by a number, as in
MindSpore's tree. A path has one or two numbers: the place of an input among the arguments, where
keyword arguments follow the others in the order given; then the index of a leaf in a list, tuple or
mapping. The tool's own reader fails at anything else. An output has a path only if the call
returned several. If the program calls an argument by something else than such a number, that name
is a mark of the tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._layout.file_name import PACKED_SUFFIX, FileKind, FileName

CallDirection = Literal["forward", "backward"]

LAYER_KIND = "LAYER"
"""Kind of a mark that names the module of the calls before or after it."""
CALL_KINDS = ("NN", "Functional", "Tensor", "Torch", "VF", "NPU", "Distributed", LAYER_KIND)
RECOMPUTED_MARK = "recompute"
"""Mark of a tensor whose call repeats a forward call within the backward."""
_WORD_MARK = "="
"""Start of the mark with the path in the program's spelling."""

_MAX_REMEMBERED_CALLS = 1 << 14
_CALL_NAME = re.compile(
    rf"(?P<kind>{'|'.join(CALL_KINDS[:-1])})_(?P<api>.+)_(?P<number>[0-9]{{1,18}})"
    r"_(?P<direction>forward|backward)"
)
_LAYER_NAME = re.compile(rf"{LAYER_KIND}_(?P<api>.+)_(?P<direction>forward|backward)")
_PLACE_FORM = r"(?P<side>input|output)(?:\.(?P<path>[^/\\\0]+))?"
_TENSOR_NAME = re.compile(rf"(?P<call>.+_(?:forward|backward))_(?P<place>{_PLACE_FORM})")


class ApiCall(NamedTuple):
    """One call of an API, or its backward."""

    kind: str
    api: str
    """Name of the function, method or class; for a LAYER mark, the path of the module with `_`."""
    number: int
    """Number of the call among those of its API since the process began; 0 for a LAYER mark."""
    direction: CallDirection = "forward"

    @property
    def op_type(self) -> str:
        """Common part of the names of all calls of the API, such as `NN_Conv2d`."""
        return f"{self.kind}_{self.api}"

    @property
    def stem(self) -> str:
        """Name of the call without the direction, such as `NN_Conv2d_0`."""
        kind, api, number, _ = self
        return f"{kind}_{api}" if kind == LAYER_KIND else f"{kind}_{api}_{number}"

    @property
    def name(self) -> str:
        """Whole name of the call, such as `NN_Conv2d_0_forward`, which is an operator's name in a
        dump.
        """
        return f"{self.stem}_{self.direction}"


@dataclass(frozen=True, slots=True)
class ApiPlace:
    """Place of a tensor in its call, as in `TensorKind.argument`."""

    side: TensorSide
    path: str = ""
    """Path after the first dot, such as `0` or `1.0`; empty for the only output of a call."""
    word: str = ""
    """Path in the program's spelling, such as `other`, `extra.bias` or `1.0.0`; empty if equal to
    `path`.
    """
    scalar: str = ""
    """Type of a Python number that is dumped as a tensor: `int`, `float` or `bool`; else empty."""
    recomputed: bool = False

    @property
    def name(self) -> str:
        """Side and path, such as `input.0`, `output` or `output.1.0`."""
        return f"{self.side.value}.{self.path}" if self.path else self.side.value

    @property
    def argument(self) -> str:
        """Name of the place with its marks, such as `input.1:=dim:int` or `input.0:recompute`."""
        word = f"{_WORD_MARK}{self.word}" if self.word else ""
        marks = (word, self.scalar, RECOMPUTED_MARK if self.recomputed else "")
        return ":".join((self.name, *filter(None, marks)))


# The cache is useful because the same calls return in every iteration, and in the dump that is
# compared with.
@lru_cache(maxsize=_MAX_REMEMBERED_CALLS)
def parse_call_name(name: str) -> ApiCall | None:
    """Return the call with a name such as `NN_Conv2d_0_forward`; None for a name of
    another form.
    """
    found = _CALL_NAME.fullmatch(name)
    if found is not None:
        number = int(found["number"])
        return ApiCall(found["kind"], found["api"], number, parse_direction(found["direction"]))
    found = _LAYER_NAME.fullmatch(name)
    if found is not None:
        return ApiCall(LAYER_KIND, found["api"], 0, parse_direction(found["direction"]))
    return None


def parse_place(argument: str) -> ApiPlace | None:
    """Return the place with this `ApiPlace.argument`; None for a text of another form."""
    name, *marks = argument.split(":")
    found = re.fullmatch(_PLACE_FORM, name)
    if found is None:
        return None
    words = (mark.removeprefix(_WORD_MARK) for mark in marks if mark.startswith(_WORD_MARK))
    scalars = (
        mark for mark in marks if mark != RECOMPUTED_MARK and not mark.startswith(_WORD_MARK)
    )
    side, path = TensorSide(found["side"]), found["path"] or ""
    return ApiPlace(side, path, next(words, ""), next(scalars, ""), RECOMPUTED_MARK in marks)


def join_tensor_name(op_name: str, place: ApiPlace) -> str:
    """Return the name of a tensor as in the info file and, without `.npy`, in its file's name."""
    return f"{op_name}_{place.name}"


def parse_tensor_name(name: str) -> tuple[ApiCall, ApiPlace] | None:
    """Return the call and the place in the name of a tensor; None for a name of another form."""
    found = _TENSOR_NAME.fullmatch(name)
    call = parse_call_name(found["call"]) if found is not None else None
    if found is None or call is None:
        return None
    return call, ApiPlace(TensorSide(found["side"]), found["path"] or "")


def parse_direction(text: str) -> CallDirection:
    """Return the direction in a name."""
    return "backward" if text == "backward" else "forward"


API_FRAMEWORKS = ("torch", "mindspore", "mindtorch")
_NPY_SUFFIX = ".npy"
_TENSOR_FORMAT = "DefaultFormat"
_SIDE_WORDS = tuple(side.value for side in TensorSide)
_INFO_NAME = re.compile(rf"({'|'.join(API_FRAMEWORKS)})_api_dump_info\.(pkl|csv)")
_TENSOR_FOLDER = re.compile(rf"({'|'.join(API_FRAMEWORKS)})_api_dump")
_MAX_REMEMBERED_PLACES = 1024
"""Number of places that are remembered; there are few, however many calls there are."""
_SLOT_LIMIT = 1 << 31
_MAX_SLOT_DIGITS = 11


@dataclass(frozen=True, slots=True)
class ApiFileNames:
    """Names of the files of one framework's API dump."""

    framework: str
    """Name of the framework: one of API_FRAMEWORKS."""
    extended: bool = False
    """Whether files are as release 1.0.18 writes them: the info file ends in `.csv`, and its lines
    have two more fields.
    """

    @property
    def folder(self) -> str:
        """Name of the folder of tensors in the folder of the rank."""
        return f"{self.framework}_api_dump"

    @property
    def info_file(self) -> str:
        """Name of the info file, which is text under either suffix."""
        return f"{self.folder}_info.{'csv' if self.extended else 'pkl'}"

    @property
    def stack_file(self) -> str:
        """Name of the file with the call stacks."""
        return f"{self.folder}_stack.json"


def make_api_rank_folder(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank{rank}"


def make_api_readable_key(key: TensorKey) -> TensorKey:
    """Return the key in the form in which it is read back from a path."""
    op_name = _spell_call(key.op_name)
    call, place = parse_call_name(op_name), _find_place(key)
    return TensorKey(
        rank=key.rank,
        net_name="",
        graph=0,
        iteration=0,
        timestamp_us=0,
        op_type=op_name if call is None else call.op_type,
        op_name=op_name,
        side=place.side,
        slot=get_slot(place),
        tensor_format=_TENSOR_FORMAT,
        argument=place.name,
    )


def is_api_tensor_folder(name: str) -> bool:
    """Return whether a folder with this name in the folder of a rank holds tensors."""
    return _TENSOR_FOLDER.fullmatch(name) is not None


def parse_info_file_name(name: str) -> ApiFileNames | None:
    """Return the file names of the dump that an info file belongs to; None for any other file."""
    found = _INFO_NAME.fullmatch(name)
    return ApiFileNames(found[1], found[2] == "csv") if found is not None else None


def make_api_tensor_name(key: TensorKey) -> str:
    """Return the name of a tensor as the info file and the name of its own file spell it."""
    return join_tensor_name(_spell_call(key.op_name), _find_place(key))


def spell_api_tensor_name(op_name: str, place: ApiPlace) -> str:
    """Return the name of the tensor at a place of a call, in the spelling of files."""
    return join_tensor_name(_spell_call(op_name), _spell_place(place))


def _spell_call(op_name: str) -> str:
    # There is no cache, because nearly every name is an identifier and occurs only once.
    return op_name if op_name.isidentifier() else sanitize_name(op_name) or "_"


def _find_place(key: TensorKey) -> ApiPlace:
    return _spell_place(parse_place(key.argument) or ApiPlace(key.side, str(key.slot)))


@lru_cache(maxsize=_MAX_REMEMBERED_PLACES)
def _spell_place(place: ApiPlace) -> ApiPlace:
    path = (
        ".".join(sanitize_name(part) or "_" for part in place.path.split(".")) if place.path else ""
    )
    return ApiPlace(place.side, path)


def parse_api_file_name(name: str) -> FileName | None:
    """Return the parts of the name of a tensor's file; None for any other file.

    The operator type of a call that does not match the grammar is its whole name.
    """
    plain = name.removesuffix(PACKED_SUFFIX)
    if not plain.endswith(_NPY_SUFFIX):
        return None
    op_name, side, path = split_tensor_name(plain.removesuffix(_NPY_SUFFIX))
    if not op_name or side not in _SIDE_WORDS or (path is not None and not all(path.split("."))):
        return None
    call, place = parse_call_name(op_name), ApiPlace(TensorSide(side), path or "")
    return FileName(
        kind=FileKind.TENSOR,
        op_type=op_name if call is None else call.op_type,
        op_name=op_name,
        task=0,
        stream=0,
        timestamp_us=0,
        side=place.side,
        slot=get_slot(place),
        tensor_format=_TENSOR_FORMAT,
        argument=place.name,
    )


def split_tensor_name(name: str) -> tuple[str, str, str | None]:
    """Return the call, the side and the path in the name of a tensor; the path is None if there is
    none.
    """
    stem, dot, path = name.partition(".")
    op_name, _, side = stem.rpartition("_")
    return op_name, side, path if dot else None


def get_slot(place: ApiPlace) -> int:
    """Return the number of an argument or a result; 0 if its place has no number.

    The parts of one argument have the same number, and differ in their places.
    """
    first = place.path.partition(".")[0]
    plain = first.isascii() and first.isdecimal()
    number = int(first[:_MAX_SLOT_DIGITS]) if plain else 0
    return number if number < _SLOT_LIMIT else 0
