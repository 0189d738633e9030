"""Bytes as people read them. Pure."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Return bytes with three digits or so: `1.46 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS) - 1)
    value, unit = count / 1024**power, _UNITS[power]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
