"""Releases of MindSpore whose names and tables a tree can follow, as named output profiles. Pure.

Source: mindspore-dump.md 9.4 and 2.3; what the offline debugger of 2.0 needs: 7.4 there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """How a tree is spelt."""

    name: str
    version: str
    """Release that `config.json` names; readers compare it with their own."""
    short_names: bool = False
    """Operators are named by the last component of their scope; parameters keep their dots."""
    element_token: bool = False
    """File names end in the element type."""
    fixed_table: bool = False
    """`statistic.csv` has its ten old columns, and no comma at the end of a row."""

    def element_of(self, dtype: str, device_target: str) -> str:
        """Return the token of an element type; the CPU's is the framework's own type label."""
        if not self.element_token:
            return ""
        return _label(dtype) if device_target == "CPU" else dtype


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ms2.3", "2.3.0"),
        Profile("ms2.4", "2.4.0", element_token=True),
        Profile("ms2.0", "2.0.0", short_names=True, fixed_table=True),
    )
}
DEFAULT_PROFILE = PROFILES["ms2.3"]


def _label(dtype: str) -> str:
    """Return `Float32` for `float32`, `UInt8` for `uint8`, `Float8E4M3FN` for `float8_e4m3fn`."""
    head, _, variant = dtype.partition("_")
    for plain, label in (("bfloat", "BFloat"), ("uint", "UInt")):
        if head.startswith(plain):
            return head.replace(plain, label)
    return head.capitalize() + variant.upper()
