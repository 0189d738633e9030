"""Units as people read them: bytes as KiB, MiB and so on. Pure."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: int) -> str:
    """Return bytes with three digits or so: `1.46 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_BYTE_UNITS) - 1)
    value, unit = count / 1024**power, _BYTE_UNITS[power]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
