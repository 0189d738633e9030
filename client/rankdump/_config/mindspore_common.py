"""Section `common_dump_settings` of MindSpore's `data_dump.json`: each key by itself, in
MindSpore's own order (MindSpore 2.3, Dump guide). Pure. Rules across keys are in
`mindspore_config`. Each element of `support_device` is read as an unsigned 32-bit number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rankdump._config.config_section import ConfigSection
from rankdump._config.operator_patterns import parse_operator_patterns
from rankdump._config.output_path import parse_output_root
from rankdump._core.plan import (
    NET_NAME_PATTERN,
    IterationSelection,
    OperatorSelection,
    SavedDataMode,
    TensorFileFormat,
)
from rankdump._core.selection import find_idle_segments, parse_iterations
from rankdump.errors import ConfigError

ALLOWED_DEVICES = "an array of device ids"
_DEVICE_KEY = "support_device"


def parse_devices(common: ConfigSection) -> tuple[int, ...]:
    """Return the device ids once each; ConfigError names the index of a wrong element."""
    items = common.read_array(_DEVICE_KEY, ALLOWED_DEVICES)
    if not items:
        common.add_note(_DEVICE_KEY, "names no device, so no rank dumps")
    devices: dict[int, None] = {}
    for index, item in enumerate(items):
        device = _parse_device(item)
        if device is None:
            raise ConfigError(
                common.file, f"{common.name}.{_DEVICE_KEY}[{index}]", item, "a device id"
            )
        if isinstance(item, float) or device != item:
            common.add_note(_DEVICE_KEY, f"is not a device id and is read as {device}", item)
        if device in devices:
            common.add_note(_DEVICE_KEY, "is listed twice and counts once", device)
        devices[device] = None
    return tuple(devices)


def _parse_device(item: object) -> int | None:
    """Return what MindSpore makes of a number: it cuts fractions and lets negatives wrap."""
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return None
    if isinstance(item, float) and not math.isfinite(item):
        return None
    return int(item) & 0xFFFF_FFFF


_ALLOWED_MODES = "0 (every operator), 1 (those in kernels) or 2 (those marked with set_dump)"
_ALLOWED_NET_NAMES = "1 to 255 letters, digits, _ and -"
_ALLOWED_ITERATIONS = '"all", or numbers and ranges without blanks as "0|5-8|100-120"'
_ALLOWED_SIDES = "0 (inputs and outputs), 1 (inputs) or 2 (outputs)"
_ALLOWED_KERNELS = "an array of operator types, full scope names and name-regex(...)"
_ALLOWED_DEBUG_MODES = "0 (no detection), 3 (overflow) or 4 (exception)"
_ALLOWED_SYNCHRONOUS_DEBUG_MODES = f"{_ALLOWED_DEBUG_MODES}; 1 and 2 are for asynchronous dump"
_ALLOWED_ASYNCHRONOUS_DEBUG_MODES = "0 (no detection), 1, 2 or 3 (overflow) or 4 (exception)"
_MAX_NOTED_SEGMENTS = 5

_MANDATORY_KEYS = {
    "dump_mode": _ALLOWED_MODES,
    "net_name": _ALLOWED_NET_NAMES,
    "iteration": _ALLOWED_ITERATIONS,
    "input_output": _ALLOWED_SIDES,
    "kernels": _ALLOWED_KERNELS,
    "support_device": ALLOWED_DEVICES,
}
"""In the order in which MindSpore checks for them, before it checks any value."""


@dataclass(frozen=True, slots=True)
class CommonSettings:
    """Values of `common_dump_settings`."""

    root: str
    net_name: str
    dump_mode: int
    iterations: IterationSelection
    sides: int
    operators: OperatorSelection
    devices: tuple[int, ...]
    debug_mode: int
    overflow_limit: int
    file_format: TensorFileFormat
    saved: SavedDataMode
    initial_iteration: int


def parse_common_settings(
    section: ConfigSection, environ: Mapping[str, str], *, synchronous: bool
) -> CommonSettings:
    """Return the settings; the first error in MindSpore's own order is the one reported."""
    section.require_keys(_MANDATORY_KEYS)
    dump_mode = section.read_number_among("dump_mode", (0, 1, 2), _ALLOWED_MODES)
    root = parse_output_root(section, environ)
    net_name = _parse_net_name(section)
    iterations = _parse_iterations(section)
    sides = section.read_number_among("input_output", (0, 1, 2), _ALLOWED_SIDES)
    operators = _parse_operators(section, dump_mode)
    devices = parse_devices(section)
    debug_mode = _parse_debug_mode(section, synchronous=synchronous)
    file_format = _parse_file_format(section, synchronous=synchronous)
    overflow_limit = _parse_overflow_limit(section, debug_mode)
    saved = _parse_saved_data(section, file_format)
    return CommonSettings(
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
        initial_iteration=section.read_count("initial_iteration", "a number from 0", default=0),
    )


def _parse_net_name(section: ConfigSection) -> str:
    net_name = section.read_text("net_name", _ALLOWED_NET_NAMES)
    if not NET_NAME_PATTERN.fullmatch(net_name):
        raise section.make_error("net_name", _ALLOWED_NET_NAMES)
    return net_name


def _parse_iterations(section: ConfigSection) -> IterationSelection:
    text = section.read_text("iteration", _ALLOWED_ITERATIONS)
    iterations = parse_iterations(text)
    if iterations is None:
        without_blanks = "".join(text.split())
        meant = text != without_blanks and parse_iterations(without_blanks) is not None
        raise section.make_error(
            "iteration", _ALLOWED_ITERATIONS + (f'; here "{without_blanks}"' if meant else "")
        )
    idle = find_idle_segments(text)
    for segment, reason in list(idle.items())[:_MAX_NOTED_SEGMENTS]:
        section.add_note("iteration", f"{reason} and matches no iteration", segment)
    if len(idle) > _MAX_NOTED_SEGMENTS:
        section.add_note("iteration", f"has {len(idle)} segments that match no iteration")
    return iterations


def _parse_operators(section: ConfigSection, dump_mode: int) -> OperatorSelection:
    items = section.read_array("kernels", _ALLOWED_KERNELS)
    if dump_mode != 1:
        return OperatorSelection(everything=dump_mode == 0, marked=dump_mode == 2)
    try:
        return parse_operator_patterns(
            items, lambda entry, reason: section.add_note("kernels", reason, entry)
        )
    except ValueError as error:
        allowed = f"a valid regular expression in name-regex(...), not {error}"
        raise section.make_error("kernels", allowed) from None


def _parse_debug_mode(section: ConfigSection, *, synchronous: bool) -> int:
    if synchronous:
        return section.read_number_among(
            "op_debug_mode", (0, 3, 4), _ALLOWED_SYNCHRONOUS_DEBUG_MODES, default=0
        )
    if "op_debug_mode" not in section.values:
        section.add_note(
            "op_debug_mode", "MindSpore requires it in asynchronous dump; it is read as 0"
        )
    return section.read_number_among(
        "op_debug_mode", (0, 1, 2, 3, 4), _ALLOWED_ASYNCHRONOUS_DEBUG_MODES, default=0
    )


def _parse_file_format(section: ConfigSection, *, synchronous: bool) -> TensorFileFormat:
    """Return the format of files; synchronous dump has only npy."""
    if synchronous:
        if section.values.get("file_format", "npy") != "npy":
            section.add_note("file_format", "is ignored in synchronous dump, which writes npy")
        return "npy"
    return cast(
        "TensorFileFormat", section.read_choice("file_format", ("bin", "npy"), default="bin")
    )


def _parse_overflow_limit(section: ConfigSection, debug_mode: int) -> int:
    """Return after how many operators a rank stops; MindSpore reads the key from 2.4 on."""
    if debug_mode in (1, 2, 3):
        return section.read_count("overflow_number", "a number from 0 (no limit)", default=0)
    if "overflow_number" in section.values:
        raise section.make_error("overflow_number", "no such key unless op_debug_mode is 3")
    return 0


def _parse_saved_data(section: ConfigSection, file_format: TensorFileFormat) -> SavedDataMode:
    saved = section.read_choice("saved_data", ("tensor", "statistic", "full"), default="tensor")
    if saved != "tensor" and file_format != "npy":
        allowed = '"tensor"; "statistic" and "full" need file_format "npy" in asynchronous dump'
        raise section.make_error("saved_data", allowed)
    return cast("SavedDataMode", saved)
