"""Which settings may change while a process runs, and which wait for its next start. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rankdumpd.settings import Settings

LIVE = {
    "agent": (
        "roots",
        "keep_free_bytes",
        "keep_free_ratio",
        "keep_free_inodes_ratio",
        "disk_bytes",
        "job_bytes",
        "retain_days",
        "retain_bytes",
    ),
    "coordinator": ("roots",),
    "log": ("level",),
}
"""What rooms take over at once; files of certificates are read again whenever they are used."""


@dataclass(frozen=True, slots=True)
class News:
    """Settings that were read again."""

    settings: Settings
    """What holds from now on."""
    changed: tuple[str, ...]
    """Names of what was taken over."""
    waiting: tuple[str, ...]
    """Names of what changed too, and holds only after the next start."""


def adopt(old: Settings, new: Settings) -> News:
    """Return the old settings with what of the new ones may change while a process runs."""
    changed: list[str] = []
    waiting: list[str] = []
    sections: dict[str, object] = {}
    for section in dataclasses.fields(Settings):
        before, after = getattr(old, section.name), getattr(new, section.name)
        live = LIVE.get(section.name, ())
        names = [f.name for f in dataclasses.fields(after)]
        other = [name for name in names if getattr(before, name) != getattr(after, name)]
        taken = {name: getattr(after, name) for name in other if name in live}
        changed += [f"{section.name}.{name}" for name in other if name in live]
        waiting += [f"{section.name}.{name}" for name in other if name not in live]
        sections[section.name] = dataclasses.replace(before, **taken)
    return News(dataclasses.replace(old, **sections), tuple(changed), tuple(waiting))
