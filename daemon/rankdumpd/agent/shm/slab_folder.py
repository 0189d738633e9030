"""The folder of an agent's slabs, which that agent locks, and the shares of the memory limit for
queue, slabs and sessions.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rankdump._core.log_once import LogOnce
from rankdump._core.units import format_bytes, format_count
from rankdump._shm.slab_format import compute_slab_bytes
from rankdump.errors import ConfigError, CorruptedError, ExhaustedError, UnavailableError
from rankdumpd.agent.records import FileDescriptor
from rankdumpd.agent.shm.ring_reader import iter_unread_sizes
from rankdumpd.agent.shm.slab_file import UNFINISHED_SUFFIX, SlabFile, make_slab, open_slab
from rankdumpd.server.state_files import make_group_folder

SLAB_SUFFIX = ".slab"
_HASH_CHARACTERS = 16
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")

_logger = logging.getLogger(__name__)


def find_slab_folder(runtime_dir: str, socket: Path | None) -> Path | None:
    """Return the folder of an agent's slabs; None when the agent listens on no Unix socket.

    Unless `runtime_dir` is set, the folder is beside the socket, so that one bind mount gives a
    container both.
    """
    if socket is None:
        return None
    folder = Path(runtime_dir) if runtime_dir else socket.parent
    if not is_in_memory(folder, _MOUNTS.read_text()):
        _logger.warning(
            "shared memory in %s will be written to a disk: set agent.runtime_dir to a folder "
            "on tmpfs",
            folder,
        )
    return folder / "slabs"


def make_slab_name(session_id: str, secret_hash: str) -> str:
    """Return the name of a session's slab, which other members of the group would have to guess.

    `secret_hash` is the hash of the session's secret, in hexadecimal; empty for a session without a
    secret.
    """
    hashed = f".{secret_hash[:_HASH_CHARACTERS]}" if secret_hash else ""
    return f"{session_id}{hashed}{SLAB_SUFFIX}"


def parse_session_id(name: str) -> str:
    """Return the session id that the name of a slab contains."""
    return name.partition(".")[0]


def is_in_memory(folder: Path, mounts: str) -> bool:
    """Return whether a folder is on a file system in memory; `mounts` is the text of mountinfo."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(_unescape(left.split(" ")[4]))
        # A later mount at the same point hides an earlier one, so `>=` and not `>`.
        if folder.resolve().is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = right.split(" ")[0], len(point.parts)
    return kind in _MEMORY_FILE_SYSTEMS


def find_group_id(name: str) -> int:
    """Return the number of a group, -1 for an empty name; ConfigError for an unknown group."""
    if not name:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError("settings", "agent.runtime_group", name, "a group of this host") from None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


SESSION_BYTES = 8 << 20
"""Bytes of memory for a session besides its slab: one message of the largest size."""
_MIN_SESSIONS = 16


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The memory limit that queue, slabs and sessions stay below together."""

    total_bytes: int
    queue_bytes: int
    """Bytes of the queue, or of the largest record if that is more, because it passes the queue
    alone.
    """
    record_bytes: int
    """Bytes of the largest record that fits into memory."""

    def session_fault(self, *, slab_bytes: int, sessions: int) -> str:
        """Return why one more session does not fit into the limit; empty when it does."""
        return self._fault("a session", SESSION_BYTES, slab_bytes, sessions)

    def slab_fault(self, wanted_bytes: int, *, slab_bytes: int, sessions: int) -> str:
        """Return why one more slab does not fit into the limit; empty when it does."""
        return self._fault("a slab", wanted_bytes, slab_bytes, sessions)

    def _fault(self, what: str, wanted_bytes: int, slab_bytes: int, sessions: int) -> str:
        used_bytes = self.queue_bytes + slab_bytes + sessions * SESSION_BYTES
        if used_bytes + wanted_bytes <= self.total_bytes:
            return ""
        return (
            f"{what} needs {wanted_bytes} bytes, and {max(0, self.total_bytes - used_bytes)} of "
            f"the agent's {self.total_bytes} (agent.memory_bytes) are left: "
            f"{self.queue_bytes} for its queue, {slab_bytes} in slabs, {sessions} sessions"
        )


def share_memory(
    memory_bytes: int, *, machine_bytes: int, queue_bytes: int, max_record_bytes: int
) -> MemoryShares:
    """Return the shares of the memory limit; without a limit, the shares of half the machine's
    memory.

    On a small machine that half grows to the size that a few sessions need.
    """
    total_bytes = memory_bytes or max(
        machine_bytes // 2, queue_bytes + _MIN_SESSIONS * SESSION_BYTES
    )
    record_bytes = min(max_record_bytes, max(queue_bytes, total_bytes // 2))
    return MemoryShares(total_bytes, max(queue_bytes, record_bytes), record_bytes)


SLAB_FOLDER_MODE = 0o710
"""The group may enter the folder but not list it, so that only a rank knows the name of
its slab.
"""
_ENTER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SlabFolder:
    """Creates and removes the slabs of an agent; safe to use from several threads."""

    def __init__(
        self, folder: Path | None, *, group: int, ring_bytes: int, memory: MemoryShares
    ) -> None:
        """Without a folder, or with rings of 0 bytes, no slabs are created.

        UnavailableError when another agent has its slabs in the folder, because each agent would
        remove the slabs of the other.
        """
        self._folder = folder if ring_bytes else None
        self._group, self._ring_bytes, self._memory = group, ring_bytes, memory
        self._lock = threading.Lock()
        self._lengths: dict[str, int] = {}
        self._warnings = LogOnce(_logger)
        self._losses: list[str] = []
        self._stopping = threading.Event()
        self._lock_file = self._lock_folder()

    @property
    def offered(self) -> bool:
        """Whether this agent offers slabs to its ranks."""
        return self._folder is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            return sum(self._lengths.values())

    def make(
        self,
        session_id: str,
        *,
        wanted_bytes: int,
        sessions: int,
        secret_hash: str = "",
        has_journal: bool = False,
    ) -> SlabFile:
        """Create a session's slab in place of an earlier one; ExhaustedError when that is
        impossible.
        """
        path = self._path(session_id, secret_hash)
        ring_bytes = min(wanted_bytes, self._ring_bytes)
        length = compute_slab_bytes(ring_bytes, has_journal=has_journal)
        with self._lock:
            others = sum(self._lengths.values()) - self._lengths.get(session_id, 0)
            fault = self._memory.slab_fault(length, slab_bytes=others, sessions=sessions)
            if fault:
                raise self._make_error("full", fault)
            self._lengths[session_id] = length
        try:
            self._make_folder(path.parent)
            return make_slab(
                path,
                length,
                group=self._group,
                has_journal=has_journal,
                stopping=self._stopping.is_set,
            )
        except OSError as error:
            self._forget(session_id)
            if self._stopping.is_set():
                raise ExhaustedError("the agent is stopping") from None
            why = f"a slab of {length} bytes cannot be made in {path.parent}: {error}"
            raise self._make_error("folder", why) from None

    def find(self, session_id: str, *, secret_hash: str = "") -> SlabFile | None:
        """Return the slab of a session from an earlier process; CorruptedError if the slab is
        invalid.
        """
        if self._folder is None:
            return None
        path = self._path(session_id, secret_hash)
        try:
            slab = open_slab(path)
        except OSError as error:
            _remove_file(path)
            raise CorruptedError(f"slab {path} cannot be opened: {error}") from None
        if slab is not None:
            with self._lock:
                self._lengths[session_id] = slab.length
        return slab

    def remove(self, session_id: str, slab: SlabFile) -> None:
        """Remove the slab of a session."""
        slab.remove()
        self._forget(session_id)

    def remove_strays(
        self, needed: Collection[str], find_last_committed: Callable[[str], int | None]
    ) -> None:
        """Remove slabs of earlier processes that no session and no process needs.

        `find_last_committed` returns the highest sequence number of a session's committed frames;
        None for a session that the ledger does not know.
        """
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.glob(f"*{SLAB_SUFFIX}"):
            session_id = parse_session_id(path.name)
            if session_id not in needed and not _is_in_use(path):
                self._note_stray(path, find_last_committed(session_id))
                _remove_file(path)
        for path in self._folder.glob(f"*{UNFINISHED_SUFFIX}"):
            _remove_file(path)

    def findings(self) -> list[str]:
        """Return a sentence for each loss of data in slabs of earlier processes."""
        return list(self._losses)

    def _note_stray(self, path: Path, last_committed: int | None) -> None:
        frames, byte_count = _count_unread(path, last_committed or 0)
        if not frames:
            _logger.info("removing %s, which no session needs", path)
            return
        why = "its rank was lost more than a day ago"
        if last_committed is None:
            why = (
                "its session is not in the ledger: that is a new one, or an agent with another "
                "agent.state_dir had this runtime folder"
            )
        sentence = (
            f"{path} is removed with {format_count(frames, 'frame')} ({format_bytes(byte_count)}) "
            f"that nobody had read: {why}"
        )
        _logger.warning("%s", sentence, extra={"session": parse_session_id(path.name)})
        self._losses.append(sentence)

    def stop(self) -> None:
        """Stop creating the slabs that are not complete yet."""
        self._stopping.set()

    def leave(self) -> None:
        """Unlock the folder, and remove it if it is empty."""
        if self._folder is not None and not self.held_bytes:
            # The folder may not exist, or contain files of others.
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        self._lock_file = None

    def _lock_folder(self) -> FileDescriptor | None:
        """Lock the folder; None where that is impossible, since creating the first slab reports the
        reason.
        """
        while self._folder is not None:
            try:
                self._make_folder(self._folder)
                lock_file = FileDescriptor(os.open(self._folder, _ENTER_FLAGS))
                fcntl.flock(lock_file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = f"agent.runtime_dir: {self._folder.parent}"
                raise UnavailableError(f"{where} has the slabs of another agent") from None
            except FileNotFoundError:
                # Another agent has just ended and has removed the folder in the meantime.
                continue
            except OSError:
                return None
            # The agent that ended may also have removed the lock file after it was opened here.
            if os.fstat(lock_file.number).st_nlink:
                return lock_file
        return None

    def _path(self, session_id: str, secret_hash: str) -> Path:
        if self._folder is None:
            raise ExhaustedError("this agent makes no slabs")
        return self._folder / make_slab_name(session_id, secret_hash)

    def _make_folder(self, folder: Path) -> None:
        # The folder of the socket may not exist yet.
        make_group_folder(folder.parent, self._group)
        # Another session may create the folder at the same time.
        folder.mkdir(parents=True, mode=SLAB_FOLDER_MODE, exist_ok=True)
        status = folder.lstat()
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to user {status.st_uid}")
        if stat.S_IMODE(status.st_mode) != SLAB_FOLDER_MODE:
            os.chown(folder, -1, self._group)
            folder.chmod(SLAB_FOLDER_MODE)

    def _forget(self, session_id: str) -> None:
        with self._lock:
            self._lengths.pop(session_id, None)

    def _make_error(self, kind: str, why: str) -> ExhaustedError:
        """Return the error for one session; only the first error of each kind is logged."""
        message = f"some ranks send frames on their streams instead of shared memory: {why}"
        self._warnings.log(logging.WARNING, message, about=kind)
        return ExhaustedError(why)


def _remove_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # Only logged, because a slab that stays takes memory and does no other harm.
        _logger.warning("%s cannot be removed: %s", path, error)


def _count_unread(path: Path, after: int) -> tuple[int, int]:
    """Return the number of frames in a slab whose sequence numbers are above `after`, and their
    bytes, as far as they can be read.
    """
    frames = byte_count = 0
    with contextlib.suppress(OSError, CorruptedError):
        slab = open_slab(path)
        for size in iter_unread_sizes(slab, after) if slab else ():
            frames += 1
            byte_count += size
    return frames, byte_count


def _is_in_use(path: Path) -> bool:
    try:
        slab = open_slab(path)
    except OSError:
        return False
    return slab is not None and slab.is_in_use()
