"""Counts, bytes, durations and percentages in the form in which people read them. Pure."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TEN_HOURS_US = 36_000_000_000


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(count: int) -> str:
    """Return a number of bytes with about three digits, such as `1.46 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_BYTE_UNITS) - 1)
    value, unit = count / 1024**power, _BYTE_UNITS[power]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"


def format_duration(microseconds: float) -> str:
    """Return a time in a suitable unit: `0.25 ms`, `8.2 ms`, `680 ms`, `12 s`, `1,836
    s`, `12.5 h`.
    """
    value, unit = microseconds / 1e3, "ms"
    if microseconds >= 1_000_000:
        value, unit = microseconds / 1e6, "s"
    if microseconds >= _TEN_HOURS_US:
        value, unit = microseconds / 3.6e9, "h"
    if value < 1:
        return f"{value:.2g} {unit}"
    return f"{_drop_zero(f'{value:.1f}')} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def format_percentage(share: float) -> str:
    """Return a share as a percentage, with a decimal below ten percent: `0.2%`, `60%`, `125%`."""
    percent = 100 * share
    return f"{_drop_zero(f'{percent:.1f}')}%" if percent < 10 else f"{percent:.0f}%"


def _drop_zero(number: str) -> str:
    return number.removesuffix(".0")
