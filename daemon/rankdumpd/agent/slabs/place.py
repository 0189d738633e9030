"""Where slabs can stand: looks at the machine, changes nothing."""

from __future__ import annotations

import grp
import logging
import re
from pathlib import Path

from rankdump.contract.errors import ConfigError

SUFFIX = ".slab"
_HASH_CHARACTERS = 16
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")

_log = logging.getLogger(__name__)


def folder_for(runtime_dir: str, socket: Path | None) -> Path | None:
    """Return the folder of an agent's slabs; None when it listens on no socket of this host.

    Without a setting it stands beside the socket: one bind mount shows a container both.
    """
    if socket is None:
        return None
    folder = Path(runtime_dir) if runtime_dir else socket.parent
    if not in_memory(folder, _MOUNTS.read_text()):
        _log.warning(
            "shared memory in %s will be written to a disk: agent.runtime_dir may name a folder "
            "on tmpfs",
            folder,
        )
    return folder / "slabs"


def slab_name(session_id: str, secret_hash: str) -> str:
    """Return the name of a session's slab: who is of the group, but not that rank, has to guess it.

    The hash is that of the session's secret, in hexadecimal; empty for a session without one.
    """
    guessed = f".{secret_hash[:_HASH_CHARACTERS]}" if secret_hash else ""
    return f"{session_id}{guessed}{SUFFIX}"


def session_of(name: str) -> str:
    """Return the session whose slab has a name."""
    return name.partition(".")[0]


def in_memory(folder: Path, mounts: str) -> bool:
    """Return whether a folder stands on a file system without a disk, given mountinfo's text."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split(" ")[4]))
        # A later mount at the same point hides the earlier one.
        if folder.resolve().is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = right.split(" ")[0], len(point.parts)
    return kind in _IN_MEMORY


def group_of(name: str) -> int:
    """Return a group's number, -1 for none; ConfigError when there is no such group."""
    if not name:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError("settings", "agent.runtime_group", name, "a group of this host") from None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
