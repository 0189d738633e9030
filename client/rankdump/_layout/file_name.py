"""Names of dumped files of any writer, all forms parsed into one value; and the full names in the
`mapping.csv` of a folder. Pure.

    {type}.{name}.{task}[.{stream}].{stamp}                            a bin file; `.csv`: its table
    {type}.{name}.{number}.{task}.{stream}.{stamp}                     of a captured stream
    ...[.{task type}.{context}.{thread}[.{device}]]                    of a part of an FFTS task
    ...{side}.{slot}                                                   a bin file of one tensor
    ...{side}.{slot}[.{format}[.{element}]].npy                        a tensor
    Opdebug.Node_OpDebug.{task}[.{stream}].{stamp}...                  an overflow
    ...{side}.{slot}.json                                              the JSON of one, never packed
    exception_info.{stream}.{task}.{stamp}                             an exception
    {kernel}.{stream}.{task}.{core type}.{core}.{stamp}                an exception, by a callback

Each name ends in `.zst` if the file is packed. Source: CANN, dump file names. Names of aclnn begin
with the name of the API, which is that of the operator. Rows of `mapping.csv` are written by
MindSpore, by CANN (which adds a row for every block it writes) and by rankdump; a name on disk is a
number, with or without the file's suffix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum
from typing import NamedTuple

from rankdump._core.record import TensorSide

UNKNOWN_ID = 65535
ACLNN_PREFIX = "aclnn"
PACKED_SUFFIX = ".zst"
_JSON_SUFFIX = ".json"
# Numbers are digits without leading zeros, so that each number has exactly one text, and none is
# too long for `int`.
NUMBER_PATTERN = r"(?:0|[1-9][0-9]{0,19})"
_MAX_TASK_TYPE = 4
"""Largest number of a task type: AICORE, AICPU, DEBUG, HCCL, FFTSPLUS."""
_MAX_ID = (1 << 32) - 1
_MIN_NUMBERS, _MAX_NUMBERS = 2, 4
"""Minimum and maximum count of numbers in a name, before those that FFTS adds."""
_OVERFLOW_WORDS = ("Opdebug", "Node_OpDebug")
OVERFLOW_PREFIX = ".".join((*_OVERFLOW_WORDS, ""))
"""Prefix of the names of overflow files."""
_NAME_PATTERN = re.compile(
    rf"(?P<first>[^./]+)\.(?P<second>[^./]+)\.(?P<numbers>{NUMBER_PATTERN}(?:\.{NUMBER_PATTERN}){{1,7}})"
    rf"(?:\.(?P<side>input|output)\.(?P<slot>{NUMBER_PATTERN})"
    r"(?:\.(?P<format>[^./]+)(?:\.(?P<element>[^./]+))?)?)?"
)
_EXCEPTION_PATTERN = re.compile(
    rf"(?P<kernel>[^./]+)\.(?P<stream>{NUMBER_PATTERN})\.(?P<task>{NUMBER_PATTERN})"
    rf"(?P<core>\.[^./]+\.{NUMBER_PATTERN})?\.(?P<stamp>{NUMBER_PATTERN})"
)
_NUMBERED_PATTERN = re.compile(r"(?:.+\.)?[0-9]+", re.S)
_TAGGED_PATTERN = re.compile(rf"(?P<name>.+)\.custom\.{NUMBER_PATTERN}")
_EXCEPTION_INFO = "exception_info"


class FileKind(Enum):
    """Kind of content of a file."""

    TENSOR = "npy"
    OPERATOR = "bin"
    """The file has all tensors of an operator."""
    MEMBER = "bin of one tensor"
    TABLE = "csv"
    """The file has statistics of an operator's tensors."""
    OVERFLOW = "overflow"
    """The file has the state of the cores, and no tensor of an operator."""
    OVERFLOW_JSON = "overflow as JSON"

    @property
    def holds_tensors(self) -> bool:
        """Whether the file is a tensor or contains tensors."""
        # The first comparison decides for nearly every file of a folder.
        return self is FileKind.TENSOR or self in (FileKind.OPERATOR, FileKind.MEMBER)


class FileName(NamedTuple):
    """Parts of the name of a file. It is a NamedTuple because that is created fastest: there is one
    for each file of a tree.
    """

    kind: FileKind
    op_type: str
    op_name: str
    task: int
    stream: int
    timestamp_us: int
    """Time stamp in microseconds; for an exception, the digits of its date."""
    side: TensorSide = TensorSide.INPUT
    """Side; this field and those after it apply to tensors, members, and the JSON of overflows."""
    slot: int = 0
    tensor_format: str = ""
    element: str = ""
    number: int | None = None
    """Iteration in the name of a captured stream; None for other files."""
    part: tuple[int, ...] = ()
    """Task type, context, thread and device of a part of an FFTS task; empty for others."""
    argument: str = ""
    """Place of the tensor in its call, in an API dump."""

    @property
    def context(self) -> int:
        """Context of a part of an FFTS task; 65535 for a whole task."""
        return self.part[1] if self.part else UNKNOWN_ID

    @property
    def thread(self) -> int:
        """Thread of a part of an FFTS task; 65535 for a whole task."""
        return self.part[2] if self.part else UNKNOWN_ID

    @property
    def is_overflow(self) -> bool:
        """Whether the file describes an overflow, in any form."""
        return (self.op_type, self.op_name) == _OVERFLOW_WORDS


def is_numbered_name(name: str) -> bool:
    """Return whether a name may be that of a bin file, all of which end in a number.

    The number is a time stamp, a slot, or the number that replaces a long name.
    """
    return _NUMBERED_PATTERN.fullmatch(name.removesuffix(PACKED_SUFFIX)) is not None


def parse_file_name(name: str) -> FileName | None:
    """Return the parts of a file name in one of CANN's folders; None for any other file."""
    body, kind = _split_suffix(name)
    found = _NAME_PATTERN.fullmatch(body)
    if found is None:
        return None
    ids = _split_numbers([int(number) for number in found["numbers"].split(".")])
    if not _is_valid_form(kind, found) or ids is None:
        return None
    number, task, stream, stamp, part = ids
    first, second, tensor = found["first"], found["second"], found["side"] is not None
    if kind is FileKind.OPERATOR and (tensor or (first, second) == _OVERFLOW_WORDS):
        kind = FileKind.MEMBER if tensor else FileKind.OVERFLOW
    op_type, op_name = (second, first) if first.startswith(ACLNN_PREFIX) else (first, second)
    return FileName(
        kind=kind,
        op_type=op_type,
        op_name=op_name,
        task=task,
        stream=stream,
        timestamp_us=stamp,
        side=TensorSide(found["side"] or TensorSide.INPUT),
        slot=int(found["slot"] or 0),
        tensor_format=found["format"] or "",
        element=found["element"] or "",
        number=number,
        part=part,
    )


def parse_exception_name(name: str) -> FileName | None:
    """Return the parts of a file name in a folder of exceptions."""
    packed = PACKED_SUFFIX if name.endswith(PACKED_SUFFIX) else ""
    tagged = _TAGGED_PATTERN.fullmatch(name.removesuffix(packed))
    body = tagged["name"] if tagged else name.removesuffix(packed)
    found = _EXCEPTION_PATTERN.fullmatch(body)
    if found is None or not (found["core"] or found["kernel"] == _EXCEPTION_INFO):
        return parse_file_name(body + packed)
    return FileName(
        kind=FileKind.OPERATOR,
        op_type=found["kernel"],
        op_name=found["kernel"],
        task=int(found["task"]),
        stream=int(found["stream"]),
        timestamp_us=int(found["stamp"]),
    )


def _split_suffix(name: str) -> tuple[str, FileKind]:
    body = name.removesuffix(PACKED_SUFFIX)
    for suffix, kind in ((".npy", FileKind.TENSOR), (".csv", FileKind.TABLE)):
        if body.endswith(suffix):
            return body.removesuffix(suffix), kind
    if name.endswith(_JSON_SUFFIX):
        return name.removesuffix(_JSON_SUFFIX), FileKind.OVERFLOW_JSON
    return body, FileKind.OPERATOR


def _is_valid_form(kind: FileKind, found: re.Match[str]) -> bool:
    """Return whether a file of this kind may have this name."""
    tensor = found["side"] is not None
    if kind is FileKind.TENSOR:
        return tensor
    if kind is FileKind.OVERFLOW_JSON and (found["first"], found["second"]) != _OVERFLOW_WORDS:
        return False
    forms = {FileKind.TABLE: not tensor, FileKind.OVERFLOW_JSON: tensor}
    return found["format"] is None and forms.get(kind, True)


def _split_numbers(numbers: list[int]) -> tuple[int | None, int, int, int, tuple[int, ...]] | None:
    """Return number, task, stream, stamp and part; None if the numbers have another form."""
    part: tuple[int, ...] = ()
    for length in (4, 3):  # with and without the device
        last = numbers[-length:]
        possible = last[0] <= _MAX_TASK_TYPE and max(last) <= _MAX_ID
        if len(numbers) - length >= _MIN_NUMBERS and possible:
            numbers, part = numbers[:-length], tuple(last)
            break
    if len(numbers) > _MAX_NUMBERS:
        return None
    *before, stamp = numbers
    number = before.pop(0) if len(numbers) == _MAX_NUMBERS else None
    task, stream = before if len(before) > 1 else (before[0], UNKNOWN_ID)
    return number, task, stream, stamp, part


_SHORT_NAME = re.compile(r"[0-9a-f]+(?:\.[A-Za-z0-9.]*)?")
"""Name that replaces a long one; the numbers of msaccucmp are hexadecimal."""


class LongFileNames:
    """Full names of files by their names on disk."""

    def __init__(self, rows: Iterable[str] = ()) -> None:
        """`rows` are without line ends; rows that name no file are skipped."""
        pairs = (row.removesuffix("\r").partition(",") for row in rows)
        self._names = {
            short: full for short, _, full in pairs if full and _SHORT_NAME.fullmatch(short)
        }

    @classmethod
    def parse(cls, content: bytes) -> LongFileNames:
        """Return the names in the content of a whole file."""
        # Only `\n` ends a row, because the name of an operator may contain other line ends.
        return cls(content.decode("utf-8", errors="surrogateescape").split("\n"))

    def list_absent_names(self, there: Collection[str]) -> list[str]:
        """Return the names on disk that are not among `there`, packed or not."""
        return [
            name for name in self._names if name not in there and name + PACKED_SUFFIX not in there
        ]

    def get_full_name(self, name: str) -> str:
        """Return the full name of a file; the name itself if it was not shortened."""
        if not self._names:
            return name
        # The row of a file that was packed later has the unpacked name.
        plain = name.removesuffix(PACKED_SUFFIX)
        return self._names.get(name) or (
            self._names[plain] + name[len(plain) :] if plain in self._names else name
        )
