"""Ingest that kills itself at one of its system calls.

python killed_ingest.py CALL ARGUMENTS...     as `rankdumpd ingest ARGUMENTS`
"""

from __future__ import annotations

import os
import sys

from deadly_calls import make_deadly

from rankdumpd.main import main

_CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "rmdir", "mkdir", "fchmod")

for each in _CALLS:
    make_deadly(os, each, int(sys.argv[1]))
main(["ingest", *sys.argv[2:]])
