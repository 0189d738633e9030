"""The section `common_dump_settings`: each key by itself, in MindSpore's own order. Pure.

Facts: mindspore-dump.md 1.1-1.7. What keys mean for each other is in `debug_mode` and `content`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rankdump.contract.dialect.devices import ALLOWED as _DEVICES
from rankdump.contract.dialect.devices import parse_devices
from rankdump.contract.dialect.kernels import parse_kernels
from rankdump.contract.dialect.root import parse_root
from rankdump.contract.dialect.section import Section
from rankdump.contract.iterations import idle_segments, parse_iterations
from rankdump.contract.plan import NET_NAME, FileFormat, Iterations, Operators, SavedData

_MODES = "0 (every operator), 1 (those in kernels) or 2 (those marked with set_dump)"
_NET_NAMES = "1 to 255 letters, digits, _ and -"
_ITERATIONS = '"all", or numbers and ranges without blanks as "0|5-8|100-120"'
_SIDES = "0 (inputs and outputs), 1 (inputs) or 2 (outputs)"
_KERNELS = "an array of operator types, full scope names and name-regex(...)"
_DEBUG_MODES = "0 (no detection), 3 (overflow) or 4 (exception)"
_ONLY_ASYNC = f"{_DEBUG_MODES}; 1 and 2 are for asynchronous dump"
_ALL_MODES = "0 (no detection), 1, 2 or 3 (overflow) or 4 (exception)"
_NOTED_SEGMENTS = 5

_MANDATORY = {
    "dump_mode": _MODES,
    "net_name": _NET_NAMES,
    "iteration": _ITERATIONS,
    "input_output": _SIDES,
    "kernels": _KERNELS,
    "support_device": _DEVICES,
}
"""In the order in which MindSpore asks for them, before it looks at any value."""


@dataclass(frozen=True, slots=True)
class Common:
    """What `common_dump_settings` says."""

    root: str
    net_name: str
    dump_mode: int
    iterations: Iterations
    sides: int
    operators: Operators
    devices: tuple[int, ...]
    debug_mode: int
    overflow_limit: int
    file_format: FileFormat
    saved: SavedData
    initial_iteration: int


def parse_common(section: Section, environ: Mapping[str, str], *, synchronous: bool) -> Common:
    """Return the settings; the first fault in MindSpore's own order is the one reported."""
    section.require(_MANDATORY)
    dump_mode = section.uint("dump_mode", (0, 1, 2), _MODES)
    root = parse_root(section, environ)
    net_name = _net_name(section)
    iterations = _iterations(section)
    sides = section.uint("input_output", (0, 1, 2), _SIDES)
    operators = _operators(section, dump_mode)
    devices = parse_devices(section)
    debug_mode = _debug_mode(section, synchronous=synchronous)
    file_format = _file_format(section, synchronous=synchronous)
    overflow_limit = _overflow_limit(section, debug_mode)
    saved = _saved(section, file_format)
    return Common(
        root=root,
        net_name=net_name,
        dump_mode=dump_mode,
        iterations=iterations,
        sides=sides,
        operators=operators,
        devices=devices,
        debug_mode=debug_mode,
        overflow_limit=overflow_limit,
        file_format=file_format,
        saved=saved,
        initial_iteration=section.count("initial_iteration", "a number from 0", default=0),
    )


def _net_name(section: Section) -> str:
    net_name = section.text("net_name", _NET_NAMES)
    if not NET_NAME.fullmatch(net_name):
        raise section.refusal("net_name", _NET_NAMES)
    return net_name


def _iterations(section: Section) -> Iterations:
    text = section.text("iteration", _ITERATIONS)
    iterations = parse_iterations(text)
    if iterations is None:
        without_blanks = "".join(text.split())
        meant = text != without_blanks and parse_iterations(without_blanks) is not None
        raise section.refusal(
            "iteration", _ITERATIONS + (f'; here "{without_blanks}"' if meant else "")
        )
    idle = idle_segments(text)
    for segment, reason in list(idle.items())[:_NOTED_SEGMENTS]:
        section.note("iteration", f"{reason} and matches no iteration", segment)
    if len(idle) > _NOTED_SEGMENTS:
        section.note("iteration", f"has {len(idle)} segments that match no iteration")
    return iterations


def _operators(section: Section, dump_mode: int) -> Operators:
    items = section.items("kernels", _KERNELS)
    if dump_mode != 1:
        return Operators(everything=dump_mode == 0, marked=dump_mode == 2)
    try:
        return parse_kernels(items, lambda entry, reason: section.note("kernels", reason, entry))
    except ValueError as error:
        allowed = f"a valid regular expression in name-regex(...), not {error}"
        raise section.refusal("kernels", allowed) from None


def _debug_mode(section: Section, *, synchronous: bool) -> int:
    if synchronous:
        return section.uint("op_debug_mode", (0, 3, 4), _ONLY_ASYNC, default=0)
    if "op_debug_mode" not in section.values:
        section.note("op_debug_mode", "MindSpore asks for it in asynchronous dump; taken as 0")
    return section.uint("op_debug_mode", (0, 1, 2, 3, 4), _ALL_MODES, default=0)


def _file_format(section: Section, *, synchronous: bool) -> FileFormat:
    """Return the format that counts: synchronous dump knows one."""
    if synchronous:
        if section.values.get("file_format", "npy") != "npy":
            section.note("file_format", "is not read in synchronous dump, which writes npy")
        return "npy"
    return cast("FileFormat", section.choice("file_format", ("bin", "npy"), default="bin"))


def _overflow_limit(section: Section, debug_mode: int) -> int:
    """Return after how many operators a rank stops; 2.4 and later look at the key."""
    if debug_mode in (1, 2, 3):
        return section.count("overflow_number", "a number from 0 (no limit)", default=0)
    if "overflow_number" in section.values:
        raise section.refusal("overflow_number", "no such key unless op_debug_mode is 3")
    return 0


def _saved(section: Section, file_format: FileFormat) -> SavedData:
    saved = section.choice("saved_data", ("tensor", "statistic", "full"), default="tensor")
    if saved != "tensor" and file_format != "npy":
        allowed = '"tensor"; "statistic" and "full" need file_format "npy" in asynchronous dump'
        raise section.refusal("saved_data", allowed)
    return cast("SavedData", saved)
