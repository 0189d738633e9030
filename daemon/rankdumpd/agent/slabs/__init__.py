"""The slab files of one agent, within its share of memory; knows neither sessions nor frames."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Collection
from pathlib import Path

from rankdump.contract.errors import ConfigError, DamagedError, ExhaustedError
from rankdump.contract.slab import slab_bytes
from rankdumpd.agent.elements import Descriptor
from rankdumpd.agent.slabs.cap import Cap
from rankdumpd.agent.slabs.file import UNFINISHED, Slab, find_slab, make_slab
from rankdumpd.agent.slabs.place import SUFFIX, session_of, slab_name
from rankdumpd.group_folder import make_folder

FOLDER_MODE = 0o710
"""The group may enter and not look around: names of slabs are known to their ranks alone."""
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = logging.getLogger(__name__)


class Slabs:
    """Makes slabs and takes them away; safe to use from several threads."""

    def __init__(self, folder: Path | None, *, group: int, ring_bytes: int, cap: Cap) -> None:
        """Make none without a folder, or with rings of no bytes.

        ConfigError when another agent has its slabs there: each would take the other's away.
        """
        self._folder = folder if ring_bytes else None
        self._group, self._ring_bytes, self._cap = group, ring_bytes, cap
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._said: set[str] = set()
        self._stopping = threading.Event()
        self._guard = self._own()

    @property
    def offered(self) -> bool:
        """Whether this agent makes slabs at all."""
        return self._folder is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            return sum(self._held.values())

    def make(
        self, session_id: str, *, wanted_bytes: int, sessions: int, secret_hash: str = ""
    ) -> Slab:
        """Make a session's slab, in the place of an earlier one; ExhaustedError says why not."""
        path = self._path(session_id, secret_hash)
        length = slab_bytes(min(wanted_bytes, self._ring_bytes))
        with self._lock:
            others = sum(self._held.values()) - self._held.get(session_id, 0)
            fault = self._cap.slab_fault(length, slab_bytes=others, sessions=sessions)
            if fault:
                raise self._none("full", fault)
            self._held[session_id] = length
        try:
            self._make_folder(path.parent)
            return make_slab(path, length, group=self._group, stopping=self._stopping.is_set)
        except OSError as error:
            self._forget(session_id)
            if self._stopping.is_set():
                raise ExhaustedError("the agent is stopping") from None
            why = f"no slab of {length} bytes in {path.parent}: {error}"
            raise self._none("folder", why) from None

    def find(self, session_id: str, *, secret_hash: str = "") -> Slab | None:
        """Return the slab that an earlier process left to a session; DamagedError if it is none."""
        if self._folder is None:
            return None
        path = self._path(session_id, secret_hash)
        try:
            slab = find_slab(path)
        except OSError as error:
            _take_away(path)
            raise DamagedError(f"slab {path} cannot be opened: {error}") from None
        if slab is not None:
            with self._lock:
                self._held[session_id] = slab.length
        return slab

    def remove(self, session_id: str, slab: Slab) -> None:
        """Take a slab away."""
        slab.remove()
        self._forget(session_id)

    def remove_strays(self, needed: Collection[str]) -> None:
        """Take away what earlier processes left and no session and no process needs."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.glob(f"*{SUFFIX}"):
            if session_of(path.name) not in needed and not _in_use(path):
                _log.info("removing %s, which no session needs", path)
                _take_away(path)
        for path in self._folder.glob(f"*{UNFINISHED}"):
            _take_away(path)

    def stop(self) -> None:
        """Finish none of those that are being made."""
        self._stopping.set()

    def leave(self) -> None:
        """Leave the folder to the next process, or take it away if nothing is left in it."""
        if self._folder is not None and not self.held_bytes:
            # Where it is not there, or not empty: what stands there is not ours to remove.
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        self._guard = None

    def _own(self) -> Descriptor | None:
        """Lock the folder itself; None where there is no such lock, or no such folder: the first
        that wants a slab will hear why.
        """
        while self._folder is not None:
            try:
                self._make_folder(self._folder)
                guard = Descriptor(os.open(self._folder, _ENTER))
                fcntl.flock(guard.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                allowed = "a folder in which no other agent has its slabs"
                where = str(self._folder.parent)
                raise ConfigError("settings", "agent.runtime_dir", where, allowed) from None
            except FileNotFoundError:
                # An agent that ended took it away at this moment.
                continue
            except OSError:
                return None
            # The same, a moment later.
            if os.fstat(guard.number).st_nlink:
                return guard
        return None

    def _path(self, session_id: str, secret_hash: str) -> Path:
        if self._folder is None:
            raise ExhaustedError("this agent makes no slabs")
        return self._folder / slab_name(session_id, secret_hash)

    def _make_folder(self, folder: Path) -> None:
        # The socket's folder, before there is a socket.
        make_folder(folder.parent, self._group)
        # Another session may be just as far.
        folder.mkdir(parents=True, mode=FOLDER_MODE, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to user {facts.st_uid}")
        if stat.S_IMODE(facts.st_mode) != FOLDER_MODE:
            os.chown(folder, -1, self._group)
            folder.chmod(FOLDER_MODE)

    def _forget(self, session_id: str) -> None:
        with self._lock:
            self._held.pop(session_id, None)

    def _none(self, kind: str, why: str) -> ExhaustedError:
        # Every session hears of it; the log once.
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("frames of some ranks travel on their streams: %s", why)
        return ExhaustedError(why)


def _take_away(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # It costs memory, but keeps nobody from working.
        _log.warning("%s cannot be removed: %s", path, error)


def _in_use(path: Path) -> bool:
    try:
        slab = find_slab(path)
    except OSError:
        return False
    if slab is None:
        return False
    try:
        return slab.in_use()
    finally:
        slab.close()
