"""Search for collectives that were executed and not seen: process groups count the collectives of
their backends, and what they counted between our calls was called past torch's operators.

Only gloo is compared, whose count rises by the collectives of the calling thread alone. Replays of
a CUDA graph and groups written in Python have no such count; they are named as such.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from rankdump._core.events import UnseenReason

# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

_COUNTED_BACKENDS = frozenset({"gloo"})


class UnseenCollectiveCounter:
    """Collectives that were not seen, by group and reason, until they are taken."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """What each group had counted after our last look; -1 when it cannot be compared."""
        self._found: Counter[tuple[str, UnseenReason]] = Counter()

    def restart(self) -> None:
        """Forget everything: collectives of a time without a listener are nobody's loss."""
        self._known.clear()
        self._found.clear()
        for group in list_groups():
            self._known[group] = _read_count(group)

    def compare(self, group: dist.ProcessGroup) -> None:
        """Count what a group executed since the last look."""
        before = self._known.get(group)
        if before == -1:
            return
        count = self._known[group] = _read_count(group)
        if before is not None and count > before:
            self._found[str(group.group_name), UnseenReason.BACKEND_CALL] += count - before

    def skip(self, group: dist.ProcessGroup) -> None:
        """Take what a group has counted by now as seen."""
        if self._known.get(group) != -1:
            self._known[group] = _read_count(group)

    def add(self, group: str, reason: UnseenReason) -> None:
        """Count one collective that is known to be missing."""
        self._found[group, reason] += 1

    def take(self) -> dict[tuple[str, UnseenReason], int]:
        """Return and forget what was found, after a look at all groups."""
        for group in list_groups():
            self.compare(group)
            if is_python_group(group):
                self._found[str(group.group_name), UnseenReason.PYTHON_GROUP] = 0
        found, self._found = dict(self._found), Counter()
        return found


def list_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, except those without members here."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def is_python_group(group: dist.ProcessGroup) -> bool:
    """Return whether a class in Python replaces collectives of the group."""
    classes = type(group).__mro__
    return any("allreduce" in vars(each) for each in classes[: classes.index(dist.ProcessGroup)])


def is_captured(tensor_device: torch.device | None) -> bool:
    """Return whether a call is only captured into a CUDA graph, whose replays are not seen."""
    if tensor_device is None or tensor_device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing()


def _read_count(group: Any) -> int:
    try:
        if str(group.name()).lower() not in _COUNTED_BACKENDS:
            return -1
        return group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return -1
