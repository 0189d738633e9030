"""MindSpore's `data_dump.json` as version 2.3 reads it, and newer keys as newer versions do: each
key of its two sections in MindSpore's own order, rules across keys, and notes about unknown keys.
Pure.

Source: MindSpore 2.3 and later, Dump guide. Where MindSpore silently does something surprising,
rankdump does the same with a warning. Each element of `support_device` is read as an unsigned
32-bit number. On CPU and GPU MindSpore dumps synchronously whatever `e2e_dump_settings` says;
rankdump follows the file on any device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from rankdump._config.config_section import ConfigNotes, ConfigSection, describe_unknown_key
from rankdump._config.operator_patterns import parse_operator_patterns
from rankdump._config.output_path import parse_output_root
from rankdump._config.rankdump_section import (
    RANKDUMP_KEYS,
    RANKDUMP_SECTION,
    parse_rankdump_section,
)
from rankdump._core.plan import (
    NET_NAME_PATTERN,
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    StatisticPrecision,
    TensorFileFormat,
    TensorSelection,
    TriggerMode,
)
from rankdump._core.selection import find_idle_segments, parse_iterations
from rankdump._core.statistics import DEFAULT_STATISTICS, DEVICE_STATISTICS, STATISTIC_TITLES
from rankdump._layout.profile import PROFILES, Profile
from rankdump.errors import MISSING_VALUE, ConfigError

COMMON_SECTION = "common_dump_settings"
E2E_SECTION = "e2e_dump_settings"
MINDSPORE_KEYS: dict[str, tuple[str, ...]] = {
    COMMON_SECTION: (
        "dump_mode",
        "path",
        "net_name",
        "iteration",
        "saved_data",
        "input_output",
        "kernels",
        "support_device",
        "op_debug_mode",
        "file_format",
        "statistic_category",
        "overflow_number",
        "initial_iteration",
    ),
    E2E_SECTION: (
        "enable",
        "trans_flag",
        "save_kernel_args",
        "sample_mode",
        "sample_num",
        "stat_calc_mode",
        "device_stat_precision_mode",
    ),
}
"""Keys of each section."""

_SECTION_NAMES = (*MINDSPORE_KEYS, RANKDUMP_SECTION)
_OTHER_KEYS = {
    "async_dump_settings": "MindSpore has ignored it since version 1.3",
    "dump": "it is the section of a CANN acl.json, and this file is a data_dump.json",
}
"""Sections that earlier releases or other files have, with the reason why they are not read."""


def note_unknown_keys(body: Mapping[str, object], notes: ConfigNotes) -> None:
    """Add a note for each unknown key, with the known key that was probably meant."""
    for key, value in body.items():
        if key not in _SECTION_NAMES:
            reason = (
                _OTHER_KEYS.get(key)
                or _describe_other_section(key)
                or describe_unknown_key(key, _SECTION_NAMES)
            )
            notes.add(key, value, f"is ignored: {reason}")
    for section, known in MINDSPORE_KEYS.items():
        values = body.get(section)
        if isinstance(values, dict):
            for key, value in cast("dict[str, object]", values).items():
                if key not in known:
                    reason = _describe_other_section(key) or describe_unknown_key(key, known)
                    notes.add(f"{section}.{key}", value, f"is ignored: {reason}")


def _describe_other_section(key: str) -> str:
    if key in _SECTION_NAMES:
        return "the section belongs beside the others, not in one of them"
    sections = {**MINDSPORE_KEYS, RANKDUMP_SECTION: RANKDUMP_KEYS}
    return next(
        (f"the key belongs in {name}" for name, known in sections.items() if key in known), ""
    )


_ALLOWED_DEVICES = "an array of device ids"
_DEVICE_KEY = "support_device"


def parse_devices(common: ConfigSection) -> tuple[int, ...]:
    """Return the device ids without repetitions; ConfigError names the index of a wrong element."""
    items = common.read_array(_DEVICE_KEY, _ALLOWED_DEVICES)
    if not items:
        common.add_note(_DEVICE_KEY, "names no device, so no rank dumps")
    devices: dict[int, None] = {}
    for index, item in enumerate(items):
        device = _parse_device(item)
        if device is None:
            raise common.make_part_error(f"{_DEVICE_KEY}[{index}]", item, "a device id")
        if isinstance(item, float) or device != item:
            common.add_note(_DEVICE_KEY, f"is not a device id and is read as {device}", item)
        if device in devices:
            common.add_note(_DEVICE_KEY, "is listed twice and counts once", device)
        devices[device] = None
    return tuple(devices)


def _parse_device(item: object) -> int | None:
    """Return the device id that MindSpore makes from a number: it cuts fractions and lets negative
    numbers wrap around.
    """
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
    "support_device": _ALLOWED_DEVICES,
}
"""Mandatory keys in the order in which MindSpore checks that they exist, before it checks any
value.
"""


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
    """Return the settings of the section; of several errors, the first one in MindSpore's own order
    is raised.
    """
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
    number = section.values["iteration"]
    if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
        raise section.make_error("iteration", f'{_ALLOWED_ITERATIONS}; here "{number}"')
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
        if items:
            section.add_note("kernels", f"is not used: only dump_mode 1 uses it, not {dump_mode}")
        return OperatorSelection(everything=dump_mode == 0, marked=dump_mode == 2)
    try:
        return parse_operator_patterns(
            items, lambda entry, reason: section.add_note("kernels", reason, entry)
        )
    except ValueError as error:
        raise _make_kernels_error(section, items, error) from None


def _make_kernels_error(
    section: ConfigSection, items: list[object], error: ValueError
) -> ConfigError:
    """Return the error for the first entry that is wrong by itself, else for the list."""
    allowed = "a valid regular expression in name-regex(...), not"
    for index, item in enumerate(items):
        try:
            parse_operator_patterns([item], lambda entry, reason: None)
        except ValueError as alone:
            return section.make_part_error(f"kernels[{index}]", item, f"{allowed} {alone}")
    return section.make_error("kernels", f"{allowed} {error}")


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
    """Return the format of tensor files; a synchronous dump has only npy."""
    if synchronous:
        if section.values.get("file_format", "npy") != "npy":
            section.add_note("file_format", "is ignored in synchronous dump, which writes npy")
        return "npy"
    return cast(
        "TensorFileFormat", section.read_choice("file_format", ("bin", "npy"), default="bin")
    )


def _parse_overflow_limit(section: ConfigSection, debug_mode: int) -> int:
    """Return the number of operators with an overflow after which a rank stops; MindSpore reads
    this key since 2.4.
    """
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


_ALLOWED_FLAG = "true or false"
_ALLOWED_SAMPLE_MODES = "0 (off) or 1 (on)"
_ALLOWED_SAMPLE_NUMBERS = "a number from 1"
_DEFAULT_SAMPLE = 100
_ASYNCHRONOUS_REASON = (
    "selects asynchronous dump: an Ascend tree is written on every device, although MindSpore "
    "itself dumps synchronously on CPU and GPU"
)


@dataclass(frozen=True, slots=True)
class EndToEndSettings:
    """Values of `e2e_dump_settings`; the defaults are those of a file without the section."""

    enabled: bool = False
    kernel_arguments: bool = False
    on_device: bool = False
    precision: StatisticPrecision = "high"
    sample_elements: int = 0
    """Number of elements that tensors are cut to; 0 means that they are not cut."""


def parse_e2e(body: Mapping[str, object], *, file: str, notes: ConfigNotes) -> EndToEndSettings:
    """Return the settings of the section; of several errors, the first one in MindSpore's own order
    is raised.
    """
    if E2E_SECTION not in body:
        notes.add(E2E_SECTION, MISSING_VALUE, f"this {_ASYNCHRONOUS_REASON}")
        return EndToEndSettings()
    section = ConfigSection.from_body(body, E2E_SECTION, file=file, notes=notes)
    section.require_keys({"enable": _ALLOWED_FLAG, "trans_flag": _ALLOWED_FLAG})
    enabled = section.read_flag("enable")
    if not enabled:
        section.add_note("enable", _ASYNCHRONOUS_REASON)
    if not section.read_flag("trans_flag"):
        section.add_note("trans_flag", "changes nothing: tensors are in the host's format anyway")
    return EndToEndSettings(
        enabled=enabled,
        kernel_arguments=section.read_flag("save_kernel_args", False),
        on_device=section.read_choice("stat_calc_mode", ("host", "device"), default="host")
        == "device",
        precision=_parse_precision(section),
        sample_elements=_parse_sample_elements(section, enabled=enabled),
    )


def _parse_precision(section: ConfigSection) -> StatisticPrecision:
    key = "device_stat_precision_mode"
    word = section.read_choice(key, ("high", "low"), default="high")
    if word == "low" and section.values.get("stat_calc_mode") != "device":
        section.add_note(key, 'is not used: only stat_calc_mode "device" uses it')
    return cast("StatisticPrecision", word)


def _parse_sample_elements(section: ConfigSection, *, enabled: bool) -> int:
    if not section.read_number_among("sample_mode", (0, 1), _ALLOWED_SAMPLE_MODES, default=0):
        if section.values.get("sample_num", _DEFAULT_SAMPLE) != _DEFAULT_SAMPLE:
            section.add_note("sample_num", "is not used: only sample_mode 1 uses it")
        return 0
    number = section.read_count("sample_num", _ALLOWED_SAMPLE_NUMBERS, default=_DEFAULT_SAMPLE)
    if not number:
        raise section.make_error("sample_num", _ALLOWED_SAMPLE_NUMBERS)
    if not enabled:
        section.add_note("sample_mode", "becomes 0: only enabled synchronous dump samples")
        return 0
    return number


_OVERFLOW_REASON = "op_debug_mode looks for overflow in every operator"
_INPUTS_REASON = "op_debug_mode 4 writes the inputs of the operator that raised"


def select_trigger_mode(debug_mode: int) -> TriggerMode:
    """Return the trigger that a debug mode selects."""
    return "always" if debug_mode == 0 else "exception" if debug_mode == 4 else "overflow"


def apply_debug_mode(
    common: CommonSettings, e2e: EndToEndSettings, notes: ConfigNotes
) -> tuple[CommonSettings, EndToEndSettings]:
    """Return the settings of both sections with the changes that the debug mode implies."""
    trigger = select_trigger_mode(common.debug_mode)
    if trigger == "overflow":
        return _apply_overflow_mode(common, notes), e2e
    if trigger == "exception":
        return _apply_exception_mode(common, notes), _remove_sampling(e2e, notes)
    return common, e2e


def _apply_overflow_mode(common: CommonSettings, notes: ConfigNotes) -> CommonSettings:
    if common.debug_mode != 3:
        notes.add(
            f"{COMMON_SECTION}.op_debug_mode",
            common.debug_mode,
            "becomes 3: rankdump does not distinguish kinds of overflow",
        )
    if common.dump_mode != 0:
        notes.add(f"{COMMON_SECTION}.dump_mode", common.dump_mode, f"becomes 0: {_OVERFLOW_REASON}")
    if common.sides != 0:
        reason = "becomes 0: both sides of an operator with overflow are dumped"
        notes.add(f"{COMMON_SECTION}.input_output", common.sides, reason)
    return replace(common, dump_mode=0, operators=OperatorSelection(), sides=0)


def _apply_exception_mode(common: CommonSettings, notes: ConfigNotes) -> CommonSettings:
    if common.iterations.spans is not None:
        reason = 'becomes "all": it is not known in advance when an operator raises'
        notes.add(f"{COMMON_SECTION}.iteration", common.iterations.text, reason)
    if common.saved != "tensor":
        notes.add(
            f"{COMMON_SECTION}.saved_data", common.saved, f'becomes "tensor": {_INPUTS_REASON}'
        )
    if common.sides == 2:
        notes.add(f"{COMMON_SECTION}.input_output", common.sides, f"becomes 1: {_INPUTS_REASON}")
    if common.dump_mode != 0:
        reason = "watches only the selected operators; from 2.4 on MindSpore watches every one"
        notes.add(f"{COMMON_SECTION}.dump_mode", common.dump_mode, reason)
    sides = 1 if common.sides == 2 else common.sides
    return replace(common, iterations=IterationSelection(), saved="tensor", sides=sides)


def _remove_sampling(e2e: EndToEndSettings, notes: ConfigNotes) -> EndToEndSettings:
    if e2e.sample_elements:
        notes.add(
            f"{E2E_SECTION}.sample_mode", 1, "becomes 0: op_debug_mode 4 writes whole tensors"
        )
    return replace(e2e, sample_elements=0)


_STATISTIC_KEY = "statistic_category"
_STATISTIC_WORDS = ", ".join(f'"{item}"' for item in STATISTIC_TITLES)


def parse_mindspore_content(
    section: ConfigSection, common: CommonSettings, e2e: EndToEndSettings, profile: Profile
) -> ContentSettings:
    """Return the content settings; `section` is the one that `common` came from."""
    reason = _explain_host_only(common, e2e, profile)
    if e2e.on_device and reason:
        section.notes.add(f"{E2E_SECTION}.stat_calc_mode", "device", f'becomes "host": {reason}')
    on_device = e2e.on_device and not reason
    content = ContentSettings(
        saved=common.saved,
        on_device=on_device,
        precision=e2e.precision,
        sample_elements=e2e.sample_elements,
        kernel_arguments=e2e.kernel_arguments,
    )
    if not content.has_tables:
        if section.values.get(_STATISTIC_KEY, list(DEFAULT_STATISTICS)) != list(DEFAULT_STATISTICS):
            section.add_note(
                _STATISTIC_KEY, f'is not used: saved_data is "{common.saved}", without statistics'
            )
        return content
    items = _parse_items(section)
    if profile.fixed_table and _STATISTIC_KEY in section.values:
        section.add_note(
            _STATISTIC_KEY, f"is not used: the tables of profile {profile.name} are fixed"
        )
    return replace(content, statistics=_select_device_items(section, items) if on_device else items)


def _explain_host_only(common: CommonSettings, e2e: EndToEndSettings, profile: Profile) -> str:
    """Return why statistics cannot be computed on the device; empty if they can."""
    if common.saved != "statistic":
        return f'saved_data is "{common.saved}", so the elements come to the host'
    if not e2e.enabled:
        return "synchronous dump is not enabled"
    if select_trigger_mode(common.debug_mode) == "overflow":
        return "op_debug_mode checks the elements first"
    if profile.fixed_table:
        return f"the tables of profile {profile.name} have columns that a device cannot compute"
    return ""


def _parse_items(section: ConfigSection) -> tuple[str, ...]:
    if _STATISTIC_KEY not in section.values:
        return DEFAULT_STATISTICS
    items = section.read_array(_STATISTIC_KEY, f"an array of {_STATISTIC_WORDS}")
    if not items:
        section.add_note(_STATISTIC_KEY, "names no statistic, so the tables have none")
    for index, item in enumerate(items):
        if not (isinstance(item, str) and item in STATISTIC_TITLES):
            raise section.make_part_error(f"{_STATISTIC_KEY}[{index}]", item, _STATISTIC_WORDS)
    named = tuple(cast("list[str]", items))
    for item in dict.fromkeys(named):
        if named.count(item) > 1:
            section.add_note(
                _STATISTIC_KEY,
                f"is listed {named.count(item)} times and has as many columns",
                item,
            )
    return named


def _select_device_items(section: ConfigSection, items: tuple[str, ...]) -> tuple[str, ...]:
    left_out = [item for item in dict.fromkeys(items) if item not in DEVICE_STATISTICS]
    if left_out:
        listed = ", ".join(left_out)
        section.add_note(
            _STATISTIC_KEY,
            f"is used without {listed}: a device computes only {', '.join(DEVICE_STATISTICS)}",
        )
    return tuple(item for item in items if item in DEVICE_STATISTICS)


def parse_mindspore_config(
    body: Mapping[str, object], *, file: str, environ: Mapping[str, str], notes: ConfigNotes
) -> DumpPlan:
    """Return the plan of a document; of several errors, the first one in MindSpore's own order is
    raised.
    """
    note_unknown_keys(body, notes)
    acl_dump = _is_acl_dump(file, environ)
    e2e = parse_e2e(body, file=file, notes=notes)
    section = ConfigSection.from_body(body, COMMON_SECTION, file=file, notes=notes)
    common = parse_common_settings(section, environ, synchronous=e2e.enabled)
    common, e2e = apply_debug_mode(common, e2e, notes)
    own = parse_rankdump_section(
        body,
        file=file,
        output=OutputSettings(common.root, common.net_name, file_format=common.file_format),
        notes=notes,
        select_layout=lambda profile: _select_layout(e2e.enabled, acl_dump, profile),
    )
    content = parse_mindspore_content(section, common, e2e, PROFILES[own.output.profile])
    selection = _make_selection(common, notes)
    return own.make_plan(selection, content, dialect="mindspore", notes=notes)


def _is_acl_dump(file: str, environ: Mapping[str, str]) -> bool:
    """Return whether MindSpore would pass the file on to CANN (variable MS_ACL_DUMP_CFG_PATH)."""
    named = environ.get("MS_ACL_DUMP_CFG_PATH", "")
    return bool(named) and named in (file, environ.get("MINDSPORE_DUMP_CONFIG", ""))


def _select_layout(enabled: bool, acl_dump: bool, profile: str) -> str:
    """Return the layout of the tree that MindSpore would write."""
    if enabled:
        return "mindspore-sync"
    if PROFILES[profile].fixed_table:
        return "mindspore-async"
    return "cann-op-step" if acl_dump else "cann"


def _make_selection(common: CommonSettings, notes: ConfigNotes) -> TensorSelection:
    first, spans = common.initial_iteration, common.iterations.spans
    if spans and all(high < first for _, high in spans):
        reason = f"ends before initial_iteration {first}: no iteration is selected"
        notes.add(f"{COMMON_SECTION}.iteration", common.iterations.text, reason)
    return TensorSelection(
        iterations=common.iterations,
        devices=common.devices,
        operators=common.operators,
        inputs=common.sides != 2,
        outputs=common.sides != 1,
        initial_iteration=first,
        trigger=select_trigger_mode(common.debug_mode),
        overflow_limit=common.overflow_limit,
    )
