"""Update of a table that kills itself at one of its system calls.

python killed_table.py CALL    the request as JSON on standard input
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import sys
from typing import Any

import pyarrow.parquet as pq

from rankdumpd.agent.table.table_process import TableRequest, write_rows

_CALLS = ("open", "fsync", "rename", "unlink", "mkdir", "fchmod", "close")
_counter = itertools.count(1)


def deadly(place: Any, name: str, last: int) -> None:
    real: Any = getattr(place, name)

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

    setattr(place, name, call)


request = TableRequest(**json.loads(sys.stdin.read()))
for each in _CALLS:
    deadly(os, each, int(sys.argv[1]))
deadly(fcntl, "flock", int(sys.argv[1]))
deadly(pq.ParquetWriter, "write_table", int(sys.argv[1]))
answer = write_rows(request)
sys.exit(answer.error or None)
