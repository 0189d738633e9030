"""Tells which call an error comes from. An error is known by sight and never kept.

What an error's traceback holds must die when the script lets go of the error: a script that
frees memory and tries again relies on it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import CodeType

_CHAIN = 32
"""Errors looked at in a row of causes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What an error is recognised by.

    Its identity alone would do but for one that was caught and freed, and whose place another
    one took; that one was hardly raised by the same line.
    """

    identity: int
    code: CodeType | None
    line: int


def handled_now() -> int:
    """Return the identity of the error that this thread is handling; 0 for none."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def raised_since(handled: int) -> BaseException | None:
    """Return the error being handled, unless it already was when `handled` was taken."""
    error = sys.exc_info()[1]
    return None if error is None or id(error) == handled else error


def fault_of(error: BaseException) -> Fault:
    """Return what an error is recognised by, while it is being handled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return Fault(id(error), None, 0)
    return Fault(id(error), trace.tb_frame.f_code, trace.tb_lineno)


def comes_from(error: BaseException, fault: Fault | None) -> bool:
    """Return whether an error is that one, or was raised because of it."""
    found: BaseException | None = error
    for _ in range(_CHAIN):
        if found is None or fault is None:
            return False
        if fault_of(found) == fault:
            return True
        found = found.__cause__ or found.__context__
    return False
