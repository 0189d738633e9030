"""A process that compares groups of pairs, and the caller's end of it.

It is a Python of its own that imports this module and nothing of the caller's: a process of
`multiprocessing` would import the caller's script again, which may be a training. It reads from a
pipe between the two, and ends when the other end is gone.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rankdump.diff.groups import Answers, Group, compare_group
from rankdump.diff.values import Settings

SERVE = f"from {__name__} import serve"
"""How the process comes by what it does."""


class Worker:
    """One such process; starts with the object, which serves one thread."""

    def __init__(self) -> None:
        own, other = Pipe()
        with other:
            path = f"import sys; sys.path[:] = {sys.path!r}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{path}; {SERVE}; serve({other.fileno()})"],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                # An interrupt from the terminal is the caller's, who then ends this process.
                start_new_session=True,
            )
        self._pipe: Connection[Any, Any] = own

    def started(self) -> bool:
        """Wait until it can compare; return whether it came so far."""
        try:
            return self._pipe.recv() is None
        except (EOFError, OSError):
            return False

    def compare(self, group: Group, settings: Settings) -> Answers | None:
        """Return the outcomes of a group; None when the process died, or was ended, before that.

        An error in it is raised here.
        """
        try:
            self._pipe.send((group, settings))
            answer: Answers | Exception = self._pipe.recv()
        except (EOFError, OSError):
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """End it in the midst of its work; any thread may."""
        self._process.kill()

    def close(self) -> None:
        """Let it end, and wait for that."""
        self._pipe.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Compare what comes out of a pipe until the other end is closed."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    try:
        pipe.send(None)
        while True:
            group, settings = pipe.recv()
            try:
                answer = compare_group(group, settings)
            except Exception as error:  # the caller's to raise: it knows what was compared
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
