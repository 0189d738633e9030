"""Failing layer of a process under `os`, `time` and `sqlite3`, set by a control page.

Installed at the start of a process (`site/sitecustomize.py`), or for a test (`FaultLayer.undo`).
Calls fail when their path, or that of their descriptor, is below the prefix.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from faults.control_page import CALLS, ControlPage

from rankdumpd.agent.storage import tree

_PAUSE_S = 0.01
_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_COMMANDS = ("BEGIN", "COMMIT")


class FaultLayer:
    """Replacements of the real calls."""

    def __init__(self, control: ControlPage, prefix: str, seed: int = 0) -> None:
        """Install it: errors below the prefix, and the clock everywhere."""
        self._control, self._prefix = control, prefix
        self._dice = random.Random(seed)
        self._real: list[tuple[Any, str, Any]] = []
        for call in CALLS:
            if call != "sqlite":
                self._replace(os, call, self._guarded(call, getattr(os, call)))
        self._replace(os, "writev", self._guarded("write", os.writev))
        real_time, real_ns = time.time, time.time_ns
        self._replace(time, "time", lambda: real_time() + self._ahead_us() / 1e6)
        self._replace(time, "time_ns", lambda: real_ns() + self._ahead_us() * 1000)
        self._replace(sqlite3, "connect", self._connect(sqlite3.connect))
        # Calls of C are not seen here, so small files are made by calls of Python.
        self._replace(tree, "KERNELS", tree.KERNELS._replace(write_small_files=None))

    def undo(self) -> None:
        """Put the real calls back."""
        while self._real:
            setattr(*self._real.pop())

    def _replace(self, module: Any, name: str, call: object) -> None:
        self._real.append((module, name, getattr(module, name)))
        setattr(module, name, call)

    def _ahead_us(self) -> int:
        ahead_us = self._control.clock_us
        if ahead_us:
            self._control.hit("clock")
        return ahead_us

    def _guarded(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        control = self._control

        def guarded(*args: Any, **fields: Any) -> Any:
            number, per_mille = control.failing(call)
            if (per_mille or control.stalled) and self._ours(args, fields):
                self._wait()
                if per_mille and self._dice.randrange(1000) < per_mille:
                    control.hit(call)
                    raise OSError(number, os.strerror(number), str(args[0]))
            try:
                return real(*args, **fields)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    control.hit("descriptors")
                raise

        return guarded

    def _ours(self, args: tuple[Any, ...], fields: dict[str, Any]) -> bool:
        # By path, by descriptor, or relative to the descriptor of a folder.
        named = [*args[:2], *(fields[name] for name in _FOLDERS if fields.get(name) is not None)]
        return any(_path_of(each).startswith(self._prefix) for each in named)

    def _wait(self) -> None:
        if self._control.stalled:
            self._control.hit("stall")
        while self._control.stalled:
            time.sleep(_PAUSE_S)

    def _connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        control, dice = self._control, self._dice

        class Failing(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
                _, per_mille = control.failing("sqlite")
                if per_mille and sql.startswith(_COMMANDS) and dice.randrange(1000) < per_mille:
                    control.hit("sqlite")
                    raise sqlite3.OperationalError("disk I/O error")
                return super().execute(sql, *args)

        return lambda *args, **fields: real(*args, **{"factory": Failing} | fields)


def _path_of(named: Any) -> str:
    if not isinstance(named, int):
        return os.fsdecode(named) if isinstance(named, bytes) else str(named)
    try:
        return os.readlink(f"/proc/self/fd/{named}")  # noqa: PTH115
    except OSError:
        return ""


def install(control: str, prefix: str) -> None:
    """Install the layer of a process for as long as it lives."""
    FaultLayer(ControlPage(control), prefix, seed=os.getpid())
