"""How the process of a rank ended."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

from rankdumpd.agent.session.rank_process import (
    format_process_end,
    open_process,
    read_process_end,
)

KNOWS_ENDS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


def test_end_of_a_process_is_known_once_its_parent_waited() -> None:
    """Where the kernel cannot tell, the end stays unknown."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    process = open_process(child.pid)
    assert process is not None
    assert read_process_end(process) == ""
    child.send_signal(signal.SIGABRT)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert read_process_end(process) == ("SIGABRT" if KNOWS_ENDS else "")


def test_process_that_does_not_exist_has_no_descriptor() -> None:
    """The number of a rank in a container may be that of no process here."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert open_process(child) is None
    assert open_process(-1) is None
    assert open_process(1 << 70) is None


def test_end_of_a_process_is_named_as_shells_do() -> None:
    """Signals by name, codes by number."""
    assert format_process_end(-9) == "SIGKILL"
    assert format_process_end(3) == "exit code 3"
    assert format_process_end(-250) == "signal 250"
