"""Ingest that kills itself at one of its system calls.

python killed_ingest.py CALL ARGUMENTS...     as `rankdumpd ingest ARGUMENTS`
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from rankdumpd.main import main

_CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "rmdir", "mkdir", "fchmod")
_counter = itertools.count(1)


def deadly(name: str, last: int) -> None:
    real: Any = getattr(os, name)

    def call(*args: Any, **fields: Any) -> Any:
        number = next(_counter)
        if number == last and number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*args, **fields)
        finally:
            # Also behind a call that failed.
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, call)


for each in _CALLS:
    deadly(each, int(sys.argv[1]))
main(["ingest", *sys.argv[2:]])
