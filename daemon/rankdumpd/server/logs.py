"""Log output of a process on standard error: lines for people or JSON objects for machines, with
journal priorities where systemd reads them.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rankdumpd.settings import LogSettings

LOG_KEYS = ("job", "rank", "session", "iteration", "root", "worker")
"""The only keys that `extra=` may use; JSON lines have them beside the message."""

_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""Syslog priorities, each with the lowest log level that it stands for, highest first."""


class SessionIdentity(Protocol):
    """Object with the ids of a session, such as a session request or a session status."""

    @property
    def job_id(self) -> str:
        """Id of the job."""
        ...

    @property
    def rank(self) -> int:
        """Number of the rank in its job."""
        ...

    @property
    def session_id(self) -> str:
        """Id of the session."""
        ...


def build_log_fields(session: SessionIdentity, **more: object) -> dict[str, object]:
    """Return the `extra` fields for log lines about a session."""
    return {"job": session.job_id, "rank": session.rank, "session": session.session_id, **more}


def log_about(
    logger: logging.Logger, session: SessionIdentity, **more: object
) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose lines carry the ids of a session."""
    return logging.LoggerAdapter(logger, build_log_fields(session, **more))


class RecentTexts:
    """Texts that were logged recently and are not logged again for some seconds; safe to use from
    several threads.
    """

    def __init__(self, quiet_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A text counts as new again `quiet_s` seconds after it was logged."""
        self._quiet_s, self._clock = quiet_s, clock
        self._lock = threading.Lock()
        self._logged_s: dict[str, float] = {}

    def is_new(self, text: str) -> bool:
        """Remember a text; return whether it has to be logged."""
        with self._lock:
            now_s = self._clock()
            self._logged_s = {
                each: at_s for each, at_s in self._logged_s.items() if now_s - at_s < self._quiet_s
            }
            is_new = text not in self._logged_s
            self._logged_s.setdefault(text, now_s)
            return is_new


class TextLogFormatter(logging.Formatter):
    """Formats log lines for people; `who` is put in front of the name of the logger."""

    def __init__(self, who: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")


class JsonLogFormatter(logging.Formatter):
    """Formats a log line as a JSON object: time, level, logger, message, process, and the LOG_KEYS
    that are set.
    """

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._process = {"process": os.getpid(), **({"who": who.strip()} if who else {})}

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line without its newline."""
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
    """Puts the priority that journald reads in front of each line of another formatter."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of the other formatter, each with its priority."""
        mark = next(f"<{number}>" for least, number in _PRIORITIES if record.levelno >= least)
        return mark + self._inner.format(record).replace("\n", f"\n{mark}")


def build_formatter(settings: LogSettings, *, who: str, journal: bool) -> logging.Formatter:
    """Return the formatter for the log settings; `journal` adds priorities for journald."""
    formatter = JsonLogFormatter(who) if settings.format == "json" else TextLogFormatter(who)
    return JournalLogFormatter(formatter) if journal else formatter


def set_up_logging(
    settings: LogSettings, environ: Mapping[str, str], *, who: str = "", to: TextIO | None = None
) -> None:
    """Send the log of this process to standard error; `who` names a worker."""
    stream = to or sys.stderr
    handler = logging.StreamHandler(stream)
    journal = environ.get("JOURNAL_STREAM", "") == _identify_stream(stream)
    handler.setFormatter(build_formatter(settings, who=who, journal=journal))
    logging.basicConfig(handlers=[handler], level=settings.level.upper())


def _identify_stream(stream: TextIO) -> str:
    """Return the device and inode of a stream, in the form that systemd's JOURNAL_STREAM has."""
    try:
        found = os.fstat(stream.fileno())
    except OSError:
        return "none"
    return f"{found.st_dev}:{found.st_ino}"
