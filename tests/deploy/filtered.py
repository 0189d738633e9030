"""Runs a command under a unit's system call filter, without a service manager, in the host copy.

    python3 filtered.py NAMES-FILE COMMAND...

Calls that the file does not name fail with EPERM, as under SystemCallErrorNumber=EPERM; so does
memory that is writable and executable, as under MemoryDenyWriteExecute.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import seccomp  # pyright: ignore[reportMissingImports]

WRITE, EXECUTE = 2, 4


def _rules(name: str) -> list[tuple[seccomp.Arg, ...]]:
    """Return the conditions under which a call is allowed."""
    if name == "mmap":
        both = WRITE | EXECUTE
        values = (0, WRITE, EXECUTE)
        return [(seccomp.Arg(2, seccomp.MASKED_EQ, both, value),) for value in values]
    if name in ("mprotect", "pkey_mprotect"):
        return [(seccomp.Arg(2, seccomp.MASKED_EQ, EXECUTE, 0),)]
    return [()]


if __name__ == "__main__":
    calls = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    calls.set_attr(seccomp.Attr.CTL_NNP, 1)
    for name in Path(sys.argv[1]).read_text().split():
        for rule in _rules(name):
            try:
                calls.add_rule(seccomp.ALLOW, name, *rule)
            except (RuntimeError, ValueError):
                break  # a call that this machine, or this library, does not know
    calls.load()
    os.execvp(sys.argv[2], sys.argv[2:])
