"""Reads how long the collectives of a process group may wait.

Backends tell it where torch has no public word for it: what is not there is not known.
"""

# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankdump.contract.timeouts import GroupTimeout

_MICROSECOND = timedelta(microseconds=1)
_known: weakref.WeakKeyDictionary[Any, dict[str, GroupTimeout | None]] = weakref.WeakKeyDictionary()
"""By group, for a name may be given again, and by kind of device; empty for the group's own."""


def timeout_of(group: dist.ProcessGroup, device: torch.device | None) -> GroupTimeout | None:
    """Return what a group's backend for tensors of a device was made with; None when unknown."""
    known = _known.get(group)
    if known is None:
        known = _known[group] = {}
    kind = "" if device is None else device.type
    if kind not in known:
        found = (_read(group, each) for each in _devices(group, device))
        known[kind] = next(filter(None, found), None)
    return known[kind]


def _devices(group: Any, device: torch.device | None) -> Sequence[torch.device]:
    if device is not None:
        return (device,)
    return tuple(getattr(group, "_device_types", ()))


def _read(group: Any, device: torch.device) -> GroupTimeout | None:
    try:
        backend = group._get_backend(device)
        limit = backend.options._timeout
        if not isinstance(limit, timedelta) or limit < timedelta():
            return None
        return GroupTimeout(str(group.group_name), backend.name().lower(), limit // _MICROSECOND)
    except (AttributeError, RuntimeError, TypeError):
        return None
