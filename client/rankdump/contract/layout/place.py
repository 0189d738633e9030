"""Where a file of a tree stands, and what all files of one session share. Pure values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from rankdump.contract.key import sanitised
from rankdump.contract.layout.profile import DEFAULT_PROFILE, Profile

NAME_MAX_BYTES = 255
MAPPING_FILE = "mapping.csv"
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file stands."""

    folder: str
    """Relative to the root, with `/`."""
    name: str
    """Name on disk."""
    mapped_from: str = ""
    """The full name, when it was too long to be the name on disk."""

    @property
    def path(self) -> str:
        """Relative to the root."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True)
class Stand:
    """What every path of one session's tree has in common."""

    root: str = ""
    """Absolute folder: CANN shortens a name by a hash of its whole path."""
    device: int = 0
    """Local device id."""
    started: str = ""
    """When the session began, `YYYYmmddHHMMSS`."""
    profile: Profile = DEFAULT_PROFILE


@lru_cache(maxsize=_REMEMBERED)
def folder_name(name: str) -> str:
    """Return a model's name as a folder can have it: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", sanitised(name))[:NAME_MAX_BYTES] or "_"
