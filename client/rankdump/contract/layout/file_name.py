"""What the name of a dumped file says, whoever wrote it: one value for every form. Pure.

    {type}.{name}.{task}[.{stream}].{stamp}                            a bin file; `.csv`: its table
    {type}.{name}.{number}.{task}.{stream}.{stamp}                     of a captured stream
    ...[.{task type}.{context}.{thread}[.{device}]]                    of a part of an FFTS task
    ...{side}.{slot}                                                   a bin file of one tensor
    ...{side}.{slot}[.{format}[.{element}]].npy                        a tensor
    Opdebug.Node_OpDebug.{task}[.{stream}].{stamp}...                  an overflow
    ...{side}.{slot}.json                                              the JSON of one, never packed
    exception_info.{stream}.{task}.{stamp}                             an exception
    {kernel}.{stream}.{task}.{core type}.{core}.{stamp}                an exception, by a callback

Each with `.zst` behind it where it is packed. Source: ascend-formats.md 2.1, 2.2, 2.4 and 4.6. The
form of aclnn's names has the API's name first, which is the operator's.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from rankdump.contract.key import Side

UNKNOWN_ID = 65535
ACLNN = "aclnn"
PACKED = ".zst"
_JSON = ".json"
# Plain digits without leading zeros: exactly one text per number, and none too long for int().
NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_MOST_TASK_TYPES = 4
"""AICORE, AICPU, DEBUG, HCCL, FFTSPLUS."""
_MOST_ID = (1 << 32) - 1
_FEWEST, _MOST = 2, 4
"""Numbers of a name in front of what FFTS adds."""
_OVERFLOW = ("Opdebug", "Node_OpDebug")
OVERFLOW_START = ".".join((*_OVERFLOW, ""))
"""What the name of a file that tells of an overflow begins with."""
_NAME = re.compile(
    rf"(?P<first>[^./]+)\.(?P<second>[^./]+)\.(?P<numbers>{NUMBER}(?:\.{NUMBER}){{1,7}})"
    rf"(?:\.(?P<side>input|output)\.(?P<slot>{NUMBER})"
    r"(?:\.(?P<format>[^./]+)(?:\.(?P<element>[^./]+))?)?)?"
)
_EXCEPTION = re.compile(
    rf"(?P<kernel>[^./]+)\.(?P<stream>{NUMBER})\.(?P<task>{NUMBER})"
    rf"(?P<core>\.[^./]+\.{NUMBER})?\.(?P<stamp>{NUMBER})"
)
_NUMBERED = re.compile(r"(?:.+\.)?[0-9]+", re.S)
_TAGGED = re.compile(rf"(?P<name>.+)\.custom\.{NUMBER}")
_NO_KERNEL = "exception_info"


class FileKind(Enum):
    """What a file holds."""

    TENSOR = "npy"
    OPERATOR = "bin"
    """All tensors of an operator."""
    MEMBER = "bin of one tensor"
    TABLE = "csv"
    """Figures of an operator's tensors."""
    OVERFLOW = "overflow"
    """The state of the cores: no tensor of an operator."""
    OVERFLOW_JSON = "overflow as JSON"

    @property
    def holds_tensors(self) -> bool:
        """Whether it is a tensor, or has some in it."""
        # Of thousands of files in a folder nearly each is a tensor.
        return self is FileKind.TENSOR or self in (FileKind.OPERATOR, FileKind.MEMBER)


class FileName(NamedTuple):
    """A name taken apart. There is one for each file of a tree: no value is made faster."""

    kind: FileKind
    op_type: str
    op_name: str
    task: int
    stream: int
    timestamp_us: int
    """Of an exception: the digits of its date, as they stand."""
    side: Side = Side.INPUT
    """Of a tensor, a member or the JSON of an overflow, like what follows."""
    slot: int = 0
    tensor_format: str = ""
    element: str = ""
    number: int | None = None
    """Iteration, of a captured stream."""
    part: tuple[int, ...] = ()
    """Task type, context, thread and device of a part of an FFTS task."""
    argument: str = ""
    """Where in its call the tensor stood, in a dump of APIs."""

    @property
    def context(self) -> int:
        """Of a part of an FFTS task; 65535 of a whole one."""
        return self.part[1] if self.part else UNKNOWN_ID

    @property
    def thread(self) -> int:
        """Of a part of an FFTS task; 65535 of a whole one."""
        return self.part[2] if self.part else UNKNOWN_ID

    @property
    def debug(self) -> bool:
        """Whether it tells of an overflow, in whatever form."""
        return (self.op_type, self.op_name) == _OVERFLOW


def numbered(name: str) -> bool:
    """Return whether a name may be a bin file's, as all of them end in a number.

    That is a time stamp, a slot, or what stands in the place of a name that was too long.
    """
    return _NUMBERED.fullmatch(name.removesuffix(PACKED)) is not None


def parsed(name: str) -> FileName | None:
    """Return what a name in one of CANN's folders says; None for any other file's."""
    body, kind = _body(name)
    found = _NAME.fullmatch(body)
    if found is None:
        return None
    ids = _ids([int(number) for number in found["numbers"].split(".")])
    if not _fits(kind, found) or ids is None:
        return None
    number, task, stream, stamp, part = ids
    first, second, tensor = found["first"], found["second"], found["side"] is not None
    if kind is FileKind.OPERATOR and (tensor or (first, second) == _OVERFLOW):
        kind = FileKind.MEMBER if tensor else FileKind.OVERFLOW
    op_type, op_name = (second, first) if first.startswith(ACLNN) else (first, second)
    return FileName(
        kind=kind,
        op_type=op_type,
        op_name=op_name,
        task=task,
        stream=stream,
        timestamp_us=stamp,
        side=Side(found["side"] or Side.INPUT),
        slot=int(found["slot"] or 0),
        tensor_format=found["format"] or "",
        element=found["element"] or "",
        number=number,
        part=part,
    )


def parsed_exception(name: str) -> FileName | None:
    """Return what a name in a folder of exceptions says."""
    packed = PACKED if name.endswith(PACKED) else ""
    tagged = _TAGGED.fullmatch(name.removesuffix(packed))
    body = tagged["name"] if tagged else name.removesuffix(packed)
    found = _EXCEPTION.fullmatch(body)
    if found is None or not (found["core"] or found["kernel"] == _NO_KERNEL):
        return parsed(body + packed)
    return FileName(
        kind=FileKind.OPERATOR,
        op_type=found["kernel"],
        op_name=found["kernel"],
        task=int(found["task"]),
        stream=int(found["stream"]),
        timestamp_us=int(found["stamp"]),
    )


def _body(name: str) -> tuple[str, FileKind]:
    body = name.removesuffix(PACKED)
    for suffix, kind in ((".npy", FileKind.TENSOR), (".csv", FileKind.TABLE)):
        if body.endswith(suffix):
            return body.removesuffix(suffix), kind
    if name.endswith(_JSON):
        return name.removesuffix(_JSON), FileKind.OVERFLOW_JSON
    return body, FileKind.OPERATOR


def _fits(kind: FileKind, found: re.Match[str]) -> bool:
    """Return whether a file of that kind is called so."""
    tensor = found["side"] is not None
    if kind is FileKind.TENSOR:
        return tensor
    if kind is FileKind.OVERFLOW_JSON and (found["first"], found["second"]) != _OVERFLOW:
        return False
    forms = {FileKind.TABLE: not tensor, FileKind.OVERFLOW_JSON: tensor}
    return found["format"] is None and forms.get(kind, True)


def _ids(numbers: list[int]) -> tuple[int | None, int, int, int, tuple[int, ...]] | None:
    """Return number, task, stream, stamp and part; None where the numbers are not these."""
    part: tuple[int, ...] = ()
    for length in (4, 3):  # with the device, and without
        last = numbers[-length:]
        possible = last[0] <= _MOST_TASK_TYPES and max(last) <= _MOST_ID
        if len(numbers) - length >= _FEWEST and possible:
            numbers, part = numbers[:-length], tuple(last)
            break
    if len(numbers) > _MOST:
        return None
    *before, stamp = numbers
    number = before.pop(0) if len(numbers) == _MOST else None
    task, stream = before if len(before) > 1 else (before[0], UNKNOWN_ID)
    return number, task, stream, stamp, part
