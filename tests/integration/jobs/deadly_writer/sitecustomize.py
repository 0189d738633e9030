"""Startup hook of Python for an agent whose writer of the table kills it, and itself, at one of its
system calls: that of the number in the file DEADLY_CALL. The agent looks often what waits, and one
that starts again writes the window of the test at once.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

FIRST = 1
number = int(Path(os.environ["DEADLY_CALL"]).read_text())
if any("table_process" in word for word in sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from deadly_calls import TABLE_CALLS, make_deadly

    from rankdumpd.server import machine

    # On a loaded machine a process of idle priority may take minutes.
    machine.become_idle = lambda: None
    victims = os.getppid(), os.getpid()
    for each in TABLE_CALLS:
        make_deadly(os, each, number, victims)
    make_deadly(fcntl, "flock", number, victims)
else:
    from rankdumpd.agent.table import table_writer

    table_writer.CHECK_INTERVAL_S = 0.05
    if number != FIRST:
        table_writer.WINDOW_RECORDS = 6
