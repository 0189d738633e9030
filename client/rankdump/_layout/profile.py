"""Output profiles: releases of MindSpore whose names and tables a tree can follow, and the unique
short operator names of profile `ms2.0`. Pure.

MindSpore up to 2.2 numbered operators across the whole network, so `Conv2d-op1` was one operator
(MindSpore 2.0 and 2.3, Dump guide; MindInsight's offline debugger requires it). With short names
the first operator with a last component keeps it, and the next one gets the next free number.
`OperatorAliases` has no lock: only one thread at a time may use it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Profile(NamedTuple):
    """Spelling of names and tables of one release.

    It is a NamedTuple because that is hashed fastest: it is part of the key of each remembered
    name.
    """

    name: str
    version: str
    """Release in `config.json`; other readers compare it with their own."""
    short_names: bool = False
    """Whether operators are named by the last component of their scope; parameters keep
    their dots.
    """
    element_token: bool = False
    """Whether file names end in the element type."""
    fixed_table: bool = False
    """Whether `statistic.csv` has its ten old columns, and no comma at the end of a row."""

    def make_element_token(self, dtype: str, device_target: str) -> str:
        """Return the token of an element type in file names; on a CPU it is the framework's own
        type label.
        """
        if not self.element_token:
            return ""
        return format_type_label(dtype) if device_target == "CPU" else dtype


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ms2.3", "2.3.0"),
        Profile("ms2.4", "2.4.0", element_token=True),
        Profile("ms2.0", "2.0.0", short_names=True, fixed_table=True),
    )
}
DEFAULT_PROFILE = PROFILES["ms2.3"]


def format_type_label(dtype: str) -> str:
    """Return `Float32` for `float32`, `UInt8` for `uint8`, `Float8E4M3FN` for `float8_e4m3fn`."""
    for plain, label in (("bfloat", "BFloat"), ("uint", "UInt"), ("float8_", "Float8")):
        if dtype.startswith(plain):
            return label + dtype.removeprefix(plain).upper()
    return dtype.capitalize()


# In a training loop that never calls `step`, call numbers rise without end.
_MAX_NAMES = 1 << 17
_NUMBERED_NAME = re.compile(r"(.+-op)([0-9]{1,9})")
_GRADIENTS_PREFIX = "Gradients/"


def make_gradient_alias(parameter: str) -> str:
    """Return the alias of a parameter's gradient, whose short name would lose the scope."""
    return f"grad.{parameter}"


class OperatorAliases:
    """Short names: unique last components of scope names; a name keeps the alias that it got."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {"": ""}
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the limit of names is reached, so that further operators keep their own."""
        return len(self._names) >= _MAX_NAMES

    def find_alias(self, name: str) -> str | None:
        """Return the alias that a name was given; None if it was given none."""
        return self._names.get(name)

    def get_alias(self, name: str) -> str:
        """Return the alias of a name; the name itself if its last component is free."""
        found = self._names.get(name)
        if found is not None or self.is_full:
            return name if found is None else found
        inner = name.removeprefix(_GRADIENTS_PREFIX)
        scope, slash, last = name.rpartition("/")
        if inner != name and "/" not in inner:
            scope, slash, last = "", "", make_gradient_alias(inner)
        alias = f"{scope}{slash}{self._take_free_name(last)}"
        self._names[name] = alias
        return alias

    def _take_free_name(self, component: str) -> str:
        """Reserve and return a component, or the component with its next free number."""
        if component not in self._taken:
            self._taken.add(component)
            return component
        numbered = _NUMBERED_NAME.fullmatch(component)
        stem = numbered[1] if numbered else f"{component}-op"
        number = max(int(numbered[2]) if numbered else 0, self._next.get(stem, 0)) + 1
        while f"{stem}{number}" in self._taken:
            number += 1
        self._next[stem] = number
        self._taken.add(f"{stem}{number}")
        return f"{stem}{number}"
