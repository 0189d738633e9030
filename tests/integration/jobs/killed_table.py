"""Update of a table that kills itself at one of its system calls.

python killed_table.py CALL    the request as JSON on standard input
"""

from __future__ import annotations

import fcntl
import json
import os
import sys

import pyarrow.parquet as pq
from deadly_calls import TABLE_CALLS, make_deadly

from rankdumpd.agent.table.table_process import TableRequest, write_rows

request = TableRequest(**json.loads(sys.stdin.read()))
for each in TABLE_CALLS:
    make_deadly(os, each, int(sys.argv[1]))
make_deadly(fcntl, "flock", int(sys.argv[1]))
make_deadly(pq.ParquetWriter, "write_table", int(sys.argv[1]))
answer = write_rows(request)
sys.exit(answer.error or None)
