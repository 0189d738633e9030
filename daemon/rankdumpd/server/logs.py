"""Log output of a process on standard error: lines for people or JSON objects for machines, with
journal priorities where systemd reads them.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from rankdumpd.settings import LogSettings

LOG_KEYS = ("job", "rank", "session", "iteration", "root", "worker")
"""What a line may be about besides its text: the only words that `extra=` uses."""

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""Of syslog, by the least level that has them."""


class SessionIdentity(Protocol):
    """What says whose it is: a session's request, or its status."""

    @property
    def job_id(self) -> str:
        """The job."""
        ...

    @property
    def rank(self) -> int:
        """The rank in it."""
        ...

    @property
    def session_id(self) -> str:
        """Its session."""
        ...


def build_log_fields(named: SessionIdentity, **more: object) -> dict[str, object]:
    """Return what a line about a session says beside its text."""
    return {"job": named.job_id, "rank": named.rank, "session": named.session_id, **more}


class TextLogFormatter(logging.Formatter):
    """A line for people; `who` stands before the name of the logger."""

    def __init__(self, who: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")


class JsonLogFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, process, and those of KEYS that are known."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._process = {"process": os.getpid(), **({"who": who.strip()} if who else {})}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        found: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        found |= {key: getattr(record, key) for key in LOG_KEYS if hasattr(record, key)}
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class JournalLogFormatter(logging.Formatter):
    """Puts before each line of another formatter how urgent it is, as journald reads it."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, each with its priority."""
        mark = next(f"<{number}>" for least, number in _PRIORITIES if record.levelno >= least)
        return mark + self._inner.format(record).replace("\n", f"\n{mark}")


def build_formatter(settings: LogSettings, *, who: str, journal: bool) -> logging.Formatter:
    """Return what makes lines of records."""
    made = JsonLogFormatter(who) if settings.format == "json" else TextLogFormatter(who)
    return JournalLogFormatter(made) if journal else made


def set_up_logging(
    settings: LogSettings, environ: Mapping[str, str], *, who: str = "", to: TextIO | None = None
) -> None:
    """Let all loggers of this process write to standard error; `who` tells a worker from others."""
    stream = to or sys.stderr
    handler = logging.StreamHandler(stream)
    journal = environ.get("JOURNAL_STREAM", "") == _identify_stream(stream)
    handler.setFormatter(build_formatter(settings, who=who, journal=journal))
    logging.basicConfig(handlers=[handler], level=settings.level.upper())


def _identify_stream(stream: TextIO) -> str:
    """Return a file as systemd names it in JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except OSError:
        return "none"
    return f"{found.st_dev}:{found.st_ino}"
