"""Ingests of which each kills itself at one of its system calls.

Each line on standard input is a list in JSON: the number of the call, and the arguments of
`rankdumpd ingest`. The line of the answer is the exit code. All modules are imported once, which
takes longer than an ingest does.
"""

from __future__ import annotations

import json
import os
import sys

from deadly_calls import make_deadly

from rankdumpd.main import main

_CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "rmdir", "mkdir", "fchmod")

for line in sys.stdin:
    call, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for each in _CALLS:
            make_deadly(os, each, call)
        main(["ingest", *arguments])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
