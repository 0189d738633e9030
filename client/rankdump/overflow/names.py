"""Names of dump files, as far as finding the operator of an overflow needs them. Pure.

    {op_type}.{op_name}.{task}[.{stream}].{timestamp}[.{kind}.{context}.{thread}[.{device}]]

A number may stand before the task (of a captured stream), and after all of it what a converted or
an npy file says of one tensor. Source: ascend-formats.md 2.1, 2.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEBUG_TYPE, DEBUG_NAME = "Opdebug", "Node_OpDebug"
_NAME = re.compile(
    r"([^.]*)\.([^.]*)\.(\d{1,255}(?:\.\d{1,255}){1,8}?)"
    r"(?:\.(input|output|l1buffer|space)\.(\d{1,9})(\.[^/]*)?)?(?:\.zst)?"
)
_STAMP_DIGITS = 12
"""A time in microseconds since 1970 has sixteen; no id comes near."""


@dataclass(frozen=True, slots=True)
class DumpName:
    """What one file's name says."""

    op_type: str
    op_name: str
    task: int
    stream: int | None
    """Older releases do not say it."""
    timestamp_us: int
    context: int | None = None
    thread: int | None = None
    side: str = ""
    slot: int = 0
    ending: str = ""
    """Behind side and slot, as `.json`."""

    @property
    def debug(self) -> bool:
        """Whether it is an overflow file or the JSON of one."""
        return self.op_type == DEBUG_TYPE and self.op_name == DEBUG_NAME

    @property
    def whole(self) -> bool:
        """Whether it is the name of a bin file with all that an operator has."""
        return not self.side


def dump_name(name: str) -> DumpName | None:
    """Return what a file's name says; None when it is no dump file's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    texts = found[3].split(".")
    numbers = [int(text) for text in texts]
    long = [at for at, text in enumerate(texts) if len(text) >= _STAMP_DIGITS]
    at = long[0] if long else min(2, len(numbers) - 1)
    ids, tail = numbers[:at], numbers[at + 1 :]
    if not 1 <= len(ids) <= 3:
        return None
    threaded = len(tail) >= 3
    return DumpName(
        op_type=found[1],
        op_name=found[2],
        task=ids[-2] if len(ids) > 1 else ids[0],
        stream=ids[-1] if len(ids) > 1 else None,
        timestamp_us=numbers[at],
        context=tail[1] if threaded else None,
        thread=tail[2] if threaded else None,
        side=found[4] or "",
        slot=int(found[5] or 0),
        ending=(found[6] or "").removesuffix(".zst"),
    )
