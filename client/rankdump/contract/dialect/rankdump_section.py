"""The section `rankdump` of a configuration file: how the tree is packed and delivered. Pure.

MindSpore ignores keys it does not know, so one file serves both. Here an unknown key is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, cast, get_args

from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.section import Section
from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.plan import Delivery, OnFull, Output

SECTION = "rankdump"
MAX_BLOCK_TIMEOUT_S = 86_400
MAX_BUFFER_BYTES = 1 << 40

_KEYS = (
    "layout",
    "profile",
    "codec",
    "on_full",
    "block_timeout_s",
    "buffer_bytes",
    "durability",
    "strict",
    "shared_memory",
    "embedded",
    "file_mode",
    "folder_mode",
)
# A dump of APIs is no configuration's: its calls come from a hook of their own.
_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.api is None)
_MODE = re.compile(r"0?[0-7]{3}")
_EMPTY: dict[str, object] = {SECTION: {}}


def parse_section(
    body: Mapping[str, object],
    *,
    file: str,
    output: Output,
    notes: Notes,
    layout_of: Callable[[str], str] | None = None,
) -> tuple[Output, Delivery]:
    """Return output and delivery; a key that is not there keeps what is given.

    `layout_of` says which tree goes with a profile where the section names none.
    """
    section = Section.of(body if SECTION in body else _EMPTY, SECTION, file=file, notes=notes)
    _check_keys(section)
    return _output(section, output, layout_of), _delivery(section, Delivery())


def _check_keys(section: Section) -> None:
    for key in section.values:
        if key not in _KEYS:
            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
            raise section.refusal(key, f"{', '.join(_KEYS)}; nearest: {nearest}")


def _output(section: Section, default: Output, layout_of: Callable[[str], str] | None) -> Output:
    profile = section.choice("profile", tuple(PROFILES), default=default.profile)
    layout = layout_of(profile) if layout_of else default.layout
    return replace(
        default,
        layout=section.choice("layout", _LAYOUTS, default=layout),
        profile=profile,
        codec=section.choice("codec", ("none", "zstd"), default=default.codec),
        file_mode=_mode(section, "file_mode", must=0o400, default=default.file_mode),
        folder_mode=_mode(section, "folder_mode", must=0o700, default=default.folder_mode),
    )


def _delivery(section: Section, default: Delivery) -> Delivery:
    on_full = section.choice("on_full", get_args(OnFull), default=default.on_full)
    durability = section.choice("durability", ("written", "synced"), default=default.durability)
    return Delivery(
        on_full=cast("OnFull", on_full),
        block_timeout_s=section.number(
            "block_timeout_s",
            low=0,
            high=MAX_BLOCK_TIMEOUT_S,
            allowed=f"seconds from 0 to {MAX_BLOCK_TIMEOUT_S}",
            default=default.block_timeout_s,
        ),
        buffer_bytes=_buffer_bytes(section, default.buffer_bytes),
        durability=cast("Literal['written', 'synced']", durability),
        strict=section.flag("strict", default.strict),
        shared_memory=section.flag("shared_memory", default.shared_memory),
        embedded=section.flag("embedded", default.embedded),
    )


def _buffer_bytes(section: Section, default: int) -> int:
    value = section.values.get("buffer_bytes", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BUFFER_BYTES:
        raise section.refusal("buffer_bytes", f"whole bytes from 1 to {MAX_BUFFER_BYTES}")
    return value


def _mode(section: Section, key: str, *, must: int, default: int) -> int:
    """Return a file mode; without the bits in `must` the agent would lock itself out."""
    allowed = f'an octal text as "{default:04o}" that includes {must:04o}'
    text = section.text(key, allowed, f"{default:04o}")
    mode = int(text, 8) if _MODE.fullmatch(text) else 0
    if mode & must != must:
        raise section.refusal(key, allowed)
    return mode
