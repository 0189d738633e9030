"""Text of ratios, shapes, counts and scope names for people. Pure: no terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from rich.cells import cell_len, set_cell_size

from rankdump._analysis.reader.query import ranges
from rankdump._core.tensor_layout import TensorLayout

_ELLIPSIS = "..."


def format_ratio(bytes_in: int, bytes_stored: int) -> str:
    """Return the compression ratio: `2.50x`, or a dash when nothing is stored."""
    return f"{bytes_in / bytes_stored:.2f}x" if bytes_stored else "-"


def format_shape(extents: Iterable[int]) -> str:
    """Return a shape without blanks: `(2,3)`, or `()` for a scalar."""
    return f"({','.join(map(str, extents))})"


def to_json_value(value: object) -> object:
    """Return a value for JSON: `nan`, infinities and complex numbers become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, complex) else value


def format_reasons(counts: Mapping[str, int]) -> str:
    """Return counts by reason, most frequent first: `disk_low 10, device_excluded 2`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered if count)


def list_first(names: Collection[str], most: int, spell: Callable[[str], str] = str) -> str:
    """Return the first names, joined by commas; `...` stands for the others."""
    more = ["..."] if len(names) > most else []
    return ", ".join([*map(spell, islice(names, most)), *more])


def shorten_text(text: str, width: int) -> str:
    """Return a text shortened in the middle to a width; a quarter of what is kept is its head."""
    if cell_len(text) <= width:
        return text
    kept = max(width - len(_ELLIPSIS), 2)
    head = set_cell_size(text, kept // 4)
    tail = text
    while cell_len(tail) > kept - kept // 4:
        tail = tail[1:]
    return head + _ELLIPSIS + tail


def wrap_text(text: str, width: int | None) -> list[str]:
    """Return the lines of a sentence, broken between words; one line without a width."""
    if width is None or not text:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def format_layout(layout: TensorLayout) -> list[tuple[str, str]]:
    """Return the lines about a layout: what they are about, and the text."""
    if layout.is_sample:
        return [("kept", str(layout))]
    mesh, flat = layout.mesh, layout.flat_range
    part = f"; elements {flat[0]:,} to {flat[1]:,} of the flattened tensor" if flat else ""
    name = f"{mesh.name} " if mesh.name else ""
    return [
        ("layout", f"{layout} (from {layout.source.value})"),
        ("global shape", format_shape(layout.global_shape)),
        ("offset", format_shape(layout.global_offset) + part),
        ("mesh", f"{name}{format_shape(mesh.shape)} of ranks {ranges(mesh.list_ranks())}"),
        *([("padding", f"{layout.padding:,} elements")] if layout.padding else []),
        *([("logical name", layout.logical_name)] if layout.logical_name else []),
    ]
